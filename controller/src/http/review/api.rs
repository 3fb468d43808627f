//! Sends TokenReviews and SubjectAccessReviews to the Kubernetes API server. Each request opens its
//! own HTTPS connection, which trusts only the configured certificate authority. The number of
//! concurrent requests, the time for a request and the size of a response are limited. The token
//! and the certificate authority are read from their files for each request, because they may be
//! renewed at any time.

use std::{io, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::Semaphore, task::JoinSet};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore, crypto,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};

use super::super::guard::AccessRule;
use crate::config::KubernetesSection;

/// Maximum number of concurrent requests to the API server. Further requests wait. This wait counts
/// towards their time limit.
const MAX_CONCURRENT_REVIEWS: usize = 8;
/// Time limit for a request to the API server, including its wait for other requests.
const TIME: Duration = Duration::from_secs(5);
/// Maximum size of a response of the API server in bytes.
const ANSWER_BYTES: usize = 64 << 10;
/// Maximum length of a user's name, which appears in events and logs.
const NAME_CHARS: usize = 256;

/// Reason why a review (a request to the Kubernetes API server about a token or a right) failed.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// A file that the configuration names cannot be read.
    #[error("cannot read {path}, the file of the setting http.kubernetes.{key}")]
    File {
        /// Configuration key in section `[http.kubernetes]` that names the file.
        key: &'static str,
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The file of the certificate authority has no usable certificate.
    #[error("{path}, the file of the setting http.kubernetes.ca_file, has no usable certificate")]
    Authority {
        /// Path of the certificate authority's file.
        path: PathBuf,
    },
    /// The connection to the API server failed, or the server's certificate is not trusted.
    #[error("cannot connect to the Kubernetes API server {server}")]
    Connect {
        /// Host and port of the API server.
        server: String,
        /// Error of the connection.
        #[source]
        source: io::Error,
    },
    /// The connection to the API server ended before the response.
    #[error("no response from the Kubernetes API server {server} to a {kind}")]
    Broken {
        /// Host and port of the API server.
        server: String,
        /// Kind of the review: TokenReview or SubjectAccessReview.
        kind: &'static str,
        /// Error of the HTTP connection.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The API server's response did not arrive in time.
    #[error(
        "no response from the Kubernetes API server {server} to a {kind} within {} s",
        TIME.as_secs()
    )]
    Late {
        /// Host and port of the API server.
        server: String,
        /// Kind of the review: TokenReview or SubjectAccessReview.
        kind: &'static str,
    },
    /// The API server refused the controller's own request.
    #[error(
        "the Kubernetes API server {server} refused a {kind} with status {status}: the token in http.kubernetes.token_file needs the ClusterRole system:auth-delegator"
    )]
    Status {
        /// Host and port of the API server.
        server: String,
        /// Kind of the review: TokenReview or SubjectAccessReview.
        kind: &'static str,
        /// HTTP status of the response.
        status: StatusCode,
    },
    /// The API server's response is not a valid review.
    #[error("the response of the Kubernetes API server {server} to a {kind} is invalid")]
    Answer {
        /// Host and port of the API server.
        server: String,
        /// Kind of the review: TokenReview or SubjectAccessReview.
        kind: &'static str,
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
}

/// A Kubernetes user, in the form that a TokenReview returns and a SubjectAccessReview expects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct User {
    /// Name of the user. A SubjectAccessReview has it in the field `user`.
    #[serde(rename(serialize = "user"))]
    pub username: String,
    uid: String,
    groups: Vec<String>,
    extra: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
