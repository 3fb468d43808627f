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

mod assets;
mod calls;
mod guard;
pub mod query;
mod reply;
mod routes;
mod socket;
mod stream;
#[cfg(test)]
mod tests;
mod timed;

use std::{convert::Infallible, sync::Arc, time::Duration};

use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::Semaphore;

use crate::{
    calls::CallHub, config::ReportSection, daemon::Door, history::History, metrics::Metrics,
    observe::Hub,
};

pub use guard::{Guard, GuardError, Refused};
pub use socket::{Bound, ListenError, Listener};

/// Connections at a time; further ones wait in the kernel's short queue.
const CONNECTIONS: usize = 128;
/// Streams at a time.
const STREAMS: usize = 40;
/// Moves that are asked for and not answered, at a time.
const ACTIONS: usize = 16;
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Time for a request's head; also how long a connection may rest between requests.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// A client that takes nothing for so long is let go.
const STALL: Duration = Duration::from_secs(20);

/// What requests are answered with.
#[derive(Debug)]
pub struct Site {
    door: Door,
    hub: Arc<Hub>,
    calls: Arc<CallHub>,
    metrics: Arc<Metrics>,
    history: Option<Arc<History>>,
    guard: Guard,
    report: ReportSection,
    may_act: bool,
    streams: Arc<Semaphore>,
    actions: Arc<Semaphore>,
}

/// Where a site has from what it shows.
#[derive(Debug)]
pub struct Sources {
    /// What changes.
    pub hub: Arc<Hub>,
    /// What is called.
    pub calls: Arc<CallHub>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What was.
    pub history: Option<Arc<History>>,
}

impl Site {
    /// A site over these. `may_act`: whether containers may be moved.
    #[must_use]
    pub fn new(
        door: Door,
        sources: Sources,
        guard: Guard,
        report: ReportSection,
        may_act: bool,
    ) -> Site {
        Site {
            door,
            hub: sources.hub,
            calls: sources.calls,
            metrics: sources.metrics,
            history: sources.history,
            guard,
            report,
            may_act,
            streams: Arc::new(Semaphore::new(STREAMS)),
            actions: Arc::new(Semaphore::new(ACTIONS)),
        }
    }
}

/// Serves until the runtime ends.
pub async fn serve(listener: Listener, site: Arc<Site>) {
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
        let site = Arc::clone(&site);
        tokio::spawn(async move {
            let peer = Arc::new(peer);
            let service = service_fn(|request: Request<Incoming>| {
                let (site, peer) = (Arc::clone(&site), Arc::clone(&peer));
                async move { Ok::<_, Infallible>(routes::answer(&site, &peer, request).await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                .max_buf_size(HEAD_BYTES)
                .max_headers(64)
                .serve_connection(TokioIo::new(timed::Timed::new(stream, STALL)), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, %peer, "a connection ended early");
            }
            drop(permit);
        });
    }
}
