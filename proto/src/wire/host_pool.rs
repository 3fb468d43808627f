//! Messages on the sockets of the host pool, in the same frames as [`message`](super::message), one
//! per packet (`SOCK_SEQPACKET`). The host pool is a process of the node that allocates host memory
//! for copy outs, so that the memory is charged to Affinode's cgroup and not to the container's.
//!
//! ```text
//! agent                                  host pool                      controller
//!                                          <──── Attach + the agent's socket
//!                  <── File + memory file
//!                                          <──── Allow, for one offload
//!   Populate, one for each chunk ────────>  allocates the pages
//!                  <──────────── Populated
//!   (copies VRAM to the file's pages)
//!                                          <──── Allow of 0: the offload has ended
//!   (copies back, frees the pages)
//! ```
//!
//! While the process is offloaded, its content can move on to a disk file:
//!
//! ```text
//!                                          <──── AllowDisk
//!   OpenDisk ────────────────────────────>  creates the file
//!                  <── DiskFile + the file, read-only
//!   Store, one for each piece ───────────>  encrypts the piece, writes it
//!                  <────────────── Stored
//!   (reads and compares, frees the pages)
//!   CloseDisk, after the restore ────────>  deletes the file
//! ```
//!
//! The process maps the file, so its content outlives both the host pool and the controller. The
//! file belongs to a file system of its own whose size is the allowed amount. Therefore neither the
//! process nor a fault in the host pool can use more.
//! The process also has the disk file's descriptor and key, so it can restore without the host pool.

use super::frame::{FRAME_BYTES, FrameError, Reader, Writer};

/// Maximum number of bytes of one [`ToHostPool::Populate`] request.
pub const MAX_POPULATE_BYTES: u64 = super::copier::CHUNK_BYTES;
/// Maximum number of requests of one process that may wait for their reply.
pub const MAX_PENDING: usize = 16;
/// Size of the pieces in which content is encrypted and written to a disk file, in bytes. The last
/// piece of a process may have less, but always a multiple of 2 MiB. The offset of a piece is the
/// same in the memory file and in the disk file.
pub const DISK_PIECE_BYTES: u64 = 4 << 20;
/// Key with which the pieces of a disk file are encrypted (AES-256-GCM). Only the process and, while
/// it writes a piece, the host pool know it.
pub type DiskKey = [u8; 32];
/// Authentication tag of an encrypted piece.
pub type DiskTag = [u8; 16];

/// Returns the nonce with which the piece at an offset is encrypted. It occurs once for each key:
/// the process chooses a new key for each offload, and its content does not change meanwhile.
#[must_use]
pub const fn disk_nonce(offset: u64) -> [u8; 12] {
    let [a, b, c, d, e, f, g, h] = offset.to_le_bytes();
    [a, b, c, d, e, f, g, h, 0, 0, 0, 0]
}

/// Messages from an agent to the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToHostPool {
    /// Requests that the pages of a range of the memory file are allocated.
    Populate {
        /// First byte of the range.
        offset: u64,
        /// Size of the range in bytes, at most [`MAX_POPULATE_BYTES`].
        bytes: u64,
        /// Processor on which the requesting thread runs. The host pool allocates the pages on the
        /// same processor. The kernel then places them in the memory of that processor's NUMA node,
        /// which is near to the GPU.
        processor: u32,
    },
    /// Requests the disk file of the process. The host pool creates it if there is none.
    OpenDisk,
    /// Requests that a piece of the memory file is encrypted and written to the disk file.
    Store {
        /// First byte of the piece, a multiple of [`DISK_PIECE_BYTES`].
        offset: u64,
        /// Size of the piece in bytes, a multiple of 4 KiB and at most [`DISK_PIECE_BYTES`].
        bytes: u64,
        /// Key of this offload.
        key: DiskKey,
    },
    /// Ends the use of the disk file. No reply.
    CloseDisk,
}

