//! What passes on the sockets of a copier, in the same frames as [`message`](super::message), one a
//! packet (`SOCK_SEQPACKET`). A copier is a process of the node's that has a context on one GPU: it
//! fills the memory of processes that come home while the driver restores their contexts.
//!
//! ```text
//! agent                                     copier                          controller
//!   Parked + memory file, Pieces ... ──────>  <─────── Attach + the agent's socket
//!   Away ───────────────────────────────────> registers ──── Held ──────────>
//!                                            <───────────── Fill ───────────  with the order to restore
//!   Restoring ──────────────────────────────>
//!                        <────────── Begin    has heard both: makes, copies
//!   Restored ───────────────────────────────>  may use the room that was left for the driver
//!                        <── Block + descriptor, one for each piece that is filled
//!                        <────────── Filled ──── Filled ──────────────────>
//!   hangs up ───────────────────────────────>  lets go of everything ── Left ──>
//! ```
//!
//! Where it was prepared, the copier has registered the memory before, and copies out as well:
//!
//! ```text
//!   Prepared + memory file ─────────────────>  registers ──── Prepared ──────>
//!                        <────────── Ready
//!   Parked, Pieces ... ─────────────────────>
//!   Take + descriptor, one for each piece ──>  imports, copies each
//!   (unmaps, is checkpointed)
//!                        <────────── Copied ─── Copied ──────────────────>
//!   Away ───────────────────────────────────>  and on as above
//! ```
//!
//! What another process of the same tenant holds as well (`dedup`) it offers to both, to hold once,
//! while they are away:
//!
//! ```text
//!                        <────────── Same + a sealed file, for a chunk of the memory file
//!   compares, maps it there instead, frees the chunk
//!   Mapped ─────────────────────────────────>  fills from the sealed file ── Shared ─>
//! ```
//!
//! Whoever hangs up ends it: the content is in the process's own memory all along, or, before
//! Copied, in the device memory that it has descriptors of.

use super::frame::{FRAME_BYTES, FrameError, Reader, Writer};

/// Most pieces of one process: what each costs is more than their copies where they are many.
pub const MAX_PIECES: usize = 4096;
/// Pieces whose mean is smaller come home faster without a copier: to make one and to hand it over
/// takes about as long as to copy so much (measured on an H200: 0.1 to 0.15 ms).
pub const MIN_MEAN_BYTES: u64 = 8 << 20;
/// Pieces are multiples of this.
pub const UNIT_BYTES: u64 = 2 << 20;
/// What a memory file is registered in, and what [`FromCopier::Same`] counts in.
pub const CHUNK_BYTES: u64 = 128 << 20;
/// Pieces in one [`ToCopier::Chunks`].
pub const PIECES_A_FRAME: usize = 28;

/// One piece of device memory, as it is to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Its size, a multiple of [`UNIT_BYTES`].
    pub bytes: u64,
    /// Others on the bus may reach it (`gpuDirectRDMACapable`).
    pub rdma: bool,
}

impl Piece {
    const RDMA: u32 = 1 << 31;

    /// As a word of a frame; `None` for a size that is none.
    #[must_use]
    pub fn word(self) -> Option<u32> {
        let units = u32::try_from(self.bytes / UNIT_BYTES).ok()?;
        let fits = self.bytes.is_multiple_of(UNIT_BYTES) && units > 0 && units < Self::RDMA;
        fits.then_some(if self.rdma { units | Self::RDMA } else { units })
    }

    /// Out of a word; `None` for no size at all.
    #[must_use]
    pub fn from_word(word: u32) -> Option<Piece> {
        let units = u64::from(word & !Self::RDMA);
        (units > 0).then_some(Piece { bytes: units * UNIT_BYTES, rdma: word & Self::RDMA != 0 })
    }
}

