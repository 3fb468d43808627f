//! Creates HTTP responses, and adds the headers that every response has.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{
    Response, StatusCode,
    body::{Body, Frame, SizeHint},
    header::{self, HeaderName, HeaderValue},
};
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;

/// Type of the body of every HTTP response.
pub type ReplyBody = UnsyncBoxBody<Bytes, Infallible>;
/// An HTTP response with a [`ReplyBody`].
pub type Reply = Response<ReplyBody>;

/// Size of the chunks in which a large response is written to its connection, in bytes.
const CHUNK_BYTES: usize = 64 << 10;

/// Content security policy of the dashboard: the page may load files of this server and connect to
/// it, and no other page may frame it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const COMMON: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Creates an HTTP response with any body and the common headers.
pub fn with<B>(status: StatusCode, kind: &'static str, body: B) -> Reply
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let mut reply = Response::new(body.boxed_unsync());
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    for (name, value) in COMMON {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}

/// Creates a plain-text response that is not cached.
pub fn text(status: StatusCode, text: impl Into<Bytes>) -> Reply {
    with(status, "text/plain; charset=utf-8", Full::new(text.into()))
}

/// Creates a response with one JSON value.
pub fn json(status: StatusCode, value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(bytes) => with(status, "application/json", Full::new(bytes.into())),
        Err(error) => {
            text(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write JSON: {error}"))
        }
    }
}

/// Creates a response with one JSON value that may be large, and attaches a permit of a limited
/// resource to it. The permit is released when the client has read all but about [`CHUNK_BYTES`] of
/// the response, or has closed the connection.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn large_json(
    value: &impl Serialize,
    permit: OwnedSemaphorePermit,
) -> Result<Reply, serde_json::Error> {
    let bytes = serde_json::to_vec(value)?;
    Ok(with(StatusCode::OK, "application/json", ChunkedBody { bytes, sent: 0, _permit: permit }))
}

/// A body that is sent in chunks. A body of one chunk would be dropped, with its permit, as soon as
/// its connection holds the chunk, although the client has read nothing.
struct ChunkedBody {
    bytes: Vec<u8>,
    sent: usize,
    _permit: OwnedSemaphorePermit,
}

impl Body for ChunkedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let rest = &self.bytes[self.sent..];
        if rest.is_empty() {
            return Poll::Ready(None);
        }
        // A copy, because a part of `bytes` would keep all of its memory until it is written.
        let chunk = Bytes::copy_from_slice(&rest[..rest.len().min(CHUNK_BYTES)]);
        self.sent += chunk.len();
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.sent == self.bytes.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.bytes.len() - self.sent) as u64)
    }
}

/// Creates an error response. Its body is a JSON object with the reason `why` in the field `error`.
pub fn error(status: StatusCode, why: &str) -> Reply {
    #[derive(Serialize)]
    struct ErrorBody<'a> {
        error: &'a str,
    }
    json(status, &ErrorBody { error: why })
}
