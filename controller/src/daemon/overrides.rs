//! Applies operator overrides. An override pins a container, or turns automatic offloads on or off.
//! Overrides are stored on disk before they take effect.

use affinode_core::{ActionResult, Input, Request, overrides::OperatorOverrides};
use affinode_proto::{api::control::ActionResponse, state::State};
use tokio::sync::oneshot;

use super::{actor::NodeActor, effects, moves};
use crate::{conversion, error_chain, handle::CommandError, overrides};

/// Turns automatic offloads of the node on or off. Returns whether the setting has changed.
pub(super) fn auto_offload(
    actor: &mut NodeActor,
    on: bool,
    who: &str,
) -> Result<bool, CommandError> {
    let changed = override_with(actor, actor.node.overrides().with_auto_offload(on))?;
    if changed {
        let word = if on { "on" } else { "off" };
        actor.note(None, String::new(), format!("auto-offload was turned {word} by {who}"));
    }
    Ok(changed)
}

/// Pins a container to the GPU, or unpins it. A pinned container that is offloaded is restored.
pub(super) fn pin(
    actor: &mut NodeActor,
    name: &str,
    pinned: bool,
    who: &str,
    answer: oneshot::Sender<ActionResponse>,
) {
    let refused = |why| ActionResponse { reason_text: why, ..ActionResponse::default() };
    let key = match actor.node.find(name) {
        Ok(key) => key,
        Err(error) => return drop(answer.send(refused(error.to_string()))),
    };
    let changed = match override_with(actor, actor.node.overrides().with_pin(&key, pinned)) {
        Ok(changed) => changed,
        Err(error) => return drop(answer.send(refused(error_chain::chain(&error)))),
    };
    if changed {
        let word = if pinned { "pinned" } else { "unpinned" };
        let shown = actor.node.display_name(&key);
        actor.note(Some(&key), shown, format!("the container was {word} by {who}"));
    }
    let state = actor.node.state(&key).unwrap_or(State::Unregistered);
    // A pinned container must be on the GPU, so an offloaded container is restored.
    let resident = [State::Active, State::Idle, State::Unregistered, State::Lost];
    if pinned && !resident.contains(&state) {
        let (restored, outcome) = oneshot::channel();
        tokio::spawn(async move {
            if let Ok(response) = outcome.await {
                let _ = answer.send(of_pinned(response));
            }
        });
        return moves::act(actor, key.as_str(), Request::Restore, restored);
    }
    let done = ActionResult { done: true, state: Some(state), ..ActionResult::default() };
    let _ = answer.send(ActionResponse { pinned, ..conversion::response_of(done) });
}

/// Converts the response to the restore of a container that was pinned before. The pin is stored,
/// also if the restore was not done.
fn of_pinned(restore: ActionResponse) -> ActionResponse {
    let reason_text = match restore.done {
        true => restore.reason_text,
        false => {
            format!("the container is pinned, but is not restored yet: {}", restore.reason_text)
        }
    };
    ActionResponse { pinned: true, reason_text, ..restore }
}

/// Stores the operator overrides on disk, then applies them. Returns whether they have changed.
pub(super) fn override_with(
    actor: &mut NodeActor,
    fresh: OperatorOverrides,
) -> Result<bool, CommandError> {
    let changed = fresh != *actor.node.overrides();
    overrides::write(&actor.run_dir, &fresh)
        .map_err(|source| CommandError::Override { folder: actor.run_dir.clone(), source })?;
    if changed {
        effects::feed(actor, Input::Overridden(fresh));
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pin is stored before the restore. A response about a failed restore must not read as if
    /// the container were not pinned.
    #[test]
    fn failed_restore_is_not_a_failed_pin() {
        let restore = |done| ActionResponse {
            done,
            reason_text: "waits for VRAM".into(),
            ..ActionResponse::default()
        };
        let response = of_pinned(restore(false));
        assert!(response.pinned && !response.done);
        assert!(response.reason_text.starts_with("the container is pinned, but"));
        assert!(response.reason_text.ends_with("waits for VRAM"));
        let response = of_pinned(restore(true));
        assert_eq!((response.pinned, response.reason_text.as_str()), (true, "waits for VRAM"));
    }
}
