//! Starts the controller of the node from the first shim that needs it.
//!
//! The shim runs this binary's command `launch`, which leaves the pod's session and cgroup, starts
//! `controller` and exits. So the controller is not a child of any shim, and does not end with a
//! pod.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;

use crate::cgroup;
use crate::paths::ShimPaths;

/// Name of the controller's cgroup, which is a sibling of the pods' cgroup.
pub(crate) const CGROUP: &str = "affinode";
/// File below the run directory that a shim locks while it starts the controller.
const LOCK: &str = "launch.lock";
/// File below the run directory for the controller's output before its own log is open.
pub(crate) const LOG: &str = "controller.log";
/// Maximum time until a started controller accepts connections.
const CONTROLLER_START_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval between the attempts to connect to a started controller.
const PAUSE: Duration = Duration::from_millis(20);

/// Connects to the controller, and starts it if none runs.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Folders and sockets of the installation.
    pub paths: ShimPaths,
    /// Path of the program whose command `launch` starts the controller.
    pub program: PathBuf,
}

/// Reason why no controller could be reached or started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A file of the run directory could not be used.
    #[error("cannot create, open or lock {path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The command `launch` could not be run.
    #[error("cannot start the controller")]
    Spawn(#[source] io::Error),
    /// The controller was started, but does not accept connections.
    #[error("the controller was started but does not accept connections; see {log}")]
    Silent {
        /// File that contains the controller's own messages.
        log: PathBuf,
    },
}

impl Launcher {
    /// Creates a launcher that runs this installed binary.
    pub fn new(paths: ShimPaths) -> Launcher {
        Launcher { paths, program: installed(std::env::current_exe().ok()) }
    }

    /// Connects to the controller, and starts it if none runs. If many shims connect at once, one
    /// starts the controller and the others wait for it.
    pub async fn connect(&self) -> Result<UnixStream, LaunchError> {
        if let Some(stream) = self.try_connect().await {
            return Ok(stream);
        }
        let path = self.paths.run_dir.join(LOCK);
        let io = |source| LaunchError::Io { path: path.clone(), source };
        self.paths.make_run_dir().map_err(io)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io)?;
        let first = lock.try_lock().is_ok();
        if first {
            // The shim that held the lock before may have just started the controller.
            if let Some(stream) = self.try_connect().await {
                return Ok(stream);
            }
            self.launch().await?;
        }
        let deadline = Instant::now() + CONTROLLER_START_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(stream) = self.try_connect().await {
                return Ok(stream);
            }
            tokio::time::sleep(PAUSE).await;
        }
        // The lock is held until here, so that no other shim starts a second controller.
        drop(lock);
        Err(LaunchError::Silent { log: self.paths.run_dir.join(LOG) })
    }

    async fn try_connect(&self) -> Option<UnixStream> {
        UnixStream::connect(self.paths.control_socket()).await.ok()
    }

    async fn launch(&self) -> Result<(), LaunchError> {
        let path = self.paths.run_dir.join(LOG);
        let log = || -> io::Result<File> {
            OpenOptions::new().create(true).append(true).mode(0o640).open(&path)
        };
        let io = |source| LaunchError::Io { path: path.clone(), source };
        let mut command = Command::new(&self.program);
        command
            .arg("launch")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log().map_err(io)?)
            .stderr(log().map_err(io)?);
        let status = tokio::task::spawn_blocking(move || command.status())
            .await
            .map_err(|error| LaunchError::Spawn(io::Error::other(error)))?
            .map_err(LaunchError::Spawn)?;
        if status.success() {
            Ok(())
        } else {
            Err(LaunchError::Spawn(io::Error::other(format!(
                "{} launch failed: {status}",
                self.program.display()
            ))))
        }
    }
}

/// Returns the path of the installed program to start. `exe` is the path of the running program. If
/// another version has replaced that program, the kernel appends ` (deleted)` to the path, and this
/// function removes the suffix. If there is no such file, returns `/proc/self/exe`.
fn installed(exe: Option<PathBuf>) -> PathBuf {
    let plain = |path: PathBuf| {
        let bytes = path.as_os_str().as_bytes();
        let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
        PathBuf::from(OsStr::from_bytes(bytes))
    };
    exe.map(plain).filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

/// The command `launch`: leaves the pod's session and cgroup, and starts the controller.
pub fn launch() -> Result<(), LaunchError> {
    // setsid fails only if this process leads a session already.
    let _ = rustix::process::setsid();
    // If this fails, the controller stays in the shim's cgroup.
    let _ = cgroup::make_and_join(CGROUP, std::process::id());
    let program = installed(std::env::current_exe().ok());
    let mut controller = Command::new(program);
    // systemd passed these variables to containerd's unit. The controller does not belong to that
    // unit.
    for name in ["NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        controller.env_remove(name);
    }
    controller.arg("controller").spawn().map(drop).map_err(LaunchError::Spawn)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn controller_is_of_the_installed_version() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("shim");
        let replaced = || Some(folder.path().join("shim (deleted)"));
        assert_eq!(installed(replaced()), Path::new("/proc/self/exe"));
        std::fs::write(&program, "").unwrap();
        assert_eq!(installed(replaced()), program);
        assert_eq!(installed(Some(program.clone())), program);
        assert_eq!(installed(None), Path::new("/proc/self/exe"));
    }
}
