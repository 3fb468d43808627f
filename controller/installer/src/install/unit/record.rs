//! The record of the systemd unit that was installed. It is stored next to the record of the
//! installation.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::UnitError;
use crate::install::{files, record};

const FILE: &str = "controller-unit.json";
const VERSION: u32 = 1;

/// Record of the systemd unit that was installed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitRecord {
    version: u32,
    /// Path of the unit's file.
    pub path: PathBuf,
    /// Content of the file as it was written.
    pub text: String,
    /// Whether the installation has enabled and started the unit. A later installation does not do
    /// this again, because an operator may have disabled or stopped the unit since then.
    pub settled: bool,
    /// Folders that were created for the file, each after its parent.
    pub folders: Vec<PathBuf>,
}

impl UnitRecord {
    /// Creates the record of a unit that is about to be written.
    pub fn new(path: PathBuf, text: String) -> UnitRecord {
        let folders = files::missing_folders(path.parent().unwrap_or(Path::new("/")));
        UnitRecord { version: VERSION, path, text, settled: false, folders }
    }

    /// Returns a record of the same unit, with this text and this value of `settled`.
    pub fn with(&self, text: String, settled: bool) -> UnitRecord {
        UnitRecord { text, settled, ..self.clone() }
    }

    /// Reads the record from a folder. `None`: no unit was installed.
    pub fn read(folder: &Path) -> Result<Option<UnitRecord>, UnitError> {
        let path = UnitRecord::file(folder);
        let failed = |source| UnitError::Io { action: "read", path: path.clone(), source };
        match fs::read(&path) {
            Ok(text) => Ok(Some(record::parse(&text, VERSION).map_err(|e| failed(e.into()))?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed(source)),
        }
    }

    /// Writes the record into a folder.
    pub fn write(&self, folder: &Path) -> Result<(), UnitError> {
        let path = UnitRecord::file(folder);
        let failed = |source| UnitError::Io { action: "write", path: path.clone(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        files::replace(&path, &text, Some(0o600)).map_err(failed)
    }

    /// Removes the record from a folder.
    pub fn remove(folder: &Path) -> Result<(), UnitError> {
        let path = UnitRecord::file(folder);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(UnitError::Io { action: "remove", path, source })
            }
            _ => Ok(()),
        }
    }

    /// Returns the path of the record's file in a folder.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }
}
