//! One question to one agent: bounded in time, over TLS with the certificate that is its own.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::Empty;
use hyper::{
    Method, Request, Response,
    body::{Body, Bytes, Frame, Incoming},
    client::conn::http1,
    header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use std::{
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::{
    TlsConnector,
    rustls::{self, pki_types::ServerName},
};

use super::{cert_pin, discovery::KnownNode};

/// Time for a connection, handshake included.
const CONNECT: Duration = Duration::from_secs(3);
/// A body that says nothing for so long is over; streams of events say something every 15 s.
const SILENCE: Duration = Duration::from_secs(45);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AgentClientError {
    /// Nobody to ask.
    #[error("no agent runs on the node, or it has no address yet")]
    NoAgent,
    /// Nobody whom we could trust with a token.
    #[error("its agent has not said which certificate it shows")]
    NoCertificate,
    /// No connection.
    #[error("no connection to {0}")]
    Connect(SocketAddr, #[source] io::Error),
    /// Somebody else is at this address, or it speaks no TLS.
    #[error("{0} does not show the certificate of the node's agent")]
    Tls(SocketAddr, #[source] io::Error),
    /// The cryptography.
    #[error("cannot set up TLS")]
    Crypto(#[from] rustls::Error),
    /// What came is no answer.
    #[error("{0} does not answer as it should")]
    Http(SocketAddr, #[source] hyper::Error),
    /// Nothing came.
    #[error("{0} does not answer within {1:?}")]
    Time(SocketAddr, Duration),
    /// The question cannot be written.
    #[error("cannot write the request")]
    Question(#[from] hyper::http::Error),
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct AgentRequest<'a> {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: &'a str,
    /// `Bearer …`.
    pub authorization: HeaderValue,
    /// Kept of the user's own request: where a stream goes on, and what is understood.
    pub more: Vec<(hyper::header::HeaderName, HeaderValue)>,
    /// Time for the head of the answer.
    pub time: Duration,
}

/// Asks a node's agent.
///
/// # Errors
/// [`AgentClientError`].
pub async fn ask(
    node: &KnownNode,
    question: AgentRequest<'_>,
) -> Result<Response<AgentReply>, AgentClientError> {
    let address = node.address.ok_or(AgentClientError::NoAgent)?;
    let config = cert_pin::client(node.certificate.ok_or(AgentClientError::NoCertificate)?)?;
    let connect = async {
        let stream =
            TcpStream::connect(address).await.map_err(|e| AgentClientError::Connect(address, e))?;
        let name = ServerName::IpAddress(address.ip().into());
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream);
        stream.await.map_err(|e| AgentClientError::Tls(address, e))
    };
    let late = |time| move |_| AgentClientError::Time(address, time);
    let stream = timeout(CONNECT, connect).await.map_err(late(CONNECT))??;
    let http = |e| AgentClientError::Http(address, e);
    let talk = async {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let mut request = Request::builder()
            .method(question.method)
            .uri(question.path)
            .header(HOST, address.to_string())
            .header(AUTHORIZATION, question.authorization)
            .body(Empty::<Bytes>::new())?;
        request.headers_mut().extend(question.more);
        if !request.headers().contains_key(ACCEPT) {
            request.headers_mut().insert(ACCEPT, HeaderValue::from_static("application/json"));
        }
        let (parts, body) = sender.send_request(request).await.map_err(http)?.into_parts();
        let silence = Box::pin(sleep(SILENCE));
        Ok(Response::from_parts(
            parts,
            AgentReply { body, silence, _sender: sender, _driver: driver },
        ))
    };
    timeout(question.time, talk).await.map_err(late(question.time))?
}

/// The body of an answer; the connection lasts as long as it.
pub struct AgentReply {
    body: Incoming,
    silence: Pin<Box<Sleep>>,
    _sender: http1::SendRequest<Empty<Bytes>>,
    _driver: JoinSet<Result<(), hyper::Error>>,
}

impl Body for AgentReply {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            self.silence.as_mut().reset(tokio::time::Instant::now() + SILENCE);
            return Poll::Ready(frame);
        }
        self.silence.as_mut().poll(context).map(|()| None)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
