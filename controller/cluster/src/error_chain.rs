//! How an error is told at the edge: as the controller tells them, and those of API servers.

pub use affinode_controller::error_chain::chain;

/// What an API server answered, without what kube says around it.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
