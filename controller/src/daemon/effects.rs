//! Executes the effects of the core's decisions, in the order of the decisions.

use affinode_core::Effect;
use affinode_proto::{
    api::control::Event,
    state::State,
    wire::{
        copier::CopierOrder,
        message::{Action, ControllerMessage},
    },
};

use super::actor::NodeActor;
use crate::{
    agents::AgentHandle,
    clock::unix_ms,
    conversion,
    inventory::{InventoryQuery, process},
};

impl NodeActor {
    pub(super) fn execute_order(&mut self, effect: Effect) {
        match effect {
            Effect::Send(id, message) => {
                let sent = self.agents.get_mut(&id).is_some_and(|agent| agent.send(message));
                if sent && is_copy_out(&message) {
                    self.levels_due.get_or_insert_with(tokio::time::Instant::now);
                }
            }
            Effect::Drop(id) => {
                self.agents.remove(&id);
            }
            Effect::Journal(key, record) => {
                let written = match &record {
                    Some(record) => self.journal.write(&key, record),
                    None => self.journal.remove(&key),
                };
                if let Err(error) = written {
                    tracing::error!(%key, %error, "container {key}: cannot write its journal record. \
                                                   After a restart, the controller must estimate \
                                                   the offloaded sizes");
                }
            }
            Effect::Survey { key, processes } => {
                let known = self.node.pids().chain(self.copiers.pids()).collect();
                self.inventory.ask(InventoryQuery::Survey { key, processes, known })
            }
            Effect::Prove(key, number) => self.inventory.ask(InventoryQuery::Prove(key, number)),
            Effect::Answer(command, answer) => {
                if let Some(waiter) = self.commands.remove(&command) {
                    let _ = waiter.send(conversion::response_of(answer));
                }
            }
            Effect::Changed(change) => self.publish(conversion::event_of_change(change)),
            Effect::Publish(event) => self.publish(conversion::event_of(*event)),
            Effect::StartCopier { copier, gpu } => self.start_copier(copier, &gpu),
            Effect::AttachCopier { copier, process, most_bytes, domain } => {
                self.attach_copier(copier, process, most_bytes, domain);
            }
            Effect::FillMemory { copier, process, most_bytes } => {
                self.order_copier(copier, CopierOrder::Fill { process: process.0, most_bytes });
            }
            Effect::HoldCopier { copier, on } => {
                self.order_copier(copier, CopierOrder::HoldVram { on });
            }
            Effect::EndCopier { copier, why } => self.end_copier(copier, why),
            Effect::TurnBack(id) => {
                let told = self.agents.get(&id).map(AgentHandle::turn_back);
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

    pub(super) fn publish(&mut self, event: Event) {
        if event.to == State::Offloaded.as_str() || event.to == State::Active.as_str() {
            // The move has changed the use of VRAM. The dashboard shows this after a new reading of
            // the GPUs.
            self.ask_gpus();
        }
        tracing::info!(
            container = event.container,
            kind = event.kind,
            from = event.from,
            to = event.to,
            reason = event.reason,
            bytes = event.bytes,
            elapsed_ms = event.elapsed_ms,
            "{}",
            event.text
        );
        self.events.add(event, unix_ms());
    }
}

fn is_copy_out(message: &ControllerMessage) -> bool {
    matches!(message, ControllerMessage::Order { action: Action::CopyOut { .. }, .. })
}
