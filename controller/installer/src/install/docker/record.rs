//! The record of the runtime that was registered in Docker's configuration. It is stored next to
//! the record of the installation.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::DockerError;
use crate::install::{files, record};

const FILE: &str = "docker.json";
const VERSION: u32 = 1;

/// Describes the change that the installation made in Docker's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DockerRecord {
    version: u32,
    /// Path of dockerd's socket.
    pub socket: PathBuf,
    /// Path of dockerd's configuration file.
    pub config_file: PathBuf,
    /// Name of the runtime.
    pub runtime_name: String,
    /// Content of the file before the installation. `None`: it did not exist.
    pub original: Option<String>,
    /// Content of the file after the installation.
    pub written: String,
    /// Folders that were created for the file, each after its parent.
    pub folders: Vec<PathBuf>,
}

impl DockerRecord {
    /// Creates the record of a change that is about to be made.
    pub fn new(
        socket: &Path,
        config_file: &Path,
        runtime_name: &str,
        original: Option<&str>,
        written: &str,
    ) -> DockerRecord {
        let folder = config_file.parent().unwrap_or(Path::new("/"));
        DockerRecord {
            version: VERSION,
            socket: socket.to_owned(),
            config_file: config_file.to_owned(),
            runtime_name: runtime_name.to_owned(),
            original: original.map(str::to_owned),
            written: written.to_owned(),
            folders: files::missing_folders(folder),
        }
    }

    /// Reads the record from a folder. `None`: no runtime was registered.
    pub fn read(folder: &Path) -> Result<Option<DockerRecord>, DockerError> {
        let path = folder.join(FILE);
        let failed = |source| DockerError::Io { action: "read", path: path.clone(), source };
        match fs::read(&path) {
            Ok(text) => Ok(Some(record::parse(&text, VERSION).map_err(|e| failed(e.into()))?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed(source)),
        }
    }

    /// Writes the record into a folder. Only the file's owner can read it, because Docker's
    /// configuration may contain secrets.
    pub fn write(&self, folder: &Path) -> Result<(), DockerError> {
        let path = folder.join(FILE);
        let failed = |source| DockerError::Io { action: "write", path: path.clone(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        files::replace(&path, &text, Some(0o600)).map_err(failed)
    }

    /// Removes the record from a folder.
    pub fn remove(folder: &Path) -> Result<(), DockerError> {
        let path = folder.join(FILE);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(DockerError::Io { action: "remove", path, source })
            }
            _ => Ok(()),
        }
    }

    /// Returns the path of the record's file in a folder.
    pub fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_docker_record_of_a_newer_release_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let [socket, file] = ["docker.sock", "daemon.json"].map(|name| folder.path().join(name));
        let record = DockerRecord::new(&socket, &file, "affinode", None, "{}");
        record.write(folder.path()).unwrap();
        let path = DockerRecord::file(folder.path());
        let text = fs::read_to_string(&path).unwrap().replacen('{', "{\"new\": [1],", 1);
        fs::write(&path, &text).unwrap();
        assert_eq!(DockerRecord::read(folder.path()).unwrap(), Some(record));
        fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).unwrap();
        assert!(DockerRecord::read(folder.path()).is_err());
    }
}
