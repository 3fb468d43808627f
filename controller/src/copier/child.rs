//! The process of a copier: this program again, with the controller on its standard input.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::Stdio,
};

use affinode_copier::{LIBRARY_ENV, socket};
use affinode_proto::wire::copier::CopierReport;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{self, Command},
    task::AbortHandle,
};

use crate::{driver_library::DriverLibrary, sys};

/// A running copier. Dropping it kills the process.
#[derive(Debug)]
pub struct CopierProcess {
    socket: OwnedFd,
    ear: Option<AbortHandle>,
    process: Option<process::Child>,
}

impl CopierProcess {
    /// Starts a copier. `tell` receives its reports, then `None` when it has ended, until `tell`
    /// returns `false`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        library: &DriverLibrary,
        uuid: &str,
        ours: OwnedFd,
        theirs: OwnedFd,
        tell: impl Fn(Option<CopierReport>) -> bool + Send + 'static,
    ) -> io::Result<CopierProcess> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("affinode-copier")
            .args(["copier", uuid])
            .env(LIBRARY_ENV, library.path())
            // The driver then ignores the other GPUs.
            .env("CUDA_VISIBLE_DEVICES", uuid)
            // Not through an MPS server: the controller would not know its other clients.
            .env("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(folder) = library.folder() {
            // The library opens others of the driver by their names.
            let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let folders = std::iter::once(folder).chain(std::env::split_paths(&set));
            if let Ok(folders) = std::env::join_paths(folders) {
                command.env("LD_LIBRARY_PATH", folders);
            }
        }
        let mut process = command.spawn()?;
        if let Some(said) = process.stderr.take() {
            let gpu = uuid.to_owned();
            tokio::spawn(async move {
                let mut lines = BufReader::new(said).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    tracing::info!(gpu, "copier {gpu}: {line}");
                }
            });
        }
        let received = sys::watch_readable(ours.try_clone()?)?;
        let ear = tokio::spawn(async move {
            while let Ok(mut ready) = received.readable().await {
                match ready.try_io(|socket| socket::receive(socket.get_ref())) {
                    Ok(Ok((frame, _))) => match CopierReport::decode(&frame) {
                        Ok(report) if tell(Some(report)) => {}
                        _ => break,
                    },
                    Ok(Err(_)) => break,
                    // A spurious wakeup: there was nothing to read.
                    Err(_) => {}
                }
            }
            tell(None);
        });
        Ok(CopierProcess { socket: ours, ear: Some(ear.abort_handle()), process: Some(process) })
    }

    /// A socket without a process, for tests.
    #[cfg(test)]
    pub fn of_test(socket: OwnedFd) -> CopierProcess {
        CopierProcess { socket, ear: None, process: None }
    }

    /// Attaches a process to the socket, for tests.
    #[cfg(test)]
    pub fn of_process(&mut self, process: process::Child) {
        self.process = Some(process);
    }

    /// Sends the copier SIGKILL, without waiting.
    pub fn kill(&mut self) {
        if let Some(ear) = self.ear.take() {
            ear.abort();
        }
        if let Some(process) = &mut self.process {
            // An error means that it has ended already.
            let _ = process.start_kill();
        }
    }

    /// Whether the process has ended, and so holds no memory.
    pub fn has_ended(&mut self) -> bool {
        self.process.as_mut().is_none_or(|process| !matches!(process.try_wait(), Ok(None)))
    }

    /// Its pid; 0 after its end.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().and_then(process::Child::id).unwrap_or(0)
    }

    /// The controller's end of the socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
