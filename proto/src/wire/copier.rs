//! Messages on the sockets of a copier, in the same frames as [`message`](super::message), one per
//! packet (`SOCK_SEQPACKET`). A copier is a process of the node with a context on one GPU. While
//! the driver restores the context of an offloaded process, the copier fills the process's memory:
//! it allocates the memory in VRAM and copies the content into it.
//!
//! ```text
//! agent                                     copier                          controller
//!   CopiedOut + memory file, Chunks ... ───>  <─────── Attach + the agent's socket
//!   Checkpointed ───────────────────────────> registers ──── Registered ────>
//!                                            <───────────── Fill ───────────  with the order to restore
//!   Restoring ──────────────────────────────>
//!                        <────────── Begin    has received both: allocates, copies
//!   Restored ───────────────────────────────>  may use the VRAM that was left for the driver
//!                        <── Block + descriptor, one for each filled piece
//!                        <────────── Filled ──── Filled ──────────────────>
//!   closes the socket ──────────────────────>  releases everything ──── Detached ──>
//! ```
//!
//! For a prefaulted process, the copier registers the memory file before the offload, and also
//! copies the memory out:
//!
//! ```text
//!   Prefaulted + memory file ───────────────>  registers ──── Prefaulted ────>
//!                        <────────── Ready
//!   CopiedOut, Chunks ... ──────────────────>
//!   CopyOut + descriptor, one for each piece ─>  imports, copies each
//!   (unmaps, is checkpointed)
//!                        <────────── Copied ─── Copied ──────────────────>
//!   Checkpointed ───────────────────────────>  then as above
//! ```
//!
//! Two processes of the same dedup domain may have the same content. The copier then offers each of
//! them a sealed file with this content, so that the content is stored once while both are
//! offloaded:
//!
//! ```text
//!                        <────────── Same + a sealed file, for a chunk of the memory file
//!   compares, maps it there instead, frees the chunk
//!   Mapped ─────────────────────────────────>  fills from the sealed file ── Shared ─>
//! ```
//!
//! Agent and copier may each close the socket at any time, which ends the exchange. No content is
//! lost, because the content is still in the process's own memory, or in GPU memory of which the
//! process has a descriptor.

use super::frame::{FRAME_BYTES, FrameError, Reader, Writer};

/// Maximum number of pieces into which the copied memory of one process is divided. With more
/// pieces, the fixed costs of all pieces together would be higher than the cost of the copies.
pub const MAX_PIECES: usize = 4096;
/// Minimum mean size of a process's pieces of GPU memory, in bytes. With smaller pieces, a restore
/// without a copier is faster. The copier must allocate and export each piece, which takes as long
/// as copying this many bytes (H200: 0.1 to 0.15 ms).
pub const MIN_MEAN_BYTES: u64 = 8 << 20;
/// Unit of piece sizes in bytes. The size of each piece is a multiple of it.
pub const UNIT_BYTES: u64 = 2 << 20;
/// Size in bytes of a chunk, the part of a memory file that the copier registers at once.
/// [`FromCopier::Same`] identifies a chunk by its number.
pub const CHUNK_BYTES: u64 = 128 << 20;
/// Maximum number of pieces that one [`ToCopier::Chunks`] message announces.
pub const PIECES_A_FRAME: usize = 28;

/// One piece of a process's GPU memory, which the copier allocates at the restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Size of the piece in bytes, a multiple of [`UNIT_BYTES`].
    pub bytes: u64,
    /// Whether other devices on the bus may access the piece (`gpuDirectRDMACapable`).
    pub rdma: bool,
}

impl Piece {
    const RDMA: u32 = 1 << 31;

    /// Encodes the piece as a 32-bit word of a frame. Returns `None` if the size is invalid.
    #[must_use]
    pub fn word(self) -> Option<u32> {
        let units = u32::try_from(self.bytes / UNIT_BYTES).ok()?;
        let fits = self.bytes.is_multiple_of(UNIT_BYTES) && units > 0 && units < Self::RDMA;
        fits.then_some(if self.rdma { units | Self::RDMA } else { units })
    }

