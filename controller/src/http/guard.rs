//! Decides whether an HTTP request is admitted. The request must meet three conditions:
//!
//! - Its Host header must have one of the node's own names. A name of another site that resolves to
//!   this node is refused (DNS rebinding).
//! - It must not come from a page of another site.
//! - If a token is required, it must have a valid token: the token of a file, or a token that the
//!   Kubernetes API server accepts ([`super::review`]).

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use hyper::{HeaderMap, header};
use subtle::ConstantTimeEq;

use super::review::TokenReviewer;
use crate::config::{HttpAuth, HttpSection};

/// Minimum length of a configured token, so that it cannot be guessed.
const TOKEN_CHARS: usize = 16;

/// Reason why the guard cannot be created. HTTP is then not served.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The token file cannot be read.
    #[error("cannot read {path}, the file of the setting http.token_file")]
    Read {
        /// Path of the token file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// The token in the token file is too short to be a secret.
    #[error(
        "the token in {path} (setting http.token_file) has fewer than {TOKEN_CHARS} characters"
    )]
    Short {
        /// Path of the token file.
        path: PathBuf,
    },
    /// The configuration for the Kubernetes API server is invalid. Contains the reason.
    #[error("{0}")]
    Reviewer(String),
}

/// Reason why an HTTP request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenyReason {
    /// The Host header of the request is not a name of the node.
    Host,
    /// The request comes from a page of another site.
    Origin,
    /// The request has no token, or an invalid token.
    Token,
    /// The user of the token does not have the required right.
    Forbidden,
    /// The token could not be checked with the Kubernetes API server.
    Review,
    /// The request is invalid or too large.
    Malformed,
    /// The maximum number of streams or moves in progress is reached.
    Busy,
}

impl DenyReason {
    /// Returns the word for the reason, which is a label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            DenyReason::Host => "host",
            DenyReason::Origin => "origin",
            DenyReason::Token => "token",
            DenyReason::Forbidden => "forbidden",
            DenyReason::Review => "review",
            DenyReason::Malformed => "malformed",
            DenyReason::Busy => "busy",
        }
    }
}

/// Refusal of an HTTP request, with the texts for its sender and for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    /// Category of the reason for the refusal.
    pub kind: DenyReason,
    /// Text for the sender of the request: the reason for the refusal, and a remedy.
    pub why: String,
    /// Text for the log only. If empty, the log gets `why` in its place.
    pub detail: String,
}

impl Denied {
    /// Creates a refusal with the same text for the sender and the log.
    #[must_use]
    pub fn new(kind: DenyReason, why: impl Into<String>) -> Denied {
        Denied { kind, why: why.into(), detail: String::new() }
    }
}

/// A right to send one kind of HTTP request, in the form in which Kubernetes roles grant rights:
/// the verb `get` or `post`, and one of a few fixed paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessRule {
    /// HTTP method in lower case.
    pub verb: &'static str,
    /// Fixed path that stands for this kind of request. It does not contain the key of a container.
    pub path: &'static str,
}

/// Checks HTTP requests by the configured rules, before they are handled.
#[derive(Clone, Debug, Default)]
pub struct HttpGuard {
    hosts: Vec<String>,
    lock: AuthMode,
}

/// Method by which HTTP requests are authenticated.
#[derive(Clone, Debug, Default)]
enum AuthMode {
    /// Every request is admitted, even without a token.
    #[default]
    Open,
    /// Only requests with this token are admitted.
    Token(Vec<u8>),
    /// Only requests that the Kubernetes API server allows are admitted.
    Review(Arc<TokenReviewer>),
}

/// Sender of an admitted request. While a stream is open, the sender's right can be checked again.
#[derive(Clone, Debug)]
pub struct Principal {
    /// Name of the user, if it is known.
    pub user: Option<String>,
    again: Option<(Arc<TokenReviewer>, Vec<u8>, AccessRule)>,
}

