//! Offloads and restores containers when an operator requests it.

use affinode_core::{Input, Request};
use affinode_proto::api::control::ActionResponse;
use tokio::sync::oneshot;

use super::{actor::NodeActor, effects, incoming};

/// Offloads or restores the container with this name. The response is sent when the move is
/// complete or refused.
pub(super) fn act(
    actor: &mut NodeActor,
    name: &str,
    request: Request,
    answer: oneshot::Sender<ActionResponse>,
) {
    match actor.node.find(name) {
        Ok(key) => {
            // The memory that an offload moves may have been allocated after the last sample of the
            // counters. Therefore the counters are read again.
            for id in actor.node.connected_of(&key) {
                incoming::read_page(actor, id);
            }
            let command = actor.commands.add(answer);
            effects::feed(actor, Input::Command(command, key, request));
        }
        Err(error) => {
            let reason_text = error.to_string();
            let _ = answer.send(ActionResponse { reason_text, ..ActionResponse::default() });
        }
    }
}
