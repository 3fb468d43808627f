//! HTTPS as this program speaks it to whoever reaches it: bounded in connections, bytes and time.
//!
//! ```text
//!  connection ──> a place among those allowed ──> handshake ──> requests, one at a time ──> [`Site`]
//! ```

pub mod authz;
pub mod tls;

use std::{convert::Infallible, error::Error, io, net::SocketAddr, sync::Arc, time::Duration};

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

/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Fields of a request's head.
const HEAD_FIELDS: usize = 64;
/// How long nobody is let in after somebody could not be.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(200);

/// How much a site takes upon itself.
#[derive(Clone, Copy, Debug)]
pub struct HttpsLimits {
    /// Connections at a time; further ones wait in the kernel's queue.
    pub connections: usize,
    /// Time for a handshake.
    pub handshake: Duration,
    /// Time for a request's head; also how long a connection may rest between requests.
    pub head: Duration,
}

/// What is served.
pub trait HttpsSite: Send + Sync + 'static {
    /// The body of an answer.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static;
    /// How much of it at a time.
    const LIMITS: HttpsLimits;

    /// What is shown to the connection that comes in; without papers it is let go.
    fn papers(&self) -> Option<Arc<ServerConfig>>;

    /// The answer to a request.
    fn answer(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// Told of a client that did not like the papers, or does not speak TLS.
    fn parted(&self, error: &io::Error) {
        tracing::debug!(%error, "a client ended the handshake");
    }
}

/// Listens.
///
/// # Errors
/// When the address is in use, or none of this machine's.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Answers until the runtime ends.
pub async fn serve<S: HttpsSite>(listener: TcpListener, site: Arc<S>) {
    let connections = Arc::new(Semaphore::new(S::LIMITS.connections));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Descriptors ran out, most likely: they come back when others leave.
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
                continue;
            }
        };
        let site = Arc::clone(&site);
        tokio::spawn(async move {
            converse(stream, &*site).await;
            drop(permit);
        });
    }
}

async fn converse<S: HttpsSite>(stream: TcpStream, site: &S) {
    let Some(papers) = site.papers() else { return };
    let handshake = TlsAcceptor::from(papers).accept(stream);
    match timeout(S::LIMITS.handshake, handshake).await {
        Ok(Ok(stream)) => answer_all(stream, site).await,
        Ok(Err(error)) => site.parted(&error),
        Err(_) => tracing::debug!("a client says nothing"),
    }
}

/// Answers the requests of a connection.
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
        tracing::debug!(%error, "a connection ended early");
    }
}
