//! The HTTPS server of this program, with limits on connections, bytes and time.
//!
//! ```text
//!  connection ──> one of the connections of all clients ──> one of those of its address ──> handshake ──> requests, one at a time ──> [`HttpsSite`]
//! ```

pub mod authz;
pub mod tls;

use std::{
    collections::HashMap,
    convert::Infallible,
    error::Error,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper::{
    Request, Response,
    body::{Body, Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};

/// Maximum size of a request's head, in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// Maximum number of header fields in a request.
const HEAD_FIELDS: usize = 64;
/// Pause after a failed accept.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(200);

/// Limits that an HTTPS service sets for its connections.
#[derive(Clone, Copy, Debug)]
pub struct HttpsLimits {
    /// Maximum number of connections at the same time. Further connections wait in the kernel's
    /// queue.
    pub connections: usize,
    /// Maximum number of connections at the same time from one address, so that a client that opens
    /// connections and sends nothing does not exclude other clients. Further connections are closed.
    pub connections_per_address: usize,
    /// Time limit for the TLS handshake.
    pub handshake: Duration,
    /// Time limit for the head of a request, and for an idle connection between two requests.
    pub head: Duration,
}

/// A service that the HTTPS server provides: its limits, its TLS certificate and its replies.
pub trait HttpsSite: Send + Sync + 'static {
    /// Body type of a reply.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static;
    /// Limits on connections and times.
    const LIMITS: HttpsLimits;

    /// Returns the TLS configuration for the next connection. `None`: the server closes the
    /// connection.
    fn papers(&self) -> Option<Arc<ServerConfig>>;

    /// Returns the reply to a request.
    fn answer(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// Logs that a TLS handshake has failed, for example because the client rejected the
    /// certificate or did not use TLS. The server calls this function after each failed handshake.
    fn parted(&self, error: &io::Error) {
        tracing::debug!(%error, "https server: the TLS handshake with a client failed");
    }
}

/// Binds a TCP listener.
///
/// # Errors
/// If the address is in use, or does not belong to this machine.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Accepts and serves connections until the async runtime ends.
pub async fn serve<S: HttpsSite>(listener: TcpListener, site: Arc<S>) {
    let connections = Arc::new(Semaphore::new(S::LIMITS.connections));
    let addresses = Arc::new(AddressCounts::default());
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // The process probably has no free descriptor. Connections that close release their
                // descriptors.
                tracing::warn!(
                    %error,
                    "https server: cannot accept the connection of a client, and tries again"
                );
                tokio::time::sleep(ACCEPT_BACKOFF).await;
                continue;
            }
        };
        let most = S::LIMITS.connections_per_address;
        let Some(counted) = addresses.count(address.ip().to_canonical(), most) else {
            tracing::debug!(
                "https server: a connection was closed, because {} has {most} connections already",
                address.ip()
            );
            continue;
        };
        let site = Arc::clone(&site);
        tokio::spawn(async move {
            converse(stream, &*site).await;
            drop((permit, counted));
        });
    }
}

/// Number of open connections of each address.
#[derive(Default)]
struct AddressCounts(Mutex<HashMap<IpAddr, usize>>);

impl AddressCounts {
    /// Counts one more connection of this address until the returned value is dropped. `None`: the
    /// address has `most` connections already.
    fn count(self: &Arc<Self>, address: IpAddr, most: usize) -> Option<CountedConnection> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(CountedConnection { counts: Arc::clone(self), address })
    }
}

/// One connection in the count of its address.
struct CountedConnection {
    counts: Arc<AddressCounts>,
    address: IpAddr,
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

async fn converse<S: HttpsSite>(stream: TcpStream, site: &S) {
    let Some(papers) = site.papers() else { return };
    let handshake = TlsAcceptor::from(papers).accept(stream);
    match timeout(S::LIMITS.handshake, handshake).await {
        Ok(Ok(stream)) => answer_all(stream, site).await,
        Ok(Err(error)) => site.parted(&error),
        Err(_) => tracing::debug!("https server: a TLS handshake was not complete in time"),
    }
}

/// Serves the requests of one connection.
pub async fn answer_all<S: HttpsSite>(stream: impl AsyncRead + AsyncWrite + Unpin, site: &S) {
    let service = service_fn(|request| async { Ok::<_, Infallible>(site.answer(request).await) });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(S::LIMITS.head)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "https server: the connection to a client ended early");
    }
}

#[cfg(test)]
mod tests;
