//! Addresses of shims: `unix://` and a path, named by a hash.
//!
//! The stock shim's address says which group a container belongs to, so ours is
//! derived from it and grouping is not written a second time.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Longest path that fits a socket address, with the closing zero.
const PATH_MAX_BYTES: usize = 107;

/// A shim's address that the proxy can stand in front of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAddress {
    path: PathBuf,
}

/// Not an address that the proxy can stand in front of.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Abstract, vsock or something unknown.
    #[error(
        "the stock shim serves {0:?}, which is not a unix:// path; update containerd-shim-runc-v2 to 1.4 or later"
    )]
    NotUnix(String),
    /// A socket path that the kernel does not take.
    #[error(
        "socket path {0:?} is longer than {PATH_MAX_BYTES} bytes; shorten containerd's socket folder"
    )]
    TooLong(PathBuf),
}

impl SocketAddress {
    /// Reads `unix:///path`.
    pub fn parse(text: &str) -> Result<SocketAddress, AddressError> {
        match text.strip_prefix("unix://") {
            Some(path) if path.starts_with('/') => {
                let path = PathBuf::from(path);
                if path.as_os_str().len() > PATH_MAX_BYTES {
                    return Err(AddressError::TooLong(path));
                }
                Ok(SocketAddress { path })
            }
            _ => Err(AddressError::NotUnix(text.to_owned())),
        }
    }

    /// The address of our proxy before this stock shim: in the same folder, so
    /// that the folder's rights and length hold for it too.
    pub fn proxy(&self) -> Result<SocketAddress, AddressError> {
        let name = hex(&Sha256::digest(format!("affinode:{self}")));
        let path = self.path.with_file_name(name);
        if path.as_os_str().len() > PATH_MAX_BYTES {
            return Err(AddressError::TooLong(path));
        }
        Ok(SocketAddress { path })
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The inode of the socket, which tells it from a later one of the same name.
    #[must_use]
    pub fn inode(&self) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        std::fs::symlink_metadata(&self.path).ok().map(|meta| meta.ino())
    }

    /// Removes the socket if it still is the one with this inode: a successor
    /// may have bound the same name already.
    pub fn unlink(&self, inode: Option<u64>) {
        if inode.is_some() && self.inode() == inode {
            // Gone already is as good.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl std::fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

/// Lower-case hex digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOCK: &str =
        "unix:///run/containerd/s/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn the_proxy_lives_beside_the_stock_shim() {
        let stock = SocketAddress::parse(STOCK).unwrap();
        let ours = stock.proxy().unwrap();
        assert_eq!(ours.path().parent(), stock.path().parent());
        assert_ne!(ours, stock);
        assert_eq!(ours, stock.proxy().unwrap(), "the same for every member");
        assert_eq!(
            ours.to_string().len(),
            STOCK.len(),
            "as long as the stock shim's, so it fits where that does"
        );
    }

    #[test]
    fn other_transports_are_refused_by_name() {
        for text in ["vsock://2:1024", "\0abstract", "", "unix://relative"] {
            let error = SocketAddress::parse(text).unwrap_err().to_string();
            assert!(error.contains("not a unix:// path"), "{error}");
        }
        let long = format!("unix:///{}", "x".repeat(200));
        assert!(matches!(SocketAddress::parse(&long), Err(AddressError::TooLong(_))));
    }

    #[test]
    fn a_successor_is_not_unlinked() {
        let dir = tempfile::tempdir().unwrap();
        let address = SocketAddress { path: dir.path().join("s") };
        let first = std::os::unix::net::UnixListener::bind(address.path()).unwrap();
        let inode = address.inode();
        // Keep the first inode in use, so that the second is another.
        std::fs::hard_link(address.path(), dir.path().join("kept")).unwrap();
        std::fs::remove_file(address.path()).unwrap();
        let second = std::os::unix::net::UnixListener::bind(address.path()).unwrap();
        address.unlink(inode);
        assert!(address.path().exists());
        address.unlink(address.inode());
        assert!(!address.path().exists());
        drop((first, second));
    }
}
