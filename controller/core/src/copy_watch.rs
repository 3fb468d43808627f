//! Watches free host memory while containers are copied out. Cancels a copy out that needs more
//! host memory than is free.

use affinode_proto::wire::message::Action;

use super::{
    Effect, Key, Millis, ProcessId,
    host_memory::{MemoryPlace, MemoryPool},
    node_state::NodeState,
    process::Process,
};

/// Interval at which free host memory is read during a copy out, in milliseconds.
pub const LEVELS_INTERVAL_MS: Millis = 20;

/// A container with a copy out in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyInProgress {
    /// The container that is copied out.
    pub key: Key,
    /// The container's processes that copy memory out now, with their host pids.
    pub processes: Vec<(ProcessId, u32)>,
}

/// A container, and the free host memory of each pool that its offload uses. The pools are its
/// cgroups and the node.
pub type Levels = (Key, Vec<MemoryPool>);

/// All containers with a copy out in progress.
#[must_use]
pub(super) fn copies_in_progress(node: &NodeState) -> Vec<CopyInProgress> {
    let copies = node.registry.containers.keys().map(|key| {
        let copying = node.registry.processes.of(key).filter(|(_, process)| is_copying(process));
        let processes = copying.map(|(id, process)| (id, process.identity.pid)).collect();
        CopyInProgress { key: key.clone(), processes }
    });
    copies.filter(|copy| !copy.processes.is_empty()).collect()
}

/// Cancels each copy out that still needs more host memory than is free. Free memory was read
/// first, then the progress of the copies. Memory that a copy took between the two readings is
/// missing from its need, but still counts as free. The need can therefore be too small, but never
/// too large.
pub(super) fn host_levels_read(node: &mut NodeState, levels: Vec<Levels>) {
    for (key, pools) in levels {
        let copying = node.registry.processes.of(&key).filter(|(_, process)| is_copying(process));
        let copying: Vec<(ProcessId, u64)> =
            copying.map(|(id, process)| (id, bytes_to_touch(process))).collect();
        let need_bytes = copying.iter().fold(0_u64, |sum, (_, left)| sum.saturating_add(*left));
        // The cgroups of the container are not charged for memory of the host pool.
        let in_pool = node.host_ledger.uses_host_pool(&key);
        let is_charged = |pool: &MemoryPool| !in_pool || pool.place == MemoryPlace::Node;
        let short = pools.into_iter().find(|p| is_charged(p) && p.free_bytes < need_bytes);
        let Some(short) = short.filter(|_| need_bytes > 0) else { continue };
        node.host_ledger.turn_back(&key, MemoryPool { need_bytes, ..short });
        // The order is sent again until the copy ends, because the process may not have read
        // the first order. A second order has no further effect.
        let told = copying.into_iter().map(|(id, _)| Effect::TurnBack(id));
        node.output.effects.extend(told);
    }
}

fn is_copying(process: &Process) -> bool {
    let copies = |action| matches!(action, Action::CopyOut { .. });
    process.agent.connected && process.pending.is_some_and(|order| copies(order.action))
}

fn bytes_to_touch(process: &Process) -> u64 {
    process.activity.counters.as_ref().map_or(0, |counters| counters.filling_bytes)
}
