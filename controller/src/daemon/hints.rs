//! Handles hints (reports that a container is idle or busy) from users and containers. Also writes
//! the files that containers read: GPUs under pressure, and the container's own state. See
//! [`affinode_core::hints`] and [`affinode_core::pressure`].

use affinode_core::{Input, hints::Hint, view::FindError};
use affinode_proto::api::control::HintResponse;

use super::{actor::NodeActor, effects};
use crate::{clock::unix_ms, conversion};

/// Passes hints to the core. For each container, this is the last hint that its programs wrote into
/// the hint pipe since the previous call of this function.
pub(super) fn read_hints(actor: &mut NodeActor) {
    let said = actor.listeners.iter().filter_map(|(key, listener)| {
        let hint = Hint::last(&listener.received())?;
        Some(Input::Hinted(key.clone(), hint, "the container".into()))
    });
    for input in said.collect::<Vec<_>>() {
        effects::feed(actor, input);
    }
}

/// Updates the pressure files of all containers if the set of GPUs under pressure has changed.
pub(super) fn tell_pressure(actor: &mut NodeActor) {
    let pressed = actor.node.pressed();
    if actor.sent_pressure.as_ref() == Some(pressed) {
        return;
    }
    for (key, listener) in &actor.listeners {
        if let Err(error) = listener.tell_pressure(pressed.iter()) {
            tracing::warn!(
                %key, %error,
                "container {key}: cannot write /.affinode/run/pressure, the file that names the GPUs \
                 on which a container waits for VRAM"
            );
        }
    }
    actor.sent_pressure = Some(pressed.clone());
}

/// Updates the state file of each container whose state, reason or place in the queue has changed.
pub(super) fn write_states(actor: &mut NodeActor) {
    let (now, unix_ms) = (actor.now(), unix_ms());
    for (key, status) in actor.node.statuses(now) {
        let Some(listener) = actor.listeners.get_mut(key) else { continue };
        let ago = i64::try_from(now.saturating_sub(status.since)).unwrap_or(i64::MAX);
        let since_unix_ms = unix_ms.saturating_sub(ago);
        if let Err(error) = listener.write_state(status, since_unix_ms) {
            tracing::warn!(
                %key, %error,
                "container {key}: cannot write /.affinode/run/state, the file that shows the \
                 container's state to its programs"
            );
        }
    }
}

/// Applies a hint that was sent through the API: a container is idle or busy.
pub(super) fn hint(
    actor: &mut NodeActor,
    name: &str,
    hint: Hint,
    who: &str,
) -> Result<HintResponse, FindError> {
    let key = actor.node.find(name)?;
    effects::feed(actor, Input::Hinted(key.clone(), hint, who.to_owned()));
    let list = conversion::list(&actor.node, actor.now(), unix_ms());
    let known = list.containers.into_iter().find(|c| c.announcement.key == key.as_str());
    let known = known.unwrap_or_default();
    Ok(HintResponse {
        state: known.state,
        reason_text: known.reason_text,
        ..HintResponse::default()
    })
}
