//! The sections about what the controller shows, keeps and takes: `[http]`, `[history]`,
//! `[report]`, `[jobs]`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use affinode_proto::paths;
use serde::Deserialize;

use super::{ConfigError, KubernetesSection, duration};
use crate::core::Millis;

/// Where the dashboard, the HTTP API and the metrics are.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    /// `auto`, `off`, `address:port` or `unix:/path`.
    pub listen: String,
    /// How clients prove who they are.
    pub auth: HttpAuth,
    /// With `token`: a file with the token that clients must show; empty: none is asked for.
    pub token_file: String,
    /// With `token-review`: who knows tokens.
    pub kubernetes: KubernetesSection,
    /// A file with the certificate to show, and those between it and its authority; empty: no TLS.
    pub tls_cert_file: String,
    /// A file with the key of that certificate.
    pub tls_key_file: String,
    /// Names other than addresses and localhost that clients may call the node by.
    pub hosts: Vec<String>,
    /// Whether containers may be moved over HTTP.
    pub actions: bool,
}

/// How clients prove who they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpAuth {
    /// They show the token of `token_file`.
    #[default]
    Token,
    /// They show a token of Kubernetes, whose API server says whose it is and what they may do.
    TokenReview,
}

/// What stays on disk.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HistorySection {
    /// `auto`, `off` or a folder.
    pub dir: String,
    /// Nothing older is kept.
    #[serde(deserialize_with = "duration")]
    pub keep: Millis,
    /// Beyond this size the oldest goes first.
    pub max_mib: u64,
}

/// What `affinode report` and the dashboard reckon with.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReportSection {
    /// Price of a GPU for an hour; 0: prices are not shown.
    pub price_per_gpu_hour: f64,
    /// Shown behind a price.
    pub currency: String,
}

/// Programs that run under the controller without a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JobsSection {
    /// Whether `affinode run` is served; the controller then stays without containers, too.
    pub enabled: bool,
    /// Users beside root who may run jobs; `*`: everybody.
    pub users: Vec<String>,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// Nowhere.
    Off,
    /// On a TCP address.
    Tcp(SocketAddr),
    /// On a Unix socket, for root alone.
    Unix(PathBuf),
}

impl Default for HttpSection {
    fn default() -> HttpSection {
        HttpSection {
            listen: "auto".into(),
            auth: HttpAuth::default(),
            token_file: String::new(),
            kubernetes: KubernetesSection::default(),
            tls_cert_file: String::new(),
            tls_key_file: String::new(),
            hosts: Vec::new(),
            actions: true,
        }
    }
}

impl Default for HistorySection {
    fn default() -> HistorySection {
        HistorySection { dir: "auto".into(), keep: 14 * 24 * 3600 * 1000, max_mib: 64 }
    }
}

impl Default for ReportSection {
    fn default() -> ReportSection {
        ReportSection { price_per_gpu_hour: 0.0, currency: "USD".into() }
    }
}

/// Where the node's own controller listens.
const NODE_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9410);
/// Where the node's own controller keeps its history.
const NODE_STATE_DIR: &str = "/var/lib/affinode";

