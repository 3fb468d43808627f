//! Plans the next orders for the processes of a container, from their phases and the goal. The plan
//! uses no record of earlier steps, so a controller that restarts during a move continues from the
//! phases that it observes.
//!
//! ```text
//! offload: close all ──> lock all ──> one by one: copy out, then checkpoint (one of them, or both)
//! restore: restore one by one (with a grant) ──> unlock, open each as soon as it can
//! ```

use affinode_proto::wire::{Phase, message::Action};

use super::ProcessId;

/// Phase and offload method of one process, from which the plan is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPosition {
    /// The process that the plan is about.
    pub process: ProcessId,
    /// The phase that the agent reported last.
    pub phase: Phase,
    /// Whether the process gets no order now: an order is in progress, or its agent is not
    /// connected.
    pub occupied: bool,
    /// The method by which its memory leaves the GPU.
    pub moves: OffloadMethod,
}

/// Method by which the memory of a process leaves the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadMethod {
    /// The driver's checkpoint takes everything.
    DriverCheckpoint,
    /// The agent copies the allocations out; the context stays.
    Copy,
    /// The agent copies the allocations out, then the driver checkpoints the context.
    CopyAndCheckpoint,
}

/// A step of an offload that frees VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadStep {
    /// The agent copies the process's allocations to host memory.
    CopyOut,
    /// The driver checkpoints the process.
    Checkpoint,
}

/// The next step of an offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadPlan {
    /// Orders to send, all at once.
    Send(Vec<(ProcessId, Action)>),
    /// Every process is locked or offloaded. Repeat the survey, then run this step for this
    /// process.
    Run(ProcessId, OffloadStep),
    /// An order is in progress, or a process is between two phases.
    Wait,
    /// Every process is offloaded.
    Done,
}

/// The next orders of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RestorePlan {
    /// Orders to send now.
    pub send: Vec<(ProcessId, Action)>,
    /// The process to restore next, when the container has a grant.
    pub restore: Option<ProcessId>,
    /// Whether every process is open and no order is in progress.
    pub done: bool,
}

/// Deadlines that close and lock orders carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderDeadlines {
    /// Time for calls in progress to end when the gate closes, in milliseconds.
    pub close_ms: u32,
    /// Time limit of the driver's lock, in milliseconds.
    pub lock_ms: u32,
}

/// Plans the next step of an offload.
#[must_use]
pub fn plan_offload(positions: &[ProcessPosition], deadlines: OrderDeadlines) -> OffloadPlan {
    if positions.iter().any(|p| p.occupied) {
        return OffloadPlan::Wait;
    }
    let at = |phase: Phase| positions.iter().filter(move |p| p.phase == phase).map(|p| p.process);
    let close: Vec<_> =
        at(Phase::Open).map(|p| (p, Action::Close { deadline_ms: deadlines.close_ms })).collect();
    if !close.is_empty() {
        return OffloadPlan::Send(close);
    }
    let lock: Vec<_> =
        at(Phase::Closed).map(|p| (p, Action::Lock { timeout_ms: deadlines.lock_ms })).collect();
    if !lock.is_empty() {
        return OffloadPlan::Send(lock);
    }
    let is_out = |p: &ProcessPosition| {
        p.phase == Phase::Checkpointed
            || (p.phase == Phase::CopiedOut && p.moves == OffloadMethod::Copy)
    };
    match positions.iter().find(|p| !is_out(p)) {
        None => OffloadPlan::Done,
        Some(p) if p.phase == Phase::Locked && p.moves != OffloadMethod::DriverCheckpoint => {
            OffloadPlan::Run(p.process, OffloadStep::CopyOut)
        }
        Some(p) if matches!(p.phase, Phase::Locked | Phase::CopiedOut) => {
            OffloadPlan::Run(p.process, OffloadStep::Checkpoint)
        }
        Some(_) => OffloadPlan::Wait,
    }
}

