//! The socket of one container.

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

use affinode_proto::paths;
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
use crate::{
    core::{Key, ProcessId},
    isolated_runtime::IsolatedRuntime,
    socket_activation::ActivationSockets,
};

/// Connections of one container at a time, those without a Hello included.
pub(super) const MAX_CONNECTIONS: usize = 512;

/// Accepts a container's agents until it is dropped, and hears them, on a thread of the container's
/// own.
#[derive(Debug)]
pub struct AgentListener {
    _ward: IsolatedRuntime,
    hints: ReceivedHint,
    folder: PathBuf,
}

impl AgentListener {
    /// Listens at the socket in the folder that the container sees, replacing an old one that
    /// nobody kept.
    /// `owner`: the user whose processes alone, beside root's, may connect.
    ///
    /// # Errors
    /// The folder or socket cannot be made.
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
            // A container comes in by mounts alone: on the host nobody but root reaches its socket.
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
            Err(error) => tracing::warn!(%key, %error, "the container cannot give hints"),
        }
        let home = Handle::current();
        ward.spawn(accept(listener, key.clone(), owner, numbers, home, mail));
        Ok(AgentListener { _ward: ward, hints, folder })
    }
}

impl AgentListener {
    /// Its socket below the run directory.
    #[must_use]
    pub fn socket(key: &Key) -> String {
        let (containers, mount) = (paths::CONTAINERS_DIR, paths::MOUNT_DIR);
        format!("{containers}/{key}/{mount}/{}", paths::AGENT_SOCKET)
    }

    /// Lets the container read on which GPUs somebody waits for VRAM: a line for each.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn tell_pressure<'a>(&self, uuids: impl Iterator<Item = &'a String>) -> io::Result<()> {
        let text: String = uuids.flat_map(|uuid| [uuid, "\n"]).collect();
        let fresh = self.folder.join(format!(".{}", paths::PRESSURE_FILE));
        fs::write(&fresh, text)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o644))?;
        fs::rename(fresh, self.folder.join(paths::PRESSURE_FILE))
    }

    /// What the container wrote into its pipe since this was asked last.
    #[must_use]
    pub fn heard(&self) -> Vec<u8> {
        self.hints.take()
    }
}

async fn accept(
    listener: UnixListener,
    key: Key,
    owner: Option<u32>,
    numbers: Arc<AtomicU64>,
    home: Handle,
    mail: mpsc::Sender<AgentMail>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let budgets = Arc::new(RateLimits::new());
    loop {
        // Those who come faster wait in the kernel's backlog, which is short.
        budgets.connections.take().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: they come back.
                tracing::warn!(%key, %error, "cannot accept an agent");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let stranger = |uid| uid != 0 && owner.is_some_and(|owner| owner != uid);
        if stream.peer_cred().map_or(owner.is_some(), |peer| stranger(peer.uid())) {
            tracing::warn!(%key, "somebody else's process was turned away");
            continue;
        }
        // No place: dropped, the peer sees the end of the connection and comes back later.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let id = ProcessId(numbers.fetch_add(1, Ordering::Relaxed));
        let (key, budgets) = (key.clone(), Arc::clone(&budgets));
        let (home, mail) = (home.clone(), mail.clone());
        tokio::spawn(async move {
            connection::serve(stream, key, id, budgets, home, mail).await;
            drop(place);
        });
    }
}
