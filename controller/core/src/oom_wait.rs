//! Allocations that find no VRAM and wait for it (`affinode.io/on-oom: wait`).
//!
//! ```text
//! AllocWait ──may wait, can ever fit──> queue ──grant: evicted, held, proven──> AllocGrant ──allocated──> AllocWaitDone
//!   │                                     ^                                         │
//!   └── else: AllocGrant(no), it fails    └──────── failed again: AllocWait ────────┘ at most 3 times
//! ```
//!
//! These allocations wait in the same queue as restores and get the same grants, so each GPU serves
//! one waiter at a time. While an allocation waits, its call is not inside the driver. The process
//! can therefore be evicted for earlier waiters as if it were idle, and two processes that need
//! each other's VRAM take turns. If a container is offloaded while its allocation waits, one grant
//! serves both its restore and the allocation.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    wire::{Phase, message::ControllerMessage},
};

use super::{
    DeviceBytes, Effect, Key, Millis, ProcessId,
    event::NodeEvent,
    gpu_uuid::nvml_uuid,
    grants,
    ledger::margin_bytes,
    node_state::NodeState,
    policy::{OnOom, Policy},
    process::PendingAlloc,
    texts::size,
};

/// Assumed size of an allocation whose size only the driver knows. Such an allocation is a CUDA
/// context with its first module.
const UNKNOWN_BYTES: u64 = 1 << 30;
/// Number of failed attempts after which a waiting allocation is refused. Each attempt was made
/// under a grant of VRAM.
const MAX_ATTEMPTS: u32 = 3;
/// Time limit for an allocation after its process was ordered to try again.
const TRY_MS: Millis = 10_000;
/// Extra time in the controller's limit for a waiting allocation, beyond the library's limit.
/// Normally the library ends the wait first. The controller ends it only if the process exceeds the
/// library's limit.
const OVERTIME_MS: Millis = 2_000;
/// Time limit for an allocation with a grant. A slower allocation counts as a failed grant even if
/// it succeeds, because other processes pause their allocations until it ends.
const QUICK_MS: Millis = 1_000;

/// Why an allocation may not wait for VRAM and fails at once.
#[derive(Debug, thiserror::Error)]
enum OomWaitRefusal {
    #[error("the controller does not know the container of the process")]
    NoContainer,
    #[error(
        "the container's policy setting on_oom = \"fail\" lets no allocation wait for free VRAM"
    )]
    Policy,
    #[error(
        "the driver refused the allocation {MAX_ATTEMPTS} times, each time although enough VRAM \
         was free"
    )]
    Attempts,
    #[error("NVML does not list the GPU {0}")]
    UnknownGpu(String),
    #[error(
        "the GPU has too little VRAM for the allocation in addition to the {:.2} GiB that the \
         container holds there",
        *own_bytes as f64 / f64::from(1 << 30)
    )]
    GpuTooSmall {
        /// VRAM that the container has on the GPU already, in bytes.
        own_bytes: u64,
    },
}

/// Maximum time for which an allocation of a container waits for VRAM, in milliseconds. 0: the
/// allocation fails at once.
pub(super) fn wait_for_room_ms(policy: &Policy) -> u32 {
    match policy.on_oom {
        OnOom::Wait => u32::try_from(policy.on_oom_timeout_ms).unwrap_or(u32::MAX),
        OnOom::Fail => 0,
    }
}

pub(super) fn alloc_wait_began(
    node: &mut NodeState,
    id: ProcessId,
    ticket: u64,
    bytes: u64,
    uuid: &[u8; 16],
    attempts: u32,
) {
    let now = node.clock.now;
    let Some(process) = node.registry.processes.get(&id) else { return };
    let key = process.key.clone();
    let before = process.alloc_wait.clone().filter(|want| want.ticket == ticket);
    // A repeated message must not end the grant for the allocation.
    let is_repeated = |want: &PendingAlloc| want.attempts == attempts && want.resumed_at.is_none();
    if before.as_ref().is_some_and(is_repeated) {
        return;
    }
    // Either the process was ordered to try again and its attempt failed, or the message is
    // about another allocation.
    end_alloc_wait(node, id);
    let verdict = may_wait(node, &key, bytes, &nvml_uuid(uuid), attempts);
    let need = match verdict {
        Ok(need) => need,
        Err(why) => return refuse_alloc_wait(node, id, ticket, bytes, &why),
    };
    if before.is_none() {
        let text = format!("an allocation of {} waits for VRAM", size(bytes));
        publish_alloc_wait(node, &key, Reason::AllocationWaits, text, bytes);
    }
    let since = before.map_or(now, |want| want.since);
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.alloc_wait = Some(PendingAlloc { ticket, need, attempts, since, resumed_at: None });
    }
    if let Some(container) = node.registry.containers.get_mut(&key) {
        container.usage.last_use = now;
        let offloaded = container.rests_offloaded();
        if offloaded {
            container.cause = Reason::AllocationWaits;
        }
        let is_requested = container.goal.is_requested() && container.gives_way_to_calls();
        if offloaded || is_requested {
            container.goal.become_resident();
        }
    }
    queue_alloc_wait(node, &key);
    node.resume(&key);
}

