//! Determines when a container was last in use. Use is a CUDA call, a call in progress, or earlier
//! launched work that still runs on the GPU, as NVML's utilisation per process shows. Poll calls do
//! not count, because an idle framework polls.
//!
//! ```text
//! NVML utilisation ──shows the process, on a GPU where it holds VRAM──> in use until the next sample
//!       └─────────no further samples──────────> the last one is forgotten after 5 s
//! ```
//!
//! A sample covers up to a second, so samples count from a second after a restore.
//!
//! Without NVML utilisation (MIG, permissions, an old driver) only calls count.

use std::collections::HashMap;

use affinode_proto::wire::{Phase, counters::CounterSnapshot};

use super::{
    Key, Millis,
    container::Container,
    input::Work,
    node_state::NodeState,
    process::{DeviceWork, Process},
};

/// Time that a utilisation sample covers at most, by NVML's documentation (`nvmlUtilization_t`: a
/// sixth of a second to a second).
const SAMPLED_MS: Millis = 1_000;
/// Maximum age of a utilisation sample. A sample without a successor is ignored after this time.
const TRUST_MS: Millis = 5_000;

/// Whether the process was in use between two readings of its counters.
#[must_use]
pub fn moved(older: Option<&CounterSnapshot>, newer: &CounterSnapshot) -> bool {
    newer.inflight > 0 || newer.waiters > 0 || older.is_none_or(|older| older.calls != newer.calls)
}

/// Handles a sample of NVML utilisation. A process that is not in the sample has no work on the
/// GPU. Work from before the process registered or was last restored is ignored, because it may
/// belong to an earlier process with the same pid. So is a sample that began before the end of the
/// last restore: it can show the work of the restore itself.
pub(super) fn worked(node: &mut NodeState, work: &[Work]) {
    let now = node.clock.now;
    node.gpus.utilization_sampled_at = Some(now);
    let of_process: HashMap<(u32, &str), &Work> =
        work.iter().map(|work| ((work.pid, work.uuid.as_str()), work)).collect();
    for process in node.registry.processes.values_mut() {
        let pid = process.identity.pid;
        let seen = process.memory.vram.iter().filter(|held| held.bytes > 0);
        let seen = seen.filter_map(|held| of_process.get(&(pid, held.uuid.as_str())));
        let working = seen
            .map(|work| DeviceWork { at: now.saturating_sub(work.age_ms), percent: work.percent });
        // A prefaulted process is idle, and new work would begin with a call. NVML shows a
        // copier's registration of the process's memory as work of the process (seen on an
        // H200).
        let here = process.agent.phase == Phase::Open && !process.prefault.ordered;
        let container = node.registry.containers.get(&process.key);
        let restored_at = container.and_then(|container| container.figures.restored_at);
        // The same is true of a process's own registration of the host pool's memory.
        let here = here && !container.is_some_and(|c| registers_memory(c, now));
        let since = restored_at
            .map_or(0, |at| at.saturating_add(SAMPLED_MS))
            .max(process.activity.resident_since);
        process.activity.working = working.filter(|w| here && w.at >= since).max_by_key(|w| w.at);
        if let Some(DeviceWork { at, .. }) = process.activity.working
            && let Some(container) = node.registry.containers.get_mut(&process.key)
        {
            container.usage.last_use = container.usage.last_use.max(at);
        }
    }
}

/// Whether NVML may show the registration of the host pool's memory as work of the container. Not after
/// a call: the call may have begun other work.
fn registers_memory(container: &Container, now: Millis) -> bool {
    let prefault = container.host_pool_prefault;
    let is_recent = prefault.ready_at().is_none_or(|at| now.saturating_sub(at) <= SAMPLED_MS);
    let is_uncalled = |since: Millis| container.usage.last_called <= since;
    is_recent && prefault.registers_since().is_some_and(is_uncalled)
}

/// Finds a process of the container whose work runs on a GPU. Returns its pid, and the share of the
/// sample period in which the work ran, in percent. `None`: no process has such work.
pub(super) fn working(node: &NodeState, key: &Key) -> Option<(u32, u32)> {
    let working = |p: &Process| Some((p.identity.pid, share_of(node, p)?));
    node.registry.processes.of(key).find_map(|(_, p)| working(p))
}

/// Share of the last sample period in which work of the process ran on the GPU, in percent. 0: the
/// process is not in the sample. `None`: there is no valid sample.
#[must_use]
pub(super) fn utilization_percent(node: &NodeState, process: &Process) -> Option<u32> {
    let spoke =
        node.gpus.utilization_sampled_at.filter(|at| node.clock.now.saturating_sub(*at) < TRUST_MS);
    share_of(node, process).or(spoke.map(|_| 0))
}

fn share_of(node: &NodeState, process: &Process) -> Option<u32> {
    let recent = |w: &DeviceWork| node.clock.now.saturating_sub(w.at) < TRUST_MS;
    process.activity.working.filter(recent).map(|w| w.percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(calls: u64, polls: u64, inflight: u64) -> CounterSnapshot {
        CounterSnapshot { calls, polls, inflight, ..CounterSnapshot::default() }
    }

    #[test]
    fn calls_are_use_and_polls_are_not() {
        assert!(moved(None, &page(0, 0, 0)));
        assert!(moved(Some(&page(1, 0, 0)), &page(2, 0, 0)));
        assert!(moved(Some(&page(1, 0, 1)), &page(1, 0, 1)));
        assert!(!moved(Some(&page(1, 5, 0)), &page(1, 900, 0)));
    }
}
