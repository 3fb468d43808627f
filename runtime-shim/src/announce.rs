//! Announces this shim's containers to the controller, and restarts a controller that has ended.
//!
//! ```text
//! Quiet ──first container──> Seeking ──connected: all announced──> Watching
//!   ^                          │  ^                                   │ │
//!   │                          └──┘ no controller: start it, back off     │ │
//!   │                             ^─────── the connection ended ──────┘ │
//!   └────────────────────── last container gone ────────────────────────┘
//! ```
//!
//! One task owns the list of containers and the connection. A shim without GPU containers stays
//! Quiet: it neither starts a controller nor connects to one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use affinode_proto::api::control::Announcement;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::launch::Launcher;
use crate::paths::ShimPaths;
use crate::report;
use crate::rpc::{RpcCaller, RpcError};

/// Maximum time between two attempts to connect to the controller.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);
/// Pause after the first failed attempt to connect. It doubles with each further failed attempt.
const BACK_OFF: Duration = Duration::from_millis(250);
/// Maximum delay before a shim reconnects for the first time. All shims lose the controller at the
/// same moment, so each waits for a different time before it reconnects.
const SPREAD_MS: u32 = 200;

/// Handle of the task that sends announcements to the controller.
#[derive(Debug)]
pub struct Announcer {
    orders: mpsc::UnboundedSender<AnnounceOrder>,
    task: JoinHandle<()>,
    paths: ShimPaths,
    folders: Mutex<OwnFolders>,
}

/// Folders of this shim's containers, with the generation of the container that owns each.
#[derive(Debug, Default)]
struct OwnFolders {
    /// Generations of the containers that were announced and not withdrawn, by key.
    running: BTreeMap<String, u64>,
    /// Containers that ended, and whose folders the task must remove.
    ended: Vec<(String, u64)>,
}

#[derive(Debug)]
enum AnnounceOrder {
    Add(Box<Announcement>),
    Remove(String),
}

impl Announcer {
    /// Starts the task on the current runtime.
    #[must_use]
    pub fn spawn(launcher: Launcher) -> Announcer {
        let (orders, inbox) = mpsc::unbounded_channel();
        let paths = launcher.paths.clone();
        let task = tokio::spawn(AnnouncerState::new(launcher).run(inbox));
        Announcer { orders, task, paths, folders: Mutex::default() }
    }

    /// Announces a container to the controller while the container's Create request is still in
    /// progress.
    pub fn add(&self, container: Announcement) {
        self.folders().running.insert(container.key.clone(), container.generation);
        // Sending fails only if the task has ended, which it does when its last sender is dropped.
        let _ = self.orders.send(AnnounceOrder::Add(Box::new(container)));
    }

    /// Withdraws a container from the controller and removes the container's folder. An unknown key
    /// has no effect.
    pub fn remove(&self, key: String) {
        let mut folders = self.folders();
        if let Some(generation) = folders.running.remove(&key) {
            let is_left = |(key, generation): &(String, u64)| {
                self.paths.container(key).generation() == Some(*generation)
            };
            folders.ended.retain(is_left);
            folders.ended.push((key.clone(), generation));
        }
        drop(folders);
        let _ = self.orders.send(AnnounceOrder::Remove(key));
    }

    /// Ends the task once its queued announcements and withdrawals are done, or after `patience`.
    /// If the controller does not reply in this time, the folders of ended containers are removed
    /// nevertheless, because no other process would remove them.
    pub async fn finish(self, patience: Duration) {
        let ended = std::mem::take(&mut self.folders().ended);
        drop(self.orders);
        if tokio::time::timeout(patience, self.task).await.is_ok() {
            return;
        }
        warn!("shim: the controller does not reply, so it learns later that containers ended");
        for (key, generation) in ended {
            remove_folder(&self.paths, &key, Some(generation));
        }
    }

    fn folders(&self) -> MutexGuard<'_, OwnFolders> {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct AnnouncerState {
    launcher: Launcher,
    containers: BTreeMap<String, Announcement>,
    /// An idle connection to the controller. When it ends, the controller has ended.
    watch: Option<UnixStream>,
    failures: u32,
    next_attempt: Instant,
}

