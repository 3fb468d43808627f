//! Checks whether a proxy listens at an address, and which stock shim it serves.
//!
//! A `start` probes before it joins the proxy of its group, and a `delete` before it treats the
//! group as dead. The request is a header that is not a valid ttrpc frame. The reply is the
//! identity of the stock shim behind the proxy, as JSON; then the connection ends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::address::SocketAddress;
use crate::frame::HEADER_BYTES;

/// Bytes of the request, which are no valid header: a length above ttrpc's maximum, then a name.
pub const QUESTION: [u8; HEADER_BYTES] = *b"\xff\xff\xff\xffaffin?";
/// Maximum size of the reply in bytes.
const ANSWER_MAX_BYTES: u64 = 4096;

/// Identity of a stock shim: its process, and the inode of its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimIdentity {
    /// Process id of the stock shim.
    pub pid: i32,
    /// Start time of the process in clock ticks after boot. It distinguishes the process from a
    /// later process with the same pid.
    pub start_ticks: u64,
    /// Inode of the stock shim's socket.
    pub socket_inode: u64,
    /// Inode of the proxy's own socket. It is 0 before the socket is bound.
    #[serde(default)]
    pub proxy_inode: u64,
}

/// Result of a probe.
#[derive(Debug)]
pub enum ProbedPeer {
    /// A proxy replied with the identity of its stock shim.
    Alive(ShimIdentity),
    /// There is no socket, or it has no listener.
    Dead,
    /// A listener accepted the connection, but did not reply in time.
    Silent(io::Error),
}

/// Sends the request to this address, and waits at most `patience` for the reply.
#[must_use]
pub fn ask(address: &SocketAddress, patience: Duration) -> ProbedPeer {
    let ask = || -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(address.path())?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        stream.write_all(&QUESTION)?;
        let mut bytes = Vec::new();
        stream.take(ANSWER_MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match ask() {
        // The listener ended after the connect and before it accepted the connection.
        Ok(bytes) if bytes.is_empty() => ProbedPeer::Dead,
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(identity) => ProbedPeer::Alive(identity),
            Err(error) => ProbedPeer::Silent(error.into()),
        },
        Err(error) => match error.kind() {
            ErrorKind::NotFound
            | ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe => ProbedPeer::Dead,
            _ => ProbedPeer::Silent(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};

    use super::*;
    use crate::frame::FrameHeader;

    const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

    fn served(answer: &'static [u8]) -> ProbedPeer {
        let dir = tempfile::tempdir().unwrap();
        let address = SocketAddress::parse(&format!("unix://{}/s", dir.path().display())).unwrap();
        let listener = UnixListener::bind(address.path()).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; HEADER_BYTES];
            stream.read_exact(&mut question).unwrap();
            assert_eq!(question, QUESTION);
            stream.write_all(answer).unwrap();
        });
        let peer = ask(&address, PROBE_TIMEOUT);
        server.join().unwrap();
        peer
    }

    #[test]
    fn the_question_is_no_frame() {
        assert!(FrameHeader::decode(QUESTION).is_err());
    }

    #[test]
    fn a_proxy_names_its_stock_shim() {
        let peer = served(br#"{"pid":7,"start_ticks":9,"socket_inode":3,"later":1}"#);
        let wanted = ShimIdentity { pid: 7, start_ticks: 9, socket_inode: 3, proxy_inode: 0 };
        assert!(matches!(peer, ProbedPeer::Alive(identity) if identity == wanted));
    }

    #[test]
    fn garbage_is_not_taken_for_death() {
        assert!(matches!(served(b"\0\0\0\x04"), ProbedPeer::Silent(_)));
        assert!(matches!(served(b""), ProbedPeer::Dead));
    }

    #[test]
    fn missing_listener_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        let address = SocketAddress::parse(&format!("unix://{}/s", dir.path().display())).unwrap();
        assert!(matches!(ask(&address, PROBE_TIMEOUT), ProbedPeer::Dead));
        // Bound, and nothing listens. A closed listener would not do: a process that another test
        // starts at that moment inherits it until its exec, and answers.
        let dead = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(dead, &SocketAddrUnix::new(address.path()).unwrap()).unwrap();
        assert!(matches!(ask(&address, PROBE_TIMEOUT), ProbedPeer::Dead));
    }
}
