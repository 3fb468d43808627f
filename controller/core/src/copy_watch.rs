//! Watches containers while they are copied out. Cancels a copy out that needs more host memory
//! than is free, or whose offload is not wanted any more.
//!
//! A CUDA call that arrives during a copy out ends the offload. Without a cancellation the call
//! would wait until everything is copied, and then for VRAM, behind other containers. If another
//! container waits for the VRAM, the copy out is completed.

use std::collections::BTreeSet;

use affinode_proto::wire::message::Action;

use super::{
    Effect, Key, Millis, ProcessId,
    host_memory::{MemoryPlace, MemoryPool},
    needs,
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
/// whose offload was given up. The counters of all copying processes were read just before. A copy
/// out that frees VRAM for a waiting container continues: the waiter would find no other VRAM as
/// soon.
pub(super) fn cancel_unwanted_copies(node: &mut NodeState) {
    for copy in copies_in_progress(node) {
        if frees_vram_for_a_waiter(node, &copy.key) {
            continue;
        }
        let calls = |id: &ProcessId| {
            let process = node.registry.processes.get(id);
            let counters = process.and_then(|process| process.activity.counters.as_ref());
            counters.is_some_and(|counters| counters.waiters > 0)
        };
        let gives_way = |c: &super::container::Container| c.gives_way_to_calls();
        let container = node.registry.containers.get(&copy.key);
        if container.is_some_and(gives_way) && copy.processes.iter().any(|(id, _)| calls(id)) {
            restore::called(node, &copy.key);
        }
        let container = node.registry.containers.get(&copy.key);
        if container.is_some_and(|container| container.goal.is_resident()) {
            // The order is sent again until the copy ends, as in `host_levels_read`.
            let cancel = |(id, _): (ProcessId, _)| Effect::TurnBack(id, TurnBackCause::NotWanted);
            node.output.effects.extend(copy.processes.into_iter().map(cancel));
        }
    }
}

/// Whether another container waits for VRAM of a GPU that the offload of `key` frees.
fn frees_vram_for_a_waiter(node: &NodeState, key: &Key) -> bool {
    let processes = node.registry.processes.of(key);
    let freed: BTreeSet<&str> = processes
        .flat_map(|(_, process)| process.memory.offloaded_vram().unwrap_or_default())
        .map(|on| on.uuid.as_str())
        .collect();
    node.admission.queue.keys().filter(|waiter| *waiter != key).any(|waiter| {
        let want = needs::alloc_wait_beside_restore(node, waiter);
        let needs = needs::needs_with(node, waiter, want);
        needs.iter().any(|need| freed.contains(need.uuid.as_str()))
    })
}

fn is_copying(process: &Process) -> bool {
    let copies = |action| matches!(action, Action::CopyOut { .. });
    process.agent.connected && process.pending.is_some_and(|order| copies(order.action))
}

fn bytes_to_touch(process: &Process) -> u64 {
    process.activity.counters.as_ref().map_or(0, |counters| counters.filling_bytes)
}
