//! Moves the content of containers that are offloaded for long from the host pool to disk, one
//! container of the node at a time (`policy.disk_after`). At the restore, the library reads the
//! content back itself.
//!
//! A step also begins earlier if host memory is full, so that a waiter for VRAM can get no turn
//! ([`begin_for_waiter`]). Content of a container that waits for VRAM itself then moves too.
//!
//! ```text
//! no step ──offloaded for `disk_after`: StoreOnDisk──> Ordered ──each process has begun──> Storing
//!    ^                                                    │                                  │
//!    ├──a process has not begun within 10 s: failed───────┤                                  │
//!    ├──a process reports a failure, or 1 h has passed: failed───────────────────────────────┤
//!    ├──a restore, an exit, a lost connection: neither────┴──────────────────────────────────┤
//!    └──each process has ended: stored───────────────────────────────────────────────────────┘
//! ```
//!
//! The counters of a process show whether it stores content, and how much of its content is on disk
//! ([`Process::disk_bytes`]). The process writes them itself, so each step has a maximum duration, and
//! a container is not chosen again at once. A failed step pauses the container. Two failed steps in a
//! row pause the node, because then the disk is probably full or broken.

use affinode_proto::{
    event::EventKind,
    state::State,
    wire::{Capabilities, ProcessFlags, copier::CHUNK_BYTES},
};

use super::{
    Effect, Key, Millis, ProcessId, container::Container, event::NodeEvent, node_state::NodeState,
    prewake, process::Process, texts::size,
};

/// Time within which each process begins to store its content.
const MAX_BEGIN_MS: Millis = 10_000;
/// Maximum duration of a step. A process could otherwise keep the disk from the other containers.
const MAX_STEP_MS: Millis = 3_600_000;
/// Time before an expected restore in which no step begins, because its content would be read back
/// soon.
const BEFORE_PREWAKE_MS: Millis = 600_000;
/// Pause of a container after its step failed.
const CONTAINER_PAUSE_MS: Millis = 3_600_000;
/// Pause of the node after `MAX_FAILED` steps in a row failed.
const NODE_PAUSE_MS: Millis = 600_000;
/// Number of failed steps in a row after which the node pauses.
const MAX_FAILED: u32 = 2;
/// Minimum pause of a container after its content was stored. Its next offload counts for
/// `disk_after` anyway, so this limits only a process whose counters are false. A waiter that needs
/// the memory waits no longer than this.
const MIN_PAUSE_MS: Millis = 5_000;

/// The disk step in progress, and the results of the earlier ones.
#[derive(Debug, Default)]
pub(super) struct DiskSteps {
    /// `None`: no content is being moved to disk.
    current: Option<DiskStep>,
    failed_in_a_row: u32,
    /// Earliest time of the node's next step.
    not_before: Millis,
    /// When content last moved to disk.
    moved_at: Option<Millis>,
}

/// A move of one container's content to disk.
#[derive(Debug)]
struct DiskStep {
    key: Key,
    /// When the processes were ordered to store their content.
    since: Millis,
    /// The processes that store content.
    processes: Vec<ProcessId>,
    cause: StepCause,
    state: StepState,
}

/// Why content moves to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepCause {
    /// The container has been offloaded for `policy.disk_after`. Its restore ends the step.
    OffloadedForLong,
    /// A waiter needs the host memory. The container may wait for VRAM too: only its turn ends the
    /// step.
    NeededByWaiter,
}

#[derive(Debug)]
enum StepState {
    /// At least one process has not begun.
    Ordered {
        /// The processes that have not begun. `true`: the counters at the order showed the failure
        /// of an earlier step, so that flag shows nothing until it is cleared.
        waiting: Vec<(ProcessId, bool)>,
    },
    /// Each process has begun.
    Storing,
}

/// Result of a disk step that is over.
#[derive(Debug)]
enum StepResult {
    /// All content is on disk.
    Stored,
    /// The step failed, with a description.
    Failed(String),
    /// The content is needed again, or a process has gone. This is no failure.
    Ended,
}

/// Advances the disk step in progress, and begins the next one if there is none. Returns whether
/// content of a container has moved to disk.
pub(super) fn update(node: &mut NodeState) -> bool {
    let mut has_moved = false;
    if let Some(mut step) = node.disk.current.take() {
        match advance(node, &mut step) {
            None => node.disk.current = Some(step),
            Some(result) => {
                has_moved = matches!(result, StepResult::Stored);
                finish(node, step, result);
            }
        }
    }
    if may_begin(node) {
        let due = longest_offloaded(node);
        node.disk.current = due.map(|key| begin(node, key, StepCause::OffloadedForLong));
    }
    has_moved
}

/// Whether a step may begin now.
pub(super) fn may_begin(node: &NodeState) -> bool {
    node.settings.disk && node.disk.current.is_none() && node.clock.now >= node.disk.not_before
}

