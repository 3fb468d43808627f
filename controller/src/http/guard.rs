//! Who may ask. A request must call the node by a name that is its own (a page of
//! somebody else's that resolves its name to this node does not: DNS rebinding), must
//! not come from another site's page, and must show a token where one is needed: the one of
//! a file, or one that the API server of Kubernetes knows ([`super::review`]).

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use hyper::{HeaderMap, header};
use subtle::ConstantTimeEq;

use super::review::TokenReviewer;
use crate::config::{HttpAuth, HttpSection};

/// A token that can be guessed is none.
const TOKEN_CHARS: usize = 16;

/// Why there is no guard, and so no site.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The file cannot be read.
    #[error("cannot read the token in {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Too short to be a secret.
    #[error("the token in {path} has fewer than {TOKEN_CHARS} characters")]
    Short {
        /// The file.
        path: PathBuf,
    },
    /// The API server that knows tokens.
    #[error("{0}")]
    Reviewer(String),
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenyReason {
    /// The node has no such name.
    Host,
    /// A page of another site asks.
    Origin,
    /// No token, or a wrong one.
    Token,
    /// Whose token it is, may not do that.
    Forbidden,
    /// The token could not be checked.
    Review,
    /// It is no request, or larger than any that is needed.
    Malformed,
    /// Others have all there is of it.
    Busy,
}

impl DenyReason {
    /// For metrics.
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

/// A request that is refused, and what is said of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    /// Why.
    pub kind: DenyReason,
    /// For whoever asked: why, and what to do.
    pub why: String,
    /// For the log alone.
    pub detail: String,
}

impl Denied {
    /// One of which the log knows no more.
    #[must_use]
    pub fn new(kind: DenyReason, why: impl Into<String>) -> Denied {
        Denied { kind, why: why.into(), detail: String::new() }
    }
}

/// What is asked for: `get` or `post`, and a path out of few.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessRule {
    /// The method, in lower case.
    pub verb: &'static str,
    /// The path, without the key of a container.
    pub path: &'static str,
}

/// The rules.
#[derive(Clone, Debug, Default)]
pub struct HttpGuard {
    hosts: Vec<String>,
    lock: AuthMode,
}

/// Who is let in.
#[derive(Clone, Debug, Default)]
enum AuthMode {
    /// Whoever reaches it.
    #[default]
    Open,
    /// Who shows this token.
    Token(Vec<u8>),
    /// Whom the API server of Kubernetes lets.
    Review(Arc<TokenReviewer>),
}

/// Who was let in, and by what: asked again while a stream lasts.
#[derive(Clone, Debug)]
pub struct Principal {
    /// The user, where that is known.
    pub user: Option<String>,
    again: Option<(Arc<TokenReviewer>, Vec<u8>, AccessRule)>,
}

impl Principal {
    /// Returns when the user may not go on, which is looked at now and then. Never where
    /// nobody but this controller knows the token.
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
    /// The rules of a configuration.
    ///
    /// # Errors
    /// [`GuardError`].
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

    /// Name and origin of a request.
    ///
    /// # Errors
    /// [`Denied`].
    pub fn place(&self, headers: &HeaderMap) -> Result<(), Denied> {
        self.stands(headers).map_err(|kind| match kind {
            DenyReason::Host => Denied::new(
                kind,
                "the node is not known by this name: use its address, or add the name to http.hosts",
            ),
            _ => Denied::new(kind, "asked by a page of another site"),
        })
    }

    fn stands(&self, headers: &HeaderMap) -> Result<(), DenyReason> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).ok_or(DenyReason::Host)?;
        if hosts.next().is_some() || !self.knows(host) {
            return Err(DenyReason::Host);
        }
        // Browsers say where a page is from that asks; other clients say nothing.
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

    /// Whether whoever asks may have that.
    ///
    /// # Errors
    /// [`Denied`].
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
            (AuthMode::Token(_), _) => {
                Err(Denied::new(DenyReason::Token, "the token of http.token_file is needed"))
            }
            (AuthMode::Review(reviewer), Some(shown)) => {
                let user = Some(reviewer.admit(shown, access).await?);
                let again = Some((Arc::clone(reviewer), shown.to_vec(), access));
                Ok(Principal { user, again })
            }
            (AuthMode::Review(_), None) => Err(Denied::new(
                DenyReason::Token,
                "a token that the API server of Kubernetes knows is needed; `kubectl create token` makes one for a service account",
            )),
        }
    }

    fn knows(&self, host: &str) -> bool {
        let name = name(host).to_ascii_lowercase();
        // An address cannot be rebound: a page that names it is ours.
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || address.parse::<IpAddr>().is_ok() || self.hosts.contains(&name)
    }
}

/// The token in a file.
fn secret(file: &str) -> Result<Vec<u8>, GuardError> {
    let path = PathBuf::from(file);
    let text = std::fs::read_to_string(&path)
        .map_err(|source| GuardError::Read { path: path.clone(), source })?;
    let token = text.trim().as_bytes().to_vec();
    if token.len() < TOKEN_CHARS { Err(GuardError::Short { path }) } else { Ok(token) }
}

/// A host without its port.
fn name(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.is_empty() => {
            // In `::1` the colon is part of the address; in `[::1]:80` it is not.
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
