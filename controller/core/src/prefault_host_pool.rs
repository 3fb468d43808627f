//! Prefaults memory of the host pool for containers that may have to leave soon, so that the
//! offload neither allocates nor registers pages.
//!
//! ```text
//! Off ──unused, GPU contended──> Surveyed ──enough memory for it and for others──> Filling ──> Ready
//!  ^                                 │                                                │          │
//!  └─────────────────────────────────┴──────── too slow, offload, not contended ──────┴──────────┘
//! ```
//!
//! A GPU is contended while its offloaded containers do not all fit into its free VRAM. Then a call
//! of any of them evicts a neighbour, and waits for the neighbour's copy out. Without contention
//! nothing is prefaulted.
//!
//! After a restore, a library keeps the pages for about two seconds. If the container is unused by
//! then, the prefault keeps these pages.
//!
//! Prefaulted memory counts as kept memory. If an offload of another container needs it, the
//! process frees it (`kept_memory`). An offload does not wait for a prefault.

use affinode_proto::{
    state::State,
    wire::{Capabilities, Phase, message::ControllerMessage},
};

use super::{
    Effect, Key, Millis, ProcessId,
    container::Container,
    host_memory::{HostPoolPrefault, MemoryPlace, SurveyedMemory},
    host_pool, host_promises, needs,
    node_state::NodeState,
    offload_check,
    process::Process,
    turns,
};

/// Time within which processes prefault. Slower ones keep what they have.
const FILLING_MS: Millis = 10_000;
/// Delay before the next attempt after a prefault that found too little memory, or whose memory was
/// freed again.
const PAUSE_MS: Millis = 30_000;

/// Begins, continues or ends the prefault of a container.
pub(super) fn update(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get(key) else { return };
    let is_resident = container.goal.is_resident();
    let off = |not_before| HostPoolPrefault::Off { not_before };
    let next = match container.host_pool_prefault {
        HostPoolPrefault::Off { not_before } => {
            let begins = is_resident && now >= not_before && may_begin(node, key, container);
            if begins && is_contended(node, key) {
                host_promises::survey(node, key);
                HostPoolPrefault::Surveyed
            } else {
                off(not_before)
            }
        }
        // An offload uses the pages up, and takes over the survey.
        _ if !is_resident => off(now),
        HostPoolPrefault::Surveyed if container.survey_asked.is_none() => off(now + PAUSE_MS),
        HostPoolPrefault::Filling { .. } if missing_bytes(node, key) == 0 => {
            has_filled(node, key);
            HostPoolPrefault::Ready { since: now }
        }
        HostPoolPrefault::Filling { since } if now.saturating_sub(since) >= FILLING_MS => {
            has_filled(node, key);
            off(now + PAUSE_MS)
        }
        HostPoolPrefault::Ready { .. } if kept_bytes(node, key) == 0 => off(now + PAUSE_MS),
        HostPoolPrefault::Ready { .. } if !is_contended(node, key) => {
            send(node, key, ControllerMessage::FreeHostMemory);
            off(now + PAUSE_MS)
        }
        same => same,
    };
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.host_pool_prefault = next;
    }
}

/// Orders the prefault if the reading shows enough free memory: for this container, and for the
/// largest other one whose content fits into the host pool.
pub(super) fn surveyed(node: &mut NodeState, key: &Key, memory: SurveyedMemory, asked_at: Millis) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get(key) else { return };
    if container.host_pool_prefault != HostPoolPrefault::Surveyed {
        return;
    }
    let host_pool = memory.host_pool.iter().find(|pool| pool.place == MemoryPlace::HostPool);
    let free_bytes = host_pool.map_or(0, |pool| pool.free_bytes);
    let spare_bytes = largest_other_bytes(node, key, free_bytes);
    let begins = may_begin(node, key, container)
        && host_promises::promise_prefault(node, key, memory, asked_at, spare_bytes);
    let next = match begins {
        true => HostPoolPrefault::Filling { since: now },
        false => HostPoolPrefault::Off { not_before: now + PAUSE_MS },
    };
    if begins {
        send(node, key, ControllerMessage::PrefaultHostPool);
    }
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.host_pool_prefault = next;
    }
}

