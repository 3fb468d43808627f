//! The dashboard's files (page, scripts, styles). They are part of the binary, and the page loads
//! no other files.

use std::sync::LazyLock;

use bytes::Bytes;
use http_body_util::{Empty, Full};
use hyper::{
    HeaderMap, StatusCode,
    header::{self, HeaderValue},
};
use sha2::{Digest, Sha256};

use super::reply::{self, Reply};

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

macro_rules! files {
    ($($path:literal: $kind:expr, $file:literal;)*) => {
        const FILES: &[(&str, &str, &str)] = &[$(($path, $kind, include_str!(concat!("page/", $file)))),*];
    };
}

files! {
    "/": HTML, "index.html";
    "/style.css": STYLE, "style.css";
    "/icon.svg": IMAGE, "icon.svg";
    "/app.js": SCRIPT, "app.js";
    "/actions.js": SCRIPT, "actions.js";
    "/calls.js": SCRIPT, "calls.js";
    "/detail.js": SCRIPT, "detail.js";
    "/feed.js": SCRIPT, "feed.js";
    "/format.js": SCRIPT, "format.js";
    "/header.js": SCRIPT, "header.js";
    "/rows.js": SCRIPT, "rows.js";
    "/store.js": SCRIPT, "store.js";
    "/stream.js": SCRIPT, "stream.js";
    "/teams.js": SCRIPT, "teams.js";
    "/theme.js": SCRIPT, "theme.js";
}

/// HTTP entity tag that all files of the dashboard share. It is a digest of their contents, so it
/// changes with each version of the dashboard.
static TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hash = Sha256::new();
    for (_, _, text) in FILES {
        hash.update(text.as_bytes());
    }
    let digest: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digest}\"")
});

/// Returns the response with the file at this path, or `None` if there is no such file.
#[must_use]
pub fn find(path: &str, headers: &HeaderMap) -> Option<Reply> {
    let (_, kind, text) = FILES.iter().find(|(known, ..)| *known == path)?;
    let known =
        headers.get(header::IF_NONE_MATCH).is_some_and(|tag| tag.as_bytes() == TAG.as_bytes());
    let mut reply = if known {
        reply::with(StatusCode::NOT_MODIFIED, kind, Empty::new())
    } else {
        reply::with(StatusCode::OK, kind, Full::new(Bytes::from_static(text.as_bytes())))
    };
    reply.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&TAG) {
        reply.headers_mut().insert(header::ETAG, tag);
    }
    Some(reply)
}
