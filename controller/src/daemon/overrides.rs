//! Operator overrides: pinned containers, and whether containers are offloaded automatically. They
//! are stored on disk before they take effect.

use affinode_core::{
    ActionResult, Input, Key, Request, event::NodeEvent, overrides::OperatorOverrides,
};
use affinode_proto::{
    api::control::ActionResponse, event::EventKind, reason::Reason, state::State,
};
use tokio::sync::oneshot;

use super::actor::NodeActor;
use crate::{
    conversion, error_chain,
    handle::{Command, CommandError},
    overrides,
};

impl NodeActor {
    pub(super) fn auto_offload(&mut self, on: bool, who: &str) -> Result<bool, CommandError> {
        let changed = self.override_with(self.node.overrides().with_auto_offload(on))?;
        if changed {
            let word = if on { "on" } else { "off" };
            self.note(None, String::new(), format!("auto-offload was turned {word} by {who}"));
        }
        Ok(changed)
    }

    pub(super) fn pin(
        &mut self,
        name: &str,
        pinned: bool,
        who: &str,
        answer: oneshot::Sender<ActionResponse>,
    ) {
        let refused = |why| ActionResponse { reason_text: why, ..ActionResponse::default() };
        let key = match self.node.find(name) {
            Ok(key) => key,
            Err(error) => return drop(answer.send(refused(error.to_string()))),
        };
        let changed = match self.override_with(self.node.overrides().with_pin(&key, pinned)) {
            Ok(changed) => changed,
            Err(error) => return drop(answer.send(refused(error_chain::chain(&error)))),
        };
        if changed {
            let word = if pinned { "pinned" } else { "unpinned" };
            let shown = self.node.display_name(&key);
            self.note(Some(&key), shown, format!("the container was {word} by {who}"));
        }
        let state = self.node.state(&key).unwrap_or(State::Unregistered);
        // A pinned container must be on the GPU, so an offloaded container is restored.
        let resident = [State::Active, State::Idle, State::Unregistered, State::Lost];
        if pinned && !resident.contains(&state) {
            return self.call(Command::Act(key.to_string(), Request::Restore, answer));
        }
        let done = ActionResult { done: true, state: Some(state), ..ActionResult::default() };
        let _ = answer.send(conversion::response_of(done));
    }

    /// Publishes an event about a request and its author.
    pub(super) fn note(&mut self, key: Option<&Key>, container: String, text: String) {
        let event = NodeEvent::new(EventKind::Request, text).because(Reason::Requested);
        let event = NodeEvent { key: key.cloned(), container, ..event };
        self.publish(conversion::event_of(event));
    }

    /// Stores the overrides, then applies them. Returns whether they differ from the previous ones.
    pub(super) fn override_with(&mut self, fresh: OperatorOverrides) -> Result<bool, CommandError> {
        let changed = fresh != *self.node.overrides();
        overrides::write(&self.run_dir, &fresh)
            .map_err(|source| CommandError::Override { folder: self.run_dir.clone(), source })?;
        if changed {
            self.feed(Input::Overridden(fresh));
        }
        Ok(changed)
    }
}
