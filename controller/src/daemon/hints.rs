//! Hints from people and from containers, and the notice of pressure to containers: see
//! [`crate::core::hints`] and [`crate::core::pressure`].

use affinode_proto::api::control::HintResponse;

use super::actor::NodeActor;
use crate::{
    clock::unix_ms,
    core::{Input, hints::Hint},
};

impl NodeActor {
    /// What the containers wrote into their pipes since the last look.
    pub(super) fn read_hints(&mut self) {
        let said = self.listeners.iter().filter_map(|(key, listener)| {
            let hint = Hint::last(&listener.heard())?;
            Some(Input::Hinted(key.clone(), hint, "the container".into()))
        });
        for input in said.collect::<Vec<_>>() {
            self.feed(input);
        }
    }

    /// Lets containers read on which GPUs somebody waits, when that has changed.
    pub(super) fn tell_pressure(&mut self) {
        let pressed = self.node.pressed();
        if self.told_pressure.as_ref() == Some(pressed) {
            return;
        }
        for (key, listener) in &self.listeners {
            if let Err(error) = listener.tell_pressure(pressed.iter()) {
                tracing::warn!(%key, %error, "the container cannot be told of pressure");
            }
        }
        self.told_pressure = Some(pressed.clone());
    }

    /// Somebody says of a container that it is idle or busy.
    pub(super) fn hint(
        &mut self,
        name: &str,
        hint: Hint,
        who: &str,
    ) -> Result<HintResponse, String> {
        let key = self.node.find(name)?;
        self.feed(Input::Hinted(key.clone(), hint, who.to_owned()));
        let list = self.node.list(self.now(), unix_ms());
        let known = list.containers.into_iter().find(|c| c.announcement.key == key.as_str());
        let known = known.unwrap_or_default();
        Ok(HintResponse {
            state: known.state,
            reason_text: known.reason_text,
            ..HintResponse::default()
        })
    }
}
