//! Legacy IPC (`cuIpcGetMemHandle` and related functions) for memory that this library can copy to
//! host memory. The driver does not support legacy IPC for such memory. Therefore this library
//! makes the handle, and the exporter sends the memory as a shareable descriptor.
//!
//! ```text
//! exporter                                               importer
//!   cuIpcGetMemHandle: socket name, the      64 bytes
//!   allocation, a word ─────────────────────────────────> cuIpcOpenMemHandle
//!   agent: the word is right, the memory  <─ IpcRequest ─ sends it to the named socket
//!   exists: exports it ──── IpcReply + descriptor ──────> imports, reserves, maps: an address
//! ```
//!
//! The word in the handle is a random secret, so only a process that has the handle can request the
//! memory.
//!
//! When the first handle is created, the allocation is marked to stay on the device. Exporter and
//! importer then have a hazard, so the driver checkpoints neither. Their other memory can be copied
//! out. The agent of an exporter that is copied out still replies, because the exporter's driver is
//! neither locked nor checkpointed.

mod export;
mod import;

pub use self::export::{ExportIdentity, answer, ipc_get_mem_handle};
pub use self::import::{ByValue, OpenedOnes, ipc_close_mem_handle, opening};
pub(super) use self::import::{ipc_open_mem_handle, ipc_open_mem_handle_v2};

use super::allocations::{Allocation, MemoryPlace};

/// Whether this library can share an allocation by legacy IPC. The driver must be able to export
/// the allocation's memory.
pub(super) fn is_shareable(allocation: &Allocation) -> bool {
    let piece = &allocation.piece;
    let exportable = piece.property.handle_types & affinode_cuda_sys::POSIX_DESCRIPTOR != 0;
    // The driver does not export imported memory again, and supports no legacy IPC for pools.
    exportable && allocation.pool == 0 && !piece.imported && piece.place == MemoryPlace::Device
}