    /// Decodes a piece from a 32-bit word of a frame. Returns `None` if the size is 0.
    #[must_use]
    pub fn from_word(word: u32) -> Option<Piece> {
        let units = u64::from(word & !Self::RDMA);
        (units > 0).then_some(Piece { bytes: units * UNIT_BYTES, rdma: word & Self::RDMA != 0 })
    }
}

/// Messages from an agent to a copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToCopier {
    /// Requests that the copier registers the memory file whose descriptor is in this message. The
    /// file has no content yet.
    Prefaulted {
        /// Number of bytes of the file that the process will use.
        bytes: u64,
        /// UUID of the GPU, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
    },
    /// Requests that the copier copies the next piece of the announced list
    /// ([`ToCopier::CopiedOut`]) to the piece's place in the memory file. The message has the
    /// descriptor of the piece.
    CopyOut,
    /// Announces the list of pieces. Their content is, or will be, in a memory file: the file of
    /// this message, or the file of an earlier Prefaulted. In the file the pieces are in the order
    /// of the list, without gaps.
    CopiedOut {
        /// Total size of all pieces, in bytes.
        bytes: u64,
        /// VRAM that the driver needs to restore the process's other memory, which is not in the
        /// pieces, in bytes.
        rest_bytes: u64,
        /// Number of pieces in the Chunks messages that follow.
        pieces: u32,
        /// UUID of the GPU that the pieces were on, from `cuDeviceGetUuid`.
        uuid: [u8; 16],
    },
    /// Announces the next pieces of the list that CopiedOut began.
    Chunks {
        /// Number of entries of `words` that are valid.
        many: u32,
        /// The announced pieces, encoded with [`Piece::word`].
        words: [u32; PIECES_A_FRAME],
    },
    /// Reports that the driver has checkpointed the process, without the copied-out pieces. Only
    /// from now on may the copier register the memory file, because an earlier registration slows
    /// the checkpoint.
    Checkpointed,
    /// Reports that the driver is about to restore the process, without the copied-out pieces. From
    /// now on VRAM for all memory of the process is granted.
    Restoring,
    /// Reports that the driver has restored the process, without the copied-out pieces.
    Restored,
    /// Reply to [`FromCopier::Same`], the offer of a sealed file with the content of a chunk.
    Mapped {
        /// Number of the chunk that the copier named in its offer.
        chunk: u32,
        /// True if the process has mapped the sealed file in place of the chunk, and has freed the
        /// chunk.
        taken: bool,
    },
}

/// Messages from a copier to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromCopier {
    /// Reports that the copier begins to allocate and fill the memory.
    Begin,
    /// Delivers the next filled piece. The message has the shareable handle of the piece.
    Block {
        /// Number of the piece in the announced list, from 0.
        index: u32,
    },
    /// Reports that the copier has filled all pieces.
    Filled,
    /// Reports that the memory file is registered, so that the copier can copy memory out.
    Ready,
    /// Reports that the copier has copied all pieces to the memory file.
    Copied,
    /// Offers a sealed file with the same content as a chunk of the memory file. The message has
    /// the descriptor of the sealed file.
    Same {
        /// Number of the chunk (of [`CHUNK_BYTES`] each), from 0.
        chunk: u32,
    },
}

/// Messages from the controller to a copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierOrder {
    /// Attaches a process to the copier. The message has a socket that is connected to the
    /// process's agent.
    Attach {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Maximum number of bytes that the process may copy out.
        most_bytes: u64,
        /// Dedup domain of the process. The copier may share content between processes with the
        /// same number. 0 means no sharing.
        domain: u64,
    },
    /// Orders the copier to copy the process's memory into VRAM as soon as the process sends
    /// Restoring. The VRAM is granted for the process and proven free.
    Fill {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Granted VRAM in bytes. If the copied-out memory of the process is larger, the copier
        /// does not fill any of it, and the process restores itself.
        most_bytes: u64,
    },
    /// Begins or ends a pause of the copier's allocations, while the controller proves VRAM free or
    /// a container allocates it. During the pause the copier allocates VRAM only for a
    /// [`CopierOrder::Fill`].
    HoldVram {
        /// True if the pause begins, false if it ends.
        on: bool,
    },
}

