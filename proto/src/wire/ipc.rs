//! Legacy IPC between two processes with the library, for memory that the driver does not share by
//! `cuIpcGetMemHandle`: what is in the 64 bytes of a handle, and the two frames that pass when it
//! is opened.
//!
//! ```text
//! importer                                             exporter's agent
//!   Ask + one end of a pair of sockets ─ datagram ───>   knows the word and the memory?
//!   <──────────── Answer + descriptor of the memory ──   on that end; else it is closed
//! ```
//!
//! Everybody in the network namespace may send to the exporter's socket, so it answers only who has
//! the handle; and whoever has taken the exporter's name cannot answer without it.

use super::frame::{FRAME_BYTES, FrameError, Reader, Writer};

/// Size of a `CUipcMemHandle`.
pub const HANDLE_BYTES: usize = 64;
/// What every handle of ours begins with. One of the driver's would by chance in one of 2^64.
pub const HANDLE_MAGIC: [u8; 8] = *b"AFNipc\x001";
/// Size of the name of a socket.
pub const NAME_BYTES: usize = NAME_BEGIN.len() + 32;
const NAME_BEGIN: &[u8; 13] = b"affinode-ipc-";

/// What names one allocation of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcHandle {
    /// Names the exporter's socket.
    pub socket: [u8; 16],
    /// Who says it to the exporter has a handle.
    pub word: [u8; 16],
    /// Who says it to the importer is the exporter.
    pub proof: u64,
    /// The allocation's address in the exporter.
    pub address: u64,
    /// When it was noted there: another at the same address is not meant.
    pub since: u64,
}

impl IpcHandle {
    /// The 64 bytes.
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

    /// Reads a handle; `None`: it is not one of ours.
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

    /// The abstract name of the exporter's socket. In letters: `/proc/net/unix` shows it as it is.
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

/// From who opens a handle, with the way of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcRequest {
    /// Of the handle.
    pub word: [u8; 16],
    /// Of the handle.
    pub address: u64,
    /// Of the handle.
    pub since: u64,
}

impl IpcRequest {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        Writer::new(241).bytes(&self.word).u64(self.address).u64(self.since).frame
    }

    /// Reads a frame that anybody may have sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<IpcRequest, FrameError> {
        match Reader::open(frame)? {
            (241, mut r) => Ok(IpcRequest { word: r.bytes(), address: r.u64(), since: r.u64() }),
            (other, _) => Err(FrameError::Kind(other)),
        }
    }
}

/// To it, with a shareable descriptor of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcReply {
    /// Of the handle.
    pub proof: u64,
    /// Of the physical memory.
    pub bytes: u64,
    /// What the exporter's application had asked for.
    pub asked_bytes: u64,
}

impl IpcReply {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        Writer::new(242).u64(self.proof).u64(self.bytes).u64(self.asked_bytes).frame
    }

    /// Reads a frame that came as an answer.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
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
    fn a_handle_comes_out_as_it_went_in() {
        assert_eq!(IpcHandle::decode(&HANDLE.encode()), Some(HANDLE));
        let ask = IpcRequest { word: [7; 16], address: 1, since: 2 };
        assert_eq!(IpcRequest::decode(&ask.encode()), Ok(ask));
        let answer = IpcReply { proof: 1, bytes: 2, asked_bytes: 3 };
        assert_eq!(IpcReply::decode(&answer.encode()), Ok(answer));
        assert_eq!(IpcReply::decode(&ask.encode()), Err(FrameError::Kind(241)));
        assert_eq!(IpcRequest::decode(&answer.encode()), Err(FrameError::Kind(242)));
    }

    #[test]
    fn the_sockets_name_is_in_letters() {
        let name = HANDLE.socket_name();
        assert_eq!(&name, b"affinode-ipc-a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5");
    }

    proptest! {
        /// All 64 bytes count: no two handles mean the same.
        #[test]
        fn every_byte_of_a_handle_is_its_own(
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
        fn what_is_no_frame_is_none(bytes: [u8; 32], kind: u32) {
            let mut frame = [0; FRAME_BYTES];
            frame[..32].copy_from_slice(&bytes);
            prop_assert!(IpcRequest::decode(&frame).is_err() && IpcReply::decode(&frame).is_err());
            frame = IpcRequest { word: [1; 16], address: 1, since: 1 }.encode();
            frame[4..8].copy_from_slice(&kind.to_le_bytes());
            prop_assert_eq!(IpcRequest::decode(&frame).is_ok(), kind == 241);
        }
    }
}