struct Review<T> {
    status: T,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenStatus {
    authenticated: bool,
    user: User,
    audiences: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AccessStatus {
    allowed: bool,
    denied: bool,
}

/// The Kubernetes API server, and the files with the credentials for it.
#[derive(Debug)]
pub struct ApiServer {
    host: String,
    port: u16,
    name: ServerName<'static>,
    ca_file: PathBuf,
    token_file: PathBuf,
    audiences: Vec<String>,
    turns: Semaphore,
}

impl ApiServer {
    /// Creates the client for the API server that the configuration names.
    ///
    /// # Errors
    /// The address is invalid. The text names the accepted form.
    pub fn new(section: &KubernetesSection) -> Result<ApiServer, String> {
        let (host, port) = section.host_and_port()?;
        let name = match host.parse::<IpAddr>() {
            Ok(address) => ServerName::from(address),
            Err(_) => ServerName::try_from(host.clone())
                .map_err(|_| format!("http.kubernetes.api_server: {host:?} is not a host name"))?,
        };
        Ok(ApiServer {
            host,
            port,
            name,
            ca_file: section.ca_file.clone().into(),
            token_file: section.token_file.clone().into(),
            audiences: section.audiences.clone(),
            turns: Semaphore::new(MAX_CONCURRENT_REVIEWS),
        })
    }

    /// Returns the user to whom a token belongs, or `None` if the token is invalid or for another
    /// audience.
    pub async fn whose(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let question = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": { "token": token, "audiences": self.audiences },
        });
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let Review { status } = self.ask::<TokenStatus>("TokenReview", path, &question).await?;
        // An API server that supports audiences returns those of the requested audiences for which
        // the token is valid.
        let meant = self.audiences.is_empty()
            || status.audiences.iter().any(|held| self.audiences.contains(held));
        let name = &status.user.username;
        // The name appears in events and logs.
        let fit =
            (1..=NAME_CHARS).contains(&name.chars().count()) && !name.contains(char::is_control);
        Ok((status.authenticated && meant && fit).then_some(status.user))
    }

    /// Asks the API server whether a user has a right.
    pub async fn may(&self, user: &User, access: AccessRule) -> Result<bool, ReviewError> {
        let mut spec = json!(user);
        spec["nonResourceAttributes"] = json!({ "path": access.path, "verb": access.verb });
        let question = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec,
        });
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let review = self.ask::<AccessStatus>("SubjectAccessReview", path, &question).await?;
        Ok(review.status.allowed && !review.status.denied)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        kind: &'static str,
        path: &str,
        question: &Value,
    ) -> Result<Review<T>, ReviewError> {
        let asked = async {
            // The semaphore is never closed: either a permit is acquired, or the timeout ends the
            // wait.
            let _turn = self.turns.acquire().await;
            self.post(kind, path, question).await
        };
        let late = |_| ReviewError::Late { server: self.place(), kind };
        let answer = tokio::time::timeout(TIME, asked).await.map_err(late)??;
        serde_json::from_slice(&answer).map_err(|source| ReviewError::Answer {
            server: self.place(),
            kind,
            source,
        })
    }

    async fn post(
        &self,
        kind: &'static str,
        path: &str,
        question: &Value,
    ) -> Result<Bytes, ReviewError> {
        let token = self.read("token_file", &self.token_file).await?;
        let token = String::from_utf8_lossy(&token);
        let request = Request::post(path)
            .header(header::HOST, self.place())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Full::new(Bytes::from(question.to_string())));
        let broken = |source: Box<dyn std::error::Error + Send + Sync>| ReviewError::Broken {
            server: self.place(),
            kind,
            source,
        };
        let request = request.map_err(|e| broken(e.into()))?;
        let stream = self.connect().await?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(e.into()))?;
        // Dropping the set closes the connection when this request ends, in success and in failure.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let reply = sender.send_request(request).await.map_err(|e| broken(e.into()))?;
        let status = reply.status();
        if !status.is_success() {
            return Err(ReviewError::Status { server: self.place(), kind, status });
        }
        let body = Limited::new(reply.into_body(), ANSWER_BYTES);
        Ok(body.collect().await.map_err(broken)?.to_bytes())
    }

    async fn connect(&self) -> Result<tokio_rustls::client::TlsStream<TcpStream>, ReviewError> {
        let pem = self.read("ca_file", &self.ca_file).await?;
        let unusable = || ReviewError::Authority { path: self.ca_file.clone() };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            roots.add(certificate.map_err(|_| unusable())?).map_err(|_| unusable())?;
        }
        if roots.is_empty() {
            return Err(unusable());
        }
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|_| unusable())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connect = |source| ReviewError::Connect { server: self.place(), source };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(connect)?;
        TlsConnector::from(Arc::new(config))
            .connect(self.name.clone(), stream)
            .await
            .map_err(connect)
    }

    async fn read(&self, key: &'static str, path: &PathBuf) -> Result<Vec<u8>, ReviewError> {
        let fail = |source| ReviewError::File { key, path: path.clone(), source };
        tokio::fs::read(path).await.map_err(fail)
    }

    /// Returns the host and port of the API server, for error messages and the Host header.
    fn place(&self) -> String {
        match self.name {
            ServerName::IpAddress(_) if self.host.contains(':') => {
                format!("[{}]:{}", self.host, self.port)
            }
            _ => format!("{}:{}", self.host, self.port),
        }
    }
}
