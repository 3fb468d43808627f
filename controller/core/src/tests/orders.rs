//! Executes the core's effects in the simulated world: delivers orders to agents and stores
//! requests for readings.

use affinode_proto::wire::{
    Capabilities, Phase,
    message::{Action, AgentMessage, ControllerMessage, Outcome, PROOF_TTL_MS},
};

use super::super::{Input, ProcessId};
use super::agent::Refusal;
use super::world::{TOTAL, World};

impl World {
    /// Advances a process whose offload has begun until its gate is closed.
    pub(super) fn work_until_closed(&mut self, id: ProcessId) {
        while self.agents[&id].phase != Phase::Closed {
            self.tick();
            self.answer_question();
            self.work(id);
        }
    }

    /// Makes the agent handle its oldest message.
    pub(super) fn work(&mut self, id: ProcessId) {
        let used = [0, 1].map(|gpu| self.used_on(gpu));
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let (order, action, decided_ms) = match agent.inbox.pop_front() {
            Some(ControllerMessage::Order { order, action, decided_ms }) => {
                (order, action, decided_ms)
            }
            Some(ControllerMessage::Welcome { .. }) => {
                agent.welcomed = true;
                agent.held = agent.held_here;
                if let Some(asking) = &mut agent.asking {
                    asking.goes_ahead = false;
                }
                return self.ask(id);
            }
            Some(ControllerMessage::AllocGrant { ticket, granted }) if ticket == agent.tickets => {
                match &mut agent.asking {
                    Some(asking) if granted => asking.goes_ahead = true,
                    Some(_) => self.end_ask(id, false),
                    None => {}
                }
                return self.try_again(id);
            }
            _ => return,
        };
        let mut outcome = Outcome::Done;
        let late = action.is_restore()
            && decided_ms > 0
            && self.now.saturating_sub(decided_ms) > PROOF_TTL_MS;
        let was = agent.phase;
        let (fits, to) = match action {
            Action::Close { .. } => (was == Phase::Open, Phase::Closed),
            Action::Open => (was == Phase::Closed, Phase::Open),
            Action::Lock { .. } => (was == Phase::Closed, Phase::Locked),
            Action::CopyOut { .. } => {
                let awaits = agent.capabilities.contains(Capabilities::AWAITS_WORK);
                (was == Phase::Locked || (awaits && was == Phase::Closed), Phase::CopiedOut)
            }
            Action::Checkpoint { .. } => {
                (matches!(was, Phase::Locked | Phase::CopiedOut), Phase::Checkpointed)
            }
            Action::RestoreOnGpu { from, to } => {
                assert_eq!((usize::from(from), usize::from(to)), (agent.gpu, 1 - agent.gpu));
                let to = if agent.copied_out { Phase::Closed } else { Phase::Locked };
                (was == Phase::Checkpointed, to)
            }
            Action::Restore if agent.copied_out => (was.is_offloaded(), Phase::Closed),
            Action::Restore => (was == Phase::Checkpointed, Phase::Locked),
            Action::Unlock if agent.copied_out => (was == Phase::Locked, Phase::CopiedOut),
            Action::Unlock => (was == Phase::Locked, Phase::Closed),
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => (true, was),
        };
        assert!(fits, "{action:?} does not fit {was:?}");
        self.ordered.push(action);
        let failing = matches!(
            action,
            Action::Close { .. }
                | Action::Lock { .. }
                | Action::CopyOut { .. }
                | Action::Checkpoint { .. }
                | Action::RestoreOnGpu { .. }
        ) || (action == Action::Restore && agent.copied_out);
        let moves = matches!(action, Action::RestoreOnGpu { .. });
        if !late && was == Phase::Checkpointed && action.is_restore() {
            let there = used[if moves { 1 - agent.gpu } else { agent.gpu }];
            assert!(there + agent.size <= TOTAL, "restored without enough VRAM");
        }
        let barred = agent.keeps_context() && matches!(action, Action::Checkpoint { .. });
        if late {
            outcome = Outcome::Late;
        } else if barred {
            outcome = Outcome::Unsupported;
            let hazards = agent.hazards();
            self.feed(Input::Message(id, AgentMessage::Notice { hazards }));
        } else if let Some(fail) = self.fail.take_if(|_| failing) {
            outcome = fail;
            agent.phase = match action {
                // The agent has unlocked the process before.
                Action::CopyOut { .. } => Phase::Closed,
                Action::Checkpoint { .. } if fail == Outcome::NotCopied => Phase::Checkpointed,
                Action::Restore => Phase::CopiedOut,
                // The context is restored, but the copy in found no VRAM.
                Action::RestoreOnGpu { .. } if agent.copied_out && fail == Outcome::DriverError => {
                    agent.gpu = 1 - agent.gpu;
                    Phase::CopiedOut
                }
                Action::RestoreOnGpu { .. } => {
                    outcome = Outcome::Unreachable;
                    Phase::Checkpointed
                }
                _ => was,
            };
        } else {
            match action {
                Action::CopyOut { .. } => (agent.copied_out, agent.prepared) = (true, false),
                Action::Restore => agent.copied_out = false,
                Action::RestoreOnGpu { .. } => {
                    (agent.copied_out, agent.gpu) = (false, 1 - agent.gpu)
                }
                _ => {}
            }
            agent.phase = to;
            match action {
                Action::Close { .. } => agent.generation += 1,
                Action::Open => agent.wants = false, // Its caller went through.
                Action::HoldAllocations { .. } => {
                    (agent.held, agent.held_here) = (true, true);
                    match agent.refuses {
                        // A call is inside the driver and does not return.
                        Some(Refusal::Busy) => outcome = Outcome::Busy,
                        Some(Refusal::Silent) => return,
                        None => {}
                    }
                }
                Action::ReleaseAllocations => (agent.held, agent.held_here) = (false, false),
                _ => {}
            }
        }
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if agent.orphaned {
            self.hello(id); // The connection is gone: the Hello has all that the report had.
            return;
        }
        let (phase, swappable_bytes) = (agent.phase, agent.swappable);
        let copied_out_bytes = agent.copied_out_bytes();
        let local_memory_bytes = agent.local_memory_bytes();
        let cuda_error = if outcome == Outcome::Done { 0 } else { 304 };
        self.feed(Input::Message(
            id,
            AgentMessage::Report {
                order,
                outcome,
                phase,
                cuda_error,
                elapsed_us: 1,
                swappable_bytes,
                copied_out_bytes,
                unchanged_bytes: 0,
                zero_bytes: 0,
                local_memory_bytes,
            },
        ));
    }
}
