//! Makes the requests of a kubelet's registration valid HTTP/2.
//!
//! The kubelet opens the registration socket by its path, and Go's gRPC client then sends the path as
//! `:authority`: `%2Fvar%2Flib%2F…` (kubernetes/kubernetes#109081, seen with Kubernetes 1.36.3). That
//! is no valid authority, and the crate `h2` resets such requests (hyperium/h2#487). This module
//! replaces the value before `h2` reads it.
//!
//! The replacement has the same number of bytes, so no length in a frame changes, and the header
//! block needs not be decoded: only the lengths of its fields are read (RFC 7541, section 6).

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Number of bytes that a client sends before its first frame.
const PREFACE_BYTES: usize = 24;
/// Number of bytes of a frame before its payload.
const FRAME_HEAD_BYTES: usize = 9;
/// Maximum size of a frame's payload, in bytes. Servers of tonic keep HTTP/2's default.
const MAX_PAYLOAD_BYTES: usize = 16_384;
/// Type of a frame that begins a header block.
const HEADERS: u8 = 1;
/// Flag of a frame with padding at its end. The first byte of the payload is the length of the
/// padding.
const PADDED: u8 = 0x8;
/// Flag of a header frame with five bytes of priority.
const PRIORITY: u8 = 0x20;
/// Index of `:authority` in HPACK's static table.
const AUTHORITY: usize = 1;

/// Forwards the bytes that a client sends to a server, and makes the authority of each request
/// valid. Returns when the client has closed its side of the connection.
///
/// # Errors
/// A side failed, or the client sends a frame that exceeds HTTP/2's default size.
pub async fn forward(
    mut client: impl AsyncRead + Unpin,
    mut server: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut preface = [0; PREFACE_BYTES];
    client.read_exact(&mut preface).await?;
    server.write_all(&preface).await?;
    loop {
        let mut head = [0; FRAME_HEAD_BYTES];
        match client.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return server.shutdown().await;
            }
            read => read?,
        };
        let [high, middle, low, kind, flags, ..] = head;
        let size = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        if size > MAX_PAYLOAD_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an HTTP/2 frame is too large"));
        }
        let mut payload = vec![0; size];
        client.read_exact(&mut payload).await?;
        if kind == HEADERS {
            let _ = replace_authority(header_block(&mut payload, flags));
        }
        server.write_all(&head).await?;
        server.write_all(&payload).await?;
        server.flush().await?;
    }
}

/// Returns the header block in the payload of a header frame. The result is empty if the frame is
/// malformed.
fn header_block(payload: &mut [u8], flags: u8) -> &mut [u8] {
    let padded = flags & PADDED != 0;
    let padding = if padded { payload.first().copied().unwrap_or(0).into() } else { 0 };
    let start = usize::from(padded) + if flags & PRIORITY == 0 { 0 } else { 5 };
    let end = payload.len().saturating_sub(padding);
    payload.get_mut(start..end).unwrap_or_default()
}

/// Replaces each value of `:authority` that a header block contains as a literal. Headers of later
/// requests refer to the replaced value by its index. `None`: the block is malformed. `h2` reports
/// this error.
fn replace_authority(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while let Some(first) = block.get(at).copied() {
        let (bits, literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            // A new size of the dynamic table.
            0x20.. => (5, false),
            _ => (4, true),
        };
        let (index, next) = integer(block, at, bits)?;
        at = next;
        if !literal {
            continue;
        }
        if index == 0 {
            let (length, start) = integer(block, at, 7)?;
            at = start.checked_add(length)?;
        }
        let (length, start) = integer(block, at, 7)?;
        let end = start.checked_add(length)?;
        if index == AUTHORITY {
            // Without this bit, the value is not Huffman-coded.
            block[at] &= 0x7f;
            let fresh = b"localhost".iter().chain(std::iter::repeat(&b'x'));
            block.get_mut(start..end)?.iter_mut().zip(fresh).for_each(|(old, new)| *old = *new);
        }
        at = end;
    }
    Some(())
}

/// Reads the integer at position `at` of a header block (RFC 7541, section 5.1). The integer has
/// `bits` bits in its first byte. Returns the integer and the position after it. `None`: the block
/// is malformed.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut next = at + 1;
    if value < most {
        return Some((value, next));
    }
    // Four further bytes are enough for every length in a frame.
    for shift in [0, 7, 14, 21] {
        let byte = *block.get(next)?;
        value += usize::from(byte & 0x7f) << shift;
        next += 1;
        if byte < 0x80 {
            return Some((value, next));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a literal header field, with an indexed name and a value that is not Huffman-coded.
    fn field(index: u8, value: &str) -> Vec<u8> {
        let length = u8::try_from(value.len()).unwrap();
        [&[index, length], value.as_bytes()].concat()
    }

    #[test]
    fn only_the_authority_is_replaced() {
        // The kinds of fields: indexed, a new table size, literals with and without a name's index.
        let named = [&[0x00, 3], b"abc".as_slice(), &[2], b"de"].concat();
        let before = [vec![0x83, 0x3f, 0xe1, 0x1f], named.clone(), field(0x44, "/path")].concat();
        let mut block = [before.clone(), field(0x41, "%2Fvar%2Flib"), field(0x0f, "x")].concat();
        // Index 15 in a 4-bit prefix needs a second byte.
        let at = block.len() - 2;
        block.insert(at, 0);
        let mut expected = [before, field(0x41, "localhostxxx"), field(0x0f, "x")].concat();
        expected.insert(at, 0);
        assert_eq!(replace_authority(&mut block), Some(()));
        assert_eq!(block, expected);
    }

    #[test]
    fn huffman_coded_authority_becomes_plain() {
        let mut block = vec![0x41, 0x83, 0xff, 0xff, 0xff];
        assert_eq!(replace_authority(&mut block), Some(()));
        assert_eq!(block, [&[0x41, 3], b"loc".as_slice()].concat());
    }

    #[test]
    fn malformed_blocks_end_without_a_panic() {
        for block in [
            vec![0x41],
            vec![0x41, 0x05, b'a'],
            vec![0x7f],
            vec![0x7f, 0xff, 0xff, 0xff, 0xff, 0xff],
            vec![0x41, 0x7f, 0xff, 0xff, 0xff, 0x7f],
            vec![0x00, 0x7f],
        ] {
            assert_eq!(replace_authority(&mut block.clone()), None, "{block:?}");
        }
        assert!(header_block(&mut [9, 0], PADDED).is_empty());
        assert!(header_block(&mut [], PADDED | PRIORITY).is_empty());
        assert_eq!(header_block(&mut [1, 0, 0, 0, 0, 0, 7, 0], PADDED | PRIORITY), [7]);
    }

    #[tokio::test]
    async fn oversized_frames_are_refused() {
        let head = [0xff, 0xff, 0xff, HEADERS, 0, 0, 0, 0, 1];
        let sent = [vec![b'p'; PREFACE_BYTES], head.to_vec()].concat();
        let error = forward(sent.as_slice(), Vec::new()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
