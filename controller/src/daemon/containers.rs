//! Handles containers that are announced and withdrawn: their sockets, and the inputs to the core.

use std::sync::Arc;

use affinode_proto::api::control::Announcement;

use super::actor::NodeActor;
use crate::{
    agents::AgentListener,
    core::{ContainerSpec, Input, Key},
    inventory::process,
};

impl NodeActor {
    /// A shim announced a container. Returns its invalid annotations.
    pub(super) fn announced(&mut self, announcement: Announcement) -> Result<Vec<String>, String> {
        let key = Key::parse(&announcement.key)
            .map_err(|k| format!("invalid key {k:?}: expected 32 hex digits"))?;
        self.announce(key, announcement.into())
    }

    /// A container was created, or a job granted. Returns its invalid annotations.
    pub(super) fn announce(
        &mut self,
        key: Key,
        spec: ContainerSpec,
    ) -> Result<Vec<String>, String> {
        if self.node.is_of_another(&key, spec.generation) {
            // The previous container with that id is gone, and its shim has not withdrawn it.
            self.withdraw(key.clone());
        }
        if !self.listeners.contains_key(&key) {
            let owner = spec.job_user;
            let (numbers, mail) = (Arc::clone(&self.numbers), self.mail.clone());
            let listener =
                AgentListener::open(&mut self.sockets, &self.run_dir, &key, owner, numbers, mail)
                    .map_err(|e| format!("container {}: cannot create its socket: {e}", spec.id))?;
            // The file exists before the container's programs start.
            if let Err(error) = listener.tell_pressure(self.node.pressed().iter()) {
                tracing::warn!(%key, %error, "container {key}: cannot write the pressure file");
            }
            self.listeners.insert(key.clone(), listener);
        }
        self.feed(Input::Announced(Box::new(spec), key.clone()));
        // This file, too, exists before the container's programs start.
        self.write_states();
        Ok(self.node.warnings(&key))
    }

    /// Handles the withdrawal of a deleted container of this generation; 0: any generation. A later
    /// container of the same id may have been announced already, and stays.
    pub(super) fn withdrawn(&mut self, key: &str, generation: u64) {
        if let Ok(key) = Key::parse(key)
            && !self.node.is_of_another(&key, generation)
        {
            self.withdraw(key);
        }
    }

    /// Withdraws containers that do not exist any longer and that their shim has not withdrawn.
    /// Does nothing before its interval has passed.
    pub(super) fn withdraw_the_gone(&mut self) {
        if let Some(gone) = self.sweep.gone(self.node.deserted(process::lives)) {
            for key in gone {
                self.withdraw(key.clone());
                self.sweep.remove_folder(&key);
            }
            self.sockets.tidy();
        }
    }

    fn withdraw(&mut self, key: Key) {
        if self.node.overrides().pinned.contains(&key)
            && let Err(error) = self.override_with(self.node.overrides().with_pin(&key, false))
        {
            tracing::warn!(%key, "container {key}: {error}");
        }
        self.job_users.remove(&key);
        self.listeners.remove(&key);
        self.sockets.forget(&AgentListener::socket(&key));
        self.feed(Input::Withdrawn(key));
    }
}