/// From an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToCopier {
    /// The memory file that comes along is to be registered: nothing is in it yet.
    Prefaulted {
        /// Of it, that will be used.
        bytes: u64,
        /// Of the device, as `cuDeviceGetUuid` has it.
        uuid: [u8; 16],
    },
    /// The memory of the next piece, in the order of the list, comes along: it is to be copied to
    /// the piece's place in the file.
    CopyOut,
    /// Its content is in the memory file that comes along, or that was prepared; or will be, of
    /// what is to be taken: so many pieces one behind the other.
    CopiedOut {
        /// Of all pieces.
        bytes: u64,
        /// What the driver will need for the rest of the process.
        rest_bytes: u64,
        /// How many follow.
        pieces: u32,
        /// Of the device that they were on, as `cuDeviceGetUuid` has it.
        uuid: [u8; 16],
    },
    /// The next of them.
    Chunks {
        /// How many of `words` count.
        many: u32,
        /// See [`Piece::word`].
        words: [u32; PIECES_A_FRAME],
    },
    /// The driver has taken the rest off the device: its memory may be registered now, which
    /// would have slowed the driver down.
    Checkpointed,
    /// The driver is about to restore the rest: the room for all of it is this process's now.
    Restoring,
    /// The driver has restored the rest.
    Restored,
    /// What became of [`FromCopier::Same`].
    Mapped {
        /// Which chunk.
        chunk: u32,
        /// The sealed file is in its place, and nothing in the memory file any more.
        taken: bool,
    },
}

/// To an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromCopier {
    /// The memory is being made and filled.
    Begin,
    /// The next piece, filled; its shareable handle comes along.
    Block {
        /// Which, from 0.
        index: u32,
    },
    /// All of them are filled.
    Filled,
    /// The file is registered: the copier can copy out.
    Ready,
    /// All of them are in the file.
    Copied,
    /// The file that comes along, which nobody can write to, holds what a chunk of the memory file
    /// holds.
    Same {
        /// Which: of [`CHUNK_BYTES`], from 0.
        chunk: u32,
    },
}

/// From the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierOrder {
    /// The other end of the socket that comes along is this process's.
    Attach {
        /// The controller's number of it.
        process: u64,
        /// Most that it can have parked.
        most_bytes: u64,
        /// What others of the same number hold as well may be held once; 0: nothing may.
        domain: u64,
    },
    /// Its room is granted and proven: fill, once it says that it restores.
    Fill {
        /// Which.
        process: u64,
        /// The room. Who says to have parked more is left to bring itself home.
        most_bytes: u64,
    },
    /// Somebody's room is being proven or taken: nothing that takes VRAM may begin meanwhile, but
    /// what [`CopierOrder::Fill`] orders.
    Register {
        /// Or it is over.
        on: bool,
    },
}

/// To the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierReport {
    /// The context is there.
    Ready,
    /// A process's memory is registered: it can be filled at the speed of the bus.
    Registered {
        /// Which.
        process: u64,
        /// How much.
        bytes: u64,
    },
    /// A process that is home has its host memory registered.
    Prefaulted {
        /// Which.
        process: u64,
        /// How much.
        bytes: u64,
    },
    /// Copied out of the device.
    Copied {
        /// Which.
        process: u64,
        /// How much.
        bytes: u64,
        /// From its first piece on, in microseconds.
        elapsed_us: u64,
    },
    /// Filled.
    Filled {
        /// Which.
        process: u64,
        /// How much.
        bytes: u64,
        /// From the order on, in microseconds.
        elapsed_us: u64,
    },
    /// A process hung up, or was hung up on.
    Detached {
        /// Which.
        process: u64,
    },
    /// The driver has let go of all that it had of those that left.
    Released,
    /// So much of a process's content is held in sealed files, together with others.
    Shared {
        /// Which.
        process: u64,
        /// Of it.
        bytes: u64,
        /// Of all such files of this copier.
        stored_bytes: u64,
    },
}

