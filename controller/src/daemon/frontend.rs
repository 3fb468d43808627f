//! Runs the history, the metrics and the dashboard on a separate thread. Containers can be managed
//! without these parts, so a failure to start one of them is only logged.

use std::{path::Path, sync::Arc, thread::JoinHandle};

use crate::{
    call_trace::{CallSampler, CallTraceHub},
    config::Config,
    error_chain,
    handle::ControllerHandle,
    history::{NodeHistory, StoreLimits},
    http::{self, AppState, DataSources, HttpGuard, HttpListener},
    metrics::Metrics,
    observe::{ViewHub, ViewObserver},
};

/// Handle of the thread of history, metrics and dashboard, with the parts that the control API
/// uses.
#[derive(Debug)]
pub struct Frontend {
    /// Address of the dashboard. Empty if the dashboard is off.
    pub dashboard: String,
    /// The history on disk. `None` if the history is off or cannot be opened.
    pub history: Option<Arc<NodeHistory>>,
    hub: Arc<ViewHub>,
    thread: Option<JoinHandle<()>>,
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
        let history = open_history(run_dir, config);
        let metrics = Arc::new(match &history {
            Some(history) => Metrics::with_runs(history.runs()),
            None => Metrics::new(1),
        });
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
        let work = move || {
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
        };
        let thread = std::thread::Builder::new().name("show".into()).spawn(work);
        if let Err(error) = &thread {
            tracing::error!(%error, "controller: cannot start the thread that serves the dashboard and records the history");
        }
        Frontend { dashboard, history, hub, thread: thread.ok() }
    }

    /// Ends the thread, and waits until it has written the history to disk. Called after the actor
    /// has ended.
    pub fn end(mut self) {
        self.hub.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn open_history(run_dir: &Path, config: &Config) -> Option<Arc<NodeHistory>> {
    let folder = config.history.folder(run_dir)?;
    let limits = StoreLimits {
        keep_ms: i64::try_from(config.history.keep).unwrap_or(i64::MAX),
        max_bytes: config.history.max_mib << 20,
    };
    match NodeHistory::open(&folder, limits) {
        Ok(history) => Some(Arc::new(history)),
        Err(error) => {
            tracing::error!("history: cannot be recorded: {}", error_chain::chain(&error));
            None
        }
    }
}

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
