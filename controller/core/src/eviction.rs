//! Evicts neighbours (other containers on the same GPU) of containers that wait for VRAM.
//!
//! ```text
//! waiter ──does not fit──> missing = need + promises - free - VRAM being freed
//!                          └─> victims: not in use, resident long enough, not above the waiter's priority
//! ```
//!
//! A victim that is copied out keeps its CUDA context on the GPU. If that VRAM is needed too, the
//! context is checkpointed.
//!
//! The first waiter in the queue is served first. No later waiter may take VRAM that is freed for
//! it. If a victim is called again, it waits in the queue behind that waiter. Two containers that
//! need each other's VRAM therefore take turns of at least the minimum residency.

use affinode_proto::state::State;

use super::{
    DeviceBytes, Key, Millis,
    container::{Container, Offload},
    host_relief, idle, immediate, needs,
    node_state::NodeState,
    offload, offload_check, offload_level, overrides,
    policy::Mode,
    turns,
    victims::{self, Candidate},
};

/// Minimum interval between two searches for containers to evict for the same waiter.
const SEEK_MS: Millis = 100;
/// Waiting time after which partial evictions are allowed. Then all containers that can free some
/// of the missing VRAM are evicted, even if they do not free enough together.
const GATHER_MS: Millis = 30_000;

/// Evicts other containers from the GPUs of the waiting container `key` until it fits. `needs`: the
/// VRAM that it needs on each GPU. VRAM that is being freed, or was freed since the last NVML
/// sample, counts as free.
pub(super) fn evict_for(
    node: &mut NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    margin: fn(u64) -> u64,
) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    if container
        .restore_failures
        .eviction_searched_at
        .is_some_and(|t| now.saturating_sub(t) < SEEK_MS)
    {
        return;
    }
    container.restore_failures.eviction_searched_at = Some(now);
    let missing = missing_vram(node, key, needs, margin);
    let Some(asker) = node.registry.containers.get(key) else { return };
    if missing.iter().all(|need| need.bytes == 0) {
        return;
    }
    let began = node.called_since(key);
    let waited = began.map_or(0, |began| node.clock.now.saturating_sub(began));
    let priority = asker.policy.priority;
    let rule = node.settings.victims;
    // While host memory is short, an eviction that does not suffice would take more of it.
    let uuids = needs.iter().map(|need| need.uuid.clone()).collect();
    let is_short = || host_relief::short_holders(node, key, &uuids).next().is_some();
    let partly = waited >= GATHER_MS && (waited >= 2 * GATHER_MS || !is_short());
    let choose = |deep, partly| {
        let candidates = candidates(node, key, deep);
        victims::choose(candidates, priority, missing.clone(), rule, node.clock.now, partly)
    };
    // Try first to free enough by copies out. A restore takes about 200 ms longer if the
    // context was evicted too (H200).
    let shallow = choose(false, false);
    // If copies out do not free enough, contexts are evicted too.
    let (deep, chosen) = match shallow.is_empty() {
        false => (false, shallow),
        true => (true, choose(true, false)),
    };
    if chosen.is_empty() && (partly || immediate::is_urgent(node, key)) {
        let helpful = choose(true, true);
        if !immediate::terminate_for_vram(node, key, &missing, &helpful) && partly {
            helpful
                .iter()
                .for_each(|victim| offload::evict(node, victim, Offload::deep(node.clock.now)));
        }
    }
    let offload =
        if deep { Offload::deep(node.clock.now) } else { Offload::begins(node.clock.now) };
    chosen.iter().for_each(|victim| offload::evict(node, victim, offload));
}

