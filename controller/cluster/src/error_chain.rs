//! Formats an error with its causes, in the controller's form, also for errors of the API server.

pub use affinode_controller::error_chain::chain;

/// The API server's own message, without the text that kube adds.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
