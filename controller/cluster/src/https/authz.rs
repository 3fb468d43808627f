//! Authorisation by the cluster's API server, and the reply to a denied request.

use affinode_controller::{
    config::{HttpAuth, HttpSection, KubernetesSection},
    http::{
        Denied, DenyReason, GuardError, HttpGuard,
        reply::{self, Reply},
    },
};
use hyper::{
    StatusCode,
    header::{self, HeaderValue},
};

/// Folder in a pod in which Kubernetes mounts the token and CA certificate of the pod's service
/// account.
pub const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Returns a guard that asks the API server to review each token. The guard authenticates to the
/// API server with this pod's own account.
///
/// # Errors
/// If the pod has no account, or the address of the API server is unknown.
pub fn by_review(hosts: &[String]) -> Result<HttpGuard, GuardError> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT"));
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    HttpGuard::new(&HttpSection {
        auth: HttpAuth::TokenReview,
        hosts: hosts.to_vec(),
        kubernetes: KubernetesSection {
            api_server: format!("https://{host}:{port}"),
            ca_file: format!("{ACCOUNT}/ca.crt"),
            token_file: format!("{ACCOUNT}/token"),
            audiences: Vec::new(),
        },
        ..HttpSection::default()
    })
}

/// Returns the HTTP reply to a request that the guard denied. The dashboard shows the text of the
/// reply.
#[must_use]
pub fn refused(refusal: &Denied) -> Reply {
    let status = match refusal.kind {
        DenyReason::Host => StatusCode::MISDIRECTED_REQUEST,
        DenyReason::Token => StatusCode::UNAUTHORIZED,
        DenyReason::Review | DenyReason::Busy => StatusCode::SERVICE_UNAVAILABLE,
        DenyReason::Malformed => StatusCode::BAD_REQUEST,
        DenyReason::Origin | DenyReason::Forbidden => StatusCode::FORBIDDEN,
    };
    let mut answer = reply::error(status, &refusal.why);
    if refusal.kind == DenyReason::Token {
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    answer
}
