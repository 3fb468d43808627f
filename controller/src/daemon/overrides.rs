//! Operator overrides: pinned containers, and whether containers are offloaded automatically. They
//! are stored on disk before they take effect.

use affinode_proto::{
    api::control::{ActionResponse, Event},
    reason::Reason,
    state::State,
};
use tokio::sync::oneshot;

use super::{actor::NodeActor, command::Command};
use crate::{
    clock::unix_ms,
    core::{Input, Request, container::display_name, overrides::OperatorOverrides},
    overrides,
};

impl NodeActor {
    pub(super) fn auto_offload(&mut self, on: bool, who: &str) -> Result<bool, String> {
        let changed = self.override_with(self.node.overrides().with_auto_offload(on))?;
        if changed {
            let word = if on { "on" } else { "off" };
            self.note("", String::new(), format!("auto-offload was turned {word} by {who}"));
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
            Err(why) => return drop(answer.send(refused(why))),
        };
        let changed = match self.override_with(self.node.overrides().with_pin(&key, pinned)) {
            Ok(changed) => changed,
            Err(why) => return drop(answer.send(refused(why))),
        };
        let list = self.node.list(self.now(), unix_ms());
        let known = list.containers.into_iter().find(|c| c.announcement.key == key.as_str());
        let known = known.unwrap_or_default();
        if changed {
            let word = if pinned { "pinned" } else { "unpinned" };
            let shown = display_name(&known.announcement);
            self.note(key.as_str(), shown, format!("it was {word} by {who}"));
        }
        // An offloaded container is restored: it must be on the GPU.
        let resident = [State::Active, State::Idle, State::Unregistered, State::Lost];
        if pinned && resident.iter().all(|state| known.state != state.as_str()) {
            return self.call(Command::Act(key.to_string(), Request::Restore, answer));
        }
        let response = ActionResponse { done: true, state: known.state, ..refused(String::new()) };
        let _ = answer.send(response);
    }

    /// Publishes an event about a request and its author.
    pub(super) fn note(&mut self, key: &str, container: String, text: String) {
        let event = Event {
            kind: "request".into(),
            key: key.into(),
            container,
            reason: Reason::Requested.to_string(),
            text,
            ..Event::default()
        };
        self.publish(event);
    }

    /// Stores overrides, then puts them in force. Returns whether they are a change.
    pub(super) fn override_with(&mut self, fresh: OperatorOverrides) -> Result<bool, String> {
        let changed = fresh != *self.node.overrides();
        overrides::write(&self.run_dir, &fresh).map_err(|error| {
            format!("cannot store the operator override in {}: {error}", self.run_dir.display())
        })?;
        if changed {
            self.feed(Input::Overridden(fresh));
        }
        Ok(changed)
    }
}
