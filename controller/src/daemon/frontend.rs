//! Runs the history, the metrics and the dashboard on a separate thread. Containers can be managed
//! without these parts, so a failure to start one of them is only logged, and a stalled disk delays
//! neither the start nor the end of the controller.

use std::{path::Path, sync::Arc, time::Duration};

use tokio::sync::oneshot;

use crate::{
    call_trace::{CallSampler, CallTraceHub},
    config::Config,
    error_chain,
    handle::ControllerHandle,
    history::{ControllerRuns, FILE, NodeHistory, SpanStore, StoreLimits},
    http::{self, AppState, DataSources, HttpGuard, HttpListener},
    metrics::Metrics,
    observe::{ViewHub, ViewObserver},
};

/// Time limit for writing the history when the controller ends. If the disk stalls, the controller
/// ends without the last records. The history's file stays valid.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Handle of the thread of history, metrics and dashboard, with the parts that the control API
/// uses.
#[derive(Debug)]
pub struct Frontend {
    /// Address of the dashboard. Empty if the dashboard is off.
    pub dashboard: String,
    /// The history on disk, which may still be opened. `None` if the history is off.
    pub history: Option<Arc<NodeHistory>>,
    hub: Arc<ViewHub>,
    /// Closes when the thread has ended.
    ended: oneshot::Receiver<()>,
}

impl Frontend {
    /// Starts history, metrics and dashboard. If a part cannot be started, the other parts are
    /// started without it.
    pub fn start(
        run_dir: &Path,
        config: &Config,
        door: ControllerHandle,
        calls: Arc<CallTraceHub>,
    ) -> Frontend {
        let metrics = Arc::new(Metrics::before_history());
        let history = start_history(run_dir, config, Arc::clone(&metrics));
        Frontend::with_history(run_dir, config, door, calls, (metrics, history))
    }

    fn with_history(
        run_dir: &Path,
        config: &Config,
        door: ControllerHandle,
        calls: Arc<CallTraceHub>,
        (metrics, history): (Arc<Metrics>, Option<Arc<NodeHistory>>),
    ) -> Frontend {
        if history.is_none() {
            metrics.set_runs(ControllerRuns { starts: 1, unexpected_ends: 0 });
        }
        let hub = Arc::new(ViewHub::default());
        let bound = bind(run_dir, config);
        let dashboard = bound.as_ref().map(|served| served.place.clone()).unwrap_or_default();
        let observer = ViewObserver::new(
            door.clone(),
            Arc::clone(&hub),
            Arc::clone(&metrics),
            history.clone(),
        );
        let scout = CallSampler::new(door.clone(), Arc::clone(&calls));
        let served = bound.map(|ServedFrontend { socket, papers, guard, only_shows, .. }| {
            let prices = config.report.clone();
            let (hub, history) = (Arc::clone(&hub), history.clone());
            (
                (socket, papers),
                Arc::new(AppState::new(
                    door,
                    DataSources { hub, calls, metrics, history },
                    guard,
                    prices,
                    only_shows,
                )),
            )
        });
        let (ending, ended) = oneshot::channel::<()>();
        let work = move || {
            let _ending = ending;
            serve_all(served, scout, observer);
        };
        let thread = std::thread::Builder::new().name("show".into()).spawn(work);
        if let Err(error) = &thread {
            tracing::error!(%error, "controller: cannot start the thread that serves the dashboard and records the history");
        }
        Frontend { dashboard, history, hub, ended }
    }

    /// Ends the thread, and waits until it has written the history to disk, but at most
    /// [`END_TIMEOUT`]. Called after the actor has ended.
    pub async fn end(self) {
        self.hub.wake();
        if tokio::time::timeout(END_TIMEOUT, self.ended).await.is_err() {
            tracing::warn!(
                "history: the disk did not write the last records within {} s, so they are missing",
                END_TIMEOUT.as_secs()
            );
        }
    }
}

/// Serves the dashboard, and observes the node until the controller ends.
fn serve_all(
    served: Option<(FrontendSocket, Arc<AppState>)>,
    scout: CallSampler,
    observer: ViewObserver,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return tracing::error!(%error, "controller: cannot start the thread that serves the dashboard and records the history");
        }
    };
    runtime.block_on(async {
        if let Some(((socket, papers), site)) = served {
            match HttpListener::new(socket, papers) {
                Ok(listener) => drop(tokio::spawn(http::serve(listener, site))),
                Err(error) => tracing::error!(%error, "dashboard: cannot serve its socket"),
            }
        }
        tokio::spawn(scout.run());
        observer.run().await;
    });
    // A request that reads the history may wait for the disk.
    runtime.shutdown_background();
}

/// Starts the thread that opens and writes the history. Returns `None` if the history is off.
fn start_history(
    run_dir: &Path,
    config: &Config,
    metrics: Arc<Metrics>,
) -> Option<Arc<NodeHistory>> {
    let folder = config.history.folder(run_dir)?;
    let limits = StoreLimits {
        keep_ms: i64::try_from(config.history.keep).unwrap_or(i64::MAX),
        max_bytes: config.history.max_mib << 20,
    };
    let open = move || SpanStore::open(&folder.join(FILE), limits);
    match NodeHistory::start(open, move |runs| metrics.set_runs(runs)) {
        Ok(history) => Some(Arc::new(history)),
        Err(error) => {
            tracing::error!("history: cannot be recorded: {}", error_chain::chain(&error));
            None
        }
    }
}

/// A bound HTTP socket, and the TLS identity for its connections.
type FrontendSocket = (http::BoundSocket, Option<http::TlsIdentity>);

/// A bound HTTP socket, its address, and the guard that checks its requests.
struct ServedFrontend {
    socket: http::BoundSocket,
    papers: Option<http::TlsIdentity>,
    place: String,
    guard: HttpGuard,
    /// Reason why HTTP clients may not move containers. `None`: they may move containers.
    only_shows: Option<&'static str>,
}

fn bind(run_dir: &Path, config: &Config) -> Option<ServedFrontend> {
    let none = |why: String| {
        tracing::error!("dashboard: cannot be served: {why}");
        None
    };
    let http = &config.http;
    let guard = match HttpGuard::new(http) {
        Ok(guard) => guard,
        // Without the configured token, the API would be open to every client.
        Err(error) => return none(error_chain::chain(&error)),
    };
    let papers = match http.tls_cert_file.as_str() {
        "" => None,
        file => match http::TlsIdentity::new(file, &http.tls_key_file) {
            Ok(papers) => Some(papers),
            Err(error) => return none(error_chain::chain(&error)),
        },
    };
    let listen = match http.listen(run_dir) {
        Ok(listen) => listen,
        Err(why) => return none(why),
    };
    let bound = match HttpListener::bind(&listen) {
        Ok(bound) => bound,
        Err(error) => {
            return none(format!(
                "{}; choose another address with http.listen",
                error_chain::chain(&error)
            ));
        }
    };
    let (socket, mut place) = bound?;
    if papers.is_some() {
        place = place.replacen("http://", "https://", 1);
    }
    let only_shows = http.may_act(&listen).err();
    tracing::info!(read_only = only_shows.is_some(), "dashboard: listening at {place}");
    Some(ServedFrontend { socket, papers, place, guard, only_shows })
}

#[cfg(test)]
mod tests;
