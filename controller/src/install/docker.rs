//! Docker: registers the runtime in dockerd's configuration, and makes dockerd read it.
//!
//! ```text
//! register: record ──> dockerd examines the new file ──> file ──> SIGHUP ──> does dockerd serve it?
//!                        │ refuses                         ^                   │ no
//!                        └─> nothing has changed           └─ the old file <───┘
//! ```
//!
//! dockerd reads `runtimes` again on SIGHUP, so no container is restarted. CRI plays no part in it.

mod alone;
mod change;
mod daemon;
mod edit;
mod engine_api;
mod record;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use alone::{install as install_alone, is_alone};
use change::DockerChange;
use daemon::DockerDaemon;
use edit::RuntimeEntry;
use record::DockerRecord;
use serde::Serialize;

use super::{FileError, InstallOptions, Steps, files, record::InstallRecord};
use crate::doctor::containerd::process_runs;

/// The socket of Docker's packages.
pub const SOCKET: &str = "/run/docker.sock";

/// Whether an installation concerns Docker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DockerRequest {
    /// If a dockerd that takes shims runs on this machine.
    Detected,
    /// Only with the dockerd behind this socket.
    Required(PathBuf),
    /// Docker stays as it is.
    Never,
}

/// Why Docker's configuration was not changed.
#[derive(Debug, thiserror::Error)]
pub enum DockerError {
    /// No program answers at the socket.
    #[error(
        "no dockerd answers at {}: start Docker, or pass its socket with --docker=SOCKET",
        socket.display()
    )]
    Absent {
        /// Path of the socket.
        socket: PathBuf,
        /// The cause of the failure.
        #[source]
        source: io::Error,
    },
    /// Another program than dockerd answers there.
    #[error(
        "the program behind {} is not a dockerd of this machine (Podman or Docker Desktop?): --no-docker leaves it out",
        .0.display()
    )]
    Foreign(PathBuf),
    /// This dockerd knows no shims.
    #[error(
        "this Docker has API version {0:?}, which cannot use a shim as a runtime: install Docker 23 (API 1.42) or newer"
    )]
    Old(String),
    /// A file cannot be read or written.
    #[error(
        "cannot {action} {}{}; --no-docker leaves Docker out",
        path.display(),
        super::advice(source, "register the runtime by hand: docs/quickstart.md")
    )]
    Io {
        /// What the failed operation was.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// dockerd would not start with the file as it is.
    #[error(
        "dockerd would not start with {} as it is, and nothing was changed: correct it, or leave Docker out with --no-docker: {why}",
        path.display()
    )]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        why: String,
    },
    /// dockerd refuses the new file.
    #[error(
        "dockerd refuses {} with the change, and nothing was changed; --no-docker leaves Docker out: {why}",
        path.display()
    )]
    Refused {
        /// Path of the file.
        path: PathBuf,
        why: String,
    },
    /// The name belongs to another runtime.
    #[error(
        "runtime {name:?} in {} is another one: choose another name with --runtime-name, remove it, or leave Docker out with --no-docker",
        path.display()
    )]
    Taken {
        /// Path of the file.
        path: PathBuf,
        /// Name of the runtime.
        name: String,
    },
    /// Containers would have no runtime.
    #[error(
        "runtime {name:?} is Docker's default runtime, without which dockerd does not start: set another default-runtime in {} or in dockerd's flags, and restart dockerd",
        path.display()
    )]
    Default {
        /// Path of the file.
        path: PathBuf,
        /// Name of the runtime.
        name: String,
    },
    /// dockerd reads another file than at the installation.
    #[error(
        "dockerd reads {} now, and the runtime was registered in {}: run affinode uninstall first",
        now.display(),
        then.display()
    )]
    Moved {
        /// Path of the file that dockerd reads.
        now: PathBuf,
        /// Path of the recorded file.
        then: PathBuf,
    },
    /// The reload did not have the wanted effect.
    #[error(
        "dockerd did not take over its new configuration, and {} is as before; see journalctl --unit docker: {why}",
        path.display()
    )]
    Reload {
        /// Path of the file.
        path: PathBuf,
        why: String,
    },
    /// dockerd does not answer after the old file was put back either.
    #[error(
        "{} is as before, but dockerd does not answer with it: {after}; first error: {before}",
        path.display()
    )]
    Lost {
        /// Path of the file.
        path: PathBuf,
        /// The error that led to it.
        before: String,
        /// The error with the old file.
        after: String,
    },
}

/// What has to be done in Docker.
#[derive(Debug)]
pub enum DockerPlan {
    /// There is no Docker, or it stays as it is.
    LeftOut,
    /// dockerd serves the runtime.
    Served,
    /// The file is changed, or dockerd reads it again.
    Change(Box<DockerChange>),
}

