//! Plans the next orders for the processes of a container, from their phases and the container's
//! goal. The plan uses no record of earlier steps, so a controller that restarts during a move
//! continues from the phases that the agents report.
//!
//! ```text
//! offload: close all ──> lock those that need it ──> copy out, all at once ──> checkpoint, one by one
//! restore: copy in, all at once; restore one by one (with a grant) ──> unlock, open each
//! ```

use affinode_proto::wire::{Phase, message::Action};

use super::ProcessId;

/// Phase and offload method of one process. The next orders of its container are planned from
/// these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPosition {
    /// Id of the process at the controller.
    pub process: ProcessId,
    /// The phase that the agent reported last.
    pub phase: Phase,
    /// Whether the process can get no order now, because an order is in progress or its agent is
    /// not connected.
    pub occupied: bool,
    /// Whether an order in progress may move the process's memory off the GPU.
    pub may_leave: bool,
    /// The method by which the process's memory leaves the GPU.
    pub moves: OffloadMethod,
    /// Whether the library can wait for the GPU's work before it copies. Otherwise the driver's
    /// lock waits for the work.
    pub awaits_work: bool,
    /// Whether a copier copies the process's memory, because its host memory was prefaulted. While
    /// it copies, no other process of the container is copied.
    pub is_prefaulted: bool,
}

impl ProcessPosition {
    /// Whether the driver must lock the process before its memory leaves the GPU.
    fn needs_lock(&self) -> bool {
        self.moves == OffloadMethod::DriverCheckpoint || !self.awaits_work
    }

    /// Whether the next step of the process is a copy out.
    fn is_ready_to_copy(&self) -> bool {
        let copies = self.moves != OffloadMethod::DriverCheckpoint;
        copies && (self.phase == Phase::Locked || self.phase == Phase::Closed && self.awaits_work)
    }
}

/// Method by which the memory of a process leaves the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadMethod {
    /// The driver's checkpoint moves all memory of the process.
    DriverCheckpoint,
    /// The agent copies the allocations out. The CUDA context stays on the GPU.
    Copy,
    /// The agent copies the allocations out, then the driver checkpoints the context.
    CopyAndCheckpoint,
}

/// A step of an offload that frees VRAM of a process.
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
    /// The gates of all processes are closed. Read host memory and GPUs again (the survey), then
    /// run this step for all these processes at once.
    Run(OffloadStep, Vec<ProcessId>),
    /// Send nothing, because an order is in progress or a process is between two phases.
    Wait,
    /// The offload is complete: every process is offloaded.
    Done,
}

/// The next orders of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RestorePlan {
    /// Orders to send now.
    pub send: Vec<(ProcessId, Action)>,
    /// The processes to restore at once, as soon as the container has a grant of VRAM.
    pub restore: Vec<ProcessId>,
    /// Whether the restore is complete: the gate of every process is open and no order is in
    /// progress.
    pub done: bool,
}

/// The time limits that orders to close gates and to lock processes contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderDeadlines {
    /// Time for calls in progress to end when the gate closes, in milliseconds.
    pub close_ms: u32,
    /// Time for GPU work in progress to end when the driver locks the process, in milliseconds.
    pub lock_ms: u32,
}

/// Plans the next step of a container's offload from the phases of its processes.
#[must_use]
pub fn plan_offload(positions: &[ProcessPosition], deadlines: OrderDeadlines) -> OffloadPlan {
    if positions.iter().any(|p| p.occupied) {
        return OffloadPlan::Wait;
    }
    let at = |phase: Phase| positions.iter().filter(move |p| p.phase == phase);
    let close = Action::Close { deadline_ms: deadlines.close_ms };
    let close: Vec<_> = at(Phase::Open).map(|p| (p.process, close)).collect();
    if !close.is_empty() {
        return OffloadPlan::Send(close);
    }
    let lock = Action::Lock { timeout_ms: deadlines.lock_ms };
    let lock: Vec<_> =
        at(Phase::Closed).filter(|p| p.needs_lock()).map(|p| (p.process, lock)).collect();
    if !lock.is_empty() {
        return OffloadPlan::Send(lock);
    }
    let mut copy: Vec<_> = positions.iter().filter(|p| p.is_ready_to_copy()).collect();
    if copy.iter().any(|p| p.is_prefaulted) {
        copy.truncate(1);
    }
    if !copy.is_empty() {
        let copy = copy.iter().map(|p| p.process).collect();
        return OffloadPlan::Run(OffloadStep::CopyOut, copy);
    }
    let is_out = |p: &ProcessPosition| {
        p.phase == Phase::Checkpointed
            || (p.phase == Phase::CopiedOut && p.moves == OffloadMethod::Copy)
    };
    match positions.iter().find(|p| !is_out(p)) {
        None => OffloadPlan::Done,
        Some(p) if matches!(p.phase, Phase::Locked | Phase::CopiedOut) => {
            OffloadPlan::Run(OffloadStep::Checkpoint, vec![p.process])
        }
        Some(_) => OffloadPlan::Wait,
    }
}

