//! Offloads containers that are idle.

use affinode_proto::{reason::Reason, state::State};

use super::{
    Key, container::Offload, eligibility::is_unsafe, node_state::NodeState, offload, offload_check,
    oversubscription,
};

/// Updates whether the container is idle, and begins an offload if the policy requires it.
pub(super) fn evaluate(node: &mut NodeState, key: &Key) {
    let Some(c) = node.registry.containers.get(key) else {
        return;
    };
    if !c.goal.is_resident() || !matches!(c.shown.state, State::Active | State::Idle) {
        return;
    }
    oversubscription::update_oversubscription(node);
    let Some(c) = node.registry.containers.get(key) else { return };
    let verdict = offload_check::check_offload(node, key, false);
    let idle = node.clock.now >= c.idle_at()
        && !matches!(verdict, Err((Reason::CallInProgress | Reason::GpuBusy, _)));
    match verdict {
        Ok(()) => {
            node.set_state(key, State::Idle, Reason::IdleTimeout, "", 0, 0);
            offload::begin_offload(node, key, Reason::IdleTimeout, Offload::begins(node.clock.now));
        }
        Err((reason, detail)) => {
            let state = if idle { State::Idle } else { State::Active };
            node.set_state(key, state, reason, &detail, 0, 0);
            if is_unsafe(reason) {
                node.refuse_offload(key, reason, &detail);
            }
        }
    }
}