impl DockerPlan {
    /// Plans an installation.
    ///
    /// # Errors
    /// [`DockerError`]: it would fail.
    pub fn of(
        options: &InstallOptions,
        older: Option<&InstallRecord>,
    ) -> Result<DockerPlan, DockerError> {
        let record = DockerRecord::read(&options.state_dir)?;
        let known = record.as_ref().map(|record| record.socket.as_path());
        let alone = older.is_some_and(|older| older.block.is_none());
        let daemon = match (&options.docker, known) {
            (DockerRequest::Never, _) => return Ok(DockerPlan::LeftOut),
            (DockerRequest::Required(socket), _) => DockerDaemon::find(socket)?,
            (DockerRequest::Detected, Some(socket)) if alone => DockerDaemon::find(socket)?,
            // A connection to systemd's socket would start a Docker that does not run.
            (DockerRequest::Detected, _) if !process_runs(&[daemon::PROGRAM]) => {
                return Ok(DockerPlan::LeftOut);
            }
            (DockerRequest::Detected, known) => {
                match DockerDaemon::find(known.unwrap_or(Path::new(SOCKET))) {
                    Ok(daemon) => daemon,
                    Err(_) => return Ok(DockerPlan::LeftOut),
                }
            }
        };
        let name = record.as_ref().map_or(&options.runtime_name, |record| &record.runtime_name);
        DockerChange::to_register(daemon, record.as_ref(), name)
    }

    /// Plans the removal of what the record of this folder names.
    ///
    /// # Errors
    /// [`DockerError`]: it would fail.
    pub fn of_removal(state_dir: &Path) -> Result<DockerPlan, DockerError> {
        match DockerRecord::read(state_dir)? {
            Some(record) => DockerChange::to_remove(&record),
            None => Ok(DockerPlan::LeftOut),
        }
    }

    /// The steps, one per line.
    pub fn steps(&self) -> Steps {
        match self {
            DockerPlan::LeftOut | DockerPlan::Served => Vec::new(),
            DockerPlan::Change(change) => change.steps(),
        }
    }

    /// Carries the steps out. `state_dir` has the record.
    ///
    /// # Errors
    /// [`DockerError`]: Docker's configuration is as before.
    pub fn make(&self, state_dir: &Path) -> Result<(), DockerError> {
        match self {
            DockerPlan::LeftOut | DockerPlan::Served => Ok(()),
            DockerPlan::Change(change) => change.make(state_dir),
        }
    }

    /// Reverts an installation that failed after [`DockerPlan::make`].
    ///
    /// # Errors
    /// [`DockerError`]: the file cannot be written, or dockerd does not answer.
    pub fn undo(&self, state_dir: &Path) -> Result<(), DockerError> {
        match self {
            DockerPlan::LeftOut | DockerPlan::Served => Ok(()),
            DockerPlan::Change(change) => change.undo(state_dir),
        }
    }
}

/// Removes what a killed installer left: partly written files, and the file for dockerd's judgement.
///
/// # Errors
/// [`FileError`]: one cannot be removed.
pub fn remove_left(state_dir: &Path) -> Result<(), FileError> {
    files::remove_left(&state_dir.join(change::SCRATCH))?;
    files::tidy(&DockerRecord::file(state_dir))?;
    match DockerRecord::read(state_dir) {
        Ok(Some(record)) => files::tidy(&record.config_file),
        // A record that cannot be read is the next step's error.
        Ok(None) | Err(_) => Ok(()),
    }
}

/// The runtime in Docker's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DockerStatus {
    /// Name of the runtime.
    pub name: String,
    /// Path of dockerd's file.
    pub config_file: PathBuf,
    pub state: DockerState,
}

/// State of the runtime in Docker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DockerState {
    /// dockerd serves the runtime.
    Served,
    /// The runtime is in the file, and dockerd has not read it.
    ReloadNeeded,
    /// The runtime is in the file, and no dockerd answers.
    NoDocker,
    /// The runtime was removed from the file, or was changed.
    Changed,
}

/// The status of the recorded runtime; `None`: none was registered.
///
/// # Errors
/// [`DockerError`]: the record or the file cannot be read.
pub fn status(state_dir: &Path) -> Result<Option<DockerStatus>, DockerError> {
    let Some(record) = DockerRecord::read(state_dir)? else { return Ok(None) };
    let text = change::read(&record.config_file)?.unwrap_or_default();
    let serves = |daemon: DockerDaemon| daemon.serves(&record.runtime_name).ok();
    let state = match edit::entry(&text, &record.runtime_name) {
        Ok(RuntimeEntry::Affinode) => {
            match DockerDaemon::find(&record.socket).ok().and_then(serves) {
                Some(true) => DockerState::Served,
                Some(false) => DockerState::ReloadNeeded,
                None => DockerState::NoDocker,
            }
        }
        _ => DockerState::Changed,
    };
    Ok(Some(DockerStatus { name: record.runtime_name, config_file: record.config_file, state }))
}