/// Whether the container may have to leave soon, to the host pool, and its processes can prefault.
fn may_begin(node: &NodeState, key: &Key, container: &Container) -> bool {
    let is_still = |p: &Process| {
        p.agent.connected
            && p.agent.phase == Phase::Open
            && p.pending.is_none()
            && p.can(Capabilities::PREFAULTS_HOST_POOL)
            && p.can(Capabilities::FREES_HOST_MEMORY)
    };
    matches!(container.shown.state, State::Active | State::Idle)
        && turns::is_half_unused(node, key, container)
        && node.registry.processes.of(key).all(|(_, process)| is_still(process))
        && node.registry.processes.of(key).any(|(_, process)| content_bytes(process) > 0)
        && node.registry.processes.of(key).all(|(_, process)| !frees_pages(process))
        && !offload_check::is_too_small(node, key)
        && host_pool::may_use(node, key)
        && host_pool::is_preferred(node, key)
        && offload_check::check_offload(node, key, true).is_ok()
}

/// Whether the offloaded containers of a GPU that this container uses do not all fit into its free
/// VRAM.
fn is_contended(node: &NodeState, key: &Key) -> bool {
    let has_vram = |uuid: &str| needs::held_bytes(node, key, uuid) > 0;
    node.gpus.samples.iter().filter(|gpu| has_vram(&gpu.uuid)).any(|gpu| {
        let others = node.registry.containers.keys().filter(|other| *other != key);
        let needs = others.flat_map(|other| needs::container_needs(node, other));
        let needed_bytes: u64 = needs.filter(|on| on.uuid == gpu.uuid).map(|on| on.bytes).sum();
        needed_bytes > gpu.total_bytes.saturating_sub(gpu.used_bytes)
    })
}

/// Memory that the offload of the largest other resident container would take from the host pool,
/// in bytes. Containers that need more than `free_bytes` do not fit with or without the prefault.
fn largest_other_bytes(node: &NodeState, key: &Key, free_bytes: u64) -> u64 {
    let others = node.registry.containers.iter();
    let others = others.filter(|(other, c)| *other != key && c.goal.is_resident());
    let bytes = others.map(|(other, _)| missing_bytes(node, other));
    bytes.filter(|bytes| *bytes <= free_bytes).max().unwrap_or(0)
}

/// Memory of the host pool that the container's processes lack for a copy out, in bytes.
fn missing_bytes(node: &NodeState, key: &Key) -> u64 {
    let missing = |p: &Process| content_bytes(p).saturating_sub(kept_by(p));
    node.registry.processes.of(key).map(|(_, process)| missing(process)).sum()
}

/// Memory that a copy out of the process would copy, in bytes.
fn content_bytes(process: &Process) -> u64 {
    match process.agent.phase.is_offloaded() {
        true => 0,
        false => process.memory.swap.swappable_bytes.min(process.vram_bytes()),
    }
}

/// Whether the process is freeing the pages of its last offload. The host pool permits the
/// allocation of what a process lacks, and the process would lack more when the order arrives.
fn frees_pages(process: &Process) -> bool {
    (1..content_bytes(process)).contains(&kept_by(process))
}

fn kept_by(process: &Process) -> u64 {
    match process.uses_host_pool() {
        true => process.activity.counters.as_ref().map_or(0, |page| page.kept_bytes),
        false => 0,
    }
}

fn kept_bytes(node: &NodeState, key: &Key) -> u64 {
    node.registry.processes.of(key).fold(0, |sum, (_, p)| sum.saturating_add(kept_by(p)))
}

/// Records that the processes have memory of the host pool, in the files of their present
/// connections. The permission to allocate ends with the promise.
fn has_filled(node: &mut NodeState, key: &Key) {
    for id in node.members(key) {
        if let Some(process) = node.registry.processes.get_mut(&id)
            && process.uses_host_pool()
        {
            process.host_pool.was_used = true;
        }
    }
}

fn send(node: &mut NodeState, key: &Key, message: ControllerMessage) {
    let ids: Vec<ProcessId> = node.registry.processes.ids_of(key).collect();
    let effects = ids.into_iter().map(|id| Effect::Send(id, message));
    node.output.effects.extend(effects);
}
