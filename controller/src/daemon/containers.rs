//! Containers that are announced and withdrawn: their sockets, and what the core is told.

use std::sync::Arc;

use affinode_proto::api::control::Announcement;

use super::actor::NodeActor;
use crate::{
    agents::AgentListener,
    core::{Input, Key},
    inventory::process,
};

impl NodeActor {
    /// A container exists. Returns what was not understood of its annotations.
    pub(super) fn announce(&mut self, announcement: Announcement) -> Result<Vec<String>, String> {
        let key = Key::parse(&announcement.key)
            .map_err(|k| format!("{k:?} is no key: 32 hex digits are expected"))?;
        if self.node.is_of_another(&key, announcement.generation) {
            // The one of that id before is gone, and its shim has not come to say so.
            self.withdraw(key.clone());
        }
        if !self.listeners.contains_key(&key) {
            let owner = self.job_users.get(&key).copied();
            let (numbers, mail) = (Arc::clone(&self.numbers), self.mail.clone());
            let listener =
                AgentListener::open(&mut self.sockets, &self.run_dir, &key, owner, numbers, mail)
                    .map_err(|e| {
                    format!("cannot make the socket of container {}: {e}", announcement.id)
                })?;
            // Its programs find the notice from their first moment on.
            if let Err(error) = listener.tell_pressure(self.node.pressed().iter()) {
                tracing::warn!(%key, %error, "the container cannot be told of pressure");
            }
            self.listeners.insert(key.clone(), listener);
        }
        self.feed(Input::Announced(Box::new(announcement), key.clone()));
        Ok(self.node.warnings(&key))
    }

    /// The container of this generation is gone; 0: whichever there is. The next one of that id may
    /// be here already, and stays.
    pub(super) fn withdrawn(&mut self, key: &str, generation: u64) {
        if let Ok(key) = Key::parse(key)
            && !self.node.is_of_another(&key, generation)
        {
            self.withdraw(key);
        }
    }

    /// Those that nobody has withdrawn, now and then.
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
        if self.node.pin(&key, false)
            && let Err(error) = self.keep_wishes()
        {
            tracing::warn!(%key, "{error}");
        }
        self.job_users.remove(&key);
        self.listeners.remove(&key);
        self.sockets.forget(&AgentListener::socket(&key));
        self.feed(Input::Withdrawn(key));
    }
}
