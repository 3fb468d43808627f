//! Dashboard, HTTP API and metrics of the node, for people and their tools.
//!
//! ```text
//!  connection ──bounded in number, bytes and time──> guard ──> route ──> door to the actor
//!    [`socket`]  [`timed`]                          [`guard`]  [`routes`]
//! ```
//!
//! It runs on a thread of its own and only ever asks: where it cannot listen, or is
//! flooded, the node's containers do not notice. What is served is described in
//! `config/openapi.yaml`.

#[cfg(test)]
mod abuse;
pub mod assets;
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
    agents::RefusalLog, call_trace::CallTraceHub, config::ReportSection, daemon::ControllerHandle,
    error_chain, history::NodeHistory, metrics::Metrics, observe::ViewHub,
};

pub use guard::{AccessRule, Denied, DenyReason, GuardError, HttpGuard};
pub use routes::{access, needs_right};
use socket::HttpPeer;
pub use socket::{BoundSocket, HttpListener, ListenError};
pub use tls::{TlsError, TlsIdentity};

/// Connections at a time; further ones wait in the kernel's short queue.
const CONNECTIONS: usize = 128;
/// Streams of events at a time.
const STREAMS: usize = 40;
/// Streams of calls at a time. They are apart, as few need them and all need the others.
const CALL_STREAMS: usize = 16;
/// Moves that are asked for and not answered, at a time.
const ACTIONS: usize = 16;
/// Answers out of the history at a time, until they are taken: each may be as large as all of it.
const READS: usize = 2;
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Time for a request's head; also how long a connection may rest between requests.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// A client that takes nothing for so long is let go.
const STALL: Duration = Duration::from_secs(20);

/// What requests are answered with.
#[derive(Debug)]
pub struct AppState {
    door: ControllerHandle,
    hub: Arc<ViewHub>,
    calls: Arc<CallTraceHub>,
    metrics: Arc<Metrics>,
    history: Option<Arc<NodeHistory>>,
    guard: HttpGuard,
    report: ReportSection,
    may_act: bool,
    streams: Arc<Semaphore>,
    call_streams: Arc<Semaphore>,
    actions: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    refusals: RefusalLog,
}

/// Where a site has from what it shows.
#[derive(Debug)]
pub struct DataSources {
    /// What changes.
    pub hub: Arc<ViewHub>,
    /// What is called.
    pub calls: Arc<CallTraceHub>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What was.
    pub history: Option<Arc<NodeHistory>>,
}

impl AppState {
    /// A site over these. `may_act`: whether containers may be moved.
    #[must_use]
    pub fn new(
        door: ControllerHandle,
        sources: DataSources,
        guard: HttpGuard,
        report: ReportSection,
        may_act: bool,
    ) -> AppState {
        AppState {
            door,
            hub: sources.hub,
            calls: sources.calls,
            metrics: sources.metrics,
            history: sources.history,
            guard,
            report,
            may_act,
            streams: Arc::new(Semaphore::new(STREAMS)),
            call_streams: Arc::new(Semaphore::new(CALL_STREAMS)),
            actions: Arc::new(Semaphore::new(ACTIONS)),
            reads: Arc::new(Semaphore::new(READS)),
            refusals: RefusalLog::default(),
        }
    }

    /// Counts and tells of a request that was turned away.
    fn refused(&self, kind: DenyReason, what: String) {
        self.metrics.refused_request(kind);
        self.note(what);
    }

    /// Tells of somebody who was turned away, in the log; of many, their number.
    fn note(&self, what: String) {
        if let Some(what) = self.refusals.tell(what) {
            tracing::warn!("{what}");
        }
    }
}

/// Serves until the runtime ends.
pub async fn serve(listener: HttpListener, site: Arc<AppState>) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Descriptors ran out, most likely: they come back when others leave.
                tracing::warn!(%error, "a connection cannot be accepted");
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
                    Err(_) => tracing::debug!(%peer, "a client says nothing"),
                },
            }
            drop(permit);
        });
    }
}

/// Answers the requests of a connection.
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
        Err(error) => tracing::debug!(%error, %peer, "a connection ended early"),
        Ok(()) => {}
    }
}
