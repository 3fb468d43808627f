//! Feeds inputs to the core, and executes the effects that the core returns, in their order.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use affinode_core::{Effect, Input, Key, ProcessId};
use affinode_proto::{
    paths,
    wire::{
        copier::CopierOrder,
        message::{Action, ControllerMessage},
        vram_view::VramView,
    },
};

use super::{actor::NodeActor, copiers};
use crate::{
    agents::AgentHandle,
    conversion,
    inventory::{InventoryQuery, process},
};

/// Feeds an input to the core, and executes the effects that the core decides, in their order.
/// Effects can lead to further inputs, which are fed to the core in the same way.
pub(super) fn feed(actor: &mut NodeActor, input: Input) {
    actor.later.push_back(input);
    while let Some(input) = actor.later.pop_front() {
        for effect in actor.node.handle(actor.now(), input) {
            execute(actor, effect);
        }
    }
}

/// Executes one effect that the core decided, such as a message to an agent.
pub(super) fn execute(actor: &mut NodeActor, effect: Effect) {
    match effect {
        Effect::Send(id, message) => {
            let sent = actor.agents.get_mut(&id).is_some_and(|agent| agent.send(message));
            if sent && is_copy_out(&message) {
                actor.levels.begin();
            }
        }
        Effect::Drop(id) => {
            actor.agents.remove(&id);
        }
        Effect::Journal(key, record) => {
            let written = match &record {
                Some(record) => actor.journal.write(&key, record),
                None => actor.journal.remove(&key),
            };
            if let Err(error) = written {
                tracing::error!(%key, %error, "container {key}: cannot write its journal record. \
                                               After a restart, the controller must estimate \
                                               the offloaded sizes");
            }
        }
        Effect::Survey { key, processes } => {
            let known = actor.node.pids().chain(actor.copiers.pids()).collect();
            actor.inventory.ask(InventoryQuery::Survey { key, processes, known })
        }
        Effect::Prove(key, number) => actor.inventory.ask(InventoryQuery::Prove(key, number)),
        Effect::ReadVram { key, epoch, processes } => read_vram(actor, key, epoch, &processes),
        Effect::ShowVram { key, views } => show_vram(&actor.run_dir, &key, &views),
        Effect::Answer(command, answer) => {
            if let Some(waiter) = actor.commands.take(command) {
                let _ = waiter.send(conversion::response_of(answer));
            }
        }
        Effect::Changed(change) => actor.publish(conversion::event_of_change(change)),
        Effect::Publish(event) => actor.publish(conversion::event_of(*event)),
        Effect::StartCopier { copier, gpu } => copiers::start(actor, copier, &gpu),
        Effect::AttachCopier { copier, process, most_bytes, domain } => {
            copiers::attach(actor, copier, process, most_bytes, domain);
        }
        Effect::FillMemory { copier, process, most_bytes } => {
            copiers::order(actor, copier, CopierOrder::Fill { process: process.0, most_bytes });
        }
        Effect::HoldCopier { copier, on } => {
            copiers::order(actor, copier, CopierOrder::HoldVram { on });
        }
        Effect::EndCopier { copier, why } => copiers::end(actor, copier, why),
        Effect::TurnBack(id) => {
            let told = actor.agents.get(&id).map(AgentHandle::turn_back);
            if let Some(Err(error)) = told {
                tracing::warn!(process = id.0, %error, "process {}: cannot cancel the copy out", id.0);
            }
        }
        Effect::End { identity, by_force } => {
            if let Err(error) = process::end(&identity, by_force) {
                tracing::error!(pid = identity.pid, %error, "process {}: cannot be ended", identity.pid);
            }
        }
    }
}

/// Recalls the VRAM allowances of processes, reads their pending bytes, and then asks for a reading
/// of the GPUs.
fn read_vram(actor: &NodeActor, key: Key, epoch: u64, processes: &[ProcessId]) {
    let pending = processes.iter().map(|id| (*id, recall_vram(actor, *id, epoch))).collect();
    actor.inventory.ask(InventoryQuery::Vram { key, epoch, pending });
}

/// Recalls the VRAM allowances of a process and returns its pending bytes.
fn recall_vram(actor: &NodeActor, id: ProcessId, epoch: u64) -> u64 {
    let recalled = actor.agents.get(&id).map(|agent| agent.recall_vram(epoch));
    recalled.unwrap_or(Ok(0)).unwrap_or_else(|error| {
        tracing::warn!(
            process = id.0, %error,
            "process {}: cannot recall its VRAM allowance. Its container may exceed its limit", id.0
        );
        0
    })
}

/// Writes the file that shows a container its VRAM under a limit. Errors are ignored: the container
/// may just have been deleted, and the next sample writes again.
fn show_vram(run_dir: &Path, key: &Key, views: &[VramView]) {
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

fn is_copy_out(message: &ControllerMessage) -> bool {
    matches!(message, ControllerMessage::Order { action: Action::CopyOut { .. }, .. })
}
