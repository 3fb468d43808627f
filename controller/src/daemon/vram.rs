//! Executes the effects (decisions of the core) that concern the VRAM limits of containers.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use affinode_core::{Key, ProcessId};
use affinode_proto::{paths, wire::vram_view::VramView};

use super::actor::NodeActor;
use crate::inventory::InventoryQuery;

/// Prepares a decision about VRAM under a container's limit. Recalls the VRAM allowances (bytes
/// that a process may allocate without a message) of the container's processes. Then requests a
/// reading of the GPUs, to which the pending bytes of the processes are attached. Pending bytes are
/// allocations that NVML may not count yet.
pub(super) fn read(actor: &NodeActor, key: Key, epoch: u64, processes: &[ProcessId]) {
    let pending = recall(actor, epoch, processes);
    actor.inventory.ask(InventoryQuery::Vram { key, epoch, pending });
}

/// Recalls the VRAM allowances (bytes that a process may allocate without a message). Returns the
/// pending bytes of each process: allocations that NVML may not count yet.
pub(super) fn recall(
    actor: &NodeActor,
    epoch: u64,
    processes: &[ProcessId],
) -> Vec<(ProcessId, u64)> {
    let pending = |id: &ProcessId| {
        let recalled = actor.agents.get(id).map_or(Ok(0), |agent| agent.recall_vram(epoch));
        let pending_bytes = recalled.unwrap_or_else(|error| {
            tracing::debug!(
                process = id.0, %error,
                "process {}: cannot recall its VRAM allowance. The container may exceed its VRAM \
                 limit",
                id.0
            );
            0
        });
        (*id, pending_bytes)
    };
    processes.iter().map(pending).collect()
}

/// Writes the file that shows a container's VRAM under its limit. Programs that use NVML but not
/// CUDA, such as `nvidia-smi`, get their figures from this file. If the file cannot be updated,
/// they see older figures, or those of the whole GPU.
pub(super) fn show(run_dir: &Path, key: &Key, views: &[VramView]) {
    let folder = run_dir.join(paths::CONTAINERS_DIR).join(key.as_str());
    let (file, fresh) =
        (folder.join(paths::MOUNT_DIR).join(paths::VRAM_FILE), folder.join(".vram"));
    // The new file is written in the folder that no container reaches, and is then moved.
    let written = match views.is_empty() {
        true => fs::remove_file(&file),
        false => fs::write(&fresh, views.iter().flat_map(VramView::encode).collect::<Vec<u8>>())
            .and_then(|()| fs::set_permissions(&fresh, Permissions::from_mode(0o644)))
            .and_then(|()| fs::rename(&fresh, &file)),
    };
    if let Err(error) = written {
        tracing::debug!(%key, %error, "container {key}: cannot update the file that shows the container its VRAM");
    }
}
