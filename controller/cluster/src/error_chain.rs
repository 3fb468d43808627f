//! Formats an error together with its causes, as the controller does, and errors of the kube
//! library.

pub use affinode_controller::error_chain::chain;

/// An error of the kube library. If the API server replied with an error, the text is the server's
/// own message with the HTTP status. The text that kube adds is left out.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