/// Plans the next steps of a restore. No gate is opened while any process of the container is
/// offloaded or may become offloaded. Calls behind an open gate could take the VRAM that such a
/// process needs. `lost`: the driver cannot restore some of the processes, so the gates of the
/// other processes are opened anyway.
#[must_use]
pub fn plan_restore(positions: &[ProcessPosition], lost: bool) -> RestorePlan {
    let mut plan = RestorePlan::default();
    let let_go = lost || positions.iter().all(|p| !p.phase.is_offloaded() && !p.may_leave);
    for position in positions.iter().filter(|p| !p.occupied && let_go) {
        match position.phase {
            Phase::Locked => plan.send.push((position.process, Action::Unlock)),
            Phase::Closed => plan.send.push((position.process, Action::Open)),
            _ => {}
        }
    }
    // All copies in run at the same time. The driver restores one process at a time, in reverse
    // order of the offload, as NVIDIA's own tools do.
    let restoring = positions.iter().any(|p| p.occupied && p.phase.is_offloaded());
    if !restoring {
        let free = |phase| {
            positions
                .iter()
                .rev()
                .filter(move |p| p.phase == phase && !p.occupied)
                .map(|p| p.process)
        };
        plan.restore = free(Phase::CopiedOut).collect();
        if plan.restore.is_empty() {
            plan.restore = free(Phase::Checkpointed).take(1).collect();
        }
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
                may_leave: false,
                moves: OffloadMethod::DriverCheckpoint,
                awaits_work: false,
                is_prefaulted: false,
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
            OffloadPlan::Run(OffloadStep::Checkpoint, vec![ProcessId(1)])
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
        let take = |step| OffloadPlan::Run(step, vec![ProcessId(1)]);
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
        // The process is copied out. When its context is evicted too, its next step must be the
        // checkpoint.
        assert_eq!(
            moving(OffloadMethod::DriverCheckpoint, Phase::CopiedOut),
            take(OffloadStep::Checkpoint)
        );
    }

    #[test]
    fn restore_includes_copied_out_process() {
        let plan = plan_restore(&at(&[Phase::CopiedOut, Phase::Closed]), false);
        assert_eq!((plan.send.len(), plan.restore, plan.done), (0, vec![ProcessId(0)], false));
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
        assert_eq!((plan.send.len(), plan.restore, plan.done), (0, vec![ProcessId(1)], false));
        assert_eq!(plan_restore(&positions, true).send.len(), 2);
    }

    #[test]
    fn restore_opens_none_beside_a_copy_out() {
        let mut positions = at(&[Phase::Closed, Phase::Closed]);
        (positions[0].occupied, positions[0].may_leave) = (true, true);
        assert_eq!(plan_restore(&positions, false).send, []);
        positions[0].may_leave = false;
        assert_eq!(plan_restore(&positions, false).send, [(ProcessId(1), Action::Open)]);
    }

    #[test]
    fn restore_unlocks_each_as_soon_as_possible() {
        let plan = plan_restore(&at(&[Phase::Locked, Phase::Closed, Phase::Open]), false);
        assert_eq!(plan.send, [(ProcessId(0), Action::Unlock), (ProcessId(1), Action::Open)]);
        assert!(!plan.done);
        assert!(plan_restore(&at(&[Phase::Open]), false).done);
    }

    #[test]
    fn driver_restores_one_process_at_a_time() {
        let mut positions = at(&[Phase::Checkpointed, Phase::Checkpointed]);
        assert_eq!(plan_restore(&positions, false).restore, [ProcessId(1)]);
        positions[1].occupied = true;
        assert_eq!(plan_restore(&positions, false).restore, []);
    }

    #[test]
    fn copies_of_a_container_run_at_once() {
        let copying = |phases: &[Phase]| {
            let mut positions = at(phases);
            for position in &mut positions {
                (position.moves, position.awaits_work) = (OffloadMethod::Copy, true);
            }
            positions
        };
        let out = |ids: &[u64]| {
            OffloadPlan::Run(OffloadStep::CopyOut, ids.iter().map(|n| ProcessId(*n)).collect())
        };
        let mut positions = copying(&[Phase::Closed, Phase::CopiedOut, Phase::Closed]);
        assert_eq!(plan_offload(&positions, D), out(&[0, 2]));
        positions[0].is_prefaulted = true;
        assert_eq!(plan_offload(&positions, D), out(&[0]), "a copier copies one process at a time");
        let away = copying(&[Phase::CopiedOut, Phase::Checkpointed, Phase::CopiedOut]);
        assert_eq!(plan_restore(&away, false).restore, [ProcessId(2), ProcessId(0)]);
        let mut half = copying(&[Phase::CopiedOut, Phase::CopiedOut]);
        half[1].occupied = true;
        assert_eq!(plan_restore(&half, false).restore, [], "those under way come first");
    }

    /// Two processes are about to be copied out. Only the library of the first one is of an earlier
    /// release, which copies only after the driver's lock. Only the first process must receive the
    /// order to lock.
    #[test]
    fn lock_is_ordered_only_where_it_is_needed() {
        let mut positions = at(&[Phase::Closed, Phase::Closed]);
        positions[0].moves = OffloadMethod::Copy;
        positions[1].moves = OffloadMethod::CopyAndCheckpoint;
        positions[1].awaits_work = true;
        let lock = Action::Lock { timeout_ms: 2 };
        assert_eq!(plan_offload(&positions, D), OffloadPlan::Send(vec![(ProcessId(0), lock)]));
    }
}
