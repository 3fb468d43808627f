//! The webhook's door: HTTPS, bounded in connections, bytes and time. Whoever reaches the address
//! may ask; an answer says nothing that the asker did not bring, but for the name of the class.

use std::{convert::Infallible, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    cluster::Cluster,
    decide::Decision,
    metrics::{Metrics, Outcome},
    review::{Question, asked},
    rules::Rules,
    tls::{self, Shown},
};
use crate::report;

/// Connections at a time; an API server keeps a few of them.
const CONNECTIONS: usize = 256;
/// Time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a connection may rest. API servers close theirs after 90 s: they never meet one that
/// we are about to close.
const REST: Duration = Duration::from_secs(150);
/// Time for a question to come in whole.
const BODY_TIME: Duration = Duration::from_secs(3);
/// Bytes of a question. An object has 3 MiB at most on its way to the API server.
const BODY_BYTES: usize = 4 << 20;
/// Questions that are in memory at a time.
const AT_ONCE: usize = 32;
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;

/// Where the certificate is from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files that others renew: they are read at each connection.
    Files {
        /// The certificate.
        cert: PathBuf,
        /// Its key.
        key: PathBuf,
    },
    /// Somebody else sees to [`Door::shown`].
    Kept,
}

/// What questions are answered with.
pub struct Door {
    /// Which pods get the class.
    pub rules: Rules,
    /// What is known of the cluster.
    pub cluster: Cluster,
    /// The certificate.
    pub shown: Arc<Shown>,
    /// Where it is from.
    pub source: Source,
    /// What is counted.
    pub metrics: Metrics,
    bodies: Semaphore,
}

impl Door {
    /// A door.
    #[must_use]
    pub fn new(rules: Rules, cluster: Cluster, source: Source, shown: Arc<Shown>) -> Door {
        let (metrics, bodies) = (Metrics::default(), Semaphore::new(AT_ONCE));
        Door { rules, cluster, shown, source, metrics, bodies }
    }

    /// Reads the files, where the certificate is in files. What is of no use is told, and the one
    /// before it is shown: a file may be half written.
    pub fn refresh(&self) {
        let Source::Files { cert, key } = &self.source else { return };
        match tls::read(cert, key).and_then(|pair| self.shown.show(&pair)) {
            Ok(true) => tracing::info!("a certificate is shown from {}", cert.display()),
            Ok(false) => {}
            Err(error) => tracing::warn!("{}", report::chain(&error)),
        }
    }

    fn is_ready(&self) -> bool {
        self.shown.config().is_some() && self.cluster.is_known()
    }

    async fn review(&self, request: Request<Incoming>) -> Result<Bytes, (StatusCode, String)> {
        // Never closed: a turn is had, or the asker has left.
        let _turn = self.bodies.acquire().await;
        let body = Limited::new(request.into_body(), BODY_BYTES).collect();
        let body = match timeout(BODY_TIME, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let text = format!("a review of more than {BODY_BYTES} bytes is not read");
                return Err((StatusCode::PAYLOAD_TOO_LARGE, text));
            }
            Ok(Err(error)) => return Err((StatusCode::BAD_REQUEST, error.to_string())),
            Err(_) => {
                let text = format!("the review did not come in whole within {BODY_TIME:?}");
                return Err((StatusCode::REQUEST_TIMEOUT, text));
            }
        };
        let bad = |error| (StatusCode::BAD_REQUEST, report::chain(&error));
        let question = Question::read(&body).map_err(bad)?;
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
        let outcome = Outcome::of(&decision);
        let pod = question.pod();
        match &decision {
            // Most pods of a cluster are such.
            Decision::Leave(left) if !left.warns() => {
                tracing::debug!(pod, decision = outcome.word(), "{outcome}");
            }
            _ => tracing::info!(pod, decision = outcome.word(), "{outcome}"),
        }
        self.metrics.decided(&outcome);
        question.answer(decision, &self.rules).map(Bytes::from).map_err(bad)
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
                        tracing::warn!(%status, "a request is turned away: {text}");
                        self.metrics.refused();
                        (status, TEXT, text.into())
                    }
                }
            }
            "/mutate" => {
                let text = "POST an AdmissionReview of admission.k8s.io/v1\n";
                (StatusCode::METHOD_NOT_ALLOWED, TEXT, text.into())
            }
            "/healthz" if get => (StatusCode::OK, TEXT, "ok\n".into()),
            "/readyz" if get && self.is_ready() => (StatusCode::OK, TEXT, "ok\n".into()),
            "/readyz" if get => {
                let text = "no certificate yet, or no answer of the API server\n";
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

/// Listens.
///
/// # Errors
/// When the address is in use, or none of this machine's.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Answers until the runtime ends.
pub async fn serve(listener: TcpListener, door: Arc<Door>) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Descriptors ran out, most likely: they come back when others leave.
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        door.refresh();
        let door = Arc::clone(&door);
        tokio::spawn(async move {
            converse(stream, &door).await;
            drop(permit);
        });
    }
}

async fn converse(stream: TcpStream, door: &Door) {
    let Some(config) = door.shown.config() else { return };
    let stream = match timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => stream,
        // An API server that does not trust the certificate says so here.
        Ok(Err(error)) => return tracing::info!(%error, "a client ended the handshake"),
        Err(_) => return tracing::debug!("a client says nothing"),
    };
    answer_all(stream, door).await;
}

/// Answers the requests of a connection.
async fn answer_all<S: AsyncRead + AsyncWrite + Unpin>(stream: S, door: &Door) {
    let service = service_fn(|request| async { Ok::<_, Infallible>(door.answer(request).await) });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REST)
        .max_buf_size(HEAD_BYTES)
        .max_headers(64)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended early");
    }
}

#[cfg(test)]
mod tests;
