//! Registers Affinode's runtime in dockerd's configuration, and makes dockerd read the
//! configuration.
//!
//! ```text
//! register: record ──> dockerd examines the new file ──> file ──> SIGHUP ──> does dockerd serve it?
//!                        │ refuses                         ^                   │ no
//!                        └─> nothing has changed           └─ the old file <───┘
//! ```
//!
//! dockerd reads `runtimes` again on SIGHUP, so no container is restarted. CRI is not involved.

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

/// Path of the socket that Docker's packages use.
pub const SOCKET: &str = "/run/docker.sock";

/// Whether an installation registers the runtime in Docker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DockerRequest {
    /// Docker is included if this machine runs a dockerd that supports shims as runtimes.
    Detected,
    /// Docker must be included. Contains the path of dockerd's socket.
    Required(PathBuf),
    /// Docker's configuration is not changed.
    Never,
}

/// Reason why Docker's configuration was not changed, or was restored after a change.
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
        /// System error of the failed connection.
        #[source]
        source: io::Error,
    },
    /// A program other than dockerd answers at the socket.
    #[error(
        "the program behind {} is not a dockerd of this machine (is it Podman or Docker Desktop?): \
         pass --no-docker to skip it",
        .0.display()
    )]
    Foreign(PathBuf),
    /// This dockerd does not support shims as runtimes.
    #[error(
        "this Docker has API version {0:?}, which cannot use a shim as a runtime: install Docker 23 (API 1.42) or newer"
    )]
    Old(String),
    /// A file cannot be read or written.
    #[error(
        "cannot {action} {}{}; pass --no-docker to skip Docker",
        path.display(),
        super::advice(source, "register the runtime by hand: docs/quickstart.md")
    )]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// System error of the failed operation.
        #[source]
        source: io::Error,
    },
    /// dockerd would not start with the present content of its file.
    #[error(
        "dockerd would not start with the present content of {}, and nothing was changed. Correct \
         the file, or pass --no-docker to skip Docker: {why}",
        path.display()
    )]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// Reason, as `dockerd --validate` reports it.
        why: String,
    },
    /// dockerd would refuse the file if it contained Affinode's runtime.
    #[error(
        "dockerd would refuse {} if it contained Affinode's runtime, and nothing was changed. Pass \
         --no-docker to skip Docker: {why}",
        path.display()
    )]
    Refused {
        /// Path of the file.
        path: PathBuf,
        /// Reason, as `dockerd --validate` reports it.
        why: String,
    },
    /// A runtime of this name exists and is not Affinode's shim.
    #[error(
        "runtime {name:?} in {} already exists and is not Affinode's: choose another name with \
         --runtime-name, remove that runtime, or skip Docker with --no-docker",
        path.display()
    )]
    Taken {
        /// Path of the file.
        path: PathBuf,
        /// Name of the runtime.
        name: String,
    },
    /// The runtime is Docker's default runtime, so it cannot be removed.
    #[error(
        "cannot remove runtime {name:?}, because it is Docker's default runtime and dockerd would not start without it: set another default-runtime in {} or in dockerd's flags, and restart dockerd",
        path.display()
    )]
    Default {
        /// Path of the file.
        path: PathBuf,
        /// Name of the runtime.
        name: String,
    },
    /// dockerd now reads another file than the file in which the runtime was registered.
    #[error(
        "dockerd now reads {}, but the runtime was registered in {}: run affinode uninstall first",
        now.display(),
        then.display()
    )]
    Moved {
        /// Path of the file that dockerd reads.
        now: PathBuf,
        /// Path of the file in which the runtime was registered, according to the record.
        then: PathBuf,
    },
    /// After the reload, dockerd does not serve the new configuration.
    #[error(
        "dockerd did not load its new configuration: {why}. The earlier {} was restored; see \
         journalctl --unit docker",
        path.display()
    )]
    Reload {
        /// Path of the file.
        path: PathBuf,
        /// Reason why dockerd did not load the file.
        why: String,
    },
    /// dockerd does not answer, even after the old file was restored.
    #[error(
        "{} was restored, but dockerd does not answer: {after}; first error: {before}",
        path.display()
    )]
    Lost {
        /// Path of the file.
        path: PathBuf,
        /// The error that led to the restore of the old file.
        before: String,
        /// The error after the old file was restored.
        after: String,
    },
}

