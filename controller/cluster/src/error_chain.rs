//! Formats errors. An error is printed together with its causes, as in the controller. For an error
//! of the kube library, the API server's message is printed.

pub use affinode_controller::error_chain::chain;

/// An error of the kube library. If the API server replied with an error, this type shows only the
/// server's message and the HTTP status, without the text that kube adds.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