/// Messages from the host pool to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromHostPool {
    /// Delivers the memory file of the process. It is the first message on the socket.
    File,
    /// Reply to [`ToHostPool::Populate`]. Replies may arrive in another order than the requests.
    Populated {
        /// First byte of the range, as in the request.
        offset: u64,
        /// Whether all pages of the range exist now. If false, the allowed amount or the node's
        /// memory does not suffice.
        done: bool,
    },
    /// Reply to [`ToHostPool::OpenDisk`]. If `done` is true, the message has a descriptor of the
    /// file, which can only be read.
    DiskFile {
        /// Whether the file exists. False: the process may not use the disk, or the file cannot be
        /// created.
        done: bool,
    },
    /// Reply to [`ToHostPool::Store`]. Replies may arrive in another order than the requests.
    Stored {
        /// First byte of the piece, as in the request.
        offset: u64,
        /// Whether the piece is in the file. False: the disk is full, the maximum is reached, or the
        /// write failed.
        done: bool,
        /// Authentication tag of the encrypted piece.
        tag: DiskTag,
    },
}

/// Messages from the controller to the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPoolOrder {
    /// Attaches a process. The message has a socket that is connected to the process's agent.
    Attach {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Number of the process's container. It is the same for all processes of the container.
        container: u64,
    },
    /// Sets the maximum amount of memory in the file of a process. If the file has more pages
    /// already, they stay.
    Allow {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Allowed size of all pages of the file, in bytes. 0: no further page.
        bytes: u64,
        /// The part of `bytes` that the file contains already, as its process reports it. If the
        /// file contains less, the process may use less by the difference: that memory may be
        /// promised to others.
        kept_bytes: u64,
    },
    /// Sets the maximum size of the disk file of a process.
    AllowDisk {
        /// Number that the controller has assigned to the process.
        process: u64,
        /// Maximum size of all pieces in the file, in bytes. 0: no further piece.
        bytes: u64,
    },
    /// Ends the connection of a process. Its file stays as long as the process maps it.
    Detach {
        /// Number that the controller has assigned to the process.
        process: u64,
    },
}

