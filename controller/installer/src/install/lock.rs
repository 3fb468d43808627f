//! A lock that ensures that only one installer runs on a node. If nothing is installed when the
//! lock is released, the lock's file is removed.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::{
    InstallError,
    files::{self, FileError},
    record,
};

const FILE: &str = "install.lock";

/// Lock of an installer on the folder that contains the record.
pub struct InstallLock {
    folder: PathBuf,
    /// Folders that did not exist before the installation, each after its parent. The list begins
    /// with the folders of the lock's file. The folders of the installed files follow.
    pub made: Vec<PathBuf>,
    _held: Flock<File>,
}

impl InstallLock {
    /// Acquires the lock. Fails if another installer holds it.
    pub fn take(folder: &Path) -> Result<InstallLock, InstallError> {
        let made = files::missing_folders(folder);
        let path = folder.join(FILE);
        let failed = |source| FileError::Io { action: "open", path: path.clone(), source };
        loop {
            let file = open(folder, &path).map_err(failed)?;
            let held = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(held) => held,
                Err((_, Errno::EWOULDBLOCK)) => return Err(InstallError::Busy),
                Err((_, errno)) => return Err(failed(errno.into()).into()),
            };
            // The previous installer may have removed the file that was opened.
            let inode = |data: fs::Metadata| (data.dev(), data.ino());
            if fs::metadata(&path).ok().map(inode) == held.metadata().ok().map(inode) {
                return Ok(InstallLock { folder: folder.to_owned(), made, _held: held });
            }
        }
    }

    /// Adds folders to [`InstallLock::made`]: the missing folders of files that will be written. An
    /// uninstallation then removes these folders too.
    pub fn note_missing_folders<'a>(&mut self, paths: impl Iterator<Item = &'a Path>) {
        for folder in paths.filter_map(Path::parent) {
            let mut missing = files::missing_folders(folder);
            missing.retain(|folder| !self.made.contains(folder));
            self.made.extend(missing);
        }
    }
}

impl Drop for InstallLock {
    fn drop(&mut self) {
        if record::exists(&self.folder) {
            return;
        }
        // The lock is still held, so no other installer runs. A lock file that remains causes no
        // error later.
        let _ = fs::remove_file(self.folder.join(FILE));
        let _ = fs::remove_dir(&self.folder);
        files::remove_folders(&self.made);
    }
}

fn open(folder: &Path, path: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    File::options().create(true).truncate(false).write(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_leaves_no_file() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("lib/affinode");
        let held = InstallLock::take(&folder).unwrap();
        assert!(matches!(InstallLock::take(&folder), Err(InstallError::Busy)));
        assert!(folder.join(FILE).exists(), "a refused installer must not remove it");
        drop(held);
        assert!(!root.path().join("lib").exists());
        // If the folder contains other files, the lock file must stay.
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("other"), "").unwrap();
        drop(InstallLock::take(&folder).unwrap());
        assert!(folder.join("other").exists() && !folder.join(FILE).exists());
    }
}
