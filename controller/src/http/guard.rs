//! Who may ask. A request must call the node by a name that is its own (a page of
//! somebody else's that resolves its name to this node does not: DNS rebinding), must
//! not come from another site's page, and must show the token where there is one.

use std::{net::IpAddr, path::PathBuf};

use hyper::{HeaderMap, header};
use subtle::ConstantTimeEq;

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
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// The node has no such name.
    Host,
    /// A page of another site asks.
    Origin,
    /// No token, or a wrong one.
    Token,
}

/// The rules.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    hosts: Vec<String>,
    token: Option<Vec<u8>>,
}

impl Guard {
    /// Rules with further names, and the token in a file (none when the name is empty).
    ///
    /// # Errors
    /// [`GuardError`].
    pub fn new(hosts: &[String], token_file: &str) -> Result<Guard, GuardError> {
        let hosts = hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        if token_file.is_empty() {
            return Ok(Guard { hosts, token: None });
        }
        let path = PathBuf::from(token_file);
        let text = std::fs::read_to_string(&path)
            .map_err(|source| GuardError::Read { path: path.clone(), source })?;
        let token = text.trim().as_bytes().to_vec();
        if token.len() < TOKEN_CHARS {
            return Err(GuardError::Short { path });
        }
        Ok(Guard { hosts, token: Some(token) })
    }

    /// Name and origin of a request.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn place(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).ok_or(Refused::Host)?;
        if hosts.next().is_some() || !self.knows(host) {
            return Err(Refused::Host);
        }
        // Browsers say where a page is from that asks; other clients say nothing.
        if let Some(origin) = headers.get(header::ORIGIN) {
            let ours = [format!("http://{host}"), format!("https://{host}")];
            if !ours.iter().any(|ours| ours.as_bytes() == origin.as_bytes()) {
                return Err(Refused::Origin);
            }
        }
        match headers.get("sec-fetch-site").map(header::HeaderValue::as_bytes) {
            None | Some(b"same-origin" | b"none") => Ok(()),
            Some(_) => Err(Refused::Origin),
        }
    }

    /// The token of a request.
    ///
    /// # Errors
    /// [`Refused::Token`].
    pub fn token(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        let shown = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
            .ok_or(Refused::Token)?;
        if bool::from(shown.ct_eq(token)) { Ok(()) } else { Err(Refused::Token) }
    }

    fn knows(&self, host: &str) -> bool {
        let name = name(host).to_ascii_lowercase();
        // An address cannot be rebound: a page that names it is ours.
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || address.parse::<IpAddr>().is_ok() || self.hosts.contains(&name)
    }
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

    #[test]
    fn only_names_of_the_node_are_answered() {
        let guard = Guard::new(&["gpu-1.example".into()], "").unwrap();
        for host in [
            "127.0.0.1:9410",
            "localhost",
            "LOCALHOST:1",
            "[::1]:9410",
            "10.0.0.7",
            "gpu-1.example:9410",
        ] {
            assert_eq!(guard.place(&headers(&[("host", host)])), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9410",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
        ] {
            assert_eq!(guard.place(&headers(&[("host", host)])), Err(Refused::Host), "{host}");
        }
        assert_eq!(guard.place(&HeaderMap::new()), Err(Refused::Host));
        let mut two = headers(&[("host", "localhost")]);
        two.append("host", "localhost".parse().unwrap());
        assert_eq!(guard.place(&two), Err(Refused::Host));
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let guard = Guard::default();
        let place = |pairs: &[(&'static str, &str)]| {
            let mut all = headers(pairs);
            all.insert("host", "127.0.0.1:9410".parse().unwrap());
            guard.place(&all)
        };
        assert_eq!(place(&[("origin", "http://127.0.0.1:9410")]), Ok(()));
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:9411",
            "http://127.0.0.1:9410.evil.example",
        ] {
            assert_eq!(place(&[("origin", origin)]), Err(Refused::Origin), "{origin}");
        }
        assert_eq!(place(&[("sec-fetch-site", "cross-site")]), Err(Refused::Origin));
        assert_eq!(place(&[("sec-fetch-site", "same-origin")]), Ok(()));
    }

    #[test]
    fn the_token_must_be_the_token() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "a-long-and-secret-token\n").unwrap();
        let guard = Guard::new(&[], file.to_str().unwrap()).unwrap();
        let show = |value: &str| guard.token(&headers(&[("authorization", value)]));
        assert_eq!(show("Bearer a-long-and-secret-token"), Ok(()));
        for wrong in [
            "Bearer a-long-and-secret-tokem",
            "Bearer ",
            "a-long-and-secret-token",
            "Basic a-long-and-secret-token",
        ] {
            assert_eq!(show(wrong), Err(Refused::Token), "{wrong}");
        }
        assert_eq!(guard.token(&HeaderMap::new()), Err(Refused::Token));
        std::fs::write(&file, "short").unwrap();
        assert!(matches!(Guard::new(&[], file.to_str().unwrap()), Err(GuardError::Short { .. })));
    }
}