impl ToCopier {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            ToCopier::CopiedOut { bytes, rest_bytes, pieces, uuid } => {
                Writer::new(201).u64(bytes).u64(rest_bytes).u32(pieces).bytes(&uuid)
            }
            ToCopier::Chunks { many, words } => {
                words.iter().fold(Writer::new(202).u32(many), |writer, word| writer.u32(*word))
            }
            ToCopier::Checkpointed => Writer::new(203),
            ToCopier::Restoring => Writer::new(204),
            ToCopier::Restored => Writer::new(205),
            ToCopier::Prefaulted { bytes, uuid } => Writer::new(206).u64(bytes).bytes(&uuid),
            ToCopier::CopyOut => Writer::new(207),
            ToCopier::Mapped { chunk, taken } => Writer::new(208).u32(chunk).u32(u32::from(taken)),
        }
        .frame
    }

    /// Reads a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<ToCopier, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            201 => Ok(ToCopier::CopiedOut {
                bytes: r.u64(),
                rest_bytes: r.u64(),
                pieces: r.u32(),
                uuid: r.bytes(),
            }),
            202 => {
                let many = r.u32();
                if many as usize > PIECES_A_FRAME {
                    return Err(FrameError::Value("many", many));
                }
                Ok(ToCopier::Chunks { many, words: core::array::from_fn(|_| r.u32()) })
            }
            203 => Ok(ToCopier::Checkpointed),
            204 => Ok(ToCopier::Restoring),
            205 => Ok(ToCopier::Restored),
            206 => Ok(ToCopier::Prefaulted { bytes: r.u64(), uuid: r.bytes() }),
            207 => Ok(ToCopier::CopyOut),
            208 => Ok(ToCopier::Mapped { chunk: r.u32(), taken: r.u32() != 0 }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl FromCopier {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            FromCopier::Begin => Writer::new(211),
            FromCopier::Block { index } => Writer::new(212).u32(index),
            FromCopier::Filled => Writer::new(213),
            FromCopier::Ready => Writer::new(214),
            FromCopier::Copied => Writer::new(215),
            FromCopier::Same { chunk } => Writer::new(216).u32(chunk),
        }
        .frame
    }

    /// Reads a frame that a copier sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<FromCopier, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            211 => Ok(FromCopier::Begin),
            212 => Ok(FromCopier::Block { index: r.u32() }),
            213 => Ok(FromCopier::Filled),
            214 => Ok(FromCopier::Ready),
            215 => Ok(FromCopier::Copied),
            216 => Ok(FromCopier::Same { chunk: r.u32() }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl CopierOrder {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            CopierOrder::Attach { process, most_bytes, domain } => {
                Writer::new(221).u64(process).u64(most_bytes).u64(domain)
            }
            CopierOrder::Fill { process, most_bytes } => {
                Writer::new(222).u64(process).u64(most_bytes)
            }
            CopierOrder::Register { on } => Writer::new(223).u32(u32::from(on)),
        }
        .frame
    }

    /// Reads a frame that the controller sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<CopierOrder, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            221 => {
                let (process, most_bytes, domain) = (r.u64(), r.u64(), r.u64());
                Ok(CopierOrder::Attach { process, most_bytes, domain })
            }
            222 => Ok(CopierOrder::Fill { process: r.u64(), most_bytes: r.u64() }),
            223 => Ok(CopierOrder::Register { on: r.u32() != 0 }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl CopierReport {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            CopierReport::Ready => Writer::new(231),
            CopierReport::Registered { process, bytes } => Writer::new(232).u64(process).u64(bytes),
            CopierReport::Filled { process, bytes, elapsed_us } => {
                Writer::new(233).u64(process).u64(bytes).u64(elapsed_us)
            }
            CopierReport::Detached { process } => Writer::new(234).u64(process),
            CopierReport::Released => Writer::new(235),
            CopierReport::Prefaulted { process, bytes } => Writer::new(236).u64(process).u64(bytes),
            CopierReport::Copied { process, bytes, elapsed_us } => {
                Writer::new(237).u64(process).u64(bytes).u64(elapsed_us)
            }
            CopierReport::Shared { process, bytes, stored_bytes } => {
                Writer::new(238).u64(process).u64(bytes).u64(stored_bytes)
            }
        }
        .frame
    }

    /// Reads a frame that a copier sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<CopierReport, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            231 => Ok(CopierReport::Ready),
            232 => Ok(CopierReport::Registered { process: r.u64(), bytes: r.u64() }),
            233 => {
                Ok(CopierReport::Filled { process: r.u64(), bytes: r.u64(), elapsed_us: r.u64() })
            }
            234 => Ok(CopierReport::Detached { process: r.u64() }),
            235 => Ok(CopierReport::Released),
            236 => Ok(CopierReport::Prefaulted { process: r.u64(), bytes: r.u64() }),
            237 => {
                Ok(CopierReport::Copied { process: r.u64(), bytes: r.u64(), elapsed_us: r.u64() })
            }
            238 => {
                let (process, bytes, stored_bytes) = (r.u64(), r.u64(), r.u64());
                Ok(CopierReport::Shared { process, bytes, stored_bytes })
            }
            other => Err(FrameError::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in() {
        let parked = ToCopier::CopiedOut { bytes: 7, rest_bytes: 8, pieces: 9, uuid: [3; 16] };
        let pieces = ToCopier::Chunks { many: 28, words: core::array::from_fn(|n| n as u32 + 1) };
        let prepared = ToCopier::Prefaulted { bytes: 7, uuid: [3; 16] };
        for message in [
            parked,
            pieces,
            prepared,
            ToCopier::CopyOut,
            ToCopier::Checkpointed,
            ToCopier::Restoring,
            ToCopier::Restored,
            ToCopier::Mapped { chunk: 6, taken: true },
        ] {
            assert_eq!(ToCopier::decode(&message.encode()), Ok(message));
        }
        for message in [
            FromCopier::Begin,
            FromCopier::Block { index: 5 },
            FromCopier::Filled,
            FromCopier::Ready,
            FromCopier::Copied,
            FromCopier::Same { chunk: 4 },
        ] {
            assert_eq!(FromCopier::decode(&message.encode()), Ok(message));
        }
        for order in [
            CopierOrder::Attach { process: 1, most_bytes: 2, domain: 3 },
            CopierOrder::Fill { process: 3, most_bytes: 4 },
            CopierOrder::Register { on: true },
        ] {
            assert_eq!(CopierOrder::decode(&order.encode()), Ok(order));
        }
        for report in [
            CopierReport::Ready,
            CopierReport::Registered { process: 1, bytes: 2 },
            CopierReport::Filled { process: 1, bytes: 2, elapsed_us: 3 },
            CopierReport::Detached { process: 4 },
            CopierReport::Released,
            CopierReport::Prefaulted { process: 1, bytes: 2 },
            CopierReport::Copied { process: 1, bytes: 2, elapsed_us: 3 },
            CopierReport::Shared { process: 1, bytes: 2, stored_bytes: 3 },
        ] {
            assert_eq!(CopierReport::decode(&report.encode()), Ok(report));
        }
    }

    #[test]
    fn what_is_no_message_is_named() {
        let mut frame = ToCopier::Chunks { many: 1, words: [1; PIECES_A_FRAME] }.encode();
        frame[8] = 29;
        assert_eq!(ToCopier::decode(&frame), Err(FrameError::Value("many", 29)));
        assert_eq!(FromCopier::decode(&frame), Err(FrameError::Kind(202)));
        assert!(CopierOrder::decode(&[0; FRAME_BYTES]).is_err());
        assert!(CopierReport::decode(&frame).is_err());
    }

    #[test]
    fn a_piece_is_a_word() {
        let piece = Piece { bytes: 6 << 20, rdma: true };
        assert_eq!(piece.word().and_then(Piece::from_word), Some(piece));
        for bytes in [0, 1, UNIT_BYTES + 1, UNIT_BYTES << 31] {
            assert_eq!(Piece { bytes, rdma: false }.word(), None);
        }
        assert_eq!(Piece::from_word(1 << 31), None);
    }
}
