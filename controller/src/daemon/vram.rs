//! Executes the effects that belong to the VRAM limits of containers.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use affinode_core::{Key, ProcessId};
use affinode_proto::{paths, wire::vram_view::VramView};

use super::actor::NodeActor;
use crate::inventory::InventoryQuery;

/// Recalls the VRAM allowances of processes, reads their pending bytes, and then asks for a reading
/// of the GPUs.
pub(super) fn read(actor: &NodeActor, key: Key, epoch: u64, processes: &[ProcessId]) {
    let pending = recall(actor, epoch, processes);
    actor.inventory.ask(InventoryQuery::Vram { key, epoch, pending });
}

/// Recalls the VRAM allowances of processes. Returns the pending bytes of each.
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
                "process {}: cannot recall its VRAM allowance. Its container may exceed its limit",
                id.0
            );
            0
        });
        (*id, pending_bytes)
    };
    processes.iter().map(pending).collect()
}

/// Writes the file that shows a container its VRAM under a limit. After an error, programs without
/// CUDA in the container see an older state or the whole GPU.
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
        tracing::debug!(%key, %error, "container {key}: cannot show its VRAM");
    }
}
