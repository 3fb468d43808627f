//! The folders of an installation that its programs must find without environment variables.

use std::path::Path;

use affinode_proto::installation::PathsFile;

use super::{FileError, InstallError, InstallOptions};

/// The folders that were asked for, or else those of the present installation.
///
/// # Errors
/// [`FileError`]: the file of the present installation cannot be read.
pub fn of(options: &InstallOptions) -> Result<PathsFile, FileError> {
    let there = PathsFile::read(&options.prefix).map_err(|source| FileError::Io {
        action: "read",
        path: PathsFile::path(&options.prefix),
        source,
    })?;
    let asked = options.folders.clone();
    let (run_dir, config) = (asked.run_dir.or(there.run_dir), asked.config.or(there.config));
    Ok(PathsFile { run_dir, config })
}

/// Returns the text of `paths.conf`. `None`: the folders are the defaults, which the programs use
/// without this file.
///
/// # Errors
/// [`InstallError::Folder`]: a path cannot be written into the file.
pub fn text(folders: &PathsFile, prefix: &Path) -> Result<Option<String>, InstallError> {
    if folders.is_default() && !PathsFile::path(prefix).exists() {
        return Ok(None);
    }
    folders.text().map(Some).ok_or(InstallError::Folder)
}
