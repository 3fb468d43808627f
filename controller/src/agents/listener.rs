//! The agent socket of one container, and the thread that serves the container's agents.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use affinode_core::{Key, ProcessId, view::ContainerStatus};
use affinode_proto::paths;
use serde_json::json;
use tokio::{
    net::UnixListener,
    runtime::Handle,
    sync::{Semaphore, mpsc},
};

use super::{
    AgentMail, connection,
    hint_pipe::{self, ReceivedHint},
    rate_limit::RateLimits,
};
use crate::{isolated_runtime::IsolatedRuntime, socket_activation::ActivationSockets};

/// Maximum number of connections of one container at the same time. Connections that have not sent
/// a Hello count too.
pub(super) const MAX_CONNECTIONS: usize = 512;

/// Accepts the connections of one container's agents, and serves them on a thread that serves only
/// this container. Dropping the listener ends the thread and the connections.
#[derive(Debug)]
pub struct AgentListener {
    _ward: IsolatedRuntime,
    hints: ReceivedHint,
    folder: PathBuf,
    /// Container status that was last written to the state file. `None` if there is no file yet.
    written: Option<ContainerStatus>,
    /// Whether the last write of the state file failed.
    state_failed: bool,
}

impl AgentListener {
    /// Listens at the agent socket, which is in the folder that is mounted into the container. If
    /// systemd stored this socket for an earlier controller, that socket is used. Otherwise a new
    /// socket replaces the file. If `owner` is given, only processes of this user and of root may
    /// connect. If it is `None`, processes of any user may connect.
    ///
    /// # Errors
    /// The folder or the socket cannot be created.
    pub fn open(
        sockets: &mut ActivationSockets,
        run_dir: &Path,
        key: &Key,
        owner: Option<u32>,
        numbers: Arc<AtomicU64>,
        mail: mpsc::Sender<AgentMail>,
    ) -> io::Result<AgentListener> {
        let folder = run_dir.join(paths::CONTAINERS_DIR).join(key.as_str()).join(paths::MOUNT_DIR);
        fs::create_dir_all(&folder)?;
        if let (None, Some(place)) = (owner, folder.parent()) {
            // A container reaches its socket through a mount. On the host only root may reach it,
            // but the socket's own mode lets every user connect. The folder's mode is therefore set
            // before the socket exists.
            fs::set_permissions(place, fs::Permissions::from_mode(0o700))?;
        }
        let ward = IsolatedRuntime::begin("container")?;
        let listener = sockets.listen(&Self::socket(key), 0o666)?;
        let listener = {
            let _there = ward.runtime().enter();
            UnixListener::from_std(listener)?
        };
        let hints = ReceivedHint::default();
        let pipe = folder.join(paths::HINT_PIPE);
        match hint_pipe::make(&pipe) {
            Ok(()) => ward.spawn(hint_pipe::listen(pipe, hints.clone())),
            Err(error) => {
                tracing::warn!(
                    %key, %error,
                    "container {key}: cannot create the hint pipe, so the container cannot report \
                     that it is idle or busy"
                )
            }
        }
        let runtime = Handle::current();
        ward.spawn(accept(listener, key.clone(), owner, numbers, runtime, mail));
        Ok(AgentListener { _ward: ward, hints, folder, written: None, state_failed: false })
    }
}

impl AgentListener {
    /// Returns the path of the container's agent socket, relative to the run directory.
    #[must_use]
    pub fn socket(key: &Key) -> String {
        let (containers, mount) = (paths::CONTAINERS_DIR, paths::MOUNT_DIR);
        format!("{containers}/{key}/{mount}/{}", paths::AGENT_SOCKET)
    }

    /// Writes the pressure file, which the container's programs read. It lists, one per line, the
    /// UUIDs of the GPUs on which any container waits for VRAM.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn tell_pressure<'a>(&self, uuids: impl Iterator<Item = &'a String>) -> io::Result<()> {
        let text: String = uuids.flat_map(|uuid| [uuid, "\n"]).collect();
        self.replace(paths::PRESSURE_FILE, &text)
    }

    /// Writes the state file, from which the container's programs read the container's state. Does
    /// nothing if the file already contains this state. `since_unix_ms` is the time at which the
    /// container entered the state, in milliseconds since 1970.
    ///
    /// # Errors
    /// The file cannot be written. If several writes fail in a row, only the first failure is
    /// returned.
    pub fn write_state(&mut self, status: ContainerStatus, since_unix_ms: i64) -> io::Result<()> {
        if self.written == Some(status) {
            return Ok(());
        }
        let text = json!({
            "state": status.state.as_str(),
            "since_unix_ms": since_unix_ms,
            "reason": status.reason.as_str(),
            "waiters_before": status.waiters_before,
        });
        let replaced = self.replace(paths::STATE_FILE, &format!("{text}\n"));
        self.written = replaced.is_ok().then_some(status);
        // The write is tried again at each sample, so only the first failure is logged.
        let is_new = !std::mem::replace(&mut self.state_failed, replaced.is_err());
        if is_new { replaced } else { Ok(()) }
    }

    /// Replaces a file in the mounted folder by renaming a new file over it, so that the container
    /// reads a complete text at any time.
    fn replace(&self, name: &str, text: &str) -> io::Result<()> {
        let fresh = self.folder.join(format!(".{name}"));
        fs::write(&fresh, text)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o644))?;
        fs::rename(fresh, self.folder.join(name))
    }

    /// Returns the hints that the container wrote since the last call.
    #[must_use]
    pub fn received(&self) -> Vec<u8> {
        self.hints.take()
    }
}

async fn accept(
    listener: UnixListener,
    key: Key,
    owner: Option<u32>,
    numbers: Arc<AtomicU64>,
    runtime: Handle,
    mail: mpsc::Sender<AgentMail>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let budgets = Arc::new(RateLimits::new());
    loop {
        // The rate is limited before the accept, so a flood costs no descriptor of the controller.
        // Further connections wait in the kernel's backlog, which is short.
        budgets.connections.take().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The controller probably has no free descriptor. It tries again, because other
                // connections release descriptors.
                tracing::warn!(
                    %key, %error,
                    "container {key}: the controller cannot accept the connection of a process, \
                     and tries again"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let stranger = |uid| uid != 0 && owner.is_some_and(|owner| owner != uid);
        let uid = stream.peer_cred().ok().map(|peer| peer.uid());
        if uid.map_or(owner.is_some(), stranger) {
            let uid = uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
            tracing::warn!(
                %key,
                "container {key}: rejected the connection of a process with user id {uid}, which \
                 does not own this container"
            );
            continue;
        }
        // If the container has too many connections, this connection is dropped. The agent sees the
        // end of the connection and retries.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let id = ProcessId(numbers.fetch_add(1, Ordering::Relaxed));
        let (key, budgets) = (key.clone(), Arc::clone(&budgets));
        let (runtime, mail) = (runtime.clone(), mail.clone());
        tokio::spawn(async move {
            connection::serve(stream, key, id, budgets, runtime, mail).await;
            drop(place);
        });
    }
}
