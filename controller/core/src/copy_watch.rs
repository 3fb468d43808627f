//! Watches containers while they are copied out. Cancels a copy out that needs more host memory
//! than is free, or whose offload is not wanted any more.
//!
//! A CUDA call that arrives during a copy out ends the offload. Without a cancellation the call
//! would wait until everything is copied, and then for VRAM, behind other containers. If another
//! container waits for the VRAM, the copy out is completed.

use affinode_proto::wire::{Capabilities, message::Action};

use super::{
    Effect, Key, Millis, ProcessId,
    container::Container,
    early_release,
    host_memory::{MemoryPlace, MemoryPool},
    node_state::NodeState,
    process::Process,
    restore,
};

/// Interval at which free host memory is read during a copy out, in milliseconds.
pub const LEVELS_INTERVAL_MS: Millis = 20;

/// Why a copy out is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnBackCause {
    /// Host memory is short.
    HostMemory,
    /// The offload was given up, for example because a CUDA call of the container waits.
    NotWanted,
}

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
        let cancel = |(id, _)| Effect::TurnBack(id, TurnBackCause::HostMemory);
        node.output.effects.extend(copying.into_iter().map(cancel));
    }
}

/// Gives up the offloads of containers that have a waiting CUDA call, and cancels each copy out
/// whose offload was given up. The counters of all copying processes were read just before.
///
/// A copy out that frees VRAM for a waiting container continues: the waiter would find no other
/// VRAM as soon. The copies of a container continue also if one of its processes is copied out
/// already: its gates stay closed until that process is restored, so its VRAM would be kept in
/// vain. A copy out that has begun to free VRAM cannot be cancelled. A copy that is cancelled for
/// lack of host memory is cancelled for this reason alone.
pub(super) fn cancel_unwanted_copies(node: &mut NodeState) {
    for copy in copies_in_progress(node) {
        if node.host_ledger.short_pool(&copy.key).is_some()
            || is_partly_out(node, &copy.key)
            || early_release::frees_vram_for_a_waiter(node, &copy.key)
            || early_release::is_releasing(node, &copy.key)
        {
            continue;
        }
        let calls = |id: &ProcessId| {
            let process = node.registry.processes.get(id);
            let counters = process.and_then(|process| process.activity.counters.as_ref());
            counters.is_some_and(|counters| counters.waiters > 0)
        };
        let gives_way = |container: &Container| container.gives_way_to_calls();
        let container = node.registry.containers.get(&copy.key);
        if container.is_some_and(gives_way) && copy.processes.iter().any(|(id, _)| calls(id)) {
            restore::called(node, &copy.key);
        }
        let container = node.registry.containers.get(&copy.key);
        if container.is_some_and(|container| container.goal.is_resident()) {
            // The order is sent again until the copy ends, as in `host_levels_read`.
            let can = |id: &ProcessId| {
                let process = node.registry.processes.get(id);
                process.is_some_and(|process| process.can(Capabilities::GIVES_UP_COPIES))
            };
            let told = copy.processes.into_iter().map(|(id, _)| id).filter(can);
            let cancel = |id| Effect::TurnBack(id, TurnBackCause::NotWanted);
            node.output.effects.extend(told.map(cancel));
        }
    }
}

/// Whether a process of the container is copied out while others are still copied.
fn is_partly_out(node: &NodeState, key: &Key) -> bool {
    node.registry.processes.of(key).any(|(_, process)| process.agent.phase.is_offloaded())
}

fn is_copying(process: &Process) -> bool {
    let copies = |action| matches!(action, Action::CopyOut { .. });
    process.agent.connected && process.pending.is_some_and(|order| copies(order.action))
}

fn bytes_to_touch(process: &Process) -> u64 {
    process.activity.counters.as_ref().map_or(0, |counters| counters.filling_bytes)
}
