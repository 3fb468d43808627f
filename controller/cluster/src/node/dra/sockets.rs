//! Unix sockets in folders of the node.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use tokio::net::UnixListener;

/// A Unix socket that listens at a path of the node. Dropping the value removes the socket's file,
/// unless another process has replaced the file.
#[derive(Debug)]
pub struct NodeSocket {
    path: PathBuf,
    /// Device and inode of the socket's file.
    file: (u64, u64),
}

/// Error for a socket that could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {} for sockets of the kubelet's plugins; check the kubelet's folder (--dra-kubelet-dir or --device-plugin-dir)", path.display())]
pub struct SocketError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl NodeSocket {
    /// Creates a socket that only root can use, and the socket's folder. Replaces a socket that an
    /// earlier agent did not remove.
    ///
    /// # Errors
    /// [`SocketError`]: the folder or the socket cannot be created.
    pub fn bind(path: &Path) -> Result<(UnixListener, NodeSocket), SocketError> {
        bind(path).map_err(|source| SocketError { path: path.to_owned(), source })
    }

    /// Returns whether the path still leads to the file of this socket.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        let found = fs::symlink_metadata(&self.path);
        found.is_ok_and(|data| (data.dev(), data.ino()) == self.file)
    }
}

/// Checks that a folder exists.
///
/// # Errors
/// [`SocketError`]: the folder does not exist, or the path is not a folder.
pub fn check_folder(path: &Path) -> Result<(), SocketError> {
    match fs::read_dir(path) {
        Ok(_) => Ok(()),
        Err(source) => Err(SocketError { path: path.to_owned(), source }),
    }
}

fn bind(path: &Path) -> io::Result<(UnixListener, NodeSocket)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The address of a socket has at most 107 bytes, but the path to the node's root may be long.
    let opened = File::open(folder)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd())).join(name);
    let listener = UnixListener::bind(short)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    let data = fs::symlink_metadata(path)?;
    Ok((listener, NodeSocket { path: path.to_owned(), file: (data.dev(), data.ino()) }))
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        if self.is_in_place() {
            // If the file stays, the next agent replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn socket_below_a_long_path_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long".repeat(40)).join("plugin.sock");
        let (_listener, socket) = NodeSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn socket_of_a_newer_agent_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plugin.sock");
        let (_old_listener, old) = NodeSocket::bind(&path).unwrap();
        let (_new_listener, _new) = NodeSocket::bind(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }
}