impl AnnouncerState {
    fn new(launcher: Launcher) -> AnnouncerState {
        AnnouncerState {
            launcher,
            containers: BTreeMap::new(),
            watch: None,
            failures: 0,
            next_attempt: Instant::now(),
        }
    }

    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<AnnounceOrder>) {
        loop {
            let seeking = self.watch.is_none() && !self.containers.is_empty();
            tokio::select! {
                // Orders are checked first: an order that arrived before the connection ended must
                // still be executed.
                biased;
                order = inbox.recv() => match order {
                    Some(AnnounceOrder::Add(container)) => self.add(*container).await,
                    Some(AnnounceOrder::Remove(key)) => self.remove(&key).await,
                    None => return,
                },
                () = ended(&mut self.watch) => {
                    info!(
                        "shim: the connection to the controller ended, so the shim connects again"
                    );
                    self.watch = None;
                    self.next_attempt = Instant::now() + spread();
                }
                () = tokio::time::sleep_until(self.next_attempt), if seeking => self.seek().await,
            }
        }
    }

    async fn add(&mut self, container: Announcement) {
        self.containers.insert(container.key.clone(), container.clone());
        if self.watch.is_some() {
            self.announce(container).await;
        }
    }

    async fn remove(&mut self, key: &str) {
        let Some(Announcement { generation, .. }) = self.containers.remove(key) else { return };
        if self.watch.is_some() {
            let gone = key.to_owned();
            if let Err(error) = self.call(move |caller| caller.withdraw(&gone, generation)).await {
                warn!(
                    "container {key}: cannot report its end to the controller: {}",
                    report(&error)
                );
            }
        }
        remove_folder(&self.launcher.paths, key, Some(generation));
        if self.containers.is_empty() {
            self.watch = None;
        }
    }

    async fn seek(&mut self) {
        match self.launcher.connect().await {
            Ok(stream) => {
                self.watch = Some(stream);
                self.failures = 0;
                for container in self.containers.values().cloned().collect::<Vec<_>>() {
                    self.announce(container).await;
                }
            }
            Err(error) => {
                if self.failures == 0 {
                    warn!(
                        "shim: cannot connect to the controller, so containers run unmanaged until \
                         the controller replies: {}",
                        report(&error)
                    );
                }
                self.back_off();
            }
        }
    }

    async fn announce(&mut self, container: Announcement) {
        let id = container.id.clone();
        match self.call(|caller| caller.announce(container)).await {
            Ok(warnings) => {
                for warning in warnings {
                    warn!("container {id}: {warning}");
                }
            }
            Err(error) => {
                warn!("container {id}: cannot announce it to the controller: {}", report(&error));
                self.watch = None;
                self.back_off();
            }
        }
    }

    fn back_off(&mut self) {
        self.next_attempt = Instant::now() + back_off(self.failures) + spread();
        self.failures += 1;
    }

    /// Runs one RPC to the controller on a new connection. [`RpcCaller`] sets the time limit.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut RpcCaller) -> Result<T, RpcError> + Send + 'static,
    ) -> Result<T, RpcError> {
        let socket = self.launcher.paths.control_socket();
        tokio::task::spawn_blocking(move || call(&mut RpcCaller::control(&socket)?))
            .await
            .unwrap_or_else(|error| Err(std::io::Error::other(error).into()))
    }
}

/// Returns the pause before the next attempt to connect. `failures` is the number of failed
/// attempts before the attempt that has just failed.
pub(crate) fn back_off(failures: u32) -> Duration {
    BACK_OFF.saturating_mul(1 << failures.min(10)).min(BACK_OFF_MAX)
}

/// Waits until the watched connection ends. If there is no connection, it never returns.
pub(crate) async fn ended(watch: &mut Option<UnixStream>) {
    let Some(stream) = watch else {
        return std::future::pending().await;
    };
    // The controller sends nothing on this connection. If bytes arrive, the controller is alive.
    let mut bytes = [0; 64];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}

/// Withdraws a container from the controller, if a controller runs and replies before `deadline`,
/// and removes the container's folder. The command `delete` uses this function, because it has no
/// announcer task.
pub fn withdraw(paths: &ShimPaths, key: &str, deadline: std::time::Instant) {
    let folder = paths.container(key);
    if !folder.exists() {
        return;
    }
    let generation = folder.generation();
    // A failed call is ignored. If no controller runs, no list contains the container. A controller
    // that does not reply in time notices later that containerd has removed the bundle.
    let _ = RpcCaller::control_until(&paths.control_socket(), deadline)
        .and_then(|mut caller| caller.withdraw(key, generation.unwrap_or(0)));
    remove_folder(paths, key, generation);
}

fn remove_folder(paths: &ShimPaths, key: &str, generation: Option<u64>) {
    if let Err(error) = paths.container(key).remove(generation) {
        warn!("container {key}: cannot remove its folder in the run directory: {error}");
    }
}

/// Returns a delay below [`SPREAD_MS`] that differs between processes, so that shims do not
/// reconnect at the same moment.
pub(crate) fn spread() -> Duration {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.subsec_nanos());
    let seed = nanos ^ std::process::id().wrapping_mul(0x9e37_79b9);
    Duration::from_millis(u64::from(seed % SPREAD_MS))
}

#[cfg(test)]
mod tests;
