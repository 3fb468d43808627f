//! Configuration sections `[http]`, `[control]`, `[history]`, `[report]`, `[jobs]` and `[oci]`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use affinode_core::Millis;
use affinode_proto::paths;
use serde::Deserialize;

use super::{ConfigError, KubernetesSection, duration};

/// Section `[http]`: dashboard, HTTP API and metrics.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    /// Address at which the controller serves HTTP: `auto`, `off`, `address:port` or `unix:/path`.
    pub listen: String,
    /// Method by which clients of the API authenticate.
    pub auth: HttpAuth,
    /// File with the token that clients must send if `auth` is `token`. If empty, clients need no
    /// token.
    pub token_file: String,
    /// Kubernetes API server that checks clients' tokens if `auth` is `token-review`.
    pub kubernetes: KubernetesSection,
    /// File with the TLS certificate and its intermediate certificates. If empty, HTTP is served
    /// without TLS.
    pub tls_cert_file: String,
    /// File with the private key of the TLS certificate in `tls_cert_file`.
    pub tls_key_file: String,
    /// Host names of the node that clients may use in requests, in addition to IP addresses and
    /// localhost.
    pub hosts: Vec<String>,
    /// Clients that may offload, restore and pin containers over HTTP.
    pub actions: HttpActions,
}

/// Which clients may move containers over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpActions {
    /// Clients that send a token, and clients of a Unix socket, which only root may use.
    #[default]
    Authenticated,
    /// All clients, even without a token. These include all users of the machine, and pods in the
    /// host's network.
    AnyClient,
    /// No client, with or without a token.
    Off,
}

/// Method by which HTTP clients authenticate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpAuth {
    /// Clients send the token in `token_file`.
    #[default]
    Token,
    /// Clients send a Kubernetes token. The API server identifies the token's user and decides
    /// which requests that user may send.
    TokenReview,
}

/// Section `[control]`: access of users other than root to the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSection {
    /// Group whose members may read the node's state but change nothing. If empty, only root may
    /// read the state.
    pub view_group: String,
}

/// Section `[history]`: the history of containers that is stored on disk.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HistorySection {
    /// Folder of the history: `auto`, `off` or a path. `auto` selects the default folder.
    pub dir: String,
    /// Time for which the history is kept, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub keep: Millis,
    /// Maximum size of the history in MiB. The oldest records are removed first.
    pub max_mib: u64,
}

/// Section `[report]`: prices in `affinode report` and on the dashboard.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReportSection {
    /// Price of one GPU for one hour. If 0, no prices are shown.
    pub price_per_gpu_hour: f64,
    /// Currency of `price_per_gpu_hour`, at most 8 letters.
    pub currency: String,
}

/// Section `[oci]`: the OCI runtime that `affinode-runtime` runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OciSection {
    /// Name or path of the OCI runtime. If empty, `crun` is used if it is installed, else `runc`.
    pub runtime: PathBuf,
}

/// Section `[jobs]`: programs that run under the controller without a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JobsSection {
    /// Whether users can run jobs with `affinode run`. If true, the controller also runs while
    /// there is no container.
    pub enabled: bool,
    /// Names of the users besides root who may run jobs. The entry `*` means all users.
    pub users: Vec<String>,
}

/// Address at which the HTTP server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// The HTTP server is off and listens nowhere.
    Off,
    /// The server listens on this TCP address and port.
    Tcp(SocketAddr),
    /// The server listens on the Unix socket with this path, which only root may use.
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
            actions: HttpActions::default(),
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

/// Address of the HTTP server if `listen` is `auto` and this is the node's own controller, which
/// has the default run directory.
const NODE_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9410);
/// Folder of the history if `dir` is `auto` and this is the node's own controller, which has the
/// default run directory.
const NODE_STATE_DIR: &str = "/var/lib/affinode";

impl HttpSection {
    /// Returns the address at which the HTTP server listens. `auto` means 127.0.0.1:9410 for the
    /// node's own controller. For a private controller, which has another run directory, `auto`
    /// means a socket in that directory, so that several controllers can run on one machine.
    ///
    /// # Errors
    /// `listen` has none of the accepted forms. The error names them.
    pub fn listen(&self, run_dir: &Path) -> Result<ListenAddress, String> {
        match self.listen.as_str() {
            "off" => Ok(ListenAddress::Off),
            "auto" if run_dir == Path::new(paths::RUN_DIR) => Ok(ListenAddress::Tcp(NODE_ADDRESS)),
            "auto" => Ok(ListenAddress::Unix(run_dir.join("http.sock"))),
            other => match other.strip_prefix("unix:") {
                Some(path) if path.starts_with('/') => Ok(ListenAddress::Unix(path.into())),
                _ => other.parse().map(ListenAddress::Tcp).map_err(|_| {
                    format!("http.listen: {other:?}; accepted: auto, off, address:port, unix:/path")
                }),
            },
        }
    }

