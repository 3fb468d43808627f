//! Reads and writes the frames of ttrpc, containerd's RPC protocol.
//!
//! ```text
//! 0        4        8    9     10
//! | length | stream |type|flags| payload …
//!   u32 BE   u32 BE   u8   u8    at most 4 MiB
//! ```

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Length of a frame's header.
pub const HEADER_BYTES: usize = 10;
/// Longest payload that ttrpc allows.
pub const PAYLOAD_MAX_BYTES: u32 = 4 << 20;
/// Type of a frame that opens a stream.
pub const REQUEST: u8 = 1;
/// Type of a frame that carries a reply.
pub const RESPONSE: u8 = 2;

/// The header of a frame, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the payload in bytes.
    pub payload_bytes: u32,
    /// Stream that the frame belongs to.
    pub stream: u32,
    /// Type of the frame: request, response or data.
    pub kind: u8,
    /// Flags of the frame. The proxy passes them on unchanged.
    pub flags: u8,
}

/// Reason why bytes are not a valid ttrpc frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A payload is longer than ttrpc allows.
    #[error(
        "the payload of a ttrpc frame has {payload_bytes} bytes, more than the maximum of {PAYLOAD_MAX_BYTES}"
    )]
    TooLong {
        /// Length of the payload that the header states.
        payload_bytes: u32,
    },
    /// The connection ended within a frame, or failed.
    #[error("the connection broke within a ttrpc frame")]
    Broken(#[from] io::Error),
}

impl FrameHeader {
    /// Reads a header from its bytes.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<FrameHeader, FrameError> {
        let [a, b, c, d, e, f, g, h, kind, flags] = bytes;
        let payload_bytes = u32::from_be_bytes([a, b, c, d]);
        if payload_bytes > PAYLOAD_MAX_BYTES {
            return Err(FrameError::TooLong { payload_bytes });
        }
        Ok(FrameHeader { payload_bytes, stream: u32::from_be_bytes([e, f, g, h]), kind, flags })
    }

    /// Encodes the header as it is sent.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let [a, b, c, d] = self.payload_bytes.to_be_bytes();
        let [e, f, g, h] = self.stream.to_be_bytes();
        [a, b, c, d, e, f, g, h, self.kind, self.flags]
    }

    /// Returns a frame with this header's fields and another payload. Returns `None` if the payload
    /// is too long.
    #[must_use]
    pub fn with_payload(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let payload_bytes =
            u32::try_from(payload.len()).ok().filter(|bytes| *bytes <= PAYLOAD_MAX_BYTES)?;
        let header = FrameHeader { payload_bytes, ..*self };
        Some([&header.encode()[..], payload].concat())
    }
}

/// Reads the bytes of the next header. Returns `None` at the end of the connection.
pub async fn read_header(
    from: &mut (impl AsyncRead + Unpin),
) -> Result<Option<[u8; HEADER_BYTES]>, FrameError> {
    let mut bytes = [0; HEADER_BYTES];
    if from.read(&mut bytes[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut bytes[1..]).await?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_survive(payload_bytes in 0..=PAYLOAD_MAX_BYTES, stream: u32, kind: u8, flags: u8) {
            let header = FrameHeader { payload_bytes, stream, kind, flags };
            prop_assert_eq!(FrameHeader::decode(header.encode()).unwrap(), header);
        }

        #[test]
        fn every_header_is_itself_or_refused(bytes: [u8; HEADER_BYTES]) {
            match FrameHeader::decode(bytes) {
                Ok(header) => prop_assert_eq!(header.encode(), bytes),
                Err(FrameError::TooLong { payload_bytes }) => prop_assert!(payload_bytes > PAYLOAD_MAX_BYTES),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn a_payload_must_fit() {
        let header = FrameHeader { payload_bytes: 3, stream: 5, kind: REQUEST, flags: 0 };
        assert!(header.with_payload(&vec![0; (4 << 20) + 1]).is_none());
        let frame = header.with_payload(b"ab").unwrap();
        assert_eq!(frame, b"\0\0\0\x02\0\0\0\x05\x01\0ab");
    }

    #[tokio::test]
    async fn end_within_a_frame_is_an_error_between_not() {
        assert!(read_header(&mut &b""[..]).await.unwrap().is_none());
        assert!(matches!(read_header(&mut &b"\0\0"[..]).await, Err(FrameError::Broken(_))));
    }
}
