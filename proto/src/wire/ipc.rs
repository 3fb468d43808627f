//! Legacy IPC between two processes that have loaded the library. The driver's `cuIpcGetMemHandle`
//! gives no handle for memory that the library maps itself, so the library creates one. This module
//! defines the 64 bytes of the handle, and the two frames that the processes exchange when the
//! importer opens the handle.
//!
//! ```text
//! importer                                             exporter's agent
//!   IpcRequest + one end of a socket pair ─ datagram ──>   checks the word and the address
//!   <───────── IpcReply + descriptor of the memory ─────   if valid; otherwise closes that end
//! ```
//!
//! Every process in the network namespace can send to the exporter's socket, so the exporter
//! replies only to a sender that has the handle. Another process that has bound the exporter's
//! socket name cannot send a valid reply without the handle.

use super::frame::{FRAME_BYTES, FrameError, Reader, Writer};

/// Size of a `CUipcMemHandle` in bytes.
pub const HANDLE_BYTES: usize = 64;
/// First bytes of every IPC handle that the library creates. A handle of the driver begins with the
/// same bytes with a probability of 2^-64.
pub const HANDLE_MAGIC: [u8; 8] = *b"AFNipc\x001";
/// Length of an exporter's socket name in bytes.
pub const NAME_BYTES: usize = NAME_BEGIN.len() + 32;
const NAME_BEGIN: &[u8; 13] = b"affinode-ipc-";

/// IPC handle that the library creates. It identifies one allocation of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcHandle {
    /// Random part of the exporter's socket name.
    pub socket: [u8; 16],
    /// Secret that the importer sends, to prove that it has the handle.
    pub word: [u8; 16],
    /// Secret that the exporter sends, to prove that it created the handle.
    pub proof: u64,
    /// Address of the allocation in the exporting process.
    pub address: u64,
    /// Number that distinguishes the allocation from later allocations at the same address.
    pub since: u64,
}

impl IpcHandle {
    /// Encodes the handle as 64 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        let numbers = [self.proof, self.address, self.since].map(u64::to_le_bytes);
        let parts = HANDLE_MAGIC.iter().chain(&self.socket).chain(&self.word);
        for (to, from) in bytes.iter_mut().zip(parts.chain(numbers.as_flattened())) {
            *to = *from;
        }
        bytes
    }

    /// Decodes a handle. Returns `None` if Affinode's library did not create it.
    #[must_use]
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Option<IpcHandle> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (socket, rest) = rest.split_first_chunk()?;
        let (word, rest) = rest.split_first_chunk()?;
        let (proof, rest) = rest.split_first_chunk()?;
        let (address, rest) = rest.split_first_chunk()?;
        let since = rest.first_chunk()?;
        (*magic == HANDLE_MAGIC).then_some(IpcHandle {
            socket: *socket,
            word: *word,
            proof: u64::from_le_bytes(*proof),
            address: u64::from_le_bytes(*address),
            since: u64::from_le_bytes(*since),
        })
    }

    /// Returns the abstract name of the exporter's socket. The random part is written as
    /// hexadecimal digits, so that it is readable in `/proc/net/unix`.
    #[must_use]
    pub fn socket_name(&self) -> [u8; NAME_BYTES] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |n: u8| DIGITS.get(usize::from(n)).copied().unwrap_or(b'0');
        let digits = self.socket.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
        let mut name = [0; NAME_BYTES];
        for (to, from) in name.iter_mut().zip(NAME_BEGIN.iter().copied().chain(digits)) {
            *to = from;
        }
        name
    }
}

/// Request of an importing process for the memory of a handle. The message contains a socket for
/// the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcRequest {
    /// Secret of the importer, from [`IpcHandle::word`].
    pub word: [u8; 16],
    /// Address of the allocation, from [`IpcHandle::address`].
    pub address: u64,
    /// Number that distinguishes the allocation, from [`IpcHandle::since`].
    pub since: u64,
}

