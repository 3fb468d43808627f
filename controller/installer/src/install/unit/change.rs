//! Plans and executes a change of the controller's systemd unit.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{BOOTED, UNIT, UnitError, UnitRequest, record::UnitRecord, systemctl, text};
use crate::install::{InstallOptions, Steps, files};

/// The change of the controller's unit that an installation or an uninstallation makes.
#[derive(Debug, PartialEq, Eq)]
pub enum UnitPlan {
    /// No change: the unit is not wanted, or it is already as it should be.
    LeftOut,
    /// Writes the unit, enables it and starts it.
    Start(UnitRecord),
    /// Replaces the text of the unit. A running unit is restarted.
    Update {
        /// The record of the unit with the new text of its file.
        record: UnitRecord,
        /// Pid of the unit's main process. `None`: no process runs.
        main_pid: Option<u32>,
    },
    /// Restarts the unit, because its program was replaced.
    Restart {
        /// Pid of the unit's main process. `None`: no process runs.
        main_pid: Option<u32>,
    },
    /// Stops, disables and removes the unit.
    Remove {
        record: UnitRecord,
        /// Whether the file still has its installed content. A changed file is not removed.
        unchanged: bool,
    },
}

impl UnitPlan {
    /// Plans the change of the unit for an installation. `new_program`: the installed program is
    /// replaced.
    ///
    /// # Errors
    /// [`UnitError`]: the unit cannot be written.
    pub fn of(options: &InstallOptions, new_program: bool) -> Result<UnitPlan, UnitError> {
        let variable = |name: &str| std::env::var(name).ok();
        let wanted = || {
            let text = text::of(&options.prefix, variable);
            text.ok_or_else(|| UnitError::Prefix(options.prefix.clone()))
        };
        let Some(record) = UnitRecord::read(&options.state_dir)? else {
            let Some(folder) = options.unit.folder(options) else { return Ok(UnitPlan::LeftOut) };
            let path = folder.join(format!("{UNIT}.service"));
            // A masked unit is a link to /dev/null.
            if fs::symlink_metadata(&path).is_err() {
                return Ok(UnitPlan::Start(UnitRecord::new(path, wanted()?)));
            }
            return match options.unit {
                UnitRequest::Required(_) => Err(UnitError::Taken(path)),
                UnitRequest::Detected | UnitRequest::Never => Ok(UnitPlan::LeftOut),
            };
        };
        if options.unit == UnitRequest::Never {
            return Ok(UnitPlan::LeftOut);
        }
        let unit = systemctl::activity().unwrap_or_default();
        let restart = match new_program && unit.active {
            true => UnitPlan::Restart { main_pid: unit.main_pid },
            false => UnitPlan::LeftOut,
        };
        Ok(match read(&record.path)? {
            None => UnitPlan::Start(record.with(wanted()?, false)),
            Some(there) if there != record.text => restart,
            Some(_) if !record.settled => UnitPlan::Start(record),
            Some(there) => match wanted()? {
                text if text != there => {
                    UnitPlan::Update { record: record.with(text, true), main_pid: unit.main_pid }
                }
                _ => restart,
            },
        })
    }

    /// Plans the removal of the unit whose record is in the folder `state_dir`.
    ///
    /// # Errors
    /// [`UnitError`]: the record or the file cannot be read.
    pub fn of_removal(state_dir: &Path) -> Result<UnitPlan, UnitError> {
        let Some(record) = UnitRecord::read(state_dir)? else { return Ok(UnitPlan::LeftOut) };
        let unchanged = read(&record.path)?.is_none_or(|text| text == record.text);
        Ok(UnitPlan::Remove { record, unchanged })
    }

    /// Returns the pid of the unit's main process, if the planned change restarts the unit and
    /// thereby replaces this process. `None`: no process is replaced.
    pub fn main_pid(&self) -> Option<u32> {
        match self {
            UnitPlan::Update { main_pid, .. } | UnitPlan::Restart { main_pid } => *main_pid,
            UnitPlan::LeftOut | UnitPlan::Start(_) | UnitPlan::Remove { .. } => None,
        }
    }