impl Principal {
    /// Waits until the user has lost the right, and returns the refusal. The right is checked once
    /// per `ALLOW_TTL`. Never returns if the Kubernetes API server does not check tokens.
    pub async fn ended(&self) -> Denied {
        let Some((reviewer, token, access)) = &self.again else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(super::review::ALLOW_TTL).await;
            if let Err(refusal) = reviewer.admit(token, *access).await {
                return refusal;
            }
        }
    }
}

impl HttpGuard {
    /// Creates the guard from the section `[http]` of the configuration.
    ///
    /// # Errors
    /// [`GuardError`]: the token or the API server cannot be used.
    pub fn new(section: &HttpSection) -> Result<HttpGuard, GuardError> {
        let hosts = section.hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        let lock = match section.auth {
            HttpAuth::TokenReview => {
                let reviewer =
                    TokenReviewer::new(&section.kubernetes).map_err(GuardError::Reviewer)?;
                AuthMode::Review(Arc::new(reviewer))
            }
            HttpAuth::Token if section.token_file.is_empty() => AuthMode::Open,
            HttpAuth::Token => AuthMode::Token(secret(&section.token_file)?),
        };
        Ok(HttpGuard { hosts, lock })
    }

    /// Checks the Host and Origin headers of a request.
    ///
    /// # Errors
    /// [`Denied`]: the Host header is not a name of the node, or the request comes from a page of
    /// another site.
    pub fn place(&self, headers: &HeaderMap) -> Result<(), Denied> {
        self.stands(headers).map_err(|kind| match kind {
            DenyReason::Host => Denied::new(
                kind,
                "unknown host name: use the node's address, or add the name to http.hosts",
            ),
            _ => Denied::new(kind, "the request comes from a page of another site"),
        })
    }

    fn stands(&self, headers: &HeaderMap) -> Result<(), DenyReason> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).ok_or(DenyReason::Host)?;
        if hosts.next().is_some() || !self.knows(host) {
            return Err(DenyReason::Host);
        }
        // Browsers send the origin of the page; other clients send none.
        if let Some(origin) = headers.get(header::ORIGIN) {
            let ours = [format!("http://{host}"), format!("https://{host}")];
            if !ours.iter().any(|ours| ours.as_bytes() == origin.as_bytes()) {
                return Err(DenyReason::Origin);
            }
        }
        match headers.get("sec-fetch-site").map(header::HeaderValue::as_bytes) {
            None | Some(b"same-origin" | b"none") => Ok(()),
            Some(_) => Err(DenyReason::Origin),
        }
    }

    /// Checks that the sender of a request has the right `access`, and returns the sender.
    ///
    /// # Errors
    /// [`Denied`]: the request has no valid token, the token's user does not have the right, or the
    /// API server cannot check the token.
    pub async fn admit(
        &self,
        headers: &HeaderMap,
        access: AccessRule,
    ) -> Result<Principal, Denied> {
        let shown = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        match (&self.lock, shown) {
            (AuthMode::Open, _) => Ok(Principal { user: None, again: None }),
            (AuthMode::Token(token), Some(shown)) if bool::from(shown.ct_eq(token)) => {
                Ok(Principal { user: None, again: None })
            }
            (AuthMode::Token(_), _) => Err(Denied::new(
                DenyReason::Token,
                "a token is required: send the token that http.token_file contains",
            )),
            (AuthMode::Review(reviewer), Some(shown)) => {
                let user = Some(reviewer.admit(shown, access).await?);
                let again = Some((Arc::clone(reviewer), shown.to_vec(), access));
                Ok(Principal { user, again })
            }
            (AuthMode::Review(_), None) => Err(Denied::new(
                DenyReason::Token,
                "send a Kubernetes token; `kubectl create token` makes one for a service account",
            )),
        }
    }

    fn knows(&self, host: &str) -> bool {
        let name = name(host).to_ascii_lowercase();
        // An address needs no check. DNS rebinding needs a host name, so a page that was loaded by
        // address is a page of this node.
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || address.parse::<IpAddr>().is_ok() || self.hosts.contains(&name)
    }
}