/// Whether host memory was found short after content last moved to disk. An earlier shortage does not
/// show whether more content has to move. `short_at`: when host memory was found short.
pub(super) fn is_short_since_last_move(node: &NodeState, short_at: Millis) -> bool {
    node.disk.moved_at.is_none_or(|moved_at| short_at > moved_at)
}

/// Begins a step of a container because a waiter needs its host memory. The caller has checked
/// [`may_begin`] and [`may_move_for_waiter`].
pub(super) fn begin_for_waiter(node: &mut NodeState, key: Key) {
    let step = begin(node, key, StepCause::NeededByWaiter);
    node.disk.current = Some(step);
}

/// Whether the content of a container may move to disk because a waiter needs the host memory. The
/// container may wait for VRAM itself, but VRAM must not be promised to it.
pub(super) fn may_move_for_waiter(node: &NodeState, key: &Key) -> bool {
    let permits = |c: &Container| {
        c.policy.disk_after_ms > 0
            && node.clock.now >= c.offload_failures.disk_for_waiter_not_before
            && is_away(node, key, c)
    };
    node.registry.containers.get(key).is_some_and(permits)
        && node.registry.processes.of(key).all(|(_, process)| may_store_while_called(process))
        && node.registry.processes.of(key).any(|(_, process)| lacks_disk(process))
}

/// Content of a container that is not on disk, in bytes.
pub(super) fn movable_bytes(node: &NodeState, key: &Key) -> u64 {
    let in_memory = |p: &Process| p.content_bytes().saturating_sub(p.disk_bytes());
    let processes = node.registry.processes.of(key);
    processes.fold(0, |sum, (_, process)| sum.saturating_add(in_memory(process)))
}

/// Whether the container rests offloaded, or waits for VRAM that is not promised to it yet.
fn is_away(node: &NodeState, key: &Key, container: &Container) -> bool {
    let waits = container.shown.state == State::Queued;
    container.rests_offloaded() || (waits && !node.admission.grants.contains_key(key))
}

/// Returns the container whose content is to move to disk next. Containers without a step so far
/// come first, and among them the one that has been offloaded longest. So a container whose counters
/// are false takes no turn of another.
fn longest_offloaded(node: &NodeState) -> Option<Key> {
    let due = node.registry.containers.iter().filter(|(key, c)| is_due(node, key, c));
    let turn = |c: &Container| (c.offload_failures.disk_not_before, c.shown.since);
    let first = due.min_by_key(|(key, c)| (turn(c), (*key).clone()));
    first.map(|(key, _)| key.clone())
}

fn is_due(node: &NodeState, key: &Key, container: &Container) -> bool {
    let now = node.clock.now;
    let after_ms = container.policy.disk_after_ms;
    let is_resting = after_ms > 0
        && container.rests_offloaded()
        && now.saturating_sub(container.shown.since) >= after_ms
        && now >= container.offload_failures.disk_not_before
        && container.wake_began.is_none()
        && prewake::prewake_at(node, key).is_none_or(|at| at > now + BEFORE_PREWAKE_MS)
        && !node.admission.queue.contains(key);
    is_resting
        && node.registry.processes.of(key).all(|(_, process)| may_store(process))
        && node.registry.processes.of(key).any(|(_, process)| lacks_disk(process))
}

/// Whether a process rests, and its content is in the host pool or it has none.
fn may_store(process: &Process) -> bool {
    let waiters = process.activity.counters.as_ref().map_or(0, |counters| counters.waiters);
    waiters == 0 && may_store_while_called(process)
}

/// As [`may_store`], but calls of the process may wait for its restore.
fn may_store_while_called(process: &Process) -> bool {
    let Some(counters) = &process.activity.counters else { return false };
    let rests = process.agent.connected
        && process.agent.phase.is_offloaded()
        && process.pending.is_none()
        && process.activity.counter_error.is_none()
        && !process.is_partly_out();
    let is_in_pool = process.can(Capabilities::STORES_ON_DISK)
        && process.host_pool.was_used
        && process.uses_host_pool()
        && !counters.notes.intersects(ProcessFlags::HOST_POOL_LOST);
    rests && (is_in_pool || process.content_bytes() == 0)
}

/// Whether content of the process is not on disk.
fn lacks_disk(process: &Process) -> bool {
    process.disk_bytes() < process.content_bytes() || shows(process, ProcessFlags::DISK_FAILED)
}

fn shows(process: &Process, flags: ProcessFlags) -> bool {
    process.activity.counters.as_ref().is_some_and(|counters| counters.notes.intersects(flags))
}

/// Orders the processes of a container to store the content that is not on disk.
fn begin(node: &mut NodeState, key: Key, cause: StepCause) -> DiskStep {
    let lacking = node.registry.processes.of(&key).filter(|(_, process)| lacks_disk(process));
    let mut waiting = Vec::new();
    for (process, data) in lacking {
        // The content has the same offsets in the disk file as in memory, and zeros have their place.
        let copied_bytes = data.memory.swap.copied_out_bytes.min(data.offloaded_vram_bytes());
        let bytes = copied_bytes.next_multiple_of(CHUNK_BYTES);
        node.output.effects.push(Effect::StoreOnDisk { process, bytes });
        waiting.push((process, shows(data, ProcessFlags::DISK_FAILED)));
    }
    let processes = waiting.iter().map(|(id, _)| *id).collect();
    let state = StepState::Ordered { waiting };
    DiskStep { key, since: node.clock.now, processes, cause, state }
}