    /// Returns whether systemd runs a controller after the change.
    pub fn keeps_controller(&self) -> bool {
        matches!(self, UnitPlan::Start(_) | UnitPlan::Restart { .. }) || self.main_pid().is_some()
    }

    /// Returns descriptions of the steps, one per line.
    pub fn steps(&self) -> Steps {
        let restart = || format!("systemctl try-restart {UNIT}");
        match self {
            UnitPlan::LeftOut => Vec::new(),
            UnitPlan::Start(record) => {
                let make = format!("make {}", record.path.display());
                vec![make, format!("systemctl enable --now {UNIT}")]
            }
            UnitPlan::Update { record, .. } => {
                vec![format!("replace {}", record.path.display()), restart()]
            }
            UnitPlan::Restart { .. } => vec![restart()],
            UnitPlan::Remove { record, unchanged } => {
                let file = record.path.display();
                let removed = match unchanged {
                    true => format!("remove {file}"),
                    false => format!("leave {file}: it was changed after the installation"),
                };
                vec![format!("systemctl disable --now {UNIT}"), removed]
            }
        }
    }

    /// Executes the plan. `state_dir` is the folder that contains the record. After a failure, a
    /// new plan can be made and executed.
    ///
    /// # Errors
    /// [`UnitError`]: a file cannot be written, or systemd refused.
    pub fn make(&self, state_dir: &Path) -> Result<(), UnitError> {
        match self {
            UnitPlan::LeftOut => Ok(()),
            UnitPlan::Start(record) => start(record, state_dir),
            UnitPlan::Update { record, .. } => {
                // The record is written first. With the old record, the new text would look like an
                // operator's change.
                record.write(state_dir)?;
                put(&record.path, &record.text)?;
                systemctl::run(&["daemon-reload"])?;
                restart()
            }
            UnitPlan::Restart { .. } => restart(),
            UnitPlan::Remove { record, unchanged } => remove(record, *unchanged, state_dir),
        }
    }
}

fn start(record: &UnitRecord, state_dir: &Path) -> Result<(), UnitError> {
    record.write(state_dir)?;
    put(&record.path, &record.text)?;
    systemctl::run(&["daemon-reload"])?;
    systemctl::run(&["enable", "--now", UNIT])?;
    is_active("enable --now")?;
    record.with(record.text.clone(), true).write(state_dir)
}

/// Restarts the unit if it runs. During the restart, systemd keeps the controller's sockets, and
/// the next controller continues from the journal.
fn restart() -> Result<(), UnitError> {
    let ran = systemctl::activity()?.active;
    systemctl::run(&["try-restart", UNIT])?;
    if ran { is_active("try-restart") } else { Ok(()) }
}

fn is_active(what: &str) -> Result<(), UnitError> {
    if systemctl::activity()?.active {
        return Ok(());
    }
    let (what, why) = (what.to_owned(), format!("{UNIT} is not running"));
    Err(UnitError::Systemctl { what, why })
}

fn remove(record: &UnitRecord, unchanged: bool, state_dir: &Path) -> Result<(), UnitError> {
    let there = read(&record.path)?.is_some();
    // A failure of systemctl is ignored if systemd does not know the unit because its file is
    // missing, or if systemd does not run on this machine.
    let known = there && Path::new(BOOTED).is_dir();
    let unless_unknown = |done: Result<String, UnitError>| match done {
        Err(error) if known => Err(error),
        _ => Ok(()),
    };
    unless_unknown(systemctl::run(&["disable", "--now", UNIT]))?;
    if there && unchanged {
        let failed = |source| UnitError::Io { action: "remove", path: record.path.clone(), source };
        fs::remove_file(&record.path).map_err(failed)?;
    }
    files::remove_folders(&record.folders);
    unless_unknown(systemctl::run(&["daemon-reload"]))?;
    UnitRecord::remove(state_dir)
}

fn put(path: &Path, text: &str) -> Result<(), UnitError> {
    let failed = |source| UnitError::Io { action: "write", path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    files::replace(path, text.as_bytes(), Some(0o644)).map_err(failed)
}

/// Returns the text of a file. `None`: the file does not exist.
pub fn read(path: &Path) -> Result<Option<String>, UnitError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(UnitError::Io { action: "read", path: PathBuf::from(path), source }),
    }
}
