//! Decides which waiters may be served before an earlier waiter for the same GPU. Without these
//! exceptions, containers could wait for each other for ever.

use std::collections::BTreeSet;

use super::{Key, eviction, host_relief, needs, node_state::NodeState};

/// Whether an allocation of the resident container `key` may be served before the earlier waiter
/// `head`. It may if `head` cannot evict `key`, because `key` has a higher priority or may not be
/// evicted. Without this rule, `head` would wait for the VRAM of `key`, and `key` would wait behind
/// `head`.
pub(super) fn outranks(node: &NodeState, key: &Key, head: &Key) -> bool {
    let priority = |key: &Key| node.registry.containers.get(key).map(|c| c.policy.priority);
    let resident = needs::container_needs(node, key).is_empty();
    resident && (priority(key) > priority(head) || !eviction::may_be_evicted(node, key))
}

/// Whether the offloaded container `key` may be restored before the earlier waiter `head`, which
/// needs VRAM on `uuids`. It may if `head` cannot be served because a container there lacks host
/// memory for its offload: the restore of `key` frees host memory. Without this rule, the container
/// on the GPU would wait for the host memory of `key`, and `key` would wait behind `head`.
pub(super) fn frees_host_memory(
    node: &NodeState,
    key: &Key,
    head: &Key,
    uuids: &BTreeSet<String>,
) -> bool {
    !needs::container_needs(node, key).is_empty()
        && host_relief::is_blocked(node, head, uuids)
        && host_relief::short_holders(node, head, uuids)
            .any(|(_, holder)| host_relief::relieves(node, key, holder))
}
