//! Sends a request to the agent of one node, over TLS and with time limits. The TLS client accepts
//! only the certificate that this agent has published.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response,
    body::Bytes,
    client::conn::http1,
    header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{self, pki_types::ServerName},
};

use super::cert_pin::{self, Fingerprint};

/// Time limit for receiving a reply's body, counted from the end of the reply's head.
const BODY_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum size of a reply's body, in bytes.
const BODY_BYTES: usize = 2 << 20;
/// Maximum length of an error message from a reply whose body is not JSON, in bytes.
const SAID_BYTES: usize = 300;

/// Reason why a request to a node's agent failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentClientError {
    /// The agent has not published a certificate, so it must not receive a token.
    #[error("the node's agent has not published its certificate in an annotation of the node")]
    NoCertificate,
    /// The peer does not present the certificate that the agent has published, or does not use TLS.
    #[error("{0} does not present the certificate that the node's agent published")]
    Tls(String, #[source] io::Error),
    /// The TLS client could not be configured.
    #[error("cannot set up the TLS client for the node's agent")]
    Crypto(#[from] rustls::Error),
    /// The reply is not valid HTTP.
    #[error("{0} does not reply with valid HTTP")]
    Http(String, #[source] hyper::Error),
    /// The reply is too large.
    #[error("{0}: the agent's reply has more than {BODY_BYTES} bytes")]
    Large(String),
    /// The connection ended before the whole body of the reply was received.
    #[error("{0}: the agent's reply ended early")]
    Body(String, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// The agent did not reply in time.
    #[error("no reply from {0} within {1:?}")]
    Time(String, Duration),
    /// The request could not be built.
    #[error("cannot build the request to the node's agent")]
    Question(#[from] hyper::http::Error),
}

/// A request to an agent.
#[derive(Clone, Debug)]
pub struct AgentRequest<'a> {
    /// HTTP method of the request.
    pub method: Method,
    /// Path and query of the request, such as `/api/v1/node`.
    pub path: &'a str,
    /// Header value of the form `Bearer TOKEN`.
    pub authorization: HeaderValue,
    /// Time limit for the head of the reply.
    pub time: Duration,
}

/// Secures a stream to an agent with TLS. `peer` names the agent in errors.
///
/// # Errors
/// [`AgentClientError`]: the peer does not present the certificate with this fingerprint.
pub async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    peer: &str,
    certificate: Fingerprint,
) -> Result<TlsStream<S>, AgentClientError> {
    let config = cert_pin::client(certificate)?;
    // The client checks only the fingerprint of the certificate, so the name has no effect.
    let name = ServerName::IpAddress(IpAddr::from(Ipv4Addr::LOCALHOST).into());
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream);
    stream.await.map_err(|e| AgentClientError::Tls(peer.to_owned(), e))
}

/// Sends a request over a secured stream, and reads the whole reply, up to [`BODY_BYTES`].
///
/// # Errors
/// [`AgentClientError`]: the request could not be sent, or no complete and valid reply arrived in
/// time.
pub async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: TlsStream<S>,
    peer: &str,
    question: AgentRequest<'_>,
) -> Result<Response<Vec<u8>>, AgentClientError> {
    let http = |e| AgentClientError::Http(peer.to_owned(), e);
    let talk = async {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let request = Request::builder()
            .method(question.method)
            .uri(question.path)
            .header(HOST, peer)
            .header(AUTHORIZATION, question.authorization)
            .header(ACCEPT, "application/json")
            .body(Empty::<Bytes>::new())?;
        let answer = sender.send_request(request).await.map_err(http)?;
        Ok::<_, AgentClientError>((answer.into_parts(), sender, driver))
    };
    let late = |time| AgentClientError::Time(peer.to_owned(), time);
    // The connection ends when the sender or the driver is dropped.
    let ((parts, body), _sender, _driver) =
        timeout(question.time, talk).await.map_err(|_| late(question.time))??;
    let read = timeout(BODY_TIMEOUT, Limited::new(body, BODY_BYTES).collect()).await;
    let body = read.map_err(|_| late(BODY_TIMEOUT))?.map_err(|error| {
        if error.is::<LengthLimitError>() {
            AgentClientError::Large(peer.to_owned())
        } else {
            AgentClientError::Body(peer.to_owned(), error)
        }
    })?;
    Ok(Response::from_parts(parts, body.to_bytes().into()))
}

/// Extracts the message of an error reply: the value of `error` if the body is JSON, otherwise the
/// body as text.
#[must_use]
pub fn said(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct NodeReply {
        error: String,
    }
    match serde_json::from_slice::<NodeReply>(body) {
        Ok(said) => said.error,
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(SAID_BYTES)]).trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::https::tls::{ServedCertificate, TlsPair};

    #[tokio::test(start_paused = true)]
    async fn silent_agent_is_not_awaited_forever() {
        let made = rcgen::generate_simple_self_signed(vec!["node".to_owned()]).unwrap();
        let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
        let shown = ServedCertificate::default();
        shown.show(&TlsPair { cert, key }).unwrap();
        let certificate = cert_pin::parse(&shown.fingerprint().unwrap()).unwrap();
        let (near, far) = tokio::io::duplex(1 << 16);
        let accepted = TlsAcceptor::from(shown.config().unwrap()).accept(far);
        let (stream, agent) = tokio::join!(handshake(near, "the agent", certificate), accepted);
        let question = AgentRequest {
            method: Method::GET,
            path: "/api/v1/node",
            authorization: HeaderValue::from_static("Bearer x"),
            time: Duration::from_secs(3),
        };
        let error = exchange(stream.unwrap(), "the agent", question).await.err().unwrap();
        assert_eq!(error.to_string(), "no reply from the agent within 3s");
        drop(agent);
    }
}
