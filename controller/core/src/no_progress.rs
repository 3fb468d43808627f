//! Finds containers that hold a GPU but make no progress, and ends them if their policy says so.
//! Examples are a rank of a job whose peers are gone, a kernel that never ends, and a call that
//! waits for VRAM that no offload can free.
//!
//! ```text
//! last progress: a CUDA call began, or a process registered or was restored
//!  │  time passes without progress (`no_progress_timeout`)
//!  ├── and a call is in progress, or work runs on the GPU ──> event, warning; with on_no_progress =
//!  │                                                          "end" also SIGTERM, after 5 s SIGKILL
//!  ├── and a call waits for VRAM that no offload can free, or that a container holds whose offload
//!  │   lacks host memory ──> event, warning
//!  └── otherwise: the container is idle, offloaded or waits
//! ```
//!
//! Polls are no progress, because a rank whose peers are gone polls for ever. A waiting container is
//! never ended: it holds no memory of the GPU, and VRAM can become free at any time, for example
//! when a program outside of Affinode ends. A container is not judged while the counters of one of
//! its processes cannot be read, because its progress is then unknown.

use affinode_proto::{event::EventKind, reason::Reason, wire::Phase};

use super::{
    Effect, Key, Millis, ProcessId,
    event::NodeEvent,
    host_relief, idle, needs,
    node_state::NodeState,
    policy::NoProgressAction,
    process::{Process, Termination, TerminationCause},
    texts::size,
};

/// Why a container is considered to make no progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgressStop {
    /// A CUDA call of the process is in progress, and no other call has begun.
    CallInProgress {
        /// The process, in the PID namespace of the node.
        pid: u32,
    },
    /// Work that the process launched earlier still runs on a GPU.
    GpuWork {
        /// The process, in the PID namespace of the node.
        pid: u32,
        /// Share of the last sample period in which the work ran, in percent.
        percent: u32,
    },
    /// A call waits for VRAM, and a container that holds VRAM lacks host memory for its offload.
    NoHostMemory {
        /// VRAM that the container needs on the GPU, in bytes.
        needed_bytes: u64,
        /// Name of the container on the GPU.
        holder: String,
        /// The host memory that its offload lacked. Empty while the offload is tried again.
        detail: String,
    },
    /// A call waits for VRAM that no offload can free.
    NoRoom {
        /// VRAM that the container needs on the GPU, in bytes.
        needed_bytes: u64,
        /// Size of the GPU's VRAM, in bytes.
        total_bytes: u64,
        /// VRAM of the GPU that no offload can free, in bytes.
        unmovable_bytes: u64,
    },
}

impl ProgressStop {
    /// Whether the policy may end the container for this reason.
    #[must_use]
    pub fn permits_end(&self) -> bool {
        !matches!(self, ProgressStop::NoRoom { .. } | ProgressStop::NoHostMemory { .. })
    }

    /// Describes the evidence for users. `quiet_ms`: time since the last progress.
    #[must_use]
    pub fn text(&self, quiet_ms: Millis) -> String {
        let minutes = std::time::Duration::from_secs(quiet_ms / 60_000 * 60);
        let quiet = match quiet_ms {
            0..60_000 => format!("{} s", quiet_ms / 1000),
            _ => humantime::format_duration(minutes).to_string(),
        };
        let evidence = match self {
            ProgressStop::CallInProgress { pid } => {
                format!("a CUDA call of process {pid} is in progress, and no other call has begun")
            }
            ProgressStop::GpuWork { pid, percent } => format!(
                "work of process {pid} uses {percent} % of the GPU's time, and no CUDA call has begun"
            ),
            ProgressStop::NoHostMemory { needed_bytes, holder, detail } => {
                let colon = if detail.is_empty() { "" } else { ": " };
                format!(
                    "a CUDA call waits for {} of VRAM, but {holder} cannot be offloaded for lack of \
                     host memory{colon}{detail}",
                    size(*needed_bytes)
                )
            }
            ProgressStop::NoRoom { needed_bytes, total_bytes, unmovable_bytes } => format!(
                "a CUDA call waits for {} of VRAM, but no offload can free {} of the GPU's {}",
                size(*needed_bytes),
                size(*unmovable_bytes),
                size(*total_bytes)
            ),
        };
        format!("no progress for {quiet}: {evidence}")
    }
}

/// Time since the container last made progress. `None`: it is not registered.
pub(super) fn quiet_ms(node: &NodeState, key: &Key) -> Option<Millis> {
    let progress = node.registry.containers.get(key)?.usage.last_progress;
    let resident = node.registry.processes.of(key).map(|(_, p)| p.activity.resident_since).max();
    Some(node.clock.now.saturating_sub(progress.max(resident.unwrap_or(0))))
}

