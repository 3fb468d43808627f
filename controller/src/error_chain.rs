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
