//! Opens the listening sockets of the run directory. While no controller runs, systemd's store of
//! descriptors keeps them open.
//!
//! ```text
//! controller ──bind, FDSTORE=1──> systemd keeps a copy
//!     exits                       a new connection waits in the backlog
//! next controller <──LISTEN_FDS── uses the sockets whose files are unchanged
//! ```
//!
//! A shim starts a controller only if it cannot connect to the socket. If systemd runs the
//! controller as a unit, systemd keeps the socket open after the controller has ended, and starts
//! the next controller itself. Without systemd (no `NOTIFY_SOCKET`), each controller binds its own
//! sockets. systemd's store has a maximum size (`FileDescriptorStoreMax`). A socket for which the
//! store has no space is bound again by the next controller.

use std::{
    collections::HashMap,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::stat::{Mode, umask};
use sd_notify::NotifyState;

use crate::sys;

/// Returns whether systemd supervises this controller as a unit.
#[must_use]
pub fn supervised() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Notifies systemd, if it supervises this process, that the service is ready, with a status text.
pub fn tell_ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Shows a status text in systemd, if it supervises this process.
pub fn tell_status(status: &str) {
    tell(&[NotifyState::Status(status)]);
}

/// Listening sockets below a run directory. systemd stores copies of them for the next controller.
#[derive(Debug)]
pub struct ActivationSockets {
    run_dir: PathBuf,
    /// Sockets of an earlier controller that this controller has not used yet, by their name in
    /// systemd's store.
    kept: HashMap<String, OwnedFd>,
    /// Sockets that this controller uses and systemd stores. The key is the file below the run
    /// directory, the value is the name in systemd's store.
    stored: HashMap<String, String>,
}

impl ActivationSockets {
    /// Takes over the sockets that systemd has stored for this process.
    #[must_use]
    pub fn take(run_dir: &Path) -> ActivationSockets {
        let kept = sys::handed_over().unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "controller: cannot use the sockets that systemd stored, so it creates new ones"
            );
            Vec::new()
        });
        ActivationSockets::with(run_dir, kept)
    }

    fn with(run_dir: &Path, kept: Vec<(String, OwnedFd)>) -> ActivationSockets {
        let kept = kept.into_iter().collect();
        ActivationSockets { run_dir: run_dir.to_owned(), kept, stored: HashMap::new() }
    }

    /// Listens at a file below the run directory. If the file still belongs to a socket that
    /// systemd has stored, that socket is used. Otherwise a socket with this mode is created and
    /// replaces the file.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn listen(&mut self, file: &str, mode: u32) -> io::Result<UnixListener> {
        let path = self.run_dir.join(file);
        let kept = name(file, &path).and_then(|name| Some((self.kept.remove(&name)?, name)));
        let listener = match kept {
            Some((socket, name)) => {
                self.stored.insert(file.to_owned(), name);
                UnixListener::from(socket)
            }
            None => {
                let listener = bind(&path, mode)?;
                self.store(file, &path, &listener);
                listener
            }
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    fn store(&mut self, file: &str, path: &Path, listener: &UnixListener) {
        let Some(name) = name(file, path).filter(|_| supervised()) else { return };
        let state = [NotifyState::FdStore, NotifyState::FdName(&name)];
        match sd_notify::notify_with_fds(&state, &[listener.as_fd()]) {
            Ok(()) => drop(self.stored.insert(file.to_owned(), name)),
            Err(error) => {
                tracing::warn!(
                    %error, file,
                    "socket {file}: cannot store it in systemd, so the next controller must create \
                     it again"
                )
            }
        }
    }

    /// Removes the socket of this file from systemd's store, because it is not used any longer.
    pub fn forget(&mut self, file: &str) {
        if let Some(name) = self.stored.remove(file) {
            remove(&name);
        }
    }

    /// Removes unused sockets from systemd's store if their file is missing or belongs to another
    /// socket. The container of such a socket has ended, or another controller has created a socket
    /// at the same path.
    pub fn tidy(&mut self) {
        let run_dir = &self.run_dir;
        self.kept.retain(|kept, _| {
            let file = kept.rsplit_once(NUMBER).map_or(kept.as_str(), |(file, _)| file);
            let lives = name(file, &run_dir.join(file)).as_ref() == Some(kept);
            if !lives {
                remove(kept);
            }
            lives
        });
    }
}

