//! Runs the host pool as a child process. The process is another instance of this program. Its
//! standard input is a socket that is connected to the controller.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use affinode_copier::socket;
use affinode_proto::wire::host_pool::HostPoolOrder;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::oneshot,
};

use crate::config::DiskFolder;

/// Returns the command that runs the host pool in a memory cgroup. `disk` is its folder for disk
/// files.
pub fn command(cgroup: &Path, disk: Option<&DiskFolder>) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("affinode-host-pool").arg("host-pool").arg(cgroup);
    if let Some(disk) = disk {
        command.arg(&disk.path).arg(disk.max_bytes.to_string());
    }
    command
}

/// The host pool's child process. Dropping this value kills the process.
#[derive(Debug)]
pub struct HostPoolProcess {
    socket: OwnedFd,
    is_running: Arc<AtomicBool>,
    /// Whether the process has exited with a status other than 0. An end by a signal does not
    /// count.
    has_failed: Arc<AtomicBool>,
    /// Dropping this sender makes the controller kill the process.
    _kill: oneshot::Sender<()>,
}

impl HostPoolProcess {
    /// Starts the program of `command`, with the socket `theirs` on its standard input. `ours` is
    /// the other end of this socket.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        mut command: Command,
        ours: OwnedFd,
        theirs: OwnedFd,
    ) -> io::Result<HostPoolProcess> {
        command
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn()?;
        if let Some(said) = process.stderr.take() {
            tokio::spawn(async move {
                let mut lines = BufReader::new(said).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    tracing::info!("host pool: {line}");
                }
            });
        }
        let is_running = Arc::new(AtomicBool::new(true));
        let has_failed = Arc::new(AtomicBool::new(false));
        let (kill, killed) = oneshot::channel();
        let (runs, failed) = (Arc::clone(&is_running), Arc::clone(&has_failed));
        tokio::spawn(async move {
            let fails = wait(process, killed).await;
            failed.store(fails, Ordering::Release);
            runs.store(false, Ordering::Release);
        });
        Ok(HostPoolProcess { socket: ours, is_running, has_failed, _kill: kill })
    }

    /// Sends an order to the host pool, with the descriptor `along` if there is one.
    ///
    /// # Errors
    /// The order cannot be sent, for example because the host pool does not read its socket.
    pub fn tell(&self, order: HostPoolOrder, along: Option<&OwnedFd>) -> io::Result<()> {
        socket::send(self.socket.as_fd(), &order.encode(), along).map(drop)
    }

    /// Whether the process still runs.
    pub fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Acquire)
    }

    /// Whether the process has exited with a status other than 0. An end by a signal does not
    /// count.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Returns a function that returns whether the process still runs.
    #[cfg(test)]
    pub fn watch(&self) -> impl Fn() -> bool + use<> {
        let is_running = Arc::clone(&self.is_running);
        move || is_running.load(Ordering::Acquire)
    }
}

/// Waits until the process exits. Kills it when the sender of `killed` is dropped. Returns whether
/// the process has reported an error by its exit status.
async fn wait(mut process: Child, killed: oneshot::Receiver<()>) -> bool {
    tokio::select! {
        _ = killed => {
            // An error means that the process has exited already.
            let _ = process.start_kill();
            let _ = process.wait().await;
            false
        }
        exit = process.wait() => match exit {
            Ok(status) => {
                tracing::warn!(%status, "the host pool has ended");
                status.code().is_some_and(|code| code != 0)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot wait for the end of the host pool");
                false
            }
        },
    }
}
