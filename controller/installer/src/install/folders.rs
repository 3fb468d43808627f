//! The run directory and the configuration file of an installation. Its programs find both without
//! environment variables.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use affinode_controller::config::Config;
use affinode_proto::{installation::PathsFile, paths};

use super::{FileError, InstallError, InstallOptions, containerd};

/// Returns the run directory and the configuration file that the options name. A path that the
/// options do not name is taken from the present installation.
///
/// # Errors
/// [`FileError`]: the `paths.conf` of the present installation cannot be read.
pub fn of(options: &InstallOptions) -> Result<PathsFile, FileError> {
    let there = present(&options.prefix)?;
    let asked = options.folders.clone();
    let (run_dir, config) = (asked.run_dir.or(there.run_dir), asked.config.or(there.config));
    Ok(PathsFile { run_dir, config })
}

fn present(prefix: &Path) -> Result<PathsFile, FileError> {
    PathsFile::read(prefix).map_err(|source| FileError::Io {
        action: "read",
        path: PathsFile::path(prefix),
        source,
    })
}

/// Returns the run directory in `folders`, or the default run directory if `folders` names none.
pub fn run_dir(folders: &PathsFile) -> PathBuf {
    folders.run_dir.clone().unwrap_or_else(|| paths::RUN_DIR.into())
}

/// Checks that a change of the run directory does not lead to two controllers on the node. Running
/// containers stay with the controller of the earlier run directory. A controller in the new run
/// directory would not know these containers, and could promise their VRAM to others.
///
/// # Errors
/// [`InstallError::RunDirInUse`]: containers or jobs use the present run directory.
pub fn may_change(options: &InstallOptions, wanted: &PathsFile) -> Result<(), InstallError> {
    let (from, to) = (run_dir(&present(&options.prefix)?), run_dir(wanted));
    if from == to {
        return Ok(());
    }
    let (shims, jobs, podman) = containerd::drain(&options.prefix, &from, Duration::ZERO);
    match shims + jobs + podman {
        0 => Ok(()),
        count => Err(InstallError::RunDirInUse { from, to, count }),
    }
}

/// Checks that the controller of this release starts with the configuration of the node. An unknown
/// key, for example after a downgrade, would otherwise leave the node without a controller.
///
/// # Errors
/// [`InstallError::Config`]: a key or a value of the configuration is not accepted.
pub fn accepts_config(folders: &PathsFile) -> Result<(), InstallError> {
    let file = folders.config.clone().unwrap_or_else(|| paths::CONFIG_FILE.into());
    Config::load(&file).map(drop).map_err(InstallError::Config)
}

/// Returns the text of `paths.conf`. `None`: no file is needed, because all folders are the
/// defaults and there is no `paths.conf`.
///
/// # Errors
/// [`InstallError::Folder`]: a path cannot be written into the file.
pub fn text(folders: &PathsFile, prefix: &Path) -> Result<Option<String>, InstallError> {
    if folders.is_default() && !PathsFile::path(prefix).exists() {
        return Ok(None);
    }
    folders.text().map(Some).ok_or(InstallError::Folder)
}
