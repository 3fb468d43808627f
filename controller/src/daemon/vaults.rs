//! Where the node's orders touch its vaults.

use std::collections::HashMap;

use affinode_proto::wire::message::{Action, ControllerMessage};

use super::actor::Actor;
use crate::{
    agents::Agent,
    core::{Domain, Key, Node, ProcessId},
    inventory::Question,
    vault::{VaultMail, Vaults},
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
            self.vaults.fill(id, self.node.away_bytes_of(id));
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
        let domain = domain_of(agent, &self.node, &self.job_users, id);
        if let Some((uuid, most_bytes)) = self.node.leaves_for_a_vault(id)
            && !self.vaults.was_shown(id, &uuid)
            && may_have_one(&self.node, &self.vaults, &uuid)
            && let Some(socket) = self.vaults.attach(id, &uuid, most_bytes, domain)
        {
            agent.send_vault(socket);
        }
    }

    /// A process is to make host memory ready, which its GPU's vault gets hold of; or no longer.
    /// Where no vault is to be had nothing is made ready: it would be of no use.
    pub(super) fn prepare(&mut self, id: ProcessId, on: bool) {
        let Some(agent) = self.agents.get_mut(&id).filter(|agent| agent.prepares()) else {
            return;
        };
        let domain = domain_of(agent, &self.node, &self.job_users, id);
        if !on {
            self.vaults.unprepare(id);
            agent.send(ControllerMessage::Prepare { on });
        } else if agent.uses_vault()
            && let Some((uuid, most_bytes)) = self.node.may_prepare(id)
            && may_have_one(&self.node, &self.vaults, &uuid)
            && let Some(socket) = self.vaults.prepare(id, &uuid, most_bytes, domain)
        {
            agent.send_vault(socket);
            agent.send(ControllerMessage::Prepare { on });
        }
    }

    pub(super) fn vault_said(&mut self, mail: VaultMail) {
        self.vaults.heard(mail);
        self.ask_for_proofs();
    }

    /// Vaults give their room to who waits for some, and end when nobody is away.
    pub(super) fn keep_vaults(&mut self) {
        self.vaults.make_room(self.node.pressed(), |process| self.node.is_leaving(process));
        self.vaults.tick();
        self.ask_for_proofs();
        if self.proofs.is_empty() && !self.node.has_grants() {
            self.vaults.hold(false);
        }
    }
}

/// Whom a process may hold memory together with, if its library can.
fn domain_of(
    agent: &Agent,
    node: &Node,
    job_users: &HashMap<Key, u32>,
    id: ProcessId,
) -> Option<Domain> {
    let user = |key: &Key| job_users.get(key).copied();
    agent.dedups().then(|| node.domain_of(id, user)).flatten()
}

/// Whether a GPU may have a vault now: what a new one takes would be missing where somebody's room
/// is being proven.
fn may_have_one(node: &Node, vaults: &Vaults, uuid: &str) -> bool {
    node.is_calm() || vaults.has_ready(uuid)
}
