//! Serves the node's dashboard, HTTP API and metrics, for browsers and tools.
//!
//! ```text
//!  connection ──bounded in number, bytes and time──> guard ──> route ──> handle of the actor
//!    [`socket`]  [`write_timeout`]                  [`guard`]  [`routes`]
//! ```
//!
//! The HTTP server runs on its own thread and only sends queries and requests to the actor. If it
//! cannot listen, or receives too many requests, the node's containers are not affected.
//! `config/openapi.yaml` describes what it serves.

#[cfg(test)]
mod abuse;
mod assets;
mod call_trace;
mod guard;
pub mod query;
pub mod reply;
mod review;
mod routes;
mod socket;
#[cfg(test)]
mod stage;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
mod write_timeout;

use std::{convert::Infallible, sync::Arc, time::Duration};

use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
};

use crate::{
    agents::RefusalLog, call_trace::CallTraceHub, config::ReportSection, error_chain,
    handle::ControllerHandle, history::NodeHistory, metrics::Metrics, observe::ViewHub,
};

pub use guard::{AccessRule, Denied, DenyReason, GuardError, HttpGuard};
pub use routes::{access, needs_right};
use socket::HttpPeer;
pub use socket::{BoundSocket, HttpListener, ListenError};
pub use tls::{TlsError, TlsIdentity};

/// Maximum number of HTTP connections. Further connections wait in the kernel's backlog.
const CONNECTIONS: usize = 128;
/// Maximum number of open event streams.
const STREAMS: usize = 40;
/// Maximum number of open streams of CUDA calls. It is separate from [`STREAMS`], so that these
/// streams do not displace event streams.
const CALL_STREAMS: usize = 16;
/// Maximum number of moves in progress that HTTP requests have started.
const ACTIONS: usize = 16;
/// Maximum number of responses with history that are in memory at a time. Each may be as large as
/// the whole history.
const READS: usize = 2;
/// Maximum size of a request's head (request line and headers) in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// Time limit for receiving a request's head, and for an idle connection between requests.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// Time limit for a write to a client that makes no progress. After this time the connection is
/// closed.
const STALL: Duration = Duration::from_secs(20);

/// State that all HTTP request handlers share.
#[derive(Debug)]
pub struct AppState {
    door: ControllerHandle,
    hub: Arc<ViewHub>,
    calls: Arc<CallTraceHub>,
    metrics: Arc<Metrics>,
    history: Option<Arc<NodeHistory>>,
    guard: HttpGuard,
    report: ReportSection,
    only_shows: Option<&'static str>,
    streams: Arc<Semaphore>,
    call_streams: Arc<Semaphore>,
    actions: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    refusals: RefusalLog,
}

/// Sources of all data that the HTTP server serves.
#[derive(Debug)]
pub struct DataSources {
    /// Hub that distributes changes of the node to watchers.
    pub hub: Arc<ViewHub>,
    /// Hub of the call trace of all processes.
    pub calls: Arc<CallTraceHub>,
    /// Metrics of this controller.
    pub metrics: Arc<Metrics>,
    /// History of the node. `None` if the history is off.
    pub history: Option<Arc<NodeHistory>>,
}

impl AppState {
    /// Creates the state that HTTP request handlers share. `only_shows` is the reason why requests
    /// may not offload, restore or pin containers. It is `None` if requests may do so.
    #[must_use]
    pub fn new(
        door: ControllerHandle,
        sources: DataSources,
        guard: HttpGuard,
        report: ReportSection,
        only_shows: Option<&'static str>,
    ) -> AppState {
        AppState {
            door,
            hub: sources.hub,
            calls: sources.calls,
            metrics: sources.metrics,
            history: sources.history,
            guard,
            report,
            only_shows,
            streams: Arc::new(Semaphore::new(STREAMS)),
            call_streams: Arc::new(Semaphore::new(CALL_STREAMS)),
            actions: Arc::new(Semaphore::new(ACTIONS)),
            reads: Arc::new(Semaphore::new(READS)),
            refusals: RefusalLog::default(),
        }
    }

    /// Counts and logs a refused request.
    fn refused(&self, kind: DenyReason, what: String) {
        self.metrics.refused_request(kind.as_str());
        self.note(what);
    }

    /// Logs a refused request. If there are too many refusals, logs only their number.
    fn note(&self, what: String) {
        if let Some(what) = self.refusals.tell(what) {
            tracing::warn!("{what}");
        }
    }
}

/// Serves HTTP connections until the async runtime ends.
pub async fn serve(listener: HttpListener, site: Arc<AppState>) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // The process probably has no free descriptor. Connections that end release theirs.
                tracing::warn!(
                    %error,
                    "http: the controller cannot accept the connection of a client, and tries again"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let (site, tls) = (Arc::clone(&site), listener.papers().cloned());
        tokio::spawn(async move {
            let stream = write_timeout::WriteTimeout::new(stream, STALL);
            match tls {
                None => converse(&site, peer, stream).await,
                Some(tls) => match tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await {
                    Ok(Ok(stream)) => converse(&site, peer, stream).await,
                    Ok(Err(error)) => site.note(format!("{peer}: {}", error_chain::chain(&error))),
                    Err(_) => tracing::debug!(%peer, "client {peer}: no handshake in time"),
                },
            }
            drop(permit);
        });
    }
}

/// Serves the requests of one connection, one after the other.
async fn converse<S>(site: &Arc<AppState>, peer: HttpPeer, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let peer = &peer;
    let service = service_fn(|request: Request<Incoming>| async move {
        Ok::<_, Infallible>(routes::answer(site, peer, request).await)
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .max_headers(64)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    match served {
        Err(error) if error.is_parse() => {
            site.refused(DenyReason::Malformed, format!("a request of {peer}: {error}"));
        }
        Err(error) => tracing::debug!(%error, %peer, "client {peer}: connection ended early"),
        Ok(()) => {}
    }
}
