//! Legacy IPC (`cuIpcGetMemHandle` and its kin) for carried memory, which the driver does not share
//! so. The handle is one of ours, and the memory passes as a shareable descriptor of the driver's.
//!
//! ```text
//! exporter                                          importer
//!   cuIpcGetMemHandle: names itself, the     64 bytes
//!   allocation, a word ────────────────────────────────> cuIpcOpenMemHandle
//!   agent: the word is right, the memory     <── Ask ──  sends it to the named socket
//!   is there: exports it  ── Answer + descriptor ──────> imports, reserves, maps: an address
//! ```
//!
//! Who exports has a hazard from then on and stays on the device, so its agent can always answer.
//! The importer may be moved by any engine, by the driver too: what it has opened is no memory of
//! its own, and keeps it on the device as well.

mod export;
mod import;

pub use self::export::{ExportIdentity, answer, ipc_get_mem_handle};
pub use self::import::{ByValue, OpenedOnes, ipc_close_mem_handle, opening};
pub(super) use self::import::{ipc_open_mem_handle, ipc_open_mem_handle_v2};

use super::allocations::{Allocation, MemoryPlace};

/// Whether legacy IPC works for memory of ours: the driver exports it.
pub(super) fn is_shareable(allocation: &Allocation) -> bool {
    let piece = &allocation.piece;
    let exportable = piece.property.handle_types & affinode_cuda_sys::POSIX_DESCRIPTOR != 0;
    // The driver does not export again what was imported.
    // And of a pool nothing is shared so.
    exportable && allocation.pool == 0 && !piece.imported && piece.place == MemoryPlace::Device
}
