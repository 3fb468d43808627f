//! What to tell the processes of a container next, from where they are and where
//! they shall be. No memory of earlier steps is needed, so a controller that comes
//! back in the middle goes on from what it observes.
//!
//! ```text
//! out:   close all ──> lock all ──> one by one: park, then checkpoint (one of them, or both)
//! home:  restore one by one (with a grant) ──> unlock, open each as soon as it can
//! ```

use affinode_proto::wire::{Phase, message::Action};

use super::ProcessId;

/// One process as the plan sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPosition {
    /// Which.
    pub process: ProcessId,
    /// Where it is.
    pub phase: Phase,
    /// Whether an order is in progress, or nobody can be told.
    pub occupied: bool,
    /// What takes its memory off the device.
    pub moves: OffloadMethod,
}

/// What takes the memory of a process off the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadMethod {
    /// The driver's checkpoint.
    DriverCheckpoint,
    /// The agent's copy.
    Copy,
    /// The agent's copy, then the driver's checkpoint.
    CopyAndCheckpoint,
}

/// A step that takes memory off the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadStep {
    /// The agent's copy.
    CopyOut,
    /// The driver's checkpoint.
    Checkpoint,
}

/// The next thing on the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadPlan {
    /// Orders to send, all at once.
    Send(Vec<(ProcessId, Action)>),
    /// Every process is locked (or off): survey, then this step with this one.
    Run(ProcessId, OffloadStep),
    /// Something is in progress.
    Wait,
    /// All are away.
    Done,
}

/// The next things on the way home.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RestorePlan {
    /// Orders to send now.
    pub send: Vec<(ProcessId, Action)>,
    /// The process to restore next, once there is a grant.
    pub restore: Option<ProcessId>,
    /// Every process is open, and nothing is in progress.
    pub done: bool,
}

/// Deadlines that are part of orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderDeadlines {
    /// For calls in progress at a close.
    pub close_ms: u32,
    /// For the driver's lock.
    pub lock_ms: u32,
}

/// Plans the way out.
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

/// Plans the way home. Nobody is let go while another is still away: its calls could
/// take the VRAM that was promised to the other. `lost`: the driver cannot bring
/// some of them back, so the others are let go.
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
    // One restore at a time, last out first in, as the driver's own tools do it.
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
    fn out_goes_step_by_step_with_all() {
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
    fn memory_that_can_be_copied_is_copied_first() {
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
        // Whoever is parked for good and wanted away now goes on from there.
        assert_eq!(
            moving(OffloadMethod::DriverCheckpoint, Phase::CopiedOut),
            take(OffloadStep::Checkpoint)
        );
    }

    #[test]
    fn whoever_is_parked_comes_home_as_whoever_is_away() {
        let plan = plan_restore(&at(&[Phase::CopiedOut, Phase::Closed]), false);
        assert_eq!((plan.send.len(), plan.restore, plan.done), (0, Some(ProcessId(0)), false));
    }

    #[test]
    fn out_waits_for_whoever_is_occupied() {
        let mut positions = at(&[Phase::Open, Phase::Open]);
        positions[1].occupied = true;
        assert_eq!(plan_offload(&positions, D), OffloadPlan::Wait);
    }

    #[test]
    fn home_restores_the_last_first_and_lets_nobody_go_before() {
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
    fn home_frees_each_as_soon_as_it_can() {
        let plan = plan_restore(&at(&[Phase::Locked, Phase::Closed, Phase::Open]), false);
        assert_eq!(plan.send, [(ProcessId(0), Action::Unlock), (ProcessId(1), Action::Open)]);
        assert!(!plan.done);
        assert!(plan_restore(&at(&[Phase::Open]), false).done);
    }

    #[test]
    fn home_restores_one_at_a_time() {
        let mut positions = at(&[Phase::Checkpointed, Phase::Checkpointed]);
        positions[1].occupied = true;
        assert_eq!(plan_restore(&positions, false).restore, None);
    }
}
