//! Formats an error together with its causes, as the controller does, and errors of the kube
//! library.

pub use affinode_controller::error_chain::chain;

/// An error of the kube library. An error reply of the API server is displayed as the server's own
/// message with the HTTP status, without the text that kube adds.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