/// Reads the configured token from its file.
fn secret(file: &str) -> Result<Vec<u8>, GuardError> {
    let path = PathBuf::from(file);
    let text = std::fs::read_to_string(&path)
        .map_err(|source| GuardError::Read { path: path.clone(), source })?;
    let token = text.trim().as_bytes().to_vec();
    if token.len() < TOKEN_CHARS { Err(GuardError::Short { path }) } else { Ok(token) }
}

/// Returns the host name of a Host header without its port.
fn name(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.is_empty() => {
            // In `::1` the last colon is part of the address; in `[::1]:80` it separates the port.
            if name.contains(':') && !name.ends_with(']') { host } else { name }
        }
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(k, v)| (header::HeaderName::from_static(k), v.parse().unwrap()))
            .collect()
    }

    fn guard(hosts: &[&str], token_file: &str) -> Result<HttpGuard, GuardError> {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        HttpGuard::new(&HttpSection {
            hosts,
            token_file: token_file.into(),
            ..HttpSection::default()
        })
    }

    #[test]
    fn only_names_of_the_node_are_answered() {
        let guard = guard(&["gpu-1.example"], "").unwrap();
        for host in [
            "127.0.0.1:9410",
            "localhost",
            "LOCALHOST:1",
            "[::1]:9410",
            "10.0.0.7",
            "gpu-1.example:9410",
        ] {
            assert_eq!(guard.stands(&headers(&[("host", host)])), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9410",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
        ] {
            assert_eq!(guard.stands(&headers(&[("host", host)])), Err(DenyReason::Host), "{host}");
        }
        assert_eq!(guard.stands(&HeaderMap::new()), Err(DenyReason::Host));
        let mut two = headers(&[("host", "localhost")]);
        two.append("host", "localhost".parse().unwrap());
        assert_eq!(guard.stands(&two), Err(DenyReason::Host));
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let guard = HttpGuard::default();
        let place = |pairs: &[(&'static str, &str)]| {
            let mut all = headers(pairs);
            all.insert("host", "127.0.0.1:9410".parse().unwrap());
            guard.stands(&all)
        };
        assert_eq!(place(&[("origin", "http://127.0.0.1:9410")]), Ok(()));
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:9411",
            "http://127.0.0.1:9410.evil.example",
        ] {
            assert_eq!(place(&[("origin", origin)]), Err(DenyReason::Origin), "{origin}");
        }
        assert_eq!(place(&[("sec-fetch-site", "cross-site")]), Err(DenyReason::Origin));
        assert_eq!(place(&[("sec-fetch-site", "same-origin")]), Ok(()));
    }

    #[tokio::test]
    async fn the_token_must_be_the_token() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "a-long-and-secret-token\n").unwrap();
        let file = file.to_str().unwrap();
        let lock = guard(&[], file).unwrap();
        let access = AccessRule { verb: "get", path: "/metrics" };
        let show = async |pairs: &[(&'static str, &str)]| {
            lock.admit(&headers(pairs), access).await.map_err(|refusal| refusal.kind)
        };
        assert!(show(&[("authorization", "Bearer a-long-and-secret-token")]).await.is_ok());
        for wrong in [
            "Bearer a-long-and-secret-tokem",
            "Bearer ",
            "a-long-and-secret-token",
            "Basic a-long-and-secret-token",
        ] {
            let refused = show(&[("authorization", wrong)]).await.unwrap_err();
            assert_eq!(refused, DenyReason::Token, "{wrong}");
        }
        assert_eq!(show(&[]).await.unwrap_err(), DenyReason::Token);
        std::fs::write(file, "short").unwrap();
        assert!(matches!(guard(&[], file), Err(GuardError::Short { .. })));
    }
}