/// Plans the next steps of a restore. No process is opened while another is still offloaded,
/// because its calls could take the VRAM that was promised to the other. `lost`: the driver cannot
/// restore some of them, so the others are opened anyway.
#[must_use]
pub fn plan_restore(positions: &[ProcessPosition], lost: bool) -> RestorePlan {
    let mut plan = RestorePlan::default();
    let let_go = lost || positions.iter().all(|p| !p.phase.is_offloaded());
    for position in positions.iter().filter(|p| !p.occupied && let_go) {
        match position.phase {
            Phase::Locked => plan.send.push((position.process, Action::Unlock)),
            Phase::Closed => plan.send.push((position.process, Action::Open)),
            _ => {}
        }
    }
    // One restore at a time, in reverse order of the offload, as NVIDIA's own tools do it.
    let restoring = positions.iter().any(|p| p.occupied && p.phase.is_offloaded());
    if !restoring {
        plan.restore = positions
            .iter()
            .rev()
            .find(|p| p.phase.is_offloaded() && !p.occupied)
            .map(|p| p.process);
    }
    plan.done = positions.iter().all(|p| p.phase == Phase::Open && !p.occupied);
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: OrderDeadlines = OrderDeadlines { close_ms: 1, lock_ms: 2 };

    fn at(phases: &[Phase]) -> Vec<ProcessPosition> {
        (0..)
            .zip(phases)
            .map(|(n, phase)| ProcessPosition {
                process: ProcessId(n),
                phase: *phase,
                occupied: false,
                moves: OffloadMethod::DriverCheckpoint,
            })
            .collect()
    }

    #[test]
    fn offload_advances_all_processes_in_step() {
        let close = Action::Close { deadline_ms: 1 };
        assert_eq!(
            plan_offload(&at(&[Phase::Open, Phase::Closed]), D),
            OffloadPlan::Send(vec![(ProcessId(0), close)])
        );
        let lock = Action::Lock { timeout_ms: 2 };
        assert_eq!(
            plan_offload(&at(&[Phase::Locked, Phase::Closed]), D),
            OffloadPlan::Send(vec![(ProcessId(1), lock)])
        );
        assert_eq!(
            plan_offload(&at(&[Phase::Checkpointed, Phase::Locked, Phase::Locked]), D),
            OffloadPlan::Run(ProcessId(1), OffloadStep::Checkpoint)
        );
        assert_eq!(
            plan_offload(&at(&[Phase::Checkpointed, Phase::Checkpointed]), D),
            OffloadPlan::Done
        );
    }

    #[test]
    fn offload_copies_before_checkpoint() {
        let moving = |moves, phase| {
            let mut positions = at(&[Phase::Checkpointed, phase]);
            positions[1].moves = moves;
            plan_offload(&positions, D)
        };
        let take = |step| OffloadPlan::Run(ProcessId(1), step);
        assert_eq!(
            moving(OffloadMethod::DriverCheckpoint, Phase::Locked),
            take(OffloadStep::Checkpoint)
        );
        assert_eq!(moving(OffloadMethod::Copy, Phase::Locked), take(OffloadStep::CopyOut));
        assert_eq!(moving(OffloadMethod::Copy, Phase::CopiedOut), OffloadPlan::Done);
        assert_eq!(
            moving(OffloadMethod::CopyAndCheckpoint, Phase::Locked),
            take(OffloadStep::CopyOut)
        );
        assert_eq!(
            moving(OffloadMethod::CopyAndCheckpoint, Phase::CopiedOut),
            take(OffloadStep::Checkpoint)
        );
        assert_eq!(
            moving(OffloadMethod::CopyAndCheckpoint, Phase::Checkpointed),
            OffloadPlan::Done
        );
        // A copied-out process whose context is evicted now continues from there.
        assert_eq!(
            moving(OffloadMethod::DriverCheckpoint, Phase::CopiedOut),
            take(OffloadStep::Checkpoint)
        );
    }

    #[test]
    fn restore_includes_copied_out_process() {
        let plan = plan_restore(&at(&[Phase::CopiedOut, Phase::Closed]), false);
        assert_eq!((plan.send.len(), plan.restore, plan.done), (0, Some(ProcessId(0)), false));
    }

    #[test]
    fn offload_waits_for_occupied_process() {
        let mut positions = at(&[Phase::Open, Phase::Open]);
        positions[1].occupied = true;
        assert_eq!(plan_offload(&positions, D), OffloadPlan::Wait);
    }

    #[test]
    fn restore_opens_none_before_all_are_restored() {
        let positions = at(&[
            Phase::Checkpointed,
            Phase::Checkpointed,
            Phase::Locked,
            Phase::Closed,
            Phase::Open,
        ]);
        let plan = plan_restore(&positions, false);
        assert_eq!((plan.send.len(), plan.restore, plan.done), (0, Some(ProcessId(1)), false));
        assert_eq!(plan_restore(&positions, true).send.len(), 2);
    }

    #[test]
    fn restore_unlocks_each_as_soon_as_possible() {
        let plan = plan_restore(&at(&[Phase::Locked, Phase::Closed, Phase::Open]), false);
        assert_eq!(plan.send, [(ProcessId(0), Action::Unlock), (ProcessId(1), Action::Open)]);
        assert!(!plan.done);
        assert!(plan_restore(&at(&[Phase::Open]), false).done);
    }

    #[test]
    fn restore_is_one_process_at_a_time() {
        let mut positions = at(&[Phase::Checkpointed, Phase::Checkpointed]);
        positions[1].occupied = true;
        assert_eq!(plan_restore(&positions, false).restore, None);
    }
}
