//! HTTPS for the cluster: whom the API server knows and lets, sees the dashboard, the API and the
//! metrics of the node's controller, which itself listens on a socket for root alone.
//!
//! ```text
//!  Prometheus, browser ──TLS, token──> guard ──TokenReview, SubjectAccessReview──> API server
//!                                        │ may
//!                                        v
//!                                   the controller's socket on the node
//! ```

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use affinode_controller::http::{Guard, Refusal, Refused, access, needs_right};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Bytes, Frame, Incoming},
    client::conn::http1 as client,
    header::{self, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use crate::{report, webhook::tls::Shown};

/// Connections at a time.
const CONNECTIONS: usize = 128;
/// Time for a handshake, for the head of a request, and for the beginning of an answer; moves of
/// containers take longer.
const TIME: Duration = Duration::from_secs(20);
const MOVE: Duration = Duration::from_secs(620);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;

type Answer = Response<BoxBody<Bytes, hyper::Error>>;

/// The door.
pub struct Bridge {
    /// Who may.
    pub guard: Guard,
    /// The controller's socket.
    pub socket: PathBuf,
    /// The certificate.
    pub shown: Arc<Shown>,
    /// Whether containerd serves the runtime.
    pub served: Arc<AtomicBool>,
}

/// Answers until the runtime ends.
///
/// # Errors
/// When the address is in use, or none of this pod's.
pub async fn serve(address: SocketAddr, bridge: Bridge) -> io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let (bridge, connections) = (Arc::new(bridge), Arc::new(Semaphore::new(CONNECTIONS)));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let bridge = Arc::clone(&bridge);
        tokio::spawn(async move {
            converse(stream, &bridge).await;
            drop(permit);
        });
    }
}

async fn converse(stream: TcpStream, bridge: &Bridge) {
    let Some(config) = bridge.shown.config() else { return };
    let Ok(Ok(stream)) = timeout(TIME, TlsAcceptor::from(config).accept(stream)).await else {
        return;
    };
    talk(stream, bridge).await;
}

async fn talk(stream: impl AsyncRead + AsyncWrite + Unpin, bridge: &Bridge) {
    let service = service_fn(|request| async { Ok::<_, Infallible>(bridge.answer(request).await) });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TIME)
        .max_buf_size(HEAD_BYTES)
        .max_headers(64)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended early");
    }
}

impl Bridge {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        match path {
            // Of this program, not of the controller: there is none where no container needs it.
            "/healthz" => return text(StatusCode::OK, "ok\n"),
            "/readyz" if self.served.load(Ordering::Relaxed) => {
                return text(StatusCode::OK, "ok\n");
            }
            "/readyz" => {
                return text(StatusCode::SERVICE_UNAVAILABLE, "the runtime is not served\n");
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
        let time = if request.method() == Method::GET { TIME } else { MOVE };
        match timeout(time, self.forward(request, ended)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                tracing::debug!("no controller: {}", report::chain(&*error));
                let why = "no controller runs on this node, or not with the cluster's configuration: it starts with the first GPU container\n";
                text(StatusCode::SERVICE_UNAVAILABLE, why)
            }
            Err(_) => text(StatusCode::GATEWAY_TIMEOUT, "the controller does not answer\n"),
        }
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        ended: Ended,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let headers = request.headers_mut();
        // Checked here; the token is nobody's business there.
        for checked in ["authorization", "origin", "sec-fetch-site", "connection"] {
            headers.remove(checked);
        }
        headers.insert(header::HOST, HeaderValue::from_static("localhost"));
        let stream = UnixStream::connect(&self.socket).await?;
        let (mut sender, connection) = client::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = Bridged { body, ended, _sender: sender, _driver: driver };
        Ok(Response::from_parts(parts, body.boxed()))
    }
}

type Ended = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// The controller's answer, for as long as whoever asked may have it.
struct Bridged {
    body: Incoming,
    ended: Ended,
    _sender: client::SendRequest<Incoming>,
    _driver: JoinSet<Result<(), hyper::Error>>,
}

impl Body for Bridged {
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

fn refused(refusal: &Refusal) -> Answer {
    let status = match refusal.kind {
        Refused::Host => StatusCode::MISDIRECTED_REQUEST,
        Refused::Token => StatusCode::UNAUTHORIZED,
        Refused::Review | Refused::Busy => StatusCode::SERVICE_UNAVAILABLE,
        Refused::Malformed => StatusCode::BAD_REQUEST,
        Refused::Origin | Refused::Forbidden => StatusCode::FORBIDDEN,
    };
    tracing::debug!("refused: {} {}", refusal.why, refusal.detail);
    let mut answer = text(status, format!("{}\n", refusal.why));
    if refusal.kind == Refused::Token {
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    answer
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Answer {
    let body = Full::new(text.into()).map_err(|never| match never {}).boxed();
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

#[cfg(test)]
mod tests;
