//! The status of an installation.

use std::{fs, path::PathBuf, time::SystemTime};

use serde::Serialize;

use super::{
    InstallError, InstallOptions, containerd, containerd::ContainerdNode, files,
    record::InstallRecord,
};

/// What is installed, and whether it is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstallStatus {
    /// The status of each installed file.
    pub files: Vec<FileStatus>,
    /// The handler in containerd's configuration.
    pub handler: Option<HandlerStatus>,
    /// Number of running shims of this installation.
    pub running_shims: usize,
    /// Whether everything is unchanged and served by containerd.
    pub in_place: bool,
}

/// The status of one installed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileStatus {
    /// Path of the file.
    pub path: PathBuf,
    pub state: FileState,
}

/// State of an installed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileState {
    /// The file is unchanged.
    InPlace,
    /// The content was changed.
    Changed,
    /// The file does not exist.
    Missing,
}

/// The status of the handler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HandlerStatus {
    /// Name of the handler.
    pub name: String,
    /// Path of containerd's file.
    pub config_file: PathBuf,
    pub state: HandlerState,
}

/// State of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerState {
    /// containerd serves the handler.
    Served,
    /// The handler is in the file, and containerd has not been restarted since it was written.
    RestartNeeded,
    /// The handler is in the file, and containerd does not read that file any longer.
    NotRead,
    /// The handler is in the file, and no containerd runs.
    NoContainerd,
    /// The handler was removed from the file, or was changed.
    Changed,
}

/// Compares the node with the record; `None`: nothing is installed.
///
/// # Errors
/// [`InstallError`]: the record or a file cannot be read.
pub fn status(options: &InstallOptions) -> Result<Option<InstallStatus>, InstallError> {
    let Some(record) = InstallRecord::read(&options.state_dir)? else { return Ok(None) };
    let mut seen = Vec::new();
    for (path, sha256) in record.listed() {
        let state = match path.exists() {
            false => FileState::Missing,
            true if files::digest(path)? == sha256 => FileState::InPlace,
            true => FileState::Changed,
        };
        seen.push(FileStatus { path: path.to_owned(), state });
    }
    let handler = record.block.as_ref().map(|added| {
        let text = fs::read_to_string(&added.path).unwrap_or_default();
        let state = match ContainerdNode::find(options.socket(Some(&record))) {
            _ if !text.contains(&added.text) => HandlerState::Changed,
            Err(_) => HandlerState::NoContainerd,
            Ok(node) if !node.has_block(&record) => HandlerState::NotRead,
            Ok(node) if node.runs_since(written(&added.path)) => HandlerState::Served,
            Ok(_) => HandlerState::RestartNeeded,
        };
        let (name, config_file) = (added.runtime_name.clone(), added.path.clone());
        HandlerStatus { name, config_file, state }
    });
    let served = handler.as_ref().is_some_and(|h| h.state == HandlerState::Served);
    let in_place = served && seen.iter().all(|file| file.state == FileState::InPlace);
    let running_shims = containerd::running_shims(&options.prefix);
    Ok(Some(InstallStatus { files: seen, handler, running_shims, in_place }))
}

fn written(path: &std::path::Path) -> SystemTime {
    let written = fs::metadata(path).and_then(|file| file.modified());
    written.unwrap_or(SystemTime::UNIX_EPOCH)
}
