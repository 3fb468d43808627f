//! What is there of an installation.

use std::{fs, path::PathBuf, time::SystemTime};

use serde::Serialize;

use super::{
    InstallError, InstallOptions, containerd, containerd::ContainerdNode, files,
    record::InstallRecord,
};

/// An installation, looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstallStatus {
    /// Each file that was installed.
    pub files: Vec<FileStatus>,
    /// The handler in containerd's configuration.
    pub handler: Option<HandlerStatus>,
    /// Containers' shims of this installation that run.
    pub running_shims: usize,
    /// Nothing of it is other than it was installed.
    pub in_place: bool,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileStatus {
    /// Where it is.
    pub path: PathBuf,
    /// How it is.
    pub state: FileState,
}

/// How an installed file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileState {
    /// As it was installed.
    InPlace,
    /// Another by now.
    Changed,
    /// Gone.
    Missing,
}

/// The handler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HandlerStatus {
    /// Its name.
    pub name: String,
    /// containerd's file.
    pub config_file: PathBuf,
    /// How it is.
    pub state: HandlerState,
}

/// How a handler is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerState {
    /// containerd serves it.
    Served,
    /// It is in the file, and containerd has not been restarted since the file was written.
    RestartNeeded,
    /// It is in the file, and containerd's configuration does not come from that file any more.
    NotRead,
    /// It is in the file, and no containerd runs.
    NoContainerd,
    /// The file has it no more, or not as it was written.
    Changed,
}

/// Looks at what the record says is there. `None`: nothing is installed.
///
/// # Errors
/// [`InstallError`] when record or files cannot be read.
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
