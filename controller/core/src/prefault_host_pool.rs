//! Prefaults memory of the host pool for containers that may have to leave soon, so that the
//! offload neither allocates nor registers pages.
//!
//! ```text
//! Off ──unused, GPU contended──> Surveyed ──enough memory for it and for others──> Filling ──> Ready
//!  ^                                 │                                                │          │
//!  └─────────────────────────────────┴── failed, offload, not contended, others need it ─┴───────┘
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
    wire::{
        Capabilities, Phase, ProcessFlags, copier::CHUNK_BYTES, counters::CounterSnapshot,
        message::ControllerMessage,
    },
};

use super::{
    Effect, Key, Millis, ProcessId,
    container::Container,
    host_memory::{HostPoolPrefault, MemoryPlace, SurveyedMemory},
    host_pool, host_promises, idle, needs,
    node_state::NodeState,
    offload_check, overrides,
    policy::Mode,
    process::Process,
    turns,
};

/// Time within which a process prefaults, in addition to the time for its content.
const FILLING_MS: Millis = 10_000;
/// Speed at which a process prefaults at least, in bytes per millisecond.
const SLOWEST_BYTES_PER_MS: u64 = 4 << 20;
/// Time within which a process's counters show that it has begun.
const BEGINNING_MS: Millis = 3_000;
/// Amount of prefaulted memory beyond the content that a process may keep: two chunks.
const MAX_SURPLUS_BYTES: u64 = 2 * CHUNK_BYTES;
/// Interval at which a container that could prefault checks whether its GPU is contended.
const CONTENTION_MS: Millis = 1_000;
/// Delay before the next attempt after a prefault that failed, or whose memory was freed again.
const PAUSE_MS: Millis = 30_000;

/// Begins, continues or ends the prefault of a container.
pub(super) fn update(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get(key) else { return };
    let prefault = container.host_pool_prefault;
    let is_resident = container.goal.is_resident();
    let later = HostPoolPrefault::Off { not_before: now + PAUSE_MS };
    let next = match prefault {
        HostPoolPrefault::Off { not_before } if !is_resident || now < not_before => prefault,
        // An offload that was given up has left the memory, or a process was slow.
        HostPoolPrefault::Off { .. } if has_flag(node, key) => {
            free(node, key);
            later
        }
        HostPoolPrefault::Off { .. } => {
            if !may_begin(node, key, container) {
                prefault
            } else if is_contended(node, key) {
                host_promises::survey(node, key);
                HostPoolPrefault::Surveyed
            } else {
                HostPoolPrefault::Off { not_before: now + CONTENTION_MS }
            }
        }
        // An offload uses the pages, and takes over the survey.
        _ if !is_resident => HostPoolPrefault::Off { not_before: now },
        HostPoolPrefault::Surveyed if container.survey_asked.is_none() => later,
        HostPoolPrefault::Surveyed => prefault,
        HostPoolPrefault::Filling { since } if missing_bytes(node, key) == 0 => {
            has_filled(node, key);
            HostPoolPrefault::Ready { since, at: now }
        }
        HostPoolPrefault::Filling { since } => {
            let age_ms = now.saturating_sub(since);
            let most_ms = FILLING_MS + missing_bytes(node, key) / SLOWEST_BYTES_PER_MS;
            if age_ms < BEGINNING_MS || has_flag(node, key) && age_ms < most_ms {
                prefault
            } else {
                free(node, key);
                later
            }
        }
        HostPoolPrefault::Ready { .. } if kept_bytes(node, key) == 0 => later,
        HostPoolPrefault::Ready { .. }
            if !is_wanted(node, key, container)
                || has_surplus(node, key)
                || !is_contended(node, key) =>
        {
            free(node, key);
            later
        }
        HostPoolPrefault::Ready { .. } => prefault,
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

/// Whether an offload of the container for a waiter is permitted and would copy to the host pool.
/// Not with `retain_host_copy`, with which the pages of the last offload stay anyway.
fn is_wanted(node: &NodeState, key: &Key, container: &Container) -> bool {
    !matches!(container.policy.mode, Mode::Manual | Mode::Off)
        && !container.policy.retain_host_copy
        && overrides::permitted(node, key, false).is_ok()
        && host_pool::may_use(node, key)
        && host_pool::is_preferred(node, key)
}

/// Whether the container may have to leave soon, and its processes can prefault.
fn may_begin(node: &NodeState, key: &Key, container: &Container) -> bool {
    let now = node.clock.now;
    let notes = |p: &Process| p.activity.counters.as_ref().map(|page| page.notes);
    let is_still = |p: &Process| {
        p.agent.connected
            && p.agent.phase == Phase::Open
            && p.pending.is_none()
            && p.can(Capabilities::PREFAULTS_HOST_POOL)
            && p.can(Capabilities::FREES_HOST_MEMORY)
            // The memory of a lost connection may still be in use.
            && !notes(p).is_some_and(|notes| notes.intersects(ProcessFlags::HOST_POOL_LOST))
            && !frees_pages(p)
    };
    let mut processes = node.registry.processes.of(key);
    matches!(container.shown.state, State::Active | State::Idle)
        && processes.all(|(_, process)| is_still(process))
        && turns::is_half_unused(node, key, container)
        // Readings during a prefault show its own work, so they could hide work that runs on.
        && idle::working(node, key).is_none()
        && now >= container.offload_failures.not_before()
        && now >= container.resident_until
        && container.usage.busy_until().is_none_or(|until| now >= until)
        && node.alloc_wait_of(key).is_none()
        && node.registry.processes.of(key).any(|(_, process)| content_bytes(process) > 0)
        && !offload_check::is_too_small(node, key)
        && is_wanted(node, key, container)
        && offload_check::check_offload(node, key, true).is_ok()
}

/// Whether the counters of a process show that it prefaults, or has prefaulted.
fn has_flag(node: &NodeState, key: &Key) -> bool {
    let is_on = |page: &CounterSnapshot| page.notes.intersects(ProcessFlags::PREFAULTED_HOST_POOL);
    let mut processes = node.registry.processes.of(key);
    processes.any(|(_, process)| process.activity.counters.as_ref().is_some_and(is_on))
}

/// Whether a process keeps far more memory than its copy out would use, because it has freed device
/// memory since.
fn has_surplus(node: &NodeState, key: &Key) -> bool {
    let has = |p: &Process| kept_by(p) > content_bytes(p).saturating_add(MAX_SURPLUS_BYTES);
    node.registry.processes.of(key).any(|(_, process)| has(process))
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

/// Orders the processes to free the memory.
fn free(node: &mut NodeState, key: &Key) {
    send(node, key, ControllerMessage::FreeHostMemory);
}

fn send(node: &mut NodeState, key: &Key, message: ControllerMessage) {
    let ids: Vec<ProcessId> = node.registry.processes.ids_of(key).collect();
    let effects = ids.into_iter().map(|id| Effect::Send(id, message));
    node.output.effects.extend(effects);
}
