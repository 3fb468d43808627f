//! What passes on the sockets of a vault, in the same frames as [`message`](super::message), one a
//! packet (`SOCK_SEQPACKET`). A vault is a process of the node's that has a context on one GPU: it
//! fills the memory of processes that come home while the driver restores their contexts.
//!
//! ```text
//! agent                                     vault                          controller
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
//! Where it was prepared, the vault has registered the memory before, and copies out as well:
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
pub const MOST_PIECES: usize = 4096;
/// Pieces whose mean is smaller come home faster without a vault: to make one and to hand it over
/// takes about as long as to copy so much (measured on an H200: 0.1 to 0.15 ms).
pub const LEAST_MEAN_BYTES: u64 = 8 << 20;
/// Pieces are multiples of this.
pub const UNIT_BYTES: u64 = 2 << 20;
/// What a memory file is registered in, and what [`FromVault::Same`] counts in.
pub const CHUNK_BYTES: u64 = 128 << 20;
/// Pieces in one [`ToVault::Pieces`].
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
pub enum ToVault {
    /// The memory file that comes along is to be registered: nothing is in it yet.
    Prepared {
        /// Of it, that will be used.
        bytes: u64,
        /// Of the device, as `cuDeviceGetUuid` has it.
        uuid: [u8; 16],
    },
    /// The memory of the next piece, in the order of the list, comes along: it is to be copied to
    /// the piece's place in the file.
    Take,
    /// Its content is in the memory file that comes along, or that was prepared; or will be, of
    /// what is to be taken: so many pieces one behind the other.
    Parked {
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
    Pieces {
        /// How many of `words` count.
        many: u32,
        /// See [`Piece::word`].
        words: [u32; PIECES_A_FRAME],
    },
    /// The driver has taken the rest off the device: its memory may be registered now, which
    /// would have slowed the driver down.
    Away,
    /// The driver is about to restore the rest: the room for all of it is this process's now.
    Restoring,
    /// The driver has restored the rest.
    Restored,
    /// What became of [`FromVault::Same`].
    Mapped {
        /// Which chunk.
        chunk: u32,
        /// The sealed file is in its place, and nothing in the memory file any more.
        taken: bool,
    },
}

/// To an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromVault {
    /// The memory is being made and filled.
    Begin,
    /// The next piece, filled; its shareable handle comes along.
    Block {
        /// Which, from 0.
        index: u32,
    },
    /// All of them are filled.
    Filled,
    /// The file is registered: the vault can copy out.
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
pub enum VaultOrder {
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
    /// what [`VaultOrder::Fill`] orders.
    Hold {
        /// Or it is over.
        on: bool,
    },
}

/// To the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaultReport {
    /// The context is there.
    Ready,
    /// A process's memory is registered: it can be filled at the speed of the bus.
    Held {
        /// Which.
        process: u64,
        /// How much.
        bytes: u64,
    },
    /// A process that is home has its host memory registered.
    Prepared {
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
    Left {
        /// Which.
        process: u64,
    },
    /// The driver has let go of all that it had of those that left.
    LetGo,
    /// So much of a process's content is held in sealed files, together with others.
    Shared {
        /// Which.
        process: u64,
        /// Of it.
        bytes: u64,
        /// Of all such files of this vault.
        stored_bytes: u64,
    },
}

impl ToVault {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            ToVault::Parked { bytes, rest_bytes, pieces, uuid } => {
                Writer::new(201).u64(bytes).u64(rest_bytes).u32(pieces).bytes(&uuid)
            }
            ToVault::Pieces { many, words } => {
                words.iter().fold(Writer::new(202).u32(many), |writer, word| writer.u32(*word))
            }
            ToVault::Away => Writer::new(203),
            ToVault::Restoring => Writer::new(204),
            ToVault::Restored => Writer::new(205),
            ToVault::Prepared { bytes, uuid } => Writer::new(206).u64(bytes).bytes(&uuid),
            ToVault::Take => Writer::new(207),
            ToVault::Mapped { chunk, taken } => Writer::new(208).u32(chunk).u32(u32::from(taken)),
        }
        .frame
    }

    /// Reads a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<ToVault, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            201 => Ok(ToVault::Parked {
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
                Ok(ToVault::Pieces { many, words: core::array::from_fn(|_| r.u32()) })
            }
            203 => Ok(ToVault::Away),
            204 => Ok(ToVault::Restoring),
            205 => Ok(ToVault::Restored),
            206 => Ok(ToVault::Prepared { bytes: r.u64(), uuid: r.bytes() }),
            207 => Ok(ToVault::Take),
            208 => Ok(ToVault::Mapped { chunk: r.u32(), taken: r.u32() != 0 }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl FromVault {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            FromVault::Begin => Writer::new(211),
            FromVault::Block { index } => Writer::new(212).u32(index),
            FromVault::Filled => Writer::new(213),
            FromVault::Ready => Writer::new(214),
            FromVault::Copied => Writer::new(215),
            FromVault::Same { chunk } => Writer::new(216).u32(chunk),
        }
        .frame
    }

    /// Reads a frame that a vault sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<FromVault, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            211 => Ok(FromVault::Begin),
            212 => Ok(FromVault::Block { index: r.u32() }),
            213 => Ok(FromVault::Filled),
            214 => Ok(FromVault::Ready),
            215 => Ok(FromVault::Copied),
            216 => Ok(FromVault::Same { chunk: r.u32() }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl VaultOrder {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            VaultOrder::Attach { process, most_bytes, domain } => {
                Writer::new(221).u64(process).u64(most_bytes).u64(domain)
            }
            VaultOrder::Fill { process, most_bytes } => {
                Writer::new(222).u64(process).u64(most_bytes)
            }
            VaultOrder::Hold { on } => Writer::new(223).u32(u32::from(on)),
        }
        .frame
    }

    /// Reads a frame that the controller sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<VaultOrder, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            221 => {
                let (process, most_bytes, domain) = (r.u64(), r.u64(), r.u64());
                Ok(VaultOrder::Attach { process, most_bytes, domain })
            }
            222 => Ok(VaultOrder::Fill { process: r.u64(), most_bytes: r.u64() }),
            223 => Ok(VaultOrder::Hold { on: r.u32() != 0 }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl VaultReport {
    /// The frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            VaultReport::Ready => Writer::new(231),
            VaultReport::Held { process, bytes } => Writer::new(232).u64(process).u64(bytes),
            VaultReport::Filled { process, bytes, elapsed_us } => {
                Writer::new(233).u64(process).u64(bytes).u64(elapsed_us)
            }
            VaultReport::Left { process } => Writer::new(234).u64(process),
            VaultReport::LetGo => Writer::new(235),
            VaultReport::Prepared { process, bytes } => Writer::new(236).u64(process).u64(bytes),
            VaultReport::Copied { process, bytes, elapsed_us } => {
                Writer::new(237).u64(process).u64(bytes).u64(elapsed_us)
            }
            VaultReport::Shared { process, bytes, stored_bytes } => {
                Writer::new(238).u64(process).u64(bytes).u64(stored_bytes)
            }
        }
        .frame
    }

    /// Reads a frame that a vault sent.
    ///
    /// # Errors
    /// [`FrameError`] names what is wrong with it.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<VaultReport, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            231 => Ok(VaultReport::Ready),
            232 => Ok(VaultReport::Held { process: r.u64(), bytes: r.u64() }),
            233 => {
                Ok(VaultReport::Filled { process: r.u64(), bytes: r.u64(), elapsed_us: r.u64() })
            }
            234 => Ok(VaultReport::Left { process: r.u64() }),
            235 => Ok(VaultReport::LetGo),
            236 => Ok(VaultReport::Prepared { process: r.u64(), bytes: r.u64() }),
            237 => {
                Ok(VaultReport::Copied { process: r.u64(), bytes: r.u64(), elapsed_us: r.u64() })
            }
            238 => {
                let (process, bytes, stored_bytes) = (r.u64(), r.u64(), r.u64());
                Ok(VaultReport::Shared { process, bytes, stored_bytes })
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
        let parked = ToVault::Parked { bytes: 7, rest_bytes: 8, pieces: 9, uuid: [3; 16] };
        let pieces = ToVault::Pieces { many: 28, words: core::array::from_fn(|n| n as u32 + 1) };
        let prepared = ToVault::Prepared { bytes: 7, uuid: [3; 16] };
        for message in [
            parked,
            pieces,
            prepared,
            ToVault::Take,
            ToVault::Away,
            ToVault::Restoring,
            ToVault::Restored,
            ToVault::Mapped { chunk: 6, taken: true },
        ] {
            assert_eq!(ToVault::decode(&message.encode()), Ok(message));
        }
        for message in [
            FromVault::Begin,
            FromVault::Block { index: 5 },
            FromVault::Filled,
            FromVault::Ready,
            FromVault::Copied,
            FromVault::Same { chunk: 4 },
        ] {
            assert_eq!(FromVault::decode(&message.encode()), Ok(message));
        }
        for order in [
            VaultOrder::Attach { process: 1, most_bytes: 2, domain: 3 },
            VaultOrder::Fill { process: 3, most_bytes: 4 },
            VaultOrder::Hold { on: true },
        ] {
            assert_eq!(VaultOrder::decode(&order.encode()), Ok(order));
        }
        for report in [
            VaultReport::Ready,
            VaultReport::Held { process: 1, bytes: 2 },
            VaultReport::Filled { process: 1, bytes: 2, elapsed_us: 3 },
            VaultReport::Left { process: 4 },
            VaultReport::LetGo,
            VaultReport::Prepared { process: 1, bytes: 2 },
            VaultReport::Copied { process: 1, bytes: 2, elapsed_us: 3 },
            VaultReport::Shared { process: 1, bytes: 2, stored_bytes: 3 },
        ] {
            assert_eq!(VaultReport::decode(&report.encode()), Ok(report));
        }
    }

    #[test]
    fn what_is_no_message_is_named() {
        let mut frame = ToVault::Pieces { many: 1, words: [1; PIECES_A_FRAME] }.encode();
        frame[8] = 29;
        assert_eq!(ToVault::decode(&frame), Err(FrameError::Value("many", 29)));
        assert_eq!(FromVault::decode(&frame), Err(FrameError::Kind(202)));
        assert!(VaultOrder::decode(&[0; FRAME_BYTES]).is_err());
        assert!(VaultReport::decode(&frame).is_err());
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
