//! Builds the merged `/etc/ld.so.preload` of a container. It is the list of the image, or of a file
//! that is mounted there, followed by Affinode's line.
//!
//! glibc reads names separated by blanks, colons and newlines, and comments from `#` to the end of
//! a line. musl and static programs do not read the file.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;

use affinode_proto::paths::CONTAINER_LIB;
use rustix::fs::{FileType, Mode, OFlags};

/// Path of the preload list in an image.
pub const FILE: &str = "/etc/ld.so.preload";
/// Maximum size of a preload list that belongs to an image or to the host.
pub const MAX_BYTES: u64 = 64 << 10;

/// Types of local file systems, from which a host's preload list may be read. On other types an
/// access may wait for a remote or user-space server, or have side effects (/proc).
const FILE_SYSTEMS: [u64; 7] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x2fc1_2fc1, // zfs
    0x794c_7630, // overlay
    0x7371_7368, // squashfs
    0x0102_1994, // tmpfs
];

/// Reason why a host file that is mounted over [`FILE`] is not merged.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// The path is a folder, device, pipe or socket.
    #[error("this preload list is not a regular file")]
    NotAFile,
    /// The file is not world-readable. It is not merged, because every process of the container
    /// could read the merged list.
    #[error(
        "not every user can read this file of the host; run chmod o+r on it, or keep the container \
         unmanaged"
    )]
    Private,
    /// The file is on a network, FUSE or kernel file system.
    #[error(
        "this preload list is on a file system of type {0:#x}; Affinode adds its library only to \
         lists on local disks"
    )]
    FileSystem(u64),
    /// The file exceeds [`MAX_BYTES`].
    #[error("this preload list is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// The file could not be opened or read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Appends Affinode's line to a preload list of the image or node. That list may name a library
/// that hooks the driver, such as HAMi's. The other library is then called before Affinode's. In
/// the opposite order, the calls of the other library would reach the driver without passing the
/// gate.
#[must_use]
pub fn merge(theirs: &[u8]) -> Vec<u8> {
    if names(theirs).any(|name| name == CONTAINER_LIB.as_bytes()) {
        return theirs.to_vec();
    }
    let end: &[u8] = if matches!(theirs, [] | [.., b'\n']) { b"" } else { b"\n" };
    [theirs, end, CONTAINER_LIB.as_bytes(), b"\n"].concat()
}

/// Reads the host's file that a mount of the container puts at [`FILE`]. A pod can name any file of
/// the host, and the shim runs as root. So the function reads only files that every user of the
/// host can read.
///
/// # Errors
///
/// If the file is not a regular, world-readable file of a local disk, is too large, or cannot be
/// read.
pub fn read_host(path: &Path) -> Result<Vec<u8>, HostFileError> {
    // O_PATH: opening a device or a pipe for reading may have side effects, or block.
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(std::io::Error::from)?;
    let stat = rustix::fs::fstat(&found).map_err(std::io::Error::from)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(HostFileError::NotAFile);
    }
    if !Mode::from_raw_mode(stat.st_mode).contains(Mode::ROTH) {
        return Err(HostFileError::Private);
    }
    let kind = rustix::fs::fstatfs(&found).map_err(std::io::Error::from)?.f_type;
    let kind = kind.cast_unsigned();
    if !FILE_SYSTEMS.contains(&kind) {
        return Err(HostFileError::FileSystem(kind));
    }
    // Opens the file that was checked, not a later file of the same name.
    let file = std::fs::File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(HostFileError::TooLarge);
    }
    Ok(bytes)
}

fn names(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
        .map(|line| line.split(|byte| *byte == b'#').next().unwrap_or_default())
        .flat_map(|line| line.split(|byte| b" \t:".contains(byte)))
        .filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    const LINE: &str = "/.affinode/lib/libaffinode_preload.so";

    #[test]
    fn our_line_comes_last() {
        for (theirs, wanted) in [
            ("", format!("{LINE}\n")),
            ("/lib/a.so", format!("/lib/a.so\n{LINE}\n")),
            ("/a.so:/b.so # why\n", format!("/a.so:/b.so # why\n{LINE}\n")),
            ("/a.so # why", format!("/a.so # why\n{LINE}\n")),
            ("# /.affinode/lib/libaffinode_preload.so\n", format!("# {LINE}\n{LINE}\n")),
        ] {
            assert_eq!(merge(theirs.as_bytes()), wanted.as_bytes());
        }
    }

    #[test]
    fn an_image_that_has_the_line_keeps_its_file() {
        for own in [format!("/a.so:{LINE}\n"), LINE.to_owned(), format!("/a {LINE} /b")] {
            assert_eq!(merge(own.as_bytes()), own.as_bytes());
        }
    }

    #[test]
    fn only_public_bounded_local_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "/a.so").unwrap();
        assert_eq!(read_host(&file).unwrap(), b"/a.so");
        assert!(matches!(read_host(dir.path()), Err(HostFileError::NotAFile)));
        assert!(matches!(read_host(Path::new("/dev/zero")), Err(HostFileError::NotAFile)));
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from(0o666), 0).unwrap();
        assert!(matches!(read_host(&pipe), Err(HostFileError::NotAFile)), "and it does not wait");
        let kernel = Path::new("/proc/version");
        assert!(matches!(read_host(kernel), Err(HostFileError::FileSystem(0x9fa0))));
        assert!(matches!(read_host(&dir.path().join("none")), Err(HostFileError::Io(_))));
        let bytes = usize::try_from(MAX_BYTES).unwrap();
        std::fs::write(&file, vec![b'x'; bytes]).unwrap();
        assert_eq!(read_host(&file).unwrap().len(), bytes);
        std::fs::write(&file, vec![b'x'; bytes + 1]).unwrap();
        assert!(matches!(read_host(&file), Err(HostFileError::TooLarge)));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(read_host(&file), Err(HostFileError::Private)), "though we are root");
    }

    proptest! {
        #[test]
        fn whatever_the_image_has_stays(own: Vec<u8>) {
            let merged = merge(&own);
            prop_assert!(merged.starts_with(&own));
            prop_assert!(names(&merged).any(|name| name == LINE.as_bytes()));
            prop_assert_eq!(merge(&merged), merged.clone());
            let others: Vec<_> = names(&own).filter(|name| *name != LINE.as_bytes()).collect();
            let kept: Vec<_> = names(&merged).filter(|name| *name != LINE.as_bytes()).collect();
            prop_assert_eq!(others, kept);
        }
    }
}
