//! The socket on which the HTTP server listens: a TCP address, or a Unix socket that only root may
//! use.

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

use super::tls::TlsIdentity;
use crate::config::ListenAddress;

/// Error: the HTTP socket cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {place}; check http.listen in the configuration")]
pub struct ListenError {
    place: String,
    #[source]
    source: io::Error,
}

/// The HTTP server's socket, and the TLS identity for its connections, if there is one.
#[derive(Debug)]
pub struct HttpListener {
    socket: HttpSocket,
    papers: Option<TlsIdentity>,
}

#[derive(Debug)]
enum HttpSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A bound HTTP socket that no async runtime watches yet, so that it can be moved to another
/// thread.
#[derive(Debug)]
pub enum BoundSocket {
    /// Listener on a TCP address.
    Tcp(std::net::TcpListener),
    /// Listener on a Unix socket.
    Unix(std::os::unix::net::UnixListener),
}

/// The client at the other end of an HTTP connection.
#[derive(Clone, Debug)]
pub enum HttpPeer {
    /// A TCP client, with its address.
    Tcp(SocketAddr),
    /// A client of the Unix socket, with its user id. `None` if the id is unknown.
    Unix(Option<u32>),
}

impl fmt::Display for HttpPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HttpPeer::Tcp(address) => write!(f, "{address}"),
            HttpPeer::Unix(Some(uid)) => write!(f, "user {uid} of this machine"),
            HttpPeer::Unix(None) => write!(f, "a process of this machine"),
        }
    }
}

/// An HTTP connection over TCP or a Unix socket.
#[derive(Debug)]
pub enum HttpStream {
    /// A connection over TCP.
    Tcp(TcpStream),
    /// A connection over a Unix socket.
    Unix(UnixStream),
}

impl HttpListener {
    /// Binds the HTTP socket. Returns the socket and the address for clients, or `None` if `listen`
    /// is `Off`.
    ///
    /// # Errors
    /// [`ListenError`]: the socket cannot be bound, for example because the port is in use.
    pub fn bind(listen: &ListenAddress) -> Result<Option<(BoundSocket, String)>, ListenError> {
        let fail = |place: String| move |source| ListenError { place, source };
        match listen {
            ListenAddress::Off => Ok(None),
            ListenAddress::Tcp(address) => {
                let bind = || {
                    let socket = std::net::TcpListener::bind(address)?;
                    socket.set_nonblocking(true)?;
                    let address = socket.local_addr()?;
                    Ok((BoundSocket::Tcp(socket), format!("http://{address}")))
                };
                bind().map(Some).map_err(fail(address.to_string()))
            }
            ListenAddress::Unix(path) => {
                let place = format!("unix:{}", path.display());
                let bound = bind_unix(path).map_err(fail(place.clone()))?;
                Ok(Some((BoundSocket::Unix(bound), place)))
            }
        }
    }

    /// Registers a bound socket with the current async runtime. If `papers` is given, TCP
    /// connections use TLS with this identity.
    ///
    /// # Errors
    /// The runtime cannot watch the socket.
    pub fn new(bound: BoundSocket, papers: Option<TlsIdentity>) -> io::Result<HttpListener> {
        let socket = match bound {
            BoundSocket::Tcp(socket) => TcpListener::from_std(socket).map(HttpSocket::Tcp),
            BoundSocket::Unix(socket) => UnixListener::from_std(socket).map(HttpSocket::Unix),
        };
        Ok(HttpListener { socket: socket?, papers })
    }

    pub(super) fn papers(&self) -> Option<&TlsIdentity> {
        let network = matches!(self.socket, HttpSocket::Tcp(_));
        self.papers.as_ref().filter(|_| network)
    }

    pub(super) async fn accept(&self) -> io::Result<(HttpStream, HttpPeer)> {
        match &self.socket {
            HttpSocket::Tcp(socket) => {
                let (stream, address) = socket.accept().await?;
                // Each message of a stream is a single write, which Nagle's algorithm would only
                // delay.
                stream.set_nodelay(true)?;
                Ok((HttpStream::Tcp(stream), HttpPeer::Tcp(address)))
            }
            HttpSocket::Unix(socket) => {
                let (stream, _) = socket.accept().await?;
                let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                Ok((HttpStream::Unix(stream), HttpPeer::Unix(uid)))
            }
        }
    }
}

fn bind_unix(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    match fs::symlink_metadata(path) {
        // A socket remains if a controller was killed. Any other file is not Affinode's and stays.
        Ok(known) if known.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the path exists and is not a socket",
            ));
        }
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

impl AsyncRead for HttpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            HttpStream::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for HttpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            HttpStream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            HttpStream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            HttpStream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            HttpStream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            HttpStream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
