//! Socket addresses of shims. An address is `unix://` and a path whose file name is a hash.
//!
//! The proxy's address is derived from the address of the stock shim. The stock shim chooses which
//! containers share its address, and these containers then share one proxy.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Maximum length of a path, in bytes, that fits into a socket address with its terminating zero.
const PATH_MAX_BYTES: usize = 107;

/// A `unix://` address that the proxy can serve or connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAddress {
    path: PathBuf,
}

/// Reason why the proxy can neither serve nor connect to an address.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The address is an abstract socket, a vsock or of an unknown scheme.
    #[error(
        "the stock shim serves {0:?}, which is not a unix:// path; update containerd-shim-runc-v2 to 1.4 or later"
    )]
    NotUnix(String),
    /// A path that the kernel does not accept as a socket address.
    #[error(
        "socket path {0:?} is longer than {PATH_MAX_BYTES} bytes; shorten containerd's socket folder"
    )]
    TooLong(PathBuf),
}

impl SocketAddress {
    /// Parses an address of the form `unix:///path`.
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

    /// Returns the address of the proxy in front of the stock shim at this address. Both sockets
    /// are in the same folder, so its permissions and the limit of the path's length apply to both.
    pub fn proxy(&self) -> Result<SocketAddress, AddressError> {
        let name = hex(&Sha256::digest(format!("affinode:{self}")));
        let path = self.path.with_file_name(name);
        if path.as_os_str().len() > PATH_MAX_BYTES {
            return Err(AddressError::TooLong(path));
        }
        Ok(SocketAddress { path })
    }

    /// Path of the socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the inode of the socket file. It distinguishes this socket from a later socket with
    /// the same path. Returns `None` if there is no such file.
    #[must_use]
    pub fn inode(&self) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        std::fs::symlink_metadata(&self.path).ok().map(|meta| meta.ino())
    }

    /// Removes the socket file if it still has this inode. If another process has bound a new
    /// socket at the same path, the inode differs, and the new socket stays.
    pub fn unlink(&self, inode: Option<u64>) {
        if inode.is_some() && self.inode() == inode {
            // The file is to be removed, so it is not an error if it is missing.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl std::fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

/// Formats bytes as lower-case hex digits.
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
        // Keeps the first inode in use, so that the second socket has another inode.
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
