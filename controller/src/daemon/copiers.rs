//! Orders and effects that involve the copiers of the node.

use affinode_proto::wire::message::{Action, ControllerMessage};

use super::actor::NodeActor;
use crate::{
    copier::{CopierMessage, Copiers},
    core::{Domain, Input, Key, Node, ProcessId},
    inventory::InventoryQuery,
};

impl NodeActor {
    /// Called before an order is sent to a process.
    pub(super) fn before_order(&mut self, id: ProcessId, message: &ControllerMessage) {
        if matches!(message, ControllerMessage::Order { action: Action::CopyOut { .. }, .. }) {
            self.show_copier(id);
        }
    }

    /// Called after an order was sent.
    pub(super) fn after_order(&mut self, id: ProcessId, message: &ControllerMessage) {
        if matches!(message, ControllerMessage::Order { action: Action::Restore, .. }) {
            self.copiers.fill(id, self.node.offloaded_bytes_of(id));
        }
        if matches!(message, ControllerMessage::Order { action: Action::CopyOut { .. }, .. }) {
            self.levels_due.get_or_insert_with(tokio::time::Instant::now);
        }
    }

    /// Reads the GPUs for a proof of free VRAM, as soon as no copier is about to take VRAM.
    pub(super) fn prove(&mut self, key: Key, number: u64) {
        self.copiers.hold(true);
        self.proofs.push((key, number));
        self.ask_for_proofs();
    }

    fn ask_for_proofs(&mut self) {
        if !self.copiers.is_moving() {
            for (key, number) in self.proofs.drain(..) {
                self.inventory.ask(InventoryQuery::Prove(key, number));
            }
        }
    }

    /// Attaches a process that is copied out and then checkpointed to the copier of its GPU.
    fn show_copier(&mut self, id: ProcessId) {
        let domain = self.domain_of(id);
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if let Some((uuid, most_bytes)) = self.node.offloads_through_copier(id)
            && !self.copiers.was_shown(id, &uuid)
            && may_have_one(&self.node, &self.copiers, &uuid)
            && let Some(socket) = self.copiers.attach(id, &uuid, most_bytes, domain)
        {
            agent.send_copier(socket);
        }
    }

    /// Tells a process to prepare host memory, which the copier of its GPU registers, or to stop
    /// doing so. Without a copier nothing is prepared, and the core is told: it would have no use.
    pub(super) fn prepare(&mut self, id: ProcessId, on: bool) {
        if on {
            if !self.begin_prefault(id) {
                self.later.push_back(Input::PrefaultRefused(id));
            }
            return;
        }
        self.copiers.unprepare(id);
        if let Some(agent) = self.agents.get_mut(&id) {
            agent.send(ControllerMessage::Prefault { on });
        }
    }

    fn begin_prefault(&mut self, id: ProcessId) -> bool {
        let domain = self.domain_of(id);
        let Some(agent) = self.agents.get_mut(&id) else { return false };
        if let Some((uuid, most_bytes)) = self.node.may_prefault(id)
            && may_have_one(&self.node, &self.copiers, &uuid)
            && let Some(socket) = self.copiers.prepare(id, &uuid, most_bytes, domain)
        {
            agent.send_copier(socket) && agent.send(ControllerMessage::Prefault { on: true })
        } else {
            false
        }
    }

    fn domain_of(&self, id: ProcessId) -> Option<Domain> {
        self.node.domain_of(id)
    }

    pub(super) fn copier_said(&mut self, mail: CopierMessage) {
        self.copiers.received(mail);
        self.ask_for_proofs();
    }

    /// Ends copiers whose VRAM a container waits for, and those without offloaded processes.
    pub(super) fn keep_copiers(&mut self) {
        self.copiers.make_room(self.node.pressed(), |process| self.node.is_leaving(process));
        self.copiers.tick();
        self.ask_for_proofs();
        if self.proofs.is_empty() && !self.node.has_grants() {
            self.copiers.hold(false);
        }
    }
}

/// Whether a copier may be used on a GPU now: the VRAM of a new one would be missing for a waiter
/// while free VRAM is being proven.
fn may_have_one(node: &Node, copiers: &Copiers, uuid: &str) -> bool {
    node.is_settled() || copiers.has_ready(uuid)
}
