//! Feeds inputs to the core (the module that decides about moves). Executes the effects (actions)
//! that the core returns, in their order.

use affinode_core::{
    Effect, Input, Key, ProcessId, Record, copy_watch::TurnBackCause, input::Identity,
};
use affinode_proto::{
    paths,
    wire::{
        copier::CopierOrder,
        message::{Action, ControllerMessage},
    },
};

use super::{actor::NodeActor, copiers, host_pool, vram};
use crate::{
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
            host_pool::leave(actor, id);
        }
        Effect::Journal(key, record) => write_journal(actor, &key, record.as_ref()),
        Effect::Survey { key, processes, host_pool: may_use } => {
            let known = actor.node.pids().chain(actor.copiers.pids()).collect();
            actor.inventory.ask(InventoryQuery::Survey {
                key,
                processes,
                host_pool: may_use && actor.host_pool.is_usable(),
                known,
            });
        }
        Effect::AllowHostPool { process, bytes, kept_bytes } => {
            host_pool::allow(actor, process, bytes, kept_bytes);
        }
        Effect::LeaveHostPool(process) => host_pool::leave(actor, process),
        Effect::StoreOnDisk { process, bytes } => host_pool::store_on_disk(actor, process, bytes),
        Effect::StopDisk(process) => host_pool::stop_disk(actor, process),
        Effect::Prove { key, number, with_processes } => {
            actor.inventory.ask(InventoryQuery::Prove { key, number, with_processes });
        }
        Effect::ReadVram { key, epoch, processes } => vram::read(actor, key, epoch, &processes),
        Effect::RecallVram { epoch, processes } => drop(vram::recall(actor, epoch, &processes)),
        Effect::LimitInDriver(order) => {
            actor.inventory.ask(InventoryQuery::LimitInDriver(order));
        }
        Effect::ShowVram { key, views } => vram::show(&actor.run_dir, &key, &views),
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
        Effect::TurnBack(id, cause) => turn_back(actor, id, cause),
        Effect::End { identity, by_force } => end(&identity, by_force),
    }
}

fn end(identity: &Identity, by_force: bool) {
    if let Err(error) = process::end(identity, by_force) {
        tracing::error!(pid = identity.pid, %error, "process {}: cannot be ended", identity.pid);
    }
}

fn turn_back(actor: &NodeActor, id: ProcessId, cause: TurnBackCause) {
    let told = actor.agents.get(&id).map(|agent| agent.turn_back(cause));
    if let Some(Err(error)) = told {
        tracing::warn!(process = id.0, %error, "process {}: cannot cancel the copy out", id.0);
    }
}

fn write_journal(actor: &NodeActor, key: &Key, record: Option<&Record>) {
    let written = match record {
        Some(record) => actor.journal.write(key, record),
        None => actor.journal.remove(key),
    };
    if let Err(error) = written {
        let folder = actor.run_dir.join(paths::JOURNAL_DIR);
        tracing::error!(%key, %error, "container {key}: cannot update its journal record in {}. If \
                                       this controller ends now, the next one estimates how much \
                                       memory is offloaded, and may promise VRAM twice. Free space \
                                       in the file system of this folder", folder.display());
    }
}

fn is_copy_out(message: &ControllerMessage) -> bool {
    matches!(message, ControllerMessage::Order { action: Action::CopyOut { .. }, .. })
}