impl IpcRequest {
    /// Encodes the request as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        Writer::new(241).bytes(&self.word).u64(self.address).u64(self.since).frame
    }

    /// Decodes the request from a frame. Any process may have sent it.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<IpcRequest, FrameError> {
        match Reader::open(frame)? {
            (241, mut r) => Ok(IpcRequest { word: r.bytes(), address: r.u64(), since: r.u64() }),
            (other, _) => Err(FrameError::Kind(other)),
        }
    }
}

/// Reply of the exporting process. The message contains a shareable descriptor of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcReply {
    /// Secret of the exporter, from [`IpcHandle::proof`].
    pub proof: u64,
    /// Size of the shared physical memory, in bytes.
    pub bytes: u64,
    /// Size that the exporting application requested, in bytes.
    pub asked_bytes: u64,
}

impl IpcReply {
    /// Encodes the reply as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        Writer::new(242).u64(self.proof).u64(self.bytes).u64(self.asked_bytes).frame
    }

    /// Decodes the reply from a frame.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<IpcReply, FrameError> {
        match Reader::open(frame)? {
            (242, mut r) => Ok(IpcReply { proof: r.u64(), bytes: r.u64(), asked_bytes: r.u64() }),
            (other, _) => Err(FrameError::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HANDLE: IpcHandle =
        IpcHandle { socket: [0xa5; 16], word: [7; 16], proof: 3, address: 0x7000_0000, since: 9 };

    #[test]
    fn ipc_handle_decodes_as_encoded() {
        assert_eq!(IpcHandle::decode(&HANDLE.encode()), Some(HANDLE));
        let ask = IpcRequest { word: [7; 16], address: 1, since: 2 };
        assert_eq!(IpcRequest::decode(&ask.encode()), Ok(ask));
        let answer = IpcReply { proof: 1, bytes: 2, asked_bytes: 3 };
        assert_eq!(IpcReply::decode(&answer.encode()), Ok(answer));
        assert_eq!(IpcReply::decode(&ask.encode()), Err(FrameError::Kind(241)));
        assert_eq!(IpcRequest::decode(&answer.encode()), Err(FrameError::Kind(242)));
    }

    #[test]
    fn ipc_socket_name_is_in_letters() {
        let name = HANDLE.socket_name();
        assert_eq!(&name, b"affinode-ipc-a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5");
    }

    proptest! {
        /// Changes one of the 64 bytes of a handle. The changed bytes must decode to another
        /// handle, or to no handle.
        #[test]
        fn every_handle_byte_is_significant(
            bytes: [u8; 32], more: [u8; 32], at in 0_usize..HANDLE_BYTES, change in 1_u8..,
        ) {
            let mut handle = [0; HANDLE_BYTES];
            handle[..32].copy_from_slice(&bytes);
            handle[32..].copy_from_slice(&more);
            prop_assert_eq!(IpcHandle::decode(&handle), None, "no magic");
            handle[..8].copy_from_slice(&HANDLE_MAGIC);
            let read = IpcHandle::decode(&handle).unwrap();
            prop_assert_eq!(read.encode(), handle);
            handle[at] ^= change;
            prop_assert_ne!(IpcHandle::decode(&handle), Some(read));
        }

        #[test]
        fn invalid_ipc_frame_is_rejected(bytes: [u8; 32], kind: u32) {
            let mut frame = [0; FRAME_BYTES];
            frame[..32].copy_from_slice(&bytes);
            prop_assert!(IpcRequest::decode(&frame).is_err() && IpcReply::decode(&frame).is_err());
            frame = IpcRequest { word: [1; 16], address: 1, since: 1 }.encode();
            frame[4..8].copy_from_slice(&kind.to_le_bytes());
            prop_assert_eq!(IpcRequest::decode(&frame).is_ok(), kind == 241);
        }
    }
}
