//! Where the node's orders touch its vaults.

use affinode_proto::wire::message::{Action, ControllerMessage};

use super::actor::Actor;
use crate::{core::ProcessId, vault::VaultMail};

impl Actor {
    /// An order is about to be sent to a process.
    pub(super) fn before_order(&mut self, id: ProcessId, message: &ControllerMessage) {
        match message {
            ControllerMessage::Order { action: Action::Park { .. }, .. } => self.show_vault(id),
            ControllerMessage::Order { action: Action::Restore, .. } => self.vaults.fill(id),
            _ => {}
        }
    }

    /// A process that is copied and checkpointed after that gets a way to its GPU's vault.
    fn show_vault(&mut self, id: ProcessId) {
        let Some(agent) = self.agents.get_mut(&id).filter(|agent| agent.uses_vault()) else {
            return;
        };
        if let Some((uuid, most_bytes)) = self.node.leaves_for_a_vault(id)
            && let Some(socket) = self.vaults.attach(id, &uuid, most_bytes)
        {
            agent.send_vault(socket);
        }
    }

    pub(super) fn vault_said(&mut self, mail: VaultMail) {
        self.vaults.heard(mail);
    }

    /// Vaults give their room to who waits for some, and end when nobody is away.
    pub(super) fn keep_vaults(&mut self) {
        self.vaults.make_room(self.node.pressed());
        self.vaults.tick();
    }
}