fn may_wait(
    node: &NodeState,
    key: &Key,
    bytes: u64,
    uuid: &str,
    attempts: u32,
) -> Result<DeviceBytes, OomWaitRefusal> {
    let container = node.registry.containers.get(key).ok_or(OomWaitRefusal::NoContainer)?;
    if container.policy.on_oom == OnOom::Fail {
        return Err(OomWaitRefusal::Policy);
    }
    if attempts >= MAX_ATTEMPTS {
        return Err(OomWaitRefusal::Attempts);
    }
    let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == uuid);
    let is_readable = node.gpus.error_of(uuid).is_none();
    if gpu.is_none() && is_readable && !node.gpus.samples.is_empty() {
        return Err(OomWaitRefusal::UnknownGpu(uuid.to_owned()));
    }
    // Without a sample, the size of the GPU is unknown. `check_alloc_wait` then checks it
    // later.
    let total = gpu.map_or(u64::MAX, |gpu| gpu.total_bytes);
    let bytes = if bytes == 0 { UNKNOWN_BYTES.min(total / 8) } else { bytes };
    let own = has(node, key, uuid);
    fits_ever(node, key, &DeviceBytes { uuid: uuid.to_owned(), bytes })?;
    // An earlier attempt failed although its size was free: request more, because the driver
    // rounds up.
    let more = u64::from(attempts) * margin_bytes(total);
    let bytes = bytes.saturating_add(more).min(total.saturating_sub(own));
    Ok(DeviceBytes { uuid: uuid.to_owned(), bytes })
}

/// VRAM of a container on a GPU, in bytes. For an offloaded process, it is the VRAM that the
/// process had before its offload.
fn has(node: &NodeState, key: &Key, uuid: &str) -> u64 {
    // A sample may be older than the offload of the process.
    let all =
        node.registry.processes.of(key).flat_map(|(_, p)| match p.agent.phase.is_offloaded() {
            true => p.memory.offloaded_vram().unwrap_or_default(),
            false => &p.memory.vram,
        });
    all.filter(|held| held.uuid == uuid).map(|held| held.bytes).sum()
}

fn fits_ever(node: &NodeState, key: &Key, need: &DeviceBytes) -> Result<(), OomWaitRefusal> {
    let own = has(node, key, &need.uuid);
    match node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid) {
        Some(gpu) if own.saturating_add(need.bytes) > gpu.total_bytes => {
            Err(OomWaitRefusal::GpuTooSmall { own_bytes: own })
        }
        _ => Ok(()),
    }
}

/// Adds a resident container to the queue because one of its allocations waits for VRAM.
pub(super) fn queue_alloc_wait(node: &mut NodeState, key: &Key) {
    let Some(since) = node.alloc_wait_of(key).map(|(_, want)| want.since) else { return };
    if let Some(container) = node.registry.containers.get_mut(key).filter(|c| c.goal.is_resident())
    {
        let priority = container.policy.priority;
        let may_try = node.clock.now >= container.restore_failures.not_before;
        if may_try && !node.admission.grants.contains_key(key) {
            node.admission.queue.enter(key, priority, since);
        }
    }
}

/// Orders the process to try its allocation again, if its container is resident and has a grant
/// for this allocation. Returns false otherwise.
pub(super) fn serve_alloc_wait(node: &mut NodeState, key: &Key) -> bool {
    let granted = node.admission.grants.get(key).is_some_and(super::grant::Grant::is_granted);
    let resident = node.registry.processes.of(key).all(|(_, p)| p.agent.phase == Phase::Open);
    let meant = node.admission.grants.get(key).and_then(|grant| grant.want);
    let want = node.alloc_wait_of(key).map(|(id, want)| (id, want.ticket));
    let Some((id, ticket)) = want.filter(|_| want == meant && granted && resident) else {
        return false;
    };
    let now = node.clock.now;
    if let Some(want) = node.registry.processes.get_mut(&id).and_then(|p| p.alloc_wait.as_mut()) {
        if want.resumed_at.is_some() {
            return true;
        }
        want.resumed_at = Some(now);
        let need = vec![want.need.clone()];
        node.admission.ledger.promise(key, need);
    }
    send_alloc_grant(node, id, ticket, true);
    true
}

