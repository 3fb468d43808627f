//! What was installed, for whoever takes it off.

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

/// Whether something is installed.
pub fn exists(folder: &Path) -> bool {
    folder.join(FILE).exists()
}

/// What was put where.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstallRecord {
    version: u32,
    files: Vec<InstalledFile>,
    /// Folders that were made for them, each after the one that it is in.
    #[serde(default)]
    pub folders: Vec<PathBuf>,
    /// containerd has taken note of it.
    pub settled: bool,
    /// That containerd's socket.
    #[serde(default)]
    pub containerd: Option<PathBuf>,
    /// What was added to containerd's configuration.
    pub block: Option<AddedBlock>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InstalledFile {
    path: PathBuf,
    sha256: String,
}

/// Why it cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file.
    #[error("cannot {action} {}{}", path.display(), super::advice(source, super::ANOTHER_PLACE))]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Another program wrote it.
    #[error("{} is not understood", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl InstallRecord {
    /// What will be there when the installation is done. What an earlier one added to
    /// containerd's file stays recorded.
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
        // containerd knows a handler that stays as it is.
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

    /// Reads it; `None` where nothing is installed.
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

    /// Writes it.
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

    /// Removes it: nothing is installed any more.
    pub fn remove(&self, folder: &Path) -> Result<(), RecordError> {
        let path = folder.join(FILE);
        fs::remove_file(&path).map_err(|source| RecordError::Io { action: "remove", path, source })
    }

    /// The record's own file.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Every file that was installed, with the SHA-256 that it had.
    pub fn listed(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|file| (file.path.as_path(), file.sha256.as_str()))
    }

    /// Files that are as they were installed, and those that are others by now.
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
