//! Handles requests of operators and programs, and sends the responses.

use affinode_proto::{reason::Reason, state::State};

use super::{
    ActionResult, CommandId, Effect, Key,
    container::{Container, Offload},
    input::Request,
    node_state::NodeState,
    offload, offload_check,
};

pub(super) fn command(node: &mut NodeState, command: CommandId, key: &Key, request: Request) {
    let Some(container) = node.registry.containers.get_mut(key) else {
        let response = ActionResult { text: "no such container".into(), ..ActionResult::default() };
        node.output.effects.push(Effect::Answer(command, response));
        return;
    };
    container.commands.push((command, request));
    match (request, container.shown.state) {
        (Request::Offload, State::Offloaded) => node.answer(key, request, true, 0, 0),
        (Request::Offload, State::Active | State::Idle) => {
            match offload_check::check_offload(node, key, true) {
                Ok(()) => offload::begin_offload(
                    node,
                    key,
                    Reason::Requested,
                    Offload::begins(node.clock.now),
                ),
                Err((reason, detail)) => {
                    node.refuse_offload(key, reason, &detail);
                    if let Some(container) = node.registry.containers.get_mut(key) {
                        container.shown.reason = (reason, detail);
                    }
                    node.answer(key, request, false, 0, 0);
                }
            }
        }
        (Request::Restore, State::Active | State::Idle) => node.answer(key, request, true, 0, 0),
        (Request::Restore, State::Offloaded) => {
            container.goal.become_resident();
            container.cause = Reason::Requested;
            node.resume(key);
        }
        (Request::Restore, State::Closing | State::Offloading) => {
            container.goal.become_resident();
            container.cause = Reason::Requested;
            container.shown.reason = (Reason::Requested, String::new());
            node.answer(key, Request::Offload, false, 0, 0);
            node.resume(key);
        }
        // If the container has no processes or is lost, no move can answer the request: answer
        // it now. In all other states a move is in progress, and the end of that move answers
        // the request.
        (_, State::Unregistered | State::Lost) => node.answer(key, request, false, 0, 0),
        _ => {}
    }
}

/// Begins an offload that an operator requested while the container was being restored. If the
/// offload is not possible, answers the request.
pub(super) fn resume_offload_request(node: &mut NodeState, key: &Key) {
    let asked = |c: &Container| c.commands.iter().any(|(_, r)| *r == Request::Offload);
    if !node.registry.containers.get(key).is_some_and(asked) {
        return;
    }
    match offload_check::check_offload(node, key, true) {
        Ok(()) => {
            offload::begin_offload(node, key, Reason::Requested, Offload::begins(node.clock.now))
        }
        Err(reason) => {
            if let Some(container) = node.registry.containers.get_mut(key) {
                container.shown.reason = reason;
            }
            node.answer(key, Request::Offload, false, 0, 0);
        }
    }
}

/// Answers the open requests for a container that has stayed resident: an offload was not done, and
/// a restore is done. The container was called, or one of its processes started, after the request.
pub(super) fn settle_requests(node: &mut NodeState, key: &Key) {
    let Some(c) = node.registry.containers.get_mut(key) else { return };
    let resident = c.goal.is_resident() && matches!(c.shown.state, State::Active | State::Idle);
    if resident && !c.commands.is_empty() {
        c.shown.reason = (Reason::WokenMeanwhile, String::new());
        node.answer(key, Request::Offload, false, 0, 0);
        node.answer(key, Request::Restore, true, 0, 0);
    }
}