pub(super) fn alloc_wait_ended(node: &mut NodeState, id: ProcessId, ticket: u64, served: bool) {
    let Some(process) = node.registry.processes.get(&id) else { return };
    let key = process.key.clone();
    let Some(want) = process.alloc_wait.clone().filter(|want| want.ticket == ticket) else {
        return;
    };
    let took = want.resumed_at.map(|resumed_at| node.clock.now.saturating_sub(resumed_at));
    finish_alloc_wait(node, id, served && took.is_some_and(|ms| ms < QUICK_MS));
    if let Some(container) = node.registry.containers.get_mut(&key) {
        container.usage.last_use = node.clock.now;
    }
    let waited = node.clock.now.saturating_sub(want.since);
    let (reason, how) = match served {
        true => (Reason::RoomFound, "was made"),
        false => (Reason::NoRoomInTime, "failed"),
    };
    let seconds = waited as f64 / 1000.0;
    let text = format!(
        "an allocation of {} {how} after waiting {seconds:.1} s for VRAM",
        size(want.need.bytes)
    );
    publish_alloc_wait(node, &key, reason, text, want.need.bytes);
    queue_alloc_wait(node, &key);
}

/// Ends the wait of a process's allocation, and the grant for it. Other waiting processes of the
/// container stay in the queue.
pub(super) fn end_alloc_wait(node: &mut NodeState, id: ProcessId) {
    finish_alloc_wait(node, id, false);
}

/// Ends the wait of a process's allocation. `quick`: the allocation succeeded within `QUICK_MS`
/// after the process was ordered to try again. If it is false, a grant for the allocation counts as
/// wasted if it ends, at any stage: other processes paused their allocations for it.
fn finish_alloc_wait(node: &mut NodeState, id: ProcessId, quick: bool) {
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    let Some(want) = process.alloc_wait.take() else { return };
    let key = process.key.clone();
    let grant = node.admission.grants.get(&key);
    let is_granted = grant.is_some_and(|grant| grant.want == Some((id, want.ticket)));
    // A process whose gate is closed, but which is not offloaded, needs no VRAM to open its
    // gate again.
    let is_resident = !node.registry.processes.of(&key).any(|(_, p)| p.agent.phase.is_offloaded());
    let ends_grant = is_granted && (is_resident || want.resumed_at.is_some());
    if (ends_grant || want.resumed_at.is_some())
        && let Some(container) = node.registry.containers.get_mut(&key)
    {
        match quick {
            true => {
                container.restore_failures.in_a_row =
                    container.restore_failures.in_a_row.saturating_sub(1)
            }
            false => container.restore_failures.has_wasted_a_turn(node.clock.now),
        }
    }
    if ends_grant {
        grants::end_alloc_grant(node, &key);
    }
    if is_resident {
        node.admission.queue.leave(&key);
        queue_alloc_wait(node, &key);
    }
}

/// Ends the container's wait for an allocation that can never fit, or whose process did not make it
/// in time after the order to try again.
pub(super) fn check_alloc_wait(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    if node.alloc_wait_of(key).is_none() {
        return;
    }
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.usage.last_use = now; // A container that waits is not idle.
    }
    queue_alloc_wait(node, key);
    let waits =
        node.registry.processes.of(key).filter_map(|(id, p)| Some((id, p.alloc_wait.clone()?)));
    for (id, want) in waits.collect::<Vec<_>>() {
        check_wait_of(node, key, id, &want);
    }
}

/// Ends the wait of one process's allocation, under the conditions of [`check_alloc_wait`].
fn check_wait_of(node: &mut NodeState, key: &Key, id: ProcessId, want: &PendingAlloc) {
    let now = node.clock.now;
    let late = want.resumed_at.is_some_and(|resumed_at| now.saturating_sub(resumed_at) > TRY_MS);
    let resumed_at = want.resumed_at.is_some();
    let policy = node.registry.containers.get(key).map(|container| &container.policy);
    let limit_ms = policy.map_or(0, |policy| policy.on_oom_timeout_ms).saturating_add(OVERTIME_MS);
    let overdue = !resumed_at && now.saturating_sub(want.since) > limit_ms;
    if late || overdue {
        send_alloc_grant(node, id, want.ticket, false);
        alloc_wait_ended(node, id, want.ticket, false);
    } else if let Err(why) = fits_ever(node, key, &want.need)
        && !resumed_at
    {
        end_alloc_wait(node, id);
        refuse_alloc_wait(node, id, want.ticket, want.need.bytes, &why);
    }
}

fn refuse_alloc_wait(
    node: &mut NodeState,
    id: ProcessId,
    ticket: u64,
    bytes: u64,
    why: &OomWaitRefusal,
) {
    send_alloc_grant(node, id, ticket, false);
    let Some(key) = node.registry.processes.get(&id).map(|p| p.key.clone()) else { return };
    let text = format!("an allocation of {} fails: {why}", size(bytes));
    publish_alloc_wait(node, &key, Reason::NoRoomEver, text, bytes);
}

fn send_alloc_grant(node: &mut NodeState, id: ProcessId, ticket: u64, granted: bool) {
    node.output.effects.push(Effect::Send(id, ControllerMessage::AllocGrant { ticket, granted }));
}

fn publish_alloc_wait(node: &mut NodeState, key: &Key, reason: Reason, text: String, bytes: u64) {
    let event = NodeEvent::new(EventKind::Allocation, text);
    node.publish(key, event.because(reason).of_bytes(bytes));
}