/// The change that Docker's configuration needs, if any.
#[derive(Debug)]
pub enum DockerPlan {
    /// No change: there is no Docker, or this installation leaves Docker out.
    LeftOut,
    /// No change: dockerd already serves the runtime.
    Served,
    /// dockerd's file must be changed, or dockerd must read the unchanged file again.
    Change(Box<DockerChange>),
}

impl DockerPlan {
    /// Plans the change of Docker's configuration for an installation.
    ///
    /// # Errors
    /// [`DockerError`]: the change would fail.
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
            (DockerRequest::Detected, Some(socket)) if alone => DockerDaemon::running(socket)?,
            (DockerRequest::Detected, known) => {
                match DockerDaemon::running(known.unwrap_or(Path::new(SOCKET))) {
                    Ok(daemon) => daemon,
                    Err(_) => return Ok(DockerPlan::LeftOut),
                }
            }
        };
        let name = record.as_ref().map_or(&options.runtime_name, |record| &record.runtime_name);
        DockerChange::to_register(daemon, record.as_ref(), name)
    }

    /// Plans the removal of the runtime whose record is in the folder `state_dir`.
    ///
    /// # Errors
    /// [`DockerError`]: the removal would fail.
    pub fn of_removal(state_dir: &Path) -> Result<DockerPlan, DockerError> {
        match DockerRecord::read(state_dir)? {
            Some(record) => DockerChange::to_remove(&record),
            None => Ok(DockerPlan::LeftOut),
        }
    }

    /// Returns descriptions of the steps, one per line.
    pub fn steps(&self) -> Steps {
        match self {
            DockerPlan::LeftOut | DockerPlan::Served => Vec::new(),
            DockerPlan::Change(change) => change.steps(),
        }
    }

    /// Executes the plan. `state_dir` is the folder that contains the record.
    ///
    /// # Errors
    /// [`DockerError`]: Docker's configuration is as before, unless the error says otherwise.
    pub fn make(&self, state_dir: &Path) -> Result<(), DockerError> {
        match self {
            DockerPlan::LeftOut | DockerPlan::Served => Ok(()),
            DockerPlan::Change(change) => change.make(state_dir),
        }
    }

    /// Reverts the change of Docker's configuration, because a later step of the installation
    /// failed.
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

/// Removes temporary files of an installer that was killed: partly written files, and the file for
/// `dockerd --validate`.
///
/// # Errors
/// [`FileError`]: one of the files cannot be removed.
pub fn remove_left(state_dir: &Path) -> Result<(), FileError> {
    files::remove_left(&state_dir.join(change::SCRATCH))?;
    files::tidy(&DockerRecord::file(state_dir))?;
    match DockerRecord::read(state_dir) {
        Ok(Some(record)) => files::tidy(&record.config_file),
        // A record that cannot be read is no error here, because the next step reports it.
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Status of the registered runtime in Docker's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DockerStatus {
    /// Name of the runtime.
    pub name: String,
    /// Path of dockerd's file.
    pub config_file: PathBuf,
    /// State of the runtime in Docker.
    pub state: DockerState,
}

/// State of the runtime in Docker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DockerState {
    /// dockerd serves the runtime.
    Served,
    /// The runtime is in the file, but dockerd has not read it.
    ReloadNeeded,
    /// The runtime is in the file, but no dockerd answers.
    NoDocker,
    /// The runtime that was registered is no longer in the file, or another runtime has its name.
    Changed,
}

/// Returns the status of the registered runtime. `None`: no runtime was registered.
///
/// # Errors
/// [`DockerError`]: the record or the file cannot be read.
pub fn status(state_dir: &Path) -> Result<Option<DockerStatus>, DockerError> {
    let Some(record) = DockerRecord::read(state_dir)? else { return Ok(None) };
    let text = change::read(&record.config_file)?.unwrap_or_default();
    let serves = |daemon: DockerDaemon| daemon.serves(&record.runtime_name).ok();
    let state = match edit::entry(&text, &record.runtime_name) {
        Ok(RuntimeEntry::Affinode) => {
            match DockerDaemon::running(&record.socket).ok().and_then(serves) {
                Some(true) => DockerState::Served,
                Some(false) => DockerState::ReloadNeeded,
                None => DockerState::NoDocker,
            }
        }
        _ => DockerState::Changed,
    };
    Ok(Some(DockerStatus { name: record.runtime_name, config_file: record.config_file, state }))
}