/// Returns the result of a step. `None`: the step is not over.
fn advance(node: &NodeState, step: &mut DiskStep) -> Option<StepResult> {
    let container = node.registry.containers.get(&step.key);
    let processes: Option<Vec<&Process>> =
        step.processes.iter().map(|id| node.registry.processes.get(id)).collect();
    let rests = |process: &&Process| process.agent.connected && process.agent.phase.is_offloaded();
    let (Some(container), Some(processes)) = (container, processes) else {
        return Some(StepResult::Ended);
    };
    let stays = match step.cause {
        StepCause::OffloadedForLong => !container.goal.is_resident(),
        StepCause::NeededByWaiter => is_away(node, &step.key, container),
    };
    if !stays || !processes.iter().all(rests) {
        return Some(StepResult::Ended);
    }
    let age_ms = node.clock.now.saturating_sub(step.since);
    if let StepState::Ordered { waiting } = &mut step.state {
        let get = |id: &ProcessId| node.registry.processes.get(id);
        waiting.retain(|(id, had_failed)| !get(id).is_some_and(|p| has_begun(p, *had_failed)));
        match waiting.first().and_then(|(id, _)| get(id)) {
            Some(process) if age_ms >= MAX_BEGIN_MS => {
                let pid = process.identity.pid;
                return Some(StepResult::Failed(format!("process {pid} has not begun in time")));
            }
            Some(_) => return None,
            None => step.state = StepState::Storing,
        }
    }
    if processes.iter().any(|process| shows(process, ProcessFlags::STORING_ON_DISK)) {
        let late = || StepResult::Failed("it has not ended within an hour".into());
        return (age_ms >= MAX_STEP_MS).then(late);
    }
    match processes.iter().find(|process| lacks_disk(process)) {
        None => Some(StepResult::Stored),
        Some(process) => {
            let pid = process.identity.pid;
            Some(StepResult::Failed(format!("process {pid} could not store all content")))
        }
    }
}

fn has_begun(process: &Process, had_failed: bool) -> bool {
    let has_failed = shows(process, ProcessFlags::DISK_FAILED);
    let chunks = process.activity.counters.as_ref().map_or(0, |counters| counters.disk_chunks);
    let differs = if had_failed { !has_failed } else { has_failed || chunks > 0 };
    differs || shows(process, ProcessFlags::STORING_ON_DISK)
}

/// Records and publishes the result of a step.
fn finish(node: &mut NodeState, step: DiskStep, result: StepResult) {
    let now = node.clock.now;
    // From now on the disk files of these processes do not grow.
    let stop = step.processes.iter().map(|id| Effect::StopDisk(*id));
    node.output.effects.extend(stop);
    let event = match &result {
        StepResult::Ended => return,
        StepResult::Stored => {
            (node.disk.failed_in_a_row, node.disk.moved_at) = (0, Some(now));
            stored_event(node, &step)
        }
        StepResult::Failed(why) => {
            node.disk.failed_in_a_row += 1;
            if node.disk.failed_in_a_row >= MAX_FAILED {
                node.disk.not_before = now + NODE_PAUSE_MS;
            }
            NodeEvent::new(EventKind::DiskFailed, failed_text(why))
        }
    };
    if let Some(container) = node.registry.containers.get_mut(&step.key) {
        let after_ms = container.policy.disk_after_ms.max(MIN_PAUSE_MS);
        let (pause_ms, for_waiter_ms) = match result {
            StepResult::Failed(_) => (CONTAINER_PAUSE_MS, CONTAINER_PAUSE_MS),
            _ => (after_ms, MIN_PAUSE_MS),
        };
        let failures = &mut container.offload_failures;
        failures.disk_not_before = now + pause_ms;
        failures.disk_for_waiter_not_before = now + for_waiter_ms;
    }
    node.publish(&step.key, event);
}

fn stored_event(node: &NodeState, step: &DiskStep) -> NodeEvent {
    let stored = step.processes.iter().filter_map(|id| node.registry.processes.get(id));
    let bytes = stored.fold(0_u64, |sum, process| sum.saturating_add(process.disk_bytes()));
    let seconds = node.clock.now.saturating_sub(step.since) as f64 / 1_000.0;
    let text = format!("{} moved from host memory to disk in {seconds:.1} s", size(bytes));
    NodeEvent::new(EventKind::StoredOnDisk, text).of_bytes(bytes)
}

fn failed_text(why: &str) -> String {
    format!(
        "the content in host memory was not moved to disk: {why}; see the messages of the host pool \
         in the controller's log, and check memory.disk_folder and memory.disk_max_mib"
    )
}