    /// Checks whether clients may move containers if the HTTP server listens at this address.
    ///
    /// # Errors
    /// Clients may not move containers. The text describes how to allow it.
    pub fn may_act(&self, listen: &ListenAddress) -> Result<(), &'static str> {
        let authenticated = self.auth == HttpAuth::TokenReview
            || !self.token_file.is_empty()
            || matches!(listen, ListenAddress::Unix(_));
        match self.actions {
            HttpActions::Off => Err("http.actions is \"off\": this site is read-only"),
            HttpActions::Authenticated if !authenticated => {
                Err("this site is read-only, because its address needs no token: use the command \
                 affinode, or set http.token_file or http.actions in the configuration")
            }
            HttpActions::Authenticated | HttpActions::AnyClient => Ok(()),
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let bad = |text: String| Err(ConfigError::Bad(text));
        let listen = self.listen(Path::new(paths::RUN_DIR)).map_err(ConfigError::Bad)?;
        if self.tls_cert_file.is_empty() != self.tls_key_file.is_empty() {
            return bad("http.tls_cert_file and http.tls_key_file: set both or none".into());
        }
        let reviewed = self.auth == HttpAuth::TokenReview;
        if let ListenAddress::Tcp(address) = listen
            && !address.ip().is_loopback()
        {
            if !reviewed && self.token_file.is_empty() {
                return bad(format!(
                    "http.listen: other hosts can reach {address}: set http.token_file or http.auth = \"token-review\""
                ));
            }
            // Without TLS, every host on the network path could read and replay the token.
            if self.tls_cert_file.is_empty() {
                return bad(format!(
                    "http.listen: other hosts can reach {address}: set http.tls_cert_file and http.tls_key_file, so that the tokens of clients are encrypted"
                ));
            }
        }
        if !reviewed {
            return Ok(());
        }
        if !self.token_file.is_empty() {
            return bad(
                "http.token_file has no effect with http.auth = \"token-review\": remove one of the two".into(),
            );
        }
        self.kubernetes.check()
    }
}

impl HistorySection {
    /// Returns the folder of the history, or `None` if the history is off. `auto` means
    /// /var/lib/affinode for the node's own controller. For a private controller, which has another
    /// run directory, `auto` means a folder in that directory.
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
                "history.dir: {:?}; accepted: auto, off, /path",
                self.dir
            )));
        }
        if !(8..=1 << 20).contains(&self.max_mib) {
            return Err(ConfigError::Bad(
                "history.max_mib: out of range; accepted: 8 to 1048576".into(),
            ));
        }
        Ok(())
    }
}

impl ReportSection {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !self.price_per_gpu_hour.is_finite() || self.price_per_gpu_hour < 0.0 {
            return Err(ConfigError::Bad(
                "report.price_per_gpu_hour: invalid number; accepted: 0.0 or more".into(),
            ));
        }
        if self.currency.chars().count() > 8 {
            return Err(ConfigError::Bad(
                "report.currency: too long; accepted: up to 8 characters".into(),
            ));
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
    fn a_private_controller_uses_a_socket() {
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
    fn only_known_clients_may_move_containers() {
        let tcp = ListenAddress::Tcp(NODE_ADDRESS);
        let unix = ListenAddress::Unix("/run/affinode/http.sock".into());
        let open = HttpSection::default();
        assert!(open.may_act(&tcp).is_err(), "any user of the machine reaches this address");
        assert!(open.may_act(&unix).is_ok(), "only root reaches it");
        let with_token = HttpSection { token_file: "/etc/t".into(), ..HttpSection::default() };
        let reviewed = HttpSection { auth: HttpAuth::TokenReview, ..HttpSection::default() };
        assert!(with_token.may_act(&tcp).is_ok() && reviewed.may_act(&tcp).is_ok());
        for section in [open, with_token, reviewed] {
            let off = HttpSection { actions: HttpActions::Off, ..section.clone() };
            assert!(off.may_act(&tcp).is_err() && off.may_act(&unix).is_err());
            let any = HttpSection { actions: HttpActions::AnyClient, ..section };
            assert!(any.may_act(&tcp).is_ok() && any.may_act(&unix).is_ok());
        }
    }

    #[test]
    fn public_address_requires_token_and_tls() {
        let tls = |section| HttpSection {
            tls_cert_file: "/etc/c".into(),
            tls_key_file: "/etc/k".into(),
            ..section
        };
        for public in ["0.0.0.0:9410", "10.0.0.7:9410", "[::]:9410"] {
            let with_token = HttpSection { token_file: "/etc/t".into(), ..http(public) };
            let refusal = with_token.check().unwrap_err().to_string();
            assert!(refusal.contains("set http.tls_cert_file and http.tls_key_file"), "{refusal}");
            assert!(tls(with_token).check().is_ok());
            let refusal = tls(http(public)).check().unwrap_err().to_string();
            assert!(refusal.contains("set http.token_file"), "{refusal}");
        }
        // Only programs on the node reach these addresses.
        for local in ["127.0.0.1:1", "[::1]:1", "unix:/run/affinode/http.sock"] {
            assert!(http(local).check().is_ok());
            let with_token = HttpSection { token_file: "/etc/t".into(), ..http(local) };
            assert!(with_token.check().is_ok());
        }
        let reviewed = HttpSection { auth: HttpAuth::TokenReview, ..http("0.0.0.0:9410") };
        assert!(reviewed.check().is_err(), "no API server is configured");
        let kubernetes = KubernetesSection {
            api_server: "https://10.0.0.1:6443".into(),
            ca_file: "/etc/kubernetes/pki/ca.crt".into(),
            token_file: "/etc/affinode/api-token".into(),
            audiences: Vec::new(),
        };
        let reviewed = HttpSection { kubernetes, ..reviewed };
        assert!(
            reviewed
                .check()
                .unwrap_err()
                .to_string()
                .contains("so that the tokens of clients are encrypted")
        );
        let reviewed = tls(reviewed);
        assert!(reviewed.check().is_ok());
        assert!(HttpSection { tls_key_file: String::new(), ..reviewed.clone() }.check().is_err());
        assert!(HttpSection { token_file: "/etc/t".into(), ..reviewed }.check().is_err());
    }

    #[test]
    fn history_dir_selects_the_folder() {
        let history = |dir: &str| HistorySection { dir: dir.into(), ..HistorySection::default() };
        assert_eq!(history("auto").folder(Path::new("/tmp/x")), Some("/tmp/x/state".into()));
        assert_eq!(history("off").folder(Path::new("/tmp/x")), None);
        assert!(history("somewhere").check().is_err());
    }
}
