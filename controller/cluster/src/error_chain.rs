//! Formats an error with its causes as the controller does, including errors of the API server.

pub use affinode_controller::error_chain::chain;

/// An error of the API server, displayed as the server's own message without the text that kube
/// adds.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
