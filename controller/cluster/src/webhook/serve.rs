//! The webhook's HTTPS server, with limits on connections, bytes and time. The server does not
//! authenticate clients. Its replies contain only what the client has sent, the name and the node
//! selector of the class, and the device class of a claim.

use std::{io, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_rustls::rustls::ServerConfig;

use super::{
    cluster::ClusterState,
    decide::AdmissionDecision,
    metrics::{DecisionOutcome, Metrics},
    review::{AdmissionQuestion, asked},
    rules::NamespaceRules,
};
use crate::{
    error_chain,
    https::{HttpsLimits, HttpsSite, tls::ServedCertificate},
};

/// Time limit for the body of a request.
const BODY_TIME: Duration = Duration::from_secs(3);
/// Maximum size of a request, in bytes. An object that is sent to the API server has at most 3 MiB.
const BODY_BYTES: usize = 4 << 20;
/// Maximum number of requests whose bodies are in memory at the same time.
const MAX_CONCURRENT_REVIEWS: usize = 32;

/// HTTPS server of the webhook, which reviews pods.
pub struct WebhookServer {
    /// Rules that determine which pods get the runtime class.
    pub rules: NamespaceRules,
    /// The webhook's view of the cluster: the RuntimeClass and claims.
    pub cluster: ClusterState,
    /// The certificate that this server presents. It comes from files, or [`super::cert`] sets it.
    pub shown: Arc<ServedCertificate>,
    /// Metrics of this replica of the webhook.
    pub metrics: Metrics,
    bodies: Semaphore,
}

impl WebhookServer {
    /// Creates a server that reviews pods by `rules` and presents the certificate `shown`.
    #[must_use]
    pub fn new(
        rules: NamespaceRules,
        cluster: ClusterState,
        shown: Arc<ServedCertificate>,
    ) -> WebhookServer {
        let (metrics, bodies) = (Metrics::default(), Semaphore::new(MAX_CONCURRENT_REVIEWS));
        WebhookServer { rules, cluster, shown, metrics, bodies }
    }

    fn is_ready(&self) -> bool {
        self.shown.config().is_some() && self.cluster.is_known()
    }

    async fn review(&self, request: Request<Incoming>) -> Result<Bytes, (StatusCode, String)> {
        // The semaphore is never closed. If the client disconnects, this wait is dropped.
        let _turn = self.bodies.acquire().await;
        let body = Limited::new(request.into_body(), BODY_BYTES).collect();
        let body = match timeout(BODY_TIME, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let text = format!("the review has more than {BODY_BYTES} bytes");
                return Err((StatusCode::PAYLOAD_TOO_LARGE, text));
            }
            Ok(Err(error)) => return Err((StatusCode::BAD_REQUEST, error.to_string())),
            Err(_) => {
                let text = format!(
                    "the API server did not send the whole admission review within {BODY_TIME:?}"
                );
                return Err((StatusCode::REQUEST_TIMEOUT, text));
            }
        };
        let bad = |error| (StatusCode::BAD_REQUEST, error_chain::chain(&error));
        let question = AdmissionQuestion::read(&body).map_err(bad)?;
        drop(body);
        let class = self.cluster.class();
        let first = question.decide(&self.rules, class.as_deref(), &Default::default());
        let claims: Vec<_> = asked(&first).cloned().collect();
        let decision = if claims.is_empty() {
            first
        } else {
            let claims = self.cluster.claims(question.namespace(), claims).await;
            question.decide(&self.rules, class.as_deref(), &claims)
        };
        let outcome = DecisionOutcome::of(&decision);
        let pod = question.pod();
        match &decision {
            // Logged only at debug level: most pods of a cluster have no GPU.
            AdmissionDecision::Leave(left) if !left.warns() => {
                tracing::debug!(pod, decision = outcome.word(), "{outcome}");
            }
            _ => tracing::info!(pod, decision = outcome.word(), "{outcome}"),
        }
        self.metrics.decided(&outcome);
        question.answer(decision, &self.rules).map(Bytes::from).map_err(bad)
    }
}

impl HttpsSite for WebhookServer {
    type Body = Full<Bytes>;
    // An API server keeps a few connections, and closes idle ones after 90 s. This limit is longer,
    // so no API server uses a connection that the webhook is closing.
    const LIMITS: HttpsLimits = HttpsLimits {
        connections: 256,
        // A proxy between API servers and pods can give all of them one address.
        connections_per_address: 256,
        handshake: Duration::from_secs(10),
        head: Duration::from_secs(150),
    };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        self.shown.fresh_config()
    }

    fn parted(&self, error: &io::Error) {
        // A frequent cause is an API server that does not trust the certificate.
        tracing::info!(%error, "webhook: the TLS handshake with a client failed");
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        const JSON: &str = "application/json";
        const TEXT: &str = "text/plain; charset=utf-8";
        let get = request.method() == Method::GET;
        let (status, kind, body) = match request.uri().path() {
            "/mutate" if request.method() == Method::POST => {
                let since = Instant::now();
                let answer = self.review(request).await;
                self.metrics.took(since.elapsed());
                match answer {
                    Ok(body) => (StatusCode::OK, JSON, body),
                    Err((status, text)) => {
                        tracing::warn!(%status, "webhook: a request was rejected: {text}");
                        self.metrics.refused();
                        (status, TEXT, text.into())
                    }
                }
            }
            "/mutate" => {
                let text = "send an AdmissionReview of admission.k8s.io/v1 with POST\n";
                (StatusCode::METHOD_NOT_ALLOWED, TEXT, text.into())
            }
            "/healthz" if get => (StatusCode::OK, TEXT, "ok\n".into()),
            "/readyz" if get && self.is_ready() => (StatusCode::OK, TEXT, "ok\n".into()),
            "/readyz" if get => {
                let text = "there is no certificate yet, or the API server has not replied yet\n";
                (StatusCode::SERVICE_UNAVAILABLE, TEXT, text.into())
            }
            "/metrics" if get => match self.metrics.text(self.shown.not_after_seconds()) {
                Ok(text) => {
                    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                    (StatusCode::OK, kind, text.into())
                }
                Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, Bytes::new()),
            },
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "POST /mutate, GET /healthz, /readyz, /metrics\n".into(),
            ),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }
}

#[cfg(test)]
mod tests;
