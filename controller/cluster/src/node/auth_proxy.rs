//! HTTPS for the cluster. Users whom the API server authenticates and authorises reach the
//! dashboard, the API and the metrics of the node's controller. The controller itself listens only
//! on a socket for root.
//!
//! ```text
//!  Prometheus, browser ──TLS, token──> guard ──TokenReview, SubjectAccessReview──> API server
//!                                        │ allowed
//!                                        v
//!                                   the controller's socket on the node
//! ```

use std::{
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use affinode_controller::http::{
    Denied, HttpGuard, access, needs_right,
    reply::{self, Reply},
};
use http_body_util::{BodyExt, Full, Limited, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Bytes, Frame, Incoming},
    client::conn::http1 as client,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, task::JoinSet, time::timeout};
use tokio_rustls::rustls::ServerConfig;

use super::agent_metrics::{self, AgentMetrics};
use crate::{
    error_chain,
    https::{HttpsLimits, HttpsSite, authz, tls::ServedCertificate},
};

/// Time limit for each TLS handshake, for the head of each request, and for the start of the reply
/// to a GET request. Other requests, such as those that move a container, have a longer limit.
const TIME: Duration = Duration::from_secs(20);
const MOVE: Duration = Duration::from_secs(620);
/// Time limit for the controller's metrics. It is below the 10 s after which Prometheus cancels a
/// scrape.
const SCRAPE: Duration = Duration::from_secs(8);
/// Maximum size of the metrics that the controller may send, in bytes. The metrics of a thousand
/// containers have about 4 MiB.
const METRICS_BYTES: usize = 32 << 20;
/// Path at which the metrics are served.
const METRICS: &str = "/metrics";

type Answer = Response<UnsyncBoxBody<Bytes, hyper::Error>>;

/// Name of a header in replies. The agent sets it if the reply comes from the agent itself, because
/// no controller runs. A node without GPU containers normally has no controller.
pub const NO_CONTROLLER: &str = "affinode-controller";

/// HTTPS service of the node agent, which forwards permitted requests to the node's controller.
pub struct AuthProxy {
    /// Checks tokens and rights at the API server.
    pub guard: HttpGuard,
    /// Path of the controller's socket.
    pub socket: PathBuf,
    /// The certificate that the proxy presents.
    pub shown: Arc<ServedCertificate>,
    /// The agent's state and its metrics.
    pub metrics: Arc<AgentMetrics>,
}

impl HttpsSite for AuthProxy {
    type Body = UnsyncBoxBody<Bytes, hyper::Error>;
    const LIMITS: HttpsLimits = HttpsLimits {
        connections: 128,
        // The kubelet's probes share the connections with all pods of the cluster.
        connections_per_address: 16,
        handshake: TIME,
        head: TIME,
    };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        self.shown.fresh_config()
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        match path {
            // Health of this program. A node without GPU containers has no controller, so the
            // controller's health does not count.
            "/healthz" => return own(reply::text(StatusCode::OK, "ok\n")),
            "/readyz" if self.metrics.is_ready() => {
                return own(reply::text(StatusCode::OK, "ok\n"));
            }
            "/readyz" => {
                let why = "containerd on this node does not serve the runtime\n";
                return own(reply::text(StatusCode::SERVICE_UNAVAILABLE, why));
            }
            _ => {}
        }
        if let Err(refusal) = self.guard.place(request.headers()) {
            return refused(&refusal);
        }
        let mut ended: Ended = Box::pin(std::future::pending());
        if needs_right(path) {
            let wanted = access(request.method(), path);
            match self.guard.admit(request.headers(), wanted).await {
                Ok(admitted) => {
                    if request.method() != Method::GET {
                        let user = admitted.user.as_deref().unwrap_or_default();
                        tracing::info!(user, "{} {}", request.method(), wanted.path);
                    }
                    ended = Box::pin(async move { drop(admitted.ended().await) });
                }
                Err(refusal) => return refused(&refusal),
            }
        }
        if path == METRICS && request.method() == Method::GET {
            return self.metrics(request, ended).await;
        }
        let time = if request.method() == Method::GET { TIME } else { MOVE };
        match timeout(time, self.forward(request, ended)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                tracing::debug!("no reply from the controller: {}", error_chain::chain(&*error));
                let why = "no controller runs on this node, or the running controller does not use \
                           the cluster's configuration; a controller starts with the first GPU \
                           container";
                let mut absent = own(reply::error(StatusCode::SERVICE_UNAVAILABLE, why));
                absent.headers_mut().insert(NO_CONTROLLER, HeaderValue::from_static("none"));
                absent
            }
            Err(_) => {
                own(reply::error(StatusCode::GATEWAY_TIMEOUT, "no reply from the controller"))
            }
        }
    }
}