/// Messages from a copier to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierReport {
    /// Reports that the copier has created its CUDA context.
    Ready,
    /// Reports that the host memory of an offloaded process is registered. The copier can now copy
    /// it back into VRAM at the speed of the bus.
    Registered {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Size of the registered memory in bytes.
        bytes: u64,
    },
    /// Reports that the prefaulted host memory of a resident process is registered.
    Prefaulted {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Size of the registered memory in bytes.
        bytes: u64,
    },
    /// Reports that the copier has copied the memory of a process to the process's memory file.
    Copied {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Size of the copied memory in bytes.
        bytes: u64,
        /// Time from the arrival of the first piece to the end of the copies, in microseconds.
        elapsed_us: u64,
    },
    /// Reports that the copier has copied all memory of a process back into VRAM.
    Filled {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Size of the filled memory in bytes.
        bytes: u64,
        /// Time from the Fill order to the end of the copies, in microseconds.
        elapsed_us: u64,
    },
    /// Reports that the socket of a process was closed, by the agent or by the copier.
    Detached {
        /// Number that the controller has assigned to the process.
        process: u64,
    },
    /// Reports that the driver has released all memory of the detached processes.
    Released,
    /// Reports that a part of a process's content is stored in sealed files, shared with other
    /// processes.
    Shared {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Shared content of the process, in bytes.
        bytes: u64,
        /// Size of all sealed files of this copier, in bytes.
        stored_bytes: u64,
    },
}

impl ToCopier {
    /// Encodes the agent's message as a frame.
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

    /// Decodes a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
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
    /// Encodes the copier's message as a frame.
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

    /// Decodes a frame that a copier sent to an agent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
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
    /// Encodes the order as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            CopierOrder::Attach { process, most_bytes, domain } => {
                Writer::new(221).u64(process).u64(most_bytes).u64(domain)
            }
            CopierOrder::Fill { process, most_bytes } => {
                Writer::new(222).u64(process).u64(most_bytes)
            }
            CopierOrder::HoldVram { on } => Writer::new(223).u32(u32::from(on)),
        }
        .frame
    }

    /// Decodes a frame that the controller sent to a copier.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<CopierOrder, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            221 => {
                let (process, most_bytes, domain) = (r.u64(), r.u64(), r.u64());
                Ok(CopierOrder::Attach { process, most_bytes, domain })
            }
            222 => Ok(CopierOrder::Fill { process: r.u64(), most_bytes: r.u64() }),
            223 => Ok(CopierOrder::HoldVram { on: r.u32() != 0 }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl CopierReport {
    /// Encodes the report as a frame.
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

    /// Decodes a frame that a copier sent to the controller.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
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
    fn copier_frames_decode_as_encoded() {
        let copied_out = ToCopier::CopiedOut { bytes: 7, rest_bytes: 8, pieces: 9, uuid: [3; 16] };
        let pieces = ToCopier::Chunks { many: 28, words: core::array::from_fn(|n| n as u32 + 1) };
        let prepared = ToCopier::Prefaulted { bytes: 7, uuid: [3; 16] };
        for message in [
            copied_out,
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
            CopierOrder::HoldVram { on: true },
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
    fn invalid_copier_frame_is_named() {
        let mut frame = ToCopier::Chunks { many: 1, words: [1; PIECES_A_FRAME] }.encode();
        frame[8] = 29;
        assert_eq!(ToCopier::decode(&frame), Err(FrameError::Value("many", 29)));
        assert_eq!(FromCopier::decode(&frame), Err(FrameError::Kind(202)));
        assert!(CopierOrder::decode(&[0; FRAME_BYTES]).is_err());
        assert!(CopierReport::decode(&frame).is_err());
    }

    #[test]
    fn piece_fits_in_a_word() {
        let piece = Piece { bytes: 6 << 20, rdma: true };
        assert_eq!(piece.word().and_then(Piece::from_word), Some(piece));
        for bytes in [0, 1, UNIT_BYTES + 1, UNIT_BYTES << 31] {
            assert_eq!(Piece { bytes, rdma: false }.word(), None);
        }
        assert_eq!(Piece::from_word(1 << 31), None);
    }
}
