//! Where the node's orders touch its vaults.

use affinode_proto::wire::message::{Action, ControllerMessage};

use super::actor::Actor;
use crate::{
    core::{Key, ProcessId},
    inventory::Question,
    vault::VaultMail,
};

impl Actor {
    /// An order is about to be sent to a process.
    pub(super) fn before_order(&mut self, id: ProcessId, message: &ControllerMessage) {
        if matches!(message, ControllerMessage::Order { action: Action::Park { .. }, .. }) {
            self.show_vault(id);
        }
    }

    /// It was sent.
    pub(super) fn after_order(&mut self, id: ProcessId, message: &ControllerMessage) {
        if matches!(message, ControllerMessage::Order { action: Action::Restore, .. }) {
            self.vaults.fill(id);
        }
    }

    /// Reads devices for a proof of room, once nothing of a vault's is about to take some.
    pub(super) fn prove(&mut self, key: Key, number: u64) {
        self.vaults.hold(true);
        self.proofs.push((key, number));
        self.ask_for_proofs();
    }

    fn ask_for_proofs(&mut self) {
        if !self.vaults.is_moving() {
            for (key, number) in self.proofs.drain(..) {
                self.inventory.ask(Question::Prove(key, number));
            }
        }
    }

    /// A process that is copied and checkpointed after that gets a way to its GPU's vault.
    fn show_vault(&mut self, id: ProcessId) {
        let Some(agent) = self.agents.get_mut(&id).filter(|agent| agent.uses_vault()) else {
            return;
        };
        // What a new one takes would be missing where somebody's room is being proven.
        let calm = self.node.is_calm();
        if let Some((uuid, most_bytes)) = self.node.leaves_for_a_vault(id)
            && (calm || self.vaults.has_ready(&uuid))
            && let Some(socket) = self.vaults.attach(id, &uuid, most_bytes)
        {
            agent.send_vault(socket);
        }
    }

    pub(super) fn vault_said(&mut self, mail: VaultMail) {
        self.vaults.heard(mail);
        self.ask_for_proofs();
    }

    /// Vaults give their room to who waits for some, and end when nobody is away.
    pub(super) fn keep_vaults(&mut self) {
        self.vaults.make_room(self.node.pressed());
        self.vaults.tick();
        self.ask_for_proofs();
        if self.proofs.is_empty() && !self.node.has_grants() {
            self.vaults.hold(false);
        }
    }
}
