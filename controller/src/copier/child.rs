//! Runs a copier as a child process. The process is another instance of this program. Its standard
//! input is a socket that is connected to the controller.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
};

use affinode_copier::{LIBRARY_ENV, socket};
use affinode_core::copiers::CopierId;
use affinode_proto::wire::copier::{CopierOrder, CopierReport};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::{mpsc::UnboundedSender, oneshot},
    task::AbortHandle,
};

use super::CopierMessage;
use crate::{driver_library::DriverLibrary, sys};

/// A copier's child process. Dropping this value kills the process.
#[derive(Debug)]
pub struct CopierProcess {
    socket: OwnedFd,
    ear: AbortHandle,
    /// Sender whose message makes the controller kill the process. Dropping the sender has the same
    /// effect.
    kill: Option<oneshot::Sender<()>>,
    pid: u32,
}

impl CopierProcess {
    /// Starts the child process of a copier. Messages about the copier are sent to `mail`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        library: &DriverLibrary,
        gpu: &str,
        ours: OwnedFd,
        theirs: OwnedFd,
        id: CopierId,
        mail: UnboundedSender<CopierMessage>,
    ) -> io::Result<CopierProcess> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("affinode-copier")
            .args(["copier", gpu])
            .env(LIBRARY_ENV, library.path())
            // The driver then ignores the other GPUs.
            .env("CUDA_VISIBLE_DEVICES", gpu)
            // Keeps the copier from using an MPS server, whose other clients the controller would
            // not know.
            .env("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(folder) = library.folder() {
            // The CUDA library opens other libraries of the driver by name.
            let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let folders = std::iter::once(folder).chain(std::env::split_paths(&set));
            if let Ok(folders) = std::env::join_paths(folders) {
                command.env("LD_LIBRARY_PATH", folders);
            }
        }
        let gpu = gpu.to_owned();
        CopierProcess::spawn(command, ours, id, mail, move |line| {
            tracing::info!(gpu, "copier {gpu}: {line}");
        })
    }

    /// Starts the program of `command`. `ours` is the controller's end of a socket pair. The caller
    /// has given the other end to the program as its standard input. `log` receives each line of
    /// the program's standard error.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn spawn(
        mut command: Command,
        ours: OwnedFd,
        id: CopierId,
        mail: UnboundedSender<CopierMessage>,
        log: impl Fn(&str) + Send + 'static,
    ) -> io::Result<CopierProcess> {
        let received = sys::watch_readable(ours.try_clone()?)?;
        let mut process = command.kill_on_drop(true).spawn()?;
        if let Some(said) = process.stderr.take() {
            tokio::spawn(async move {
                let mut lines = BufReader::new(said).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    log(&line);
                }
            });
        }
        let pid = process.id().unwrap_or(0);
        let reports = mail.clone();
        let ear = tokio::spawn(async move {
            while let Ok(mut ready) = received.readable().await {
                match ready.try_io(|socket| socket::receive(socket.get_ref())) {
                    Ok(Ok((frame, _))) => match CopierReport::decode(&frame) {
                        Ok(report) if reports.send(CopierMessage::Report(id, report)).is_ok() => {}
                        _ => break,
                    },
                    Ok(Err(_)) => break,
                    // A spurious wakeup: there was no data to read.
                    Err(_) => {}
                }
            }
            // There is no receiver if the controller is shutting down.
            let _ = reports.send(CopierMessage::Closed(id));
        });
        let (kill, killed) = oneshot::channel();
        tokio::spawn(wait(process, killed, id, mail));
        Ok(CopierProcess { socket: ours, ear: ear.abort_handle(), kill: Some(kill), pid })
    }

    /// Sends an order to the copier, with the descriptor `along` if there is one.
    ///
    /// # Errors
    /// The order cannot be sent, for example because the copier does not read its socket.
    pub fn tell(&self, order: CopierOrder, along: Option<&OwnedFd>) -> io::Result<()> {
        socket::send(self.socket.as_fd(), &order.encode(), along).map(drop)
    }

    /// Sends SIGKILL to the process, without waiting for its end.
    pub fn kill(&mut self) {
        self.ear.abort();
        if let Some(kill) = self.kill.take() {
            // An error means that the process has exited already.
            let _ = kill.send(());
        }
    }

    /// Returns the process id of the copier.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for CopierProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until a process exits, and reports the exit to `mail`. Kills the process first if `killed`
/// receives a message or the sender of `killed` is dropped.
async fn wait(
    mut process: Child,
    killed: oneshot::Receiver<()>,
    id: CopierId,
    mail: UnboundedSender<CopierMessage>,
) {
    let kill = tokio::select! {
        _ = killed => true,
        _ = process.wait() => false,
    };
    if kill {
        // An error means that the process has exited already.
        let _ = process.start_kill();
        let _ = process.wait().await;
    }
    // There is no receiver if the controller is shutting down.
    let _ = mail.send(CopierMessage::Exited(id));
}
