//! Sends requests to dockerd's API on its Unix socket.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::Value;

/// Time limit for a response. A response to `/info` can take long, because dockerd counts
/// containers and queries its plugins.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum size of a response, in bytes. It is far above the size of dockerd's responses.
const REPLY_MAX_BYTES: u64 = 8 << 20;

/// Sends a GET request to dockerd and returns the JSON of its response.
///
/// # Errors
/// dockerd does not respond, the status is not 200, or the body is not JSON.
pub fn get(socket: &Path, path: &str) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // In HTTP 1.0 the server does not split the body into chunks, and closes the connection at its
    // end.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n")?;
    let mut reply = Vec::new();
    stream.take(REPLY_MAX_BYTES).read_to_end(&mut reply)?;
    json(path, &reply)
}

fn json(path: &str, reply: &[u8]) -> io::Result<Value> {
    const BLANK_LINE: &[u8] = b"\r\n\r\n";
    let status = String::from_utf8_lossy(reply.split(|byte| *byte == b'\r').next().unwrap_or(b""));
    if status.split(' ').nth(1) != Some("200") {
        return Err(io::Error::other(format!(
            "dockerd answered the request {path} with {status:?}"
        )));
    }
    let head = reply.windows(BLANK_LINE.len()).position(|bytes| bytes == BLANK_LINE);
    let body = head.map_or(&[][..], |end| &reply[end + BLANK_LINE.len()..]);
    serde_json::from_slice(body).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_success_with_json_is_an_answer() {
        let reply = b"HTTP/1.0 200 OK\r\nApi-Version: 1.45\r\n\r\n{\"Runtimes\":{\"runc\":{}}}\n";
        assert!(json("/info", reply).unwrap()["Runtimes"]["runc"].is_object());
        for other in [
            &b"HTTP/1.0 404 Not Found\r\n\r\n{}"[..],
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\n{\"cut",
            b"HTTP/1.0 200 OK\r\n",
            b"",
        ] {
            assert!(json("/info", other).is_err(), "{}", String::from_utf8_lossy(other));
        }
    }
}
