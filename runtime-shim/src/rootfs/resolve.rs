//! Looks up a path in the merged view of a rootfs's layers.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::RootfsError;

/// Maximum number of symlinks that a lookup follows. The kernel has the same limit.
const MAX_SYMLINKS: usize = 40;
/// Maximum number of names in a path, including those of symlink targets.
const MAX_NAMES: usize = 4096;

/// What a lookup has found at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResolvedPath {
    /// There is no entry at the path.
    Missing,
    /// The entry is a regular file with this content.
    Regular(Vec<u8>),
    /// The entry is not a regular file, but for example a folder, a device, a socket or a dangling
    /// symlink. The text names the kind of entry.
    Other(&'static str),
}

/// A folder of the merged tree, as one descriptor per layer, topmost first.
type Folder = Vec<OwnedFd>;

enum PathEntry {
    Missing,
    Folder(Folder),
    Symlink(OsString),
    Regular(OwnedFd),
    Other(&'static str),
}

/// Looks up an absolute path in the merged tree, from the folder `root`.
pub(super) fn find(root: Folder, path: &Path, max_bytes: u64) -> Result<ResolvedPath, RootfsError> {
    let io = |error: Errno| RootfsError::Io { path: path.to_owned(), source: error.into() };
    let mut names: VecDeque<OsString> = split(path.as_os_str());
    // The folders from the root down to the current one; never empty.
    let mut stack = vec![root];
    let (mut symlinks, mut seen, mut through_link) = (0, 0, false);
    while let Some(name) = names.pop_front() {
        if name.is_empty() || name == "." {
            continue;
        }
        seen += 1;
        if seen > MAX_NAMES {
            return Err(RootfsError::TooLong(path.to_owned()));
        }
        if name == ".." {
            if stack.len() > 1 {
                stack.pop();
            }
            continue;
        }
        let Some(folder) = stack.last() else {
            return Ok(ResolvedPath::Missing);
        };
        match look_up(folder, &name, path)? {
            PathEntry::Missing if through_link => {
                return Ok(ResolvedPath::Other("a dangling symlink"));
            }
            PathEntry::Missing => return Ok(ResolvedPath::Missing),
            PathEntry::Folder(folder) => stack.push(folder),
            PathEntry::Symlink(target) => {
                symlinks += 1;
                if symlinks > MAX_SYMLINKS {
                    return Err(RootfsError::TooLong(path.to_owned()));
                }
                through_link = true;
                if target.as_bytes().first() == Some(&b'/') {
                    stack.truncate(1);
                }
                for name in split(&target).into_iter().rev() {
                    names.push_front(name);
                }
            }
            PathEntry::Regular(file) if names.is_empty() => {
                return read(&file, max_bytes, path).map(ResolvedPath::Regular);
            }
            PathEntry::Other(kind) if names.is_empty() => return Ok(ResolvedPath::Other(kind)),
            PathEntry::Regular(_) | PathEntry::Other(_) => {
                return Err(io(Errno::NOTDIR));
            }
        }
    }
    Ok(ResolvedPath::Other("a folder"))
}

/// Looks up one name in one folder of the merged tree.
fn look_up(folder: &[OwnedFd], name: &OsStr, path: &Path) -> Result<PathEntry, RootfsError> {
    let io = |error: Errno| RootfsError::Io { path: path.to_owned(), source: error.into() };
    let mut parts = Folder::new();
    for part in folder {
        let entry = match rustix::fs::openat(
            part,
            name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            Ok(entry) => entry,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(io(error)),
        };
        let stat = rustix::fs::fstat(&entry).map_err(io)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if is_whiteout(&entry, &stat, kind).map_err(io)? {
            break;
        }
        if kind == FileType::Directory {
            if has_attribute(&entry, "redirect").map_err(io)? {
                return Err(RootfsError::Overlay("redirected folders (redirect_dir)"));
            }
            let opaque = attribute(&entry, "opaque").map_err(io)? == Some(b'y');
            parts.push(entry);
            if opaque {
                break;
            }
            continue;
        }
        if !parts.is_empty() {
            // An opaque folder hides everything below it in lower layers.
            break;
        }
        return Ok(match kind {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&entry, "", Vec::new()).map_err(io)?;
                PathEntry::Symlink(OsString::from_vec(target.into_bytes()))
            }
            FileType::RegularFile => {
                if has_attribute(&entry, "metacopy").map_err(io)? {
                    return Err(RootfsError::Overlay("metadata-only files (metacopy)"));
                }
                PathEntry::Regular(entry)
            }
            FileType::CharacterDevice | FileType::BlockDevice => PathEntry::Other("a device"),
            FileType::Fifo => PathEntry::Other("a pipe"),
            FileType::Socket => PathEntry::Other("a socket"),
            _ => PathEntry::Other("a file of unknown type"),
        });
    }
    Ok(if parts.is_empty() { PathEntry::Missing } else { PathEntry::Folder(parts) })
}

/// Whether an entry is a whiteout, which hides its name in the lower layers. overlayfs writes a
/// whiteout as a character device 0/0, or as an empty file with an attribute.
fn is_whiteout(entry: &OwnedFd, stat: &Stat, kind: FileType) -> Result<bool, Errno> {
    match kind {
        FileType::CharacterDevice => Ok(stat.st_rdev == 0),
        FileType::RegularFile if stat.st_size == 0 => has_attribute(entry, "whiteout"),
        _ => Ok(false),
    }
}

fn has_attribute(entry: &OwnedFd, name: &str) -> Result<bool, Errno> {
    Ok(attribute(entry, name)?.is_some())
}

/// Returns the first byte of the overlayfs attribute `name`, or 0 if its value is empty. Reads
/// `trusted.overlay.NAME` and, if the entry does not have it, `user.overlay.NAME`. Returns `None`
/// if the entry has neither.
fn attribute(entry: &OwnedFd, name: &str) -> Result<Option<u8>, Errno> {
    // Attributes cannot be read through an O_PATH descriptor itself.
    let path = format!("/proc/self/fd/{}", entry.as_raw_fd());
    for prefix in ["trusted.overlay.", "user.overlay."] {
        let mut value = [0u8; 256];
        match rustix::fs::getxattr(&path, format!("{prefix}{name}"), &mut value[..]) {
            Ok(_) => return Ok(Some(value[0])),
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => {}
            // The value is longer than the buffer, so the attribute exists.
            Err(Errno::RANGE) => return Ok(Some(0)),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn read(file: &OwnedFd, max_bytes: u64, path: &Path) -> Result<Vec<u8>, RootfsError> {
    let io = |source: std::io::Error| RootfsError::Io { path: path.to_owned(), source };
    // Opens the file that was checked, not a later file of the same name.
    let open = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(io)?;
    let mut bytes = Vec::new();
    open.take(max_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > max_bytes {
        return Err(RootfsError::TooLarge { path: path.to_owned(), max_bytes });
    }
    Ok(bytes)
}

/// Splits a path into its names. Empty names and `.` are also returned, because they require that
/// the name before them is a folder.
fn split(path: &OsStr) -> VecDeque<OsString> {
    path.as_bytes()
        .split(|byte| *byte == b'/')
        .map(|name| OsStr::from_bytes(name).to_owned())
        .collect()
}

#[cfg(test)]
mod tests;
