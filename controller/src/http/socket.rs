//! Where the site listens: a TCP address or a Unix socket for root.

use std::{
    fmt, fs, io,
    net::SocketAddr,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
};

use nix::sys::stat::{Mode, umask};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
};

use super::tls::Papers;
use crate::config::Listen;

/// Why it cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {place}")]
pub struct ListenError {
    place: String,
    #[source]
    source: io::Error,
}

/// A bound socket, and the papers to show there.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    papers: Option<Papers>,
}

#[derive(Debug)]
enum Socket {
    /// TCP.
    Tcp(TcpListener),
    /// Unix.
    Unix(UnixListener),
}

/// A socket that is bound and not served yet: it can go to another thread's runtime.
#[derive(Debug)]
pub enum Bound {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// Unix.
    Unix(std::os::unix::net::UnixListener),
}

/// Who is at the other end.
#[derive(Clone, Debug)]
pub enum Peer {
    /// An address.
    Tcp(SocketAddr),
    /// A user of this machine.
    Unix(Option<u32>),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Tcp(address) => write!(f, "{address}"),
            Peer::Unix(Some(uid)) => write!(f, "user {uid} of this machine"),
            Peer::Unix(None) => write!(f, "a process of this machine"),
        }
    }
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

impl Listener {
    /// Binds. Returns the socket and where clients find it; nothing when it is off.
    ///
    /// # Errors
    /// [`ListenError`]: the port is taken, most likely.
    pub fn bind(listen: &Listen) -> Result<Option<(Bound, String)>, ListenError> {
        let fail = |place: String| move |source| ListenError { place, source };
        match listen {
            Listen::Off => Ok(None),
            Listen::Tcp(address) => {
                let bind = || {
                    let socket = std::net::TcpListener::bind(address)?;
                    socket.set_nonblocking(true)?;
                    let address = socket.local_addr()?;
                    Ok((Bound::Tcp(socket), format!("http://{address}")))
                };
                bind().map(Some).map_err(fail(address.to_string()))
            }
            Listen::Unix(path) => {
                let place = format!("unix:{}", path.display());
                let bound = bind_unix(path).map_err(fail(place.clone()))?;
                Ok(Some((Bound::Unix(bound), place)))
            }
        }
    }

    /// Takes a bound socket over, inside a runtime. With papers it speaks TLS, on TCP.
    ///
    /// # Errors
    /// The runtime cannot watch it.
    pub fn new(bound: Bound, papers: Option<Papers>) -> io::Result<Listener> {
        let socket = match bound {
            Bound::Tcp(socket) => TcpListener::from_std(socket).map(Socket::Tcp),
            Bound::Unix(socket) => UnixListener::from_std(socket).map(Socket::Unix),
        };
        Ok(Listener { socket: socket?, papers })
    }

    pub(super) fn papers(&self) -> Option<&Papers> {
        let network = matches!(self.socket, Socket::Tcp(_));
        self.papers.as_ref().filter(|_| network)
    }

    pub(super) async fn accept(&self) -> io::Result<(Stream, Peer)> {
        match &self.socket {
            Socket::Tcp(socket) => {
                let (stream, address) = socket.accept().await?;
                // Each message of a stream is one write: nothing is gained by waiting.
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), Peer::Tcp(address)))
            }
            Socket::Unix(socket) => {
                let (stream, _) = socket.accept().await?;
                let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                Ok((Stream::Unix(stream), Peer::Unix(uid)))
            }
        }
    }
}

fn bind_unix(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    match fs::symlink_metadata(path) {
        // Left behind by a controller that died. Anything else is somebody's file.
        Ok(known) if known.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is no socket")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = std::os::unix::net::UnixListener::bind(PathBuf::from(path));
    umask(before);
    let socket = bound?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
