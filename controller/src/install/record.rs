//! The record of what was installed, for the uninstallation.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    FileError, SourceFile,
    edit::{AddedBlock, ConfigEdit},
    files,
};

const FILE: &str = "install.json";
const VERSION: u32 = 1;

/// Whether a folder has a record.
pub fn exists(folder: &Path) -> bool {
    folder.join(FILE).exists()
}

/// The installed files, and the block in containerd's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallRecord {
    version: u32,
    files: Vec<InstalledFile>,
    /// Folders that were created, each after its parent.
    #[serde(default)]
    pub folders: Vec<PathBuf>,
    /// Whether containerd has loaded the handler.
    pub settled: bool,
    /// Socket of that containerd.
    #[serde(default)]
    pub containerd: Option<PathBuf>,
    /// The block in containerd's configuration.
    pub block: Option<AddedBlock>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InstalledFile {
    path: PathBuf,
    sha256: String,
}

/// Why the record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::ANOTHER_PLACE))]
    Io {
        /// What the failed operation was.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The content is not a record of this version.
    #[error("{} is not a valid record of an installation", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl InstallRecord {
    /// The record of a finished installation. The block of an earlier installation stays recorded.
    pub fn of(
        prefix: &Path,
        source: &SourceFile,
        older: Option<InstallRecord>,
        edit: Option<&ConfigEdit>,
        made: &[PathBuf],
    ) -> InstallRecord {
        let mut files = Vec::new();
        for (content, path, _) in source.places(prefix) {
            files.push(InstalledFile { sha256: files::digest_of(&content), path });
        }
        let mut block = edit.map(|edit| edit.added.clone());
        let mut folders = made.to_vec();
        // containerd has loaded a handler that is not changed.
        let settled = edit.is_none() && older.as_ref().is_some_and(|older| older.settled);
        let containerd = older.as_ref().and_then(|older| older.containerd.clone());
        if let Some(older) = older {
            let elsewhere = |old: &InstalledFile| files.iter().all(|file| file.path != old.path);
            let (left, _): (Vec<_>, Vec<_>) = older.files.into_iter().partition(elsewhere);
            files.extend(left);
            block = block.or(older.block);
            folders.splice(..0, older.folders);
        }
        InstallRecord { version: VERSION, files, folders, settled, containerd, block }
    }

    /// Reads the record; `None` if nothing is installed.
    pub fn read(folder: &Path) -> Result<Option<InstallRecord>, RecordError> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(RecordError::Io { action: "read", path, source }),
        };
        match serde_json::from_slice(&text) {
            Ok(record) => Ok(Some(record)),
            Err(source) => Err(RecordError::Content { path, source }),
        }
    }

    /// Writes the record into a folder.
    pub fn write(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        let text = serde_json::to_vec_pretty(self)
            .map_err(|source| RecordError::Content { path: path.clone(), source })?;
        files::replace(&path, &text, Some(0o600)).map_err(|source| RecordError::Io {
            action: "write",
            path,
            source,
        })
    }

    /// Removes the record: nothing is installed then.
    pub fn remove(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        fs::remove_file(&path).map_err(|source| RecordError::Io { action: "remove", path, source })
    }

    /// Path of the record's file.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Every installed file with its SHA-256.
    pub fn listed(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|file| (file.path.as_path(), file.sha256.as_str()))
    }

    /// The files that are unchanged, and those that were changed since.
    pub fn files(&self) -> Result<(Vec<PathBuf>, Vec<PathBuf>), FileError> {
        let there = self.files.iter().filter(|file| file.path.exists());
        let mut known = Vec::new();
        for file in there {
            known.push((file.path.clone(), files::digest(&file.path)? == file.sha256));
        }
        let (ours, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(_, same)| *same);
        let paths = |files: Vec<(PathBuf, bool)>| files.into_iter().map(|(path, _)| path).collect();
        Ok((paths(ours), paths(others)))
    }
}
