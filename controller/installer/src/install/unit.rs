//! The systemd unit that keeps a controller running on the node, even while no container runs.
//!
//! ```text
//! install:   record ──> file ──> daemon-reload ──> enable ──> start: serves, or waits for a shim's controller
//! upgrade:   file, if its text differs ──> daemon-reload ──> try-restart: not started if it was stopped
//! uninstall: disable and stop ──> file ──> daemon-reload ──> record
//! ```
//!
//! Only a unit that Affinode wrote is changed or removed. A file that another program or a person
//! wrote or changed is kept. An operator may stop, disable or mask the unit, and no later
//! installation reverts this. Shims then start the controller.

mod change;
mod record;
mod systemctl;
mod text;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use change::UnitPlan;
use record::UnitRecord;
use serde::Serialize;
use systemctl::UnitActivity;

use super::{FileError, InstallOptions, files, folders};

/// Name of the controller's systemd unit, without its suffix.
pub const UNIT: &str = "affinode-controller";
/// Folder of the unit files that an administrator or an installer writes.
pub const FOLDER: &str = "/etc/systemd/system";
/// Folder that exists if systemd is process 1, as in sd_booted(3).
const BOOTED: &str = "/run/systemd/system";
/// Default folder of an installation's record.
const STATE_DIR: &str = "/var/lib/affinode";

/// Whether an installation includes the systemd unit of the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitRequest {
    /// The unit is included if systemd runs on this machine and the installation uses the default
    /// folders for its record, its run directory and its configuration.
    Detected,
    /// The unit must be included. Its file is written into this folder.
    Required(PathBuf),
    /// No unit is written or changed.
    Never,
}

/// Reason why the controller's unit was not installed or removed.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// A file cannot be read or written.
    #[error(
        "cannot {action} {}{}; pass --no-controller-unit to skip the unit",
        path.display(),
        super::advice(source, "leave the unit out")
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
    /// The path of the program cannot be written into a unit file.
    #[error(
        "cannot write the path {} into the controller's systemd unit: use a --prefix that has only letters, digits and the characters . / _ + -, or pass --no-controller-unit",
        .0.display()
    )]
    Prefix(PathBuf),
    /// A unit file of this name exists, and Affinode did not write it.
    #[error(
        "{} exists and is not Affinode's: remove the file, or pass --no-controller-unit to keep it",
        .0.display()
    )]
    Taken(PathBuf),
    /// systemctl cannot be run, or it failed.
    #[error(
        "systemctl {what} failed (see journalctl --unit {UNIT}, then run the same affinode command again): {why}"
    )]
    Systemctl {
        /// The arguments of systemctl.
        what: String,
        /// Text that systemctl printed.
        why: String,
    },
    /// The unit was not installed or started, but the rest of the installation is in place.
    #[error(
        "the programs and the runtime are installed, but the controller's systemd unit is not installed or does not run. Until it runs, shims start the controller"
    )]
    NotStarted(#[source] Box<UnitError>),
}

impl UnitRequest {
    /// Returns the folder for the unit in a first installation. `None`: no unit is installed.
    fn folder(&self, options: &InstallOptions) -> Option<PathBuf> {
        match self {
            UnitRequest::Never => None,
            UnitRequest::Required(folder) => Some(folder.clone()),
            UnitRequest::Detected => {
                let folder = Path::new(FOLDER);
                let own = options.state_dir == Path::new(STATE_DIR)
                    && folders::of(options).is_ok_and(|folders| folders.is_default());
                let fits = own && Path::new(BOOTED).is_dir() && is_writable(folder);
                (fits && text::is_plain(&options.prefix)).then(|| folder.to_owned())
            }
        }
    }
}

/// Returns whether files can be created in a folder. On some distributions, /etc is read-only.
fn is_writable(folder: &Path) -> bool {
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok()
}

/// The status of the controller's unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitStatus {
    /// Path of the unit's file.
    pub path: PathBuf,
    pub state: UnitState,
}

/// State of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnitState {
    /// The unit runs, and systemd starts it at boot.
    Running,
    /// The unit runs, but an operator has disabled it, so systemd does not start it at boot.
    Disabled,
    /// The unit does not run.
    Stopped,
    /// The unit fails at each start, and systemd starts it again and again.
    Failing,
    /// The content of the unit's file was changed. The unit may run or be stopped.
    Changed,
    /// The unit's file does not exist.
    Missing,
    /// The unit's file was written, but the installation has not recorded that the unit was enabled
    /// and started.
    Incomplete,
    /// systemctl does not report a state.
    Unknown,
}

/// Returns the status of the unit whose record is in this folder. `None`: no unit was installed.
///
/// # Errors
/// [`UnitError`]: the record or the file cannot be read.
pub fn status(state_dir: &Path) -> Result<Option<UnitStatus>, UnitError> {
    let Some(record) = UnitRecord::read(state_dir)? else { return Ok(None) };
    let state = match change::read(&record.path)? {
        None => UnitState::Missing,
        Some(text) if text != record.text => UnitState::Changed,
        Some(_) if !record.settled => UnitState::Incomplete,
        Some(_) => match systemctl::activity() {
            Ok(UnitActivity { active: false, .. }) => UnitState::Stopped,
            Ok(UnitActivity { failing: true, .. }) => UnitState::Failing,
            Ok(UnitActivity { enabled: false, .. }) => UnitState::Disabled,
            Ok(UnitActivity { .. }) => UnitState::Running,
            Err(_) => UnitState::Unknown,
        },
    };
    Ok(Some(UnitStatus { path: record.path, state }))
}

/// Removes partly written files that a killed installer did not remove.
///
/// # Errors
/// [`FileError`]: one of the files cannot be removed.
pub fn remove_left(state_dir: &Path) -> Result<(), FileError> {
    files::tidy(&UnitRecord::file(state_dir))?;
    match UnitRecord::read(state_dir) {
        Ok(Some(record)) => files::tidy(&record.path),
        // A record that cannot be read is no error here, because the next step reports it.
        Ok(None) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
