//! Formats an error together with all its sources.

use std::{error::Error, fmt::Write as _};

/// Returns the text of the error and its sources, joined by colons: `error: cause: deeper cause`.
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