/// Determines whether the container makes progress. Publishes an event when it no longer does, and
/// ends its processes if its policy says so.
pub(super) fn check_progress(node: &mut NodeState, key: &Key) {
    let (Some(quiet_ms), stop) = (quiet_ms(node, key), find_stop(node, key)) else { return };
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    let ends = container.policy.on_no_progress == NoProgressAction::End;
    let was_reported = container.usage.no_progress.is_some();
    container.usage.no_progress.clone_from(&stop);
    let Some(stop) = stop else {
        if was_reported {
            withdraw(node, key);
        }
        return;
    };
    if !was_reported {
        let event = NodeEvent::new(EventKind::NoProgress, stop.text(quiet_ms));
        node.publish(key, event.because(Reason::NoProgress));
    }
    if ends && stop.permits_end() {
        let all: Vec<ProcessId> = node.registry.processes.of(key).map(|(id, _)| id).collect();
        all.into_iter().for_each(|id| end(node, id, &stop.text(quiet_ms)));
    } else {
        withdraw(node, key);
    }
}

/// Returns the evidence that the container makes no progress. `None`: it makes progress, is idle,
/// or has not been without progress for long enough.
fn find_stop(node: &NodeState, key: &Key) -> Option<ProgressStop> {
    let container = node.registry.containers.get(key)?;
    let now = node.clock.now;
    let timeout_ms = container.policy.no_progress_timeout_ms;
    if container.usage.busy_until().is_some_and(|until| now < until) {
        return None;
    }
    if let Some(since) = container.wake_began {
        let is_long = now.saturating_sub(since) >= timeout_ms;
        let why = || no_host_memory(node, key).or_else(|| no_room(node, key));
        return is_long.then(why).flatten();
    }
    if quiet_ms(node, key)? < timeout_ms || node.alloc_wait_of(key).is_some() {
        return None;
    }
    let is_known = |p: &Process| p.agent.connected && p.activity.counter_error.is_none();
    if !node.registry.processes.of(key).all(|(_, p)| is_known(p)) {
        return None;
    }
    let in_call = |(_, p): &(ProcessId, &Process)| {
        p.agent.phase == Phase::Open
            && p.activity.counters.as_ref().is_some_and(|counters| counters.inflight > 0)
    };
    if let Some((_, process)) = node.registry.processes.of(key).find(in_call) {
        return Some(ProgressStop::CallInProgress { pid: process.identity.pid });
    }
    let (pid, percent) = idle::working(node, key)?;
    Some(ProgressStop::GpuWork { pid, percent })
}

/// Returns a container that holds VRAM which `key` needs and whose offload lacks host memory.
fn no_host_memory(node: &NodeState, key: &Key) -> Option<ProgressStop> {
    let needed = needs::container_needs(node, key);
    let uuids = needed.iter().map(|need| need.uuid.clone()).collect();
    let (_, holder) = host_relief::short_holders(node, key, &uuids).next()?;
    let (reason, detail) = &holder.shown.reason;
    Some(ProgressStop::NoHostMemory {
        needed_bytes: needed.iter().map(|need| need.bytes).sum(),
        holder: holder.display_name(),
        detail: if reason.is_host_shortage() { detail.clone() } else { String::new() },
    })
}

/// Returns the first GPU on which no offload can free the VRAM that the container needs.
fn no_room(node: &NodeState, key: &Key) -> Option<ProgressStop> {
    let needed = needs::container_needs(node, key);
    needed.into_iter().find_map(|need| {
        let gpu = node.gpus.samples.iter().find(|gpu| gpu.uuid == need.uuid)?;
        let unmovable_bytes = needs::unmovable_bytes(node, &need.uuid);
        (need.bytes > gpu.total_bytes.saturating_sub(unmovable_bytes)).then_some(
            ProgressStop::NoRoom {
                needed_bytes: need.bytes,
                total_bytes: gpu.total_bytes,
                unmovable_bytes,
            },
        )
    })
}

/// Orders a process to end, and later kills it if it has not ended in time.
fn end(node: &mut NodeState, id: ProcessId, evidence: &str) {
    let now = node.clock.now;
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    let by_force = match &mut process.termination {
        None => {
            let cause = TerminationCause::NoProgress;
            process.termination = Some(Termination { cause, since: now, by_force: false });
            false
        }
        Some(ending) if ending.cause == TerminationCause::NoProgress && ending.is_due(now) => {
            ending.by_force = true;
            true
        }
        Some(_) => return,
    };
    let (key, identity) = (process.key.clone(), process.identity.clone());
    if !by_force {
        let text = format!(
            "process {} ({}) is ended (on_no_progress = end): {evidence}",
            identity.pid, identity.command
        );
        node.publish(&key, NodeEvent::new(EventKind::Ended, text).because(Reason::NoProgress));
    }
    node.output.effects.push(Effect::End { identity, by_force });
}

/// Withdraws the orders to end processes of a container that makes progress again.
fn withdraw(node: &mut NodeState, key: &Key) {
    let of_key: Vec<ProcessId> = node.registry.processes.of(key).map(|(id, _)| id).collect();
    for id in of_key {
        if let Some(process) = node.registry.processes.get_mut(&id)
            && process.termination.as_ref().is_some_and(|t| t.cause == TerminationCause::NoProgress)
        {
            process.termination = None;
        }
    }
}
