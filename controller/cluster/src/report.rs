//! How an error is told at the edge: the whole chain, once.

use std::{error::Error, fmt::Write as _};

/// `what: because: because`.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let _ = write!(text, ": {source}");
        next = source.source();
    }
    text
}

/// What an API server answered, without what kube says around it.
#[derive(Debug, thiserror::Error)]
#[error("{}", match .0 {
    kube::Error::Api(status) => format!("{} (HTTP {})", status.message, status.code),
    error => chain(error),
})]
pub struct ApiError(pub kube::Error);