fn missing_vram(
    node: &NodeState,
    key: &Key,
    needs: &[DeviceBytes],
    margin: fn(u64) -> u64,
) -> Vec<DeviceBytes> {
    let leaving: Vec<Vec<DeviceBytes>> = node
        .registry
        .containers
        .iter()
        .filter(|(_, c)| !c.rests_offloaded())
        .filter_map(|(key, c)| Some((c.goal.offload()?, needs::vram_freed_by(node, key, false))))
        .filter(|(offload, freed)| is_in_time(node.clock.now, offload, freed))
        .map(|(_, freed)| freed)
        .collect();
    let missing = |need: &DeviceBytes| {
        let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid)?;
        let on_its_way = leaving.iter().flatten().filter(|held| held.uuid == need.uuid);
        let left = node.gpus.freed_since_sample.iter().filter(|left| left.uuid == need.uuid);
        let ending = needs::termination_of(node).filter(|held| held.uuid == need.uuid);
        // VRAM that is being freed counts as free here, so that no further victim is evicted
        // for it. It is promised to a waiter only when a sample shows that it is free.
        let free = gpu.total_bytes.saturating_sub(gpu.used_bytes)
            + left.map(|left| left.bytes).sum::<u64>()
            + ending.map(|held| held.bytes).sum::<u64>()
            + on_its_way.map(|held| held.bytes).sum::<u64>();
        let promised = node.admission.ledger.promised_bytes(&need.uuid)
            - node
                .admission
                .ledger
                .promised_to(key)
                .min(node.admission.ledger.promised_bytes(&need.uuid));
        let wanted = need.bytes + promised + margin(gpu.total_bytes);
        Some(DeviceBytes { uuid: need.uuid.clone(), bytes: wanted.saturating_sub(free) })
    };
    needs.iter().filter_map(missing).collect()
}

/// Whether an offload that frees this VRAM is still expected to end. A driver that hangs, or a process
/// that never reports, must not prevent the eviction of others for ever.
fn is_in_time(now: Millis, offload: &Offload, freed: &[DeviceBytes]) -> bool {
    const BASE_MS: Millis = 20_000;
    const SLOWEST_BYTES_PER_MS: u64 = 1 << 20;
    let bytes = freed.iter().fold(0_u64, |sum, on| sum.saturating_add(on.bytes));
    let longest_ms = BASE_MS + bytes / SLOWEST_BYTES_PER_MS;
    offload.requested_at.is_some_and(|at| now.saturating_sub(at) < longest_ms)
}

/// Whether a container may be evicted now. Either it is idle, or one of its own allocations waits
/// for VRAM. In the second case, the waiter that needs its VRAM is earlier in the queue. The other
/// conditions of an offload must hold too, such as the policy and the choices of operators.
pub(super) fn may_be_evicted(node: &NodeState, key: &Key) -> bool {
    let free = |c: &Container| {
        let waits =
            || node.alloc_wait_of(key).is_some() && !node.admission.grants.contains_key(key);
        let idle = || turns::is_unused(node, key, c);
        c.goal.is_resident()
            && matches!(c.shown.state, State::Active | State::Idle)
            && !matches!(c.policy.mode, Mode::Manual | Mode::Off)
            && (idle() && idle::working(node, key).is_none() || waits())
            && c.figures
                .restored_at
                .is_none_or(|t| node.clock.now.saturating_sub(t) >= c.policy.minimum_residency_ms)
            && node.clock.now >= c.offload_failures.not_before()
            && c.usage.busy_until().is_none_or(|until| node.clock.now >= until)
            && node.clock.now >= c.resident_until
            && !offload_check::is_too_small(node, key)
            && overrides::permitted(node, key, false).is_ok()
            && offload_check::check_offload(node, key, true).is_ok()
    };
    node.registry.containers.get(key).is_some_and(free)
}

fn candidates(node: &NodeState, asker: &Key, deep: bool) -> Vec<Candidate> {
    let asker_priority = node.registry.containers.get(asker).map_or(0, |c| c.policy.priority);
    // An offloaded container is not in use, so its own priority does not protect its context.
    let priority_of = |c: &Container| match c.shown.state {
        State::Offloaded => c.policy.priority.min(asker_priority),
        _ => c.policy.priority,
    };
    node.registry
        .containers
        .iter()
        .filter(|(key, _)| *key != asker)
        .filter(|(key, _)| may_be_evicted(node, key) || offload_check::may_evict_context(node, key))
        .map(|(key, c)| {
            let idle_ms = node.clock.now.saturating_sub(c.usage.last_use);
            let return_ms = match c.usage.next_use {
                Some(at) => at.saturating_sub(node.clock.now),
                // The container waits for VRAM, so its next use begins as soon as it is
                // restored.
                None if node.alloc_wait_of(key).is_some() => 0,
                None => c.usage.history.expected_return_ms(idle_ms, &node.prediction.pauses),
            };
            let holds = needs::vram_freed_by(node, key, deep);
            Candidate {
                key: key.clone(),
                priority: priority_of(c),
                idle_ms,
                return_ms,
                delay_ms: offload_level::expected_delay_ms(node, key, deep),
                holds,
            }
        })
        .collect()
}