impl AuthProxy {
    /// Replies with the agent's metrics, followed by the controller's metrics if a controller runs.
    /// The request also succeeds without a controller, so that Prometheus counts the node as up.
    async fn metrics(&self, mut request: Request<Incoming>, ended: Ended) -> Answer {
        let asked = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let asked_open =
            asked.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        // The two texts are joined here, so the controller's must not be compressed.
        request.headers_mut().remove(header::ACCEPT_ENCODING);
        let controller = match timeout(SCRAPE, self.controller_metrics(request, ended)).await {
            Ok(Ok(text)) => Some(text),
            Ok(Err(error)) => {
                tracing::debug!("no reply from the controller: {}", error_chain::chain(&*error));
                None
            }
            Err(_) => {
                tracing::debug!("the controller did not send its metrics in time");
                None
            }
        };
        let open = controller.as_ref().map_or(asked_open, |text| text.open);
        let up = controller.is_some();
        match self.metrics.text(up, self.shown.not_after_seconds()) {
            Ok(own_text) => {
                let text = controller.as_ref().map(|controller| controller.text.as_str());
                let text = agent_metrics::joined(&own_text, text, open);
                let kind = if open { agent_metrics::OPEN } else { agent_metrics::CLASSIC };
                own(reply::with(StatusCode::OK, kind, Full::new(Bytes::from(text))))
            }
            Err(error) => {
                let why = format!("cannot write metrics: {error}");
                own(reply::error(StatusCode::INTERNAL_SERVER_ERROR, &why))
            }
        }
    }

    async fn controller_metrics(
        &self,
        request: Request<Incoming>,
        ended: Ended,
    ) -> Result<ControllerText, Box<dyn std::error::Error + Send + Sync>> {
        let answer = self.forward(request, ended).await?;
        if answer.status() != StatusCode::OK {
            return Err(format!("the controller replied {}", answer.status()).into());
        }
        let kind = answer.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let open = kind.is_some_and(|kind| kind.starts_with("application/openmetrics-text"));
        let body = Limited::new(answer.into_body(), METRICS_BYTES).collect().await?.to_bytes();
        Ok(ControllerText { open, text: String::from_utf8(body.to_vec())? })
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        ended: Ended,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let headers = request.headers_mut();
        // The proxy has checked these headers. They are removed, because the controller needs no
        // token.
        for checked in ["authorization", "origin", "sec-fetch-site", "connection"] {
            headers.remove(checked);
        }
        headers.insert(header::HOST, HeaderValue::from_static("localhost"));
        let stream = UnixStream::connect(&self.socket).await?;
        let (mut sender, connection) = client::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = ProxiedConnection { body, ended, _sender: sender, _driver: driver };
        Ok(Response::from_parts(parts, body.boxed_unsync()))
    }
}

/// Metrics that the controller sent, as text. `open` is true if the text has OpenMetrics format.
struct ControllerText {
    open: bool,
    text: String,
}

type Ended = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// The controller's reply, and the connection that carries it.
struct ProxiedConnection {
    body: Incoming,
    ended: Ended,
    _sender: client::SendRequest<Incoming>,
    _driver: JoinSet<Result<(), hyper::Error>>,
}

impl Body for ProxiedConnection {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.ended.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

fn refused(refusal: &Denied) -> Answer {
    tracing::debug!("request refused: {} {}", refusal.why, refusal.detail);
    own(authz::refused(refusal))
}

fn own(reply: Reply) -> Answer {
    reply.map(|body| body.map_err(|never| match never {}).boxed_unsync())
}

#[cfg(test)]
mod tests;
