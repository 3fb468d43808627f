//! Section `[http.kubernetes]`: the API server that checks clients' tokens if `http.auth` is
//! `token-review`.

use serde::Deserialize;

use super::ConfigError;

/// Address of the Kubernetes API server, and credentials for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesSection {
    /// URL of the API server: `https://host:port`.
    pub api_server: String,
    /// File with the certificate authority of the API server.
    pub ca_file: String,
    /// File with the controller's own token for the API server. The file is read again for each
    /// request.
    pub token_file: String,
    /// Accepted audiences of clients' tokens. A token must be issued for at least one of them. If
    /// the list is empty, the API server's own audiences apply.
    pub audiences: Vec<String>,
}

/// Port of the API server if its URL has none: the default port of HTTPS.
const PORT: u16 = 443;

impl KubernetesSection {
    /// Returns the host and port of the API server.
    ///
    /// # Errors
    /// `api_server` is not a URL of the form `https://host:port`. The error names this form.
    pub fn host_and_port(&self) -> Result<(String, u16), String> {
        let bad = || {
            format!(
                "http.kubernetes.api_server: {:?}; accepted: https://host:port",
                self.api_server
            )
        };
        let rest = self.api_server.strip_prefix("https://").ok_or_else(bad)?;
        let uri: hyper::http::uri::Authority =
            rest.trim_end_matches('/').parse().map_err(|_| bad())?;
        let host = uri.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || rest.contains('@') {
            return Err(bad());
        }
        let port = match uri.port_u16() {
            Some(port) => port,
            None if uri.as_str() == uri.host() => PORT,
            None => return Err(bad()),
        };
        Ok((host.to_owned(), port))
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.host_and_port().map_err(ConfigError::Bad)?;
        for (key, file) in [("ca_file", &self.ca_file), ("token_file", &self.token_file)] {
            if !file.starts_with('/') {
                return Err(ConfigError::Bad(format!(
                    "http.kubernetes.{key}: {file:?}; accepted: an absolute path (http.auth = \"token-review\" needs this file)"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(api_server: &str) -> Result<(String, u16), String> {
        let section =
            KubernetesSection { api_server: api_server.into(), ..KubernetesSection::default() };
        section.host_and_port()
    }

    #[test]
    fn the_api_server_is_a_host_behind_https() {
        assert_eq!(at("https://10.0.0.1:6443"), Ok(("10.0.0.1".into(), 6443)));
        assert_eq!(
            at("https://kubernetes.default.svc/"),
            Ok(("kubernetes.default.svc".into(), 443))
        );
        assert_eq!(at("https://[fd00::1]:6443"), Ok(("fd00::1".into(), 6443)));
        for wrong in
            ["", "http://10.0.0.1", "https://", "https://a:b@c", "https://a/b", "https://a:99999"]
        {
            assert!(at(wrong).is_err(), "{wrong}");
        }
    }
}
