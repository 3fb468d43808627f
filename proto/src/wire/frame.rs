//! Size, fields and errors of a frame, the fixed-size message between Affinode's processes.

use super::Phase;

/// Size of every frame in bytes.
pub const FRAME_BYTES: usize = 128;
/// Magic number in the first word of every frame.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"AFNf");
/// Reason why a frame is invalid and cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The frame does not begin with [`FRAME_MAGIC`]. Contains the word found.
    Magic(u32),
    /// The receiver accepts no frames of this kind. Contains the kind.
    Kind(u32),
    /// A field has a value that the protocol does not define. Contains the field's name and the
    /// value.
    Value(&'static str, u32),
}

impl core::fmt::Display for FrameError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            FrameError::Magic(m) => {
                write!(f, "the frame begins with {m:#x}, not with the magic word")
            }
            FrameError::Kind(k) => write!(f, "the frame has the unknown kind {k}"),
            FrameError::Value(field, v) => {
                write!(f, "field {field} of the frame has the invalid value {v}")
            }
        }
    }
}

impl core::error::Error for FrameError {}

/// Encodes a frame field by field.
pub(super) struct Writer {
    pub(super) frame: [u8; FRAME_BYTES],
    at: usize,
}

impl Writer {
    pub(super) fn new(kind: u32) -> Writer {
        Writer { frame: [0; FRAME_BYTES], at: 0 }.u32(FRAME_MAGIC).u32(kind)
    }

    pub(super) fn u32(self, value: u32) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(self, value: u64) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends bytes to the frame. Bytes that do not fit are dropped. Every message fits, but an
    /// index out of range would panic, and a panic in the preload library would end the
    /// application.
    pub(super) fn bytes<const N: usize>(mut self, bytes: &[u8; N]) -> Writer {
        if let Some(to) = self.frame.get_mut(self.at..).and_then(<[u8]>::first_chunk_mut) {
            *to = *bytes;
        }
        self.at += N;
        self
    }
}

/// Decodes a frame field by field.
pub(super) struct Reader<'a> {
    frame: &'a [u8; FRAME_BYTES],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn open(frame: &'a [u8; FRAME_BYTES]) -> Result<(u32, Reader<'a>), FrameError> {
        let mut reader = Reader { frame, at: 0 };
        match reader.u32() {
            FRAME_MAGIC => Ok((reader.u32(), reader)),
            other => Err(FrameError::Magic(other)),
        }
    }

    pub(super) fn u32(&mut self) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.frame[self.at..self.at + 4]);
        self.at += 4;
        u32::from_le_bytes(word)
    }

    pub(super) fn u64(&mut self) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.frame[self.at..self.at + 8]);
        self.at += 8;
        u64::from_le_bytes(word)
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.frame[self.at..self.at + N]);
        self.at += N;
        bytes
    }

    pub(super) fn phase(&mut self) -> Result<Phase, FrameError> {
        let value = self.u32();
        Phase::from_u32(value).ok_or(FrameError::Value("phase", value))
    }
}
