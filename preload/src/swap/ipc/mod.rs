//! Legacy IPC (`cuIpcGetMemHandle` and related functions) for swappable memory, which the driver does
//! not support. The handle is made by this library, and the memory passes as a shareable descriptor.
//!
//! ```text
//! exporter                                               importer
//!   cuIpcGetMemHandle: socket name, the      64 bytes
//!   allocation, a word ─────────────────────────────────> cuIpcOpenMemHandle
//!   agent: the word is right, the memory  <─ IpcRequest ─ sends it to the named socket
//!   exists: exports it ──── IpcReply + descriptor ──────> imports, reserves, maps: an address
//! ```
//!
//! The first handle marks the allocation to stay on the device. Exporter and importer then have a
//! hazard, so the driver checkpoints neither. Their other memory can be copied out. The agent of an
//! exporter that is copied out still replies, because the exporter's driver is neither locked nor
//! checkpointed.

mod export;
mod import;

pub use self::export::{ExportIdentity, answer, ipc_get_mem_handle};
pub use self::import::{ByValue, OpenedOnes, ipc_close_mem_handle, opening};
pub(super) use self::import::{ipc_open_mem_handle, ipc_open_mem_handle_v2};

use super::allocations::{Allocation, MemoryPlace};

/// Whether this library supports legacy IPC for an allocation, which the driver must be able to
/// export.
pub(super) fn is_shareable(allocation: &Allocation) -> bool {
    let piece = &allocation.piece;
    let exportable = piece.property.handle_types & affinode_cuda_sys::POSIX_DESCRIPTOR != 0;
    // The driver does not export imported memory again, and supports no legacy IPC for pools.
    exportable && allocation.pool == 0 && !piece.imported && piece.place == MemoryPlace::Device
}
