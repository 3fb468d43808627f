//! The merged `/etc/ld.so.preload`: what the image has, or what a mount of the container puts
//! there, then our line.
//!
//! glibc reads names separated by blanks, colons and newlines, and comments from
//! `#` to the end of a line. musl and static programs do not read the file.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;

use affinode_proto::paths::CONTAINER_LIB;
use rustix::fs::{FileType, Mode, OFlags};

/// The file in an image.
pub const FILE: &str = "/etc/ld.so.preload";
/// Bound on what an image's own file may hold.
pub const MAX_BYTES: u64 = 64 << 10;

/// File systems of a node's own files. Of others a look may wait for somebody's server, or do
/// something (/proc).
const FILE_SYSTEMS: [u64; 7] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x2fc1_2fc1, // zfs
    0x794c_7630, // overlay
    0x7371_7368, // squashfs
    0x0102_1994, // tmpfs
];

/// A file of the host that is mounted over [`FILE`] and is not merged with.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// A folder, a device, a pipe.
    #[error("it is not a file")]
    NotAFile,
    /// Somebody keeps it to himself: what is merged can be read by all of the container.
    #[error("not everybody may read it; chmod o+r it, or leave the container to run unmanaged")]
    Private,
    /// Of the network, of a user's own server, of the kernel.
    #[error("it is on a file system of kind {0:#x}; only files on local disks are merged")]
    FileSystem(u64),
    /// Longer than any loader's list.
    #[error("it is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// What is there already, of the image or of the node, then our line. A library before us that
/// hooks the driver (HAMi's) stands between the program and us, as it would between the program
/// and the driver; behind us it would reach the driver past the gate.
#[must_use]
pub fn merge(theirs: &[u8]) -> Vec<u8> {
    if names(theirs).any(|name| name == CONTAINER_LIB.as_bytes()) {
        return theirs.to_vec();
    }
    let end: &[u8] = if matches!(theirs, [] | [.., b'\n']) { b"" } else { b"\n" };
    [theirs, end, CONTAINER_LIB.as_bytes(), b"\n"].concat()
}

/// The content of the host's file that would be mounted. A pod may name any: the shim, root on
/// the host, must show no more of it than everybody sees.
///
/// # Errors
/// When it is no plain, public file of a local disk, too large, or cannot be read.
pub fn read_host(path: &Path) -> Result<Vec<u8>, HostFileError> {
    // Looked at before it is opened: opening a device or a pipe may do something, or wait.
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
    // The very file that was looked at, not whatever has its name by now.
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
    fn only_a_public_file_of_a_local_disk_and_a_bounded_size_is_read() {
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