/// Separator in the name of a stored socket. It stands between the file's path and the file's
/// device and inode numbers.
const NUMBER: char = '@';

/// Returns the name of a socket in systemd's store: its file, and the file's device and inode
/// numbers, which are unique while the socket exists. Returns `None` if there is no such file.
fn name(file: &str, path: &Path) -> Option<String> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    Some(format!("{file}{NUMBER}{:x}-{:x}", found.dev(), found.ino()))
}

fn bind(path: &Path, mode: u32) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The socket is bound through a descriptor of its folder, because a socket address has at most
    // 107 bytes and the path of a run directory can be longer.
    let (folder, file) = path.parent().zip(path.file_name()).ok_or(io::ErrorKind::InvalidInput)?;
    let folder = fs::File::open(folder)?;
    let address = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(file);
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(address);
    umask(before);
    let listener = bound?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

fn remove(name: &str) {
    tell(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}

/// Sends a notification to systemd. Does nothing if systemd does not supervise this process.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "controller: cannot send a notification to systemd");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const FILE: &str = "control.sock";

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    /// Returns the name and descriptor that systemd passes to the next controller after a
    /// controller has exited.
    fn kept(dir: &Path, listener: &UnixListener) -> (String, OwnedFd) {
        (name(FILE, &dir.join(FILE)).unwrap(), listener.as_fd().try_clone_to_owned().unwrap())
    }

    #[test]
    fn the_next_controller_serves_the_backlog() {
        let dir = tempfile::tempdir().unwrap();
        let first = ActivationSockets::with(dir.path(), Vec::new()).listen(FILE, 0o600).unwrap();
        assert_eq!(mode(&dir.path().join(FILE)), 0o600);
        let kept = kept(dir.path(), &first);
        drop(first);
        let _waiting = UnixStream::connect(dir.path().join(FILE)).unwrap();
        let mut sockets = ActivationSockets::with(dir.path(), vec![kept]);
        let second = sockets.listen(FILE, 0o600).unwrap();
        assert!(second.accept().is_ok(), "it was in the backlog");
        sockets.forget(FILE);
        assert!(sockets.kept.is_empty() && sockets.stored.is_empty());
    }

    #[test]
    fn a_replaced_socket_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let old = ActivationSockets::with(dir.path(), Vec::new()).listen(FILE, 0o666).unwrap();
        let kept = kept(dir.path(), &old);
        // Between the two controllers, a controller without a supervisor ran and created its own
        // socket.
        let other = ActivationSockets::with(dir.path(), Vec::new()).listen(FILE, 0o666).unwrap();
        drop(other);
        let mut sockets = ActivationSockets::with(dir.path(), vec![kept]);
        let own = sockets.listen(FILE, 0o666).unwrap();
        let _peer = UnixStream::connect(dir.path().join(FILE)).unwrap();
        assert!(own.accept().is_ok());
        assert_eq!(sockets.kept.len(), 1);
        sockets.tidy();
        assert!(sockets.kept.is_empty(), "no file leads to it");
    }

    #[test]
    fn a_reachable_socket_stays_stored() {
        let dir = tempfile::tempdir().unwrap();
        let socket = ActivationSockets::with(dir.path(), Vec::new()).listen(FILE, 0o666).unwrap();
        let mut sockets = ActivationSockets::with(dir.path(), vec![kept(dir.path(), &socket)]);
        sockets.tidy();
        assert_eq!(sockets.kept.len(), 1, "its container may be announced yet");
        fs::remove_file(dir.path().join(FILE)).unwrap();
        sockets.tidy();
        assert!(sockets.kept.is_empty());
    }
}