impl HttpSection {
    /// Where to listen. `auto` is 127.0.0.1:9410 for the node's own controller, and a
    /// socket in the run directory for a private one, so that several live side by side.
    ///
    /// # Errors
    /// What is accepted.
    pub fn listen(&self, run_dir: &Path) -> Result<ListenAddress, String> {
        match self.listen.as_str() {
            "off" => Ok(ListenAddress::Off),
            "auto" if run_dir == Path::new(paths::RUN_DIR) => Ok(ListenAddress::Tcp(NODE_ADDRESS)),
            "auto" => Ok(ListenAddress::Unix(run_dir.join("http.sock"))),
            other => match other.strip_prefix("unix:") {
                Some(path) if path.starts_with('/') => Ok(ListenAddress::Unix(path.into())),
                _ => other.parse().map(ListenAddress::Tcp).map_err(|_| {
                    format!("http.listen: {other:?}: accepted: auto, off, address:port, unix:/path")
                }),
            },
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let bad = |text: String| Err(ConfigError::Bad(text));
        let listen = self.listen(Path::new(paths::RUN_DIR)).map_err(ConfigError::Bad)?;
        if self.tls_cert_file.is_empty() != self.tls_key_file.is_empty() {
            return bad("http.tls_cert_file and http.tls_key_file: one needs the other".into());
        }
        let reviewed = self.auth == HttpAuth::TokenReview;
        if let ListenAddress::Tcp(address) = listen
            && !address.ip().is_loopback()
        {
            if !reviewed && self.token_file.is_empty() {
                return bad(format!(
                    "http.listen: {address} can be reached from outside: http.token_file is needed, or http.auth = \"token-review\""
                ));
            }
            // A token of the cluster opens more than this node.
            if reviewed && self.tls_cert_file.is_empty() {
                return bad(format!(
                    "http.listen: {address} can be reached from outside: tokens of Kubernetes must not travel in clear, http.tls_cert_file and http.tls_key_file are needed"
                ));
            }
        }
        if !reviewed {
            return Ok(());
        }
        if !self.token_file.is_empty() {
            return bad(
                "http.token_file: with http.auth = \"token-review\" the API server knows all tokens; leave one of both out".into(),
            );
        }
        self.kubernetes.check()
    }
}

impl HistorySection {
    /// The folder, unless the history is off. `auto` is /var/lib/affinode for the node's
    /// own controller, and a folder in the run directory for a private one.
    #[must_use]
    pub fn folder(&self, run_dir: &Path) -> Option<PathBuf> {
        match self.dir.as_str() {
            "off" => None,
            "auto" if run_dir == Path::new(paths::RUN_DIR) => Some(NODE_STATE_DIR.into()),
            "auto" => Some(run_dir.join("state")),
            folder => Some(folder.into()),
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !matches!(self.dir.as_str(), "auto" | "off") && !self.dir.starts_with('/') {
            return Err(ConfigError::Bad(format!(
                "history.dir: {:?}: accepted: auto, off, /path",
                self.dir
            )));
        }
        if !(8..=1 << 20).contains(&self.max_mib) {
            return Err(ConfigError::Bad("history.max_mib: accepted: 8 to 1048576".into()));
        }
        Ok(())
    }
}

impl ReportSection {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !self.price_per_gpu_hour.is_finite() || self.price_per_gpu_hour < 0.0 {
            return Err(ConfigError::Bad(
                "report.price_per_gpu_hour: accepted: 0.0 or more".into(),
            ));
        }
        if self.currency.chars().count() > 8 {
            return Err(ConfigError::Bad("report.currency: accepted: up to 8 letters".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(listen: &str) -> HttpSection {
        HttpSection { listen: listen.into(), ..HttpSection::default() }
    }

    #[test]
    fn the_node_has_a_port_and_private_controllers_a_socket() {
        let auto = HttpSection::default();
        assert_eq!(auto.listen(Path::new(paths::RUN_DIR)), Ok(ListenAddress::Tcp(NODE_ADDRESS)));
        let private = auto.listen(Path::new("/tmp/x"));
        assert_eq!(private, Ok(ListenAddress::Unix("/tmp/x/http.sock".into())));
        assert_eq!(http("off").listen(Path::new("/tmp")), Ok(ListenAddress::Off));
        assert_eq!(
            http("unix:/a/b").listen(Path::new("/tmp")),
            Ok(ListenAddress::Unix("/a/b".into()))
        );
        assert!(http("everywhere").listen(Path::new("/tmp")).is_err());
    }

    #[test]
    fn the_world_is_let_in_with_a_token_only() {
        assert!(http("0.0.0.0:9410").check().is_err());
        let with_token = HttpSection { token_file: "/etc/t".into(), ..http("0.0.0.0:9410") };
        assert!(with_token.check().is_ok());
        assert!(http("127.0.0.1:1").check().is_ok());
        let reviewed = HttpSection { auth: HttpAuth::TokenReview, ..http("0.0.0.0:9410") };
        assert!(reviewed.check().is_err(), "nobody is named who knows tokens");
        let kubernetes = KubernetesSection {
            api_server: "https://10.0.0.1:6443".into(),
            ca_file: "/etc/kubernetes/pki/ca.crt".into(),
            token_file: "/etc/affinode/api-token".into(),
            audiences: Vec::new(),
        };
        let reviewed = HttpSection { kubernetes, ..reviewed };
        assert!(reviewed.check().unwrap_err().to_string().contains("in clear"));
        let reviewed = HttpSection {
            tls_cert_file: "/etc/c".into(),
            tls_key_file: "/etc/k".into(),
            ..reviewed
        };
        assert!(reviewed.check().is_ok());
        assert!(HttpSection { tls_key_file: String::new(), ..reviewed.clone() }.check().is_err());
        assert!(HttpSection { token_file: "/etc/t".into(), ..reviewed }.check().is_err());
    }

    #[test]
    fn history_goes_where_it_is_told() {
        let history = |dir: &str| HistorySection { dir: dir.into(), ..HistorySection::default() };
        assert_eq!(history("auto").folder(Path::new("/tmp/x")), Some("/tmp/x/state".into()));
        assert_eq!(history("off").folder(Path::new("/tmp/x")), None);
        assert!(history("somewhere").check().is_err());
    }
}
