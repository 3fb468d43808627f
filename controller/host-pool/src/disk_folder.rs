//! The folder in which disk files are created, and the maximum size of all of them.
//!
//! A disk file has no name after its creation, so the kernel deletes it as soon as no process has it
//! open. The process gets a descriptor of a read-only mount of the folder: with a writable one it
//! could fill the disk.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{AtFlags, Dir, Mode, OFlags},
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
};

use crate::{open_files::OpenFiles, sys};

/// Beginning of the names that disk files have while they are being created.
const NAME: &str = "affinode-disk-";

/// The part of the file system that stays free, as a divisor of its size: a twentieth.
const FREE_PART: u64 = 20;

/// Reason why the disk folder or a file in it cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {}", path.display())]
pub struct DiskError {
    step: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The folder for disk files.
#[derive(Debug)]
pub struct DiskFolder {
    path: PathBuf,
    folder: OwnedFd,
    /// The same folder on a read-only mount that is in no mount namespace.
    read_only: OwnedFd,
    max_bytes: u64,
    /// Size of the pieces of all disk files, in bytes.
    used_bytes: AtomicU64,
    /// Files whose connections have ended.
    open_files: OpenFiles,
    /// Number of files that were created.
    created: AtomicU64,
}

/// The two descriptors of a new disk file.
#[derive(Debug)]
pub struct NewFile {
    /// For the host pool, to write.
    pub writable: OwnedFd,
    /// For the process, to read.
    pub readable: OwnedFd,
}

impl DiskFolder {
    /// Opens the folder, and deletes files that an earlier host pool could not delete. Their size
    /// is 0: a file with content has no name.
    ///
    /// # Errors
    /// [`DiskError`] names the step that failed.
    pub fn open(path: &Path, max_bytes: u64) -> Result<DiskFolder, DiskError> {
        let failed = |step| {
            let path = path.to_owned();
            move |errno: Errno| DiskError { step, path, source: errno.into() }
        };
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .map_err(failed("open the folder for disk files,"))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let read_only =
            open_tree(&folder, "", flags).map_err(failed("clone the mount of the folder"))?;
        sys::make_read_only(&read_only)
            .map_err(failed("make a read-only mount (Linux 5.12 or later) of the folder"))?;
        let open_files = OpenFiles::new().map_err(|source| DiskError {
            step: "watch files in the folder",
            path: path.to_owned(),
            source,
        })?;
        let names = Dir::read_from(&folder).map_err(failed("read the folder"))?;
        for entry in names.flatten() {
            if entry.file_name().to_bytes().starts_with(NAME.as_bytes()) {
                // What cannot be deleted now is empty, and its name is not used again.
                let _ = rustix::fs::unlinkat(&folder, entry.file_name(), AtFlags::empty());
            }
        }
        Ok(DiskFolder {
            path: path.to_owned(),
            folder,
            read_only,
            max_bytes,
            used_bytes: AtomicU64::new(0),
            open_files,
            created: AtomicU64::new(0),
        })
    }

    /// Creates a file without a name.
    ///
    /// # Errors
    /// [`DiskError`]: for example, the file system does not support direct I/O.
    pub fn create(&self) -> Result<NewFile, DiskError> {
        let number = self.created.fetch_add(1, Ordering::Relaxed);
        let name = format!("{NAME}{}-{number}", rustix::process::getpid().as_raw_nonzero());
        let path = self.path.join(&name);
        let failed = |step| {
            let path = path.clone();
            move |errno: Errno| DiskError { step, path, source: errno.into() }
        };
        let flags = OFlags::CREATE
            | OFlags::EXCL
            | OFlags::RDWR
            | OFlags::DIRECT
            | OFlags::CLOEXEC
            | OFlags::NOFOLLOW;
        let writable = rustix::fs::openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR);
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let readable = rustix::fs::openat(&self.read_only, &name, flags, Mode::empty());
        let deleted = rustix::fs::unlinkat(&self.folder, &name, AtFlags::empty());
        let writable = writable.map_err(failed("create, for direct I/O, the disk file"))?;
        let readable = readable.map_err(failed("open, for reading, the disk file"))?;
        deleted.map_err(failed("delete the name of the disk file"))?;
        Ok(NewFile { writable, readable })
    }

    /// Counts `bytes` more as used. Returns false if the maximum would be exceeded, or if less than
    /// a twentieth of the file system would stay free.
    pub fn take(&self, bytes: u64) -> bool {
        self.give_back(self.open_files.closed_bytes());
        let has_room = rustix::fs::fstatvfs(&self.folder).is_ok_and(|found| {
            let unit = found.f_frsize;
            found.f_bavail.saturating_mul(unit)
                >= bytes.saturating_add(found.f_blocks / FREE_PART * unit)
        });
        let more = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.max_bytes);
        has_room && self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts `bytes` as free again.
    pub fn give_back(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` as free as soon as no process has the file open, which the caller is about to
    /// close.
    pub fn give_back_when_closed(&self, file: &OwnedFd, bytes: u64) {
        if let Err(error) = self.open_files.add(file, bytes) {
            tracing::warn!(
                %error,
                "cannot watch a disk file of an ended connection, so it does not count for the maximum size"
            );
            self.give_back(bytes);
        }
    }

    /// Returns the size of the pieces of all disk files, in bytes.
    #[cfg(test)]
    pub fn used_bytes(&self) -> u64 {
        self.give_back(self.open_files.closed_bytes());
        self.used_bytes.load(Ordering::Relaxed)
    }
}