impl ToHostPool {
    /// Encodes the agent's message as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            ToHostPool::Populate { offset, bytes, processor } => {
                Writer::new(241).u64(offset).u64(bytes).u32(processor)
            }
            ToHostPool::OpenDisk => Writer::new(242),
            ToHostPool::Store { offset, bytes, key } => {
                Writer::new(243).u64(offset).u64(bytes).bytes(&key)
            }
            ToHostPool::CloseDisk => Writer::new(244),
        }
        .frame
    }

    /// Decodes a frame that an agent sent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<ToHostPool, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            241 => {
                let (offset, bytes, processor) = (r.u64(), r.u64(), r.u32());
                let is_valid = (1..=MAX_POPULATE_BYTES).contains(&bytes)
                    && offset.checked_add(bytes).is_some();
                if !is_valid {
                    return Err(FrameError::Value("bytes", bytes as u32));
                }
                Ok(ToHostPool::Populate { offset, bytes, processor })
            }
            242 => Ok(ToHostPool::OpenDisk),
            243 => {
                let (offset, bytes, key) = (r.u64(), r.u64(), r.bytes());
                let is_valid = (1..=DISK_PIECE_BYTES).contains(&bytes)
                    && bytes.is_multiple_of(4096)
                    && offset.is_multiple_of(DISK_PIECE_BYTES);
                if !is_valid {
                    return Err(FrameError::Value("piece", bytes as u32));
                }
                Ok(ToHostPool::Store { offset, bytes, key })
            }
            244 => Ok(ToHostPool::CloseDisk),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl FromHostPool {
    /// Encodes the host pool's message as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            FromHostPool::File => Writer::new(251),
            FromHostPool::Populated { offset, done } => {
                Writer::new(252).u64(offset).u32(u32::from(done))
            }
            FromHostPool::DiskFile { done } => Writer::new(253).u32(u32::from(done)),
            FromHostPool::Stored { offset, done, tag } => {
                Writer::new(254).u64(offset).u32(u32::from(done)).bytes(&tag)
            }
        }
        .frame
    }

    /// Decodes a frame that the host pool sent to an agent.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<FromHostPool, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            251 => Ok(FromHostPool::File),
            252 => Ok(FromHostPool::Populated { offset: r.u64(), done: r.u32() != 0 }),
            253 => Ok(FromHostPool::DiskFile { done: r.u32() != 0 }),
            254 => Ok(FromHostPool::Stored { offset: r.u64(), done: r.u32() != 0, tag: r.bytes() }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

impl HostPoolOrder {
    /// Encodes the order as a frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        match *self {
            HostPoolOrder::Attach { process, container } => {
                Writer::new(261).u64(process).u64(container)
            }
            HostPoolOrder::Allow { process, bytes, kept_bytes } => {
                Writer::new(262).u64(process).u64(bytes).u64(kept_bytes)
            }
            HostPoolOrder::Detach { process } => Writer::new(263).u64(process),
            HostPoolOrder::AllowDisk { process, bytes } => Writer::new(264).u64(process).u64(bytes),
        }
        .frame
    }

    /// Decodes a frame that the controller sent to the host pool.
    ///
    /// # Errors
    /// [`FrameError`] names the invalid part of the frame.
    pub fn decode(frame: &[u8; FRAME_BYTES]) -> Result<HostPoolOrder, FrameError> {
        let (kind, mut r) = Reader::open(frame)?;
        match kind {
            261 => Ok(HostPoolOrder::Attach { process: r.u64(), container: r.u64() }),
            262 => {
                Ok(HostPoolOrder::Allow { process: r.u64(), bytes: r.u64(), kept_bytes: r.u64() })
            }
            263 => Ok(HostPoolOrder::Detach { process: r.u64() }),
            264 => Ok(HostPoolOrder::AllowDisk { process: r.u64(), bytes: r.u64() }),
            other => Err(FrameError::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_pool_frames_decode_as_encoded() {
        let populate = ToHostPool::Populate { offset: 1 << 40, bytes: 7, processor: 3 };
        let store = ToHostPool::Store { offset: 8 << 20, bytes: 4096, key: [7; 32] };
        for message in [populate, ToHostPool::OpenDisk, store, ToHostPool::CloseDisk] {
            assert_eq!(ToHostPool::decode(&message.encode()), Ok(message));
        }
        for message in [
            FromHostPool::File,
            FromHostPool::Populated { offset: 5, done: true },
            FromHostPool::DiskFile { done: true },
            FromHostPool::Stored { offset: 4 << 20, done: true, tag: [9; 16] },
        ] {
            assert_eq!(FromHostPool::decode(&message.encode()), Ok(message));
        }
        let orders = [
            HostPoolOrder::Attach { process: 1, container: 2 },
            HostPoolOrder::Allow { process: 1, bytes: 1 << 40, kept_bytes: 3 },
            HostPoolOrder::Detach { process: 2 },
            HostPoolOrder::AllowDisk { process: 3, bytes: 1 << 40 },
        ];
        for order in orders {
            assert_eq!(HostPoolOrder::decode(&order.encode()), Ok(order));
        }
    }

    #[test]
    fn invalid_host_pool_frames_are_refused() {
        for (offset, bytes) in [(0, 0), (0, MAX_POPULATE_BYTES + 1), (u64::MAX, 1)] {
            let frame = ToHostPool::Populate { offset, bytes, processor: 0 }.encode();
            assert!(ToHostPool::decode(&frame).is_err(), "{offset} {bytes}");
        }
        for (offset, bytes) in [(0, 0), (0, DISK_PIECE_BYTES + 4096), (0, 4097), (4096, 4096)] {
            let frame = ToHostPool::Store { offset, bytes, key: [0; 32] }.encode();
            assert!(ToHostPool::decode(&frame).is_err(), "{offset} {bytes}");
        }
        let frame = FromHostPool::File.encode();
        assert_eq!(ToHostPool::decode(&frame), Err(FrameError::Kind(251)));
        assert_eq!(HostPoolOrder::decode(&frame), Err(FrameError::Kind(251)));
        assert!(FromHostPool::decode(&[0; FRAME_BYTES]).is_err());
    }
}
