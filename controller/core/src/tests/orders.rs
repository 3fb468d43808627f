//! Makes the simulated processes handle their messages. They execute orders, or fail as the test
//! wants.

use affinode_proto::wire::{
    Capabilities, Phase, ProcessFlags,
    message::{Action, AgentMessage, ControllerMessage, Outcome, PROOF_TTL_MS},
};

use super::super::{
    Input, Millis, ProcessId,
    harness::agent::{Agent, Refusal},
};
use super::world::{Host, TOTAL, World};

/// Time for which a copy in waits for VRAM that another process frees. It is less than
/// `PROOF_TTL_MS`, because `obey` checks the age of an order when the wait is over.
const MAX_WAIT_MS: Millis = 2_400;

const PREFAULTED: ProcessFlags = ProcessFlags::PREFAULTED_HOST_POOL;

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
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let message = agent.inbox.pop_front();
        if let Some(ControllerMessage::Order { action, .. }) = message
            && self.takes_longer(id, action)
        {
            let agent = self.agents.get_mut(&id).expect("it was found before");
            return message.into_iter().for_each(|message| agent.inbox.push_front(message));
        }
        let prefaults = self.prefaults;
        let Some(agent) = self.agents.get_mut(&id) else { return };
        match message {
            Some(ControllerMessage::Order { order, action, decided_ms }) => {
                let Some(outcome) = self.obey(id, action, decided_ms) else { return };
                if self.agents[&id].orphaned {
                    return self.hello(id); // The Hello has all that the report had.
                }
                self.report(id, order, outcome, if outcome == Outcome::Done { 0 } else { 304 });
            }
            Some(ControllerMessage::Welcome { .. }) => {
                agent.welcomed = true;
                agent.held = agent.held_here;
                if let Some(asking) = &mut agent.asking {
                    asking.goes_ahead = false;
                }
                self.ask(id);
            }
            Some(ControllerMessage::AllocGrant { ticket, granted }) if ticket == agent.tickets => {
                match &mut agent.asking {
                    Some(asking) if granted => asking.goes_ahead = true,
                    Some(_) => self.end_ask(id, false),
                    None => {}
                }
                self.try_again(id);
            }
            Some(ControllerMessage::PrefaultHostPool) if prefaults => {
                assert!(agent.capabilities.contains(Capabilities::PREFAULTS_HOST_POOL));
                if agent.phase == Phase::Open {
                    agent.kept = agent.swappable;
                    agent.notes.0 |= ProcessFlags::HOST_POOL.0 | PREFAULTED.0;
                }
            }
            Some(ControllerMessage::FreeHostMemory) if agent.phase == Phase::Open => {
                agent.kept = 0;
                agent.notes.0 &= !PREFAULTED.0;
            }
            Some(ControllerMessage::StoreOnDisk) => {
                assert!(agent.capabilities.contains(Capabilities::STORES_ON_DISK));
                if agent.phase.is_offloaded() {
                    agent.begin_disk_step();
                }
            }
            _ => {}
        }
    }

    /// Advances a copy that takes several steps. Returns whether it needs another step: a copy out
    /// has not freed all VRAM, or a copy in waits for VRAM.
    fn takes_longer(&mut self, id: ProcessId, action: Action) -> bool {
        let room = self.room_of(id);
        let (now, slow_copies, fails) = (self.now, self.slow_copies, self.fail.is_some());
        let Some(agent) = self.bench.agents.get_mut(&id) else { return false };
        match action {
            Action::CopyOut { how, .. } if how.release_early && slow_copies => {
                let first = agent.released.is_none();
                let released = agent.released.get_or_insert(0);
                *released = agent.swappable.min(*released + agent.swappable / 3 + 1);
                if !first {
                    // A failure comes after half of the memory was freed.
                    let end = if fails { agent.swappable / 2 } else { agent.swappable };
                    return *released < end;
                }
                *released = 0;
                if !agent.orphaned {
                    self.feed(Input::Message(id, AgentMessage::Releasing));
                }
                true
            }
            Action::RestoreAsFreed => {
                let since = *agent.awaits_vram_since.get_or_insert(now);
                let need = agent.copied_out_bytes() + agent.local_memory_bytes();
                let waits = need > room && now.saturating_sub(since) < MAX_WAIT_MS;
                if !waits {
                    agent.awaits_vram_since = None;
                }
                waits
            }
            _ => false,
        }
    }

    /// Makes a process execute an order, or fail to execute it. Returns the outcome. `None`: the
    /// process sends no report.
    fn obey(&mut self, id: ProcessId, action: Action, decided_ms: Millis) -> Option<Outcome> {
        let used = [0, 1].map(|gpu| self.used_on(gpu));
        let age_ms = self.now.saturating_sub(decided_ms);
        let agent = self.bench.agents.get_mut(&id)?;
        let was = agent.phase;
        let to_gpu = match action {
            Action::RestoreOnGpu { .. } => 1 - agent.gpu,
            _ => agent.gpu,
        };
        let _ = agent.phase_after(action); // Asserts that the order fits.
        self.ordered.push(action);
        if action.is_restore() && decided_ms > 0 && age_ms > PROOF_TTL_MS {
            return Some(Outcome::Late);
        }
        if action == Action::RestoreAsFreed {
            self.restored_as_freed += 1;
            if agent.copied_out_bytes() + agent.local_memory_bytes() > TOTAL - used[agent.gpu] {
                return Some(Outcome::DriverError);
            }
        }
        if was == Phase::Checkpointed && action.is_restore() {
            assert!(used[to_gpu] + agent.size <= TOTAL, "restored without enough VRAM");
        }
        if agent.keeps_context() && matches!(action, Action::Checkpoint { .. }) {
            let hazards = agent.hazards();
            self.feed(Input::Message(id, AgentMessage::Notice { hazards }));
            return Some(Outcome::Unsupported);
        }
        let may_fail = match action {
            Action::Close { .. } | Action::Lock { .. } | Action::CopyOut { .. } => true,
            Action::Checkpoint { .. } | Action::RestoreOnGpu { .. } => true,
            Action::Restore => agent.copied_out,
            Action::RestoreAsFreed => true,
            _ => false,
        };
        if let Some(fail) = self.fail.take_if(|_| may_fail) {
            return Some(fails(agent, action, fail));
        }
        agent.execute(action);
        match (action, agent.refuses) {
            // A call is inside the driver and does not return.
            (Action::HoldAllocations { .. }, Some(Refusal::Busy)) => Some(Outcome::Busy),
            (Action::HoldAllocations { .. }, Some(Refusal::Silent)) => None,
            _ => Some(Outcome::Done),
        }
    }
}

/// Changes a process as an order does that fails in this way. Returns the outcome to report.
fn fails(agent: &mut Agent, action: Action, fail: Outcome) -> Outcome {
    match action {
        // The agent has freed a part of the memory. Only the driver can still fail.
        Action::CopyOut { .. } if agent.released.take().is_some_and(|bytes| bytes > 0) => {
            (agent.phase, agent.copied_out, agent.partly_out) = (Phase::CopiedOut, true, true);
            return Outcome::DriverError;
        }
        // The agent has unlocked the process before.
        Action::CopyOut { .. } => agent.phase = Phase::Closed,
        Action::Checkpoint { .. } if fail == Outcome::NotCopied => {
            agent.phase = Phase::Checkpointed;
        }
        Action::Restore | Action::RestoreAsFreed => agent.phase = Phase::CopiedOut,
        // The context is restored, but the copy in found no VRAM.
        Action::RestoreOnGpu { .. } if agent.copied_out && fail == Outcome::DriverError => {
            (agent.gpu, agent.phase) = (1 - agent.gpu, Phase::CopiedOut);
        }
        Action::RestoreOnGpu { .. } => return Outcome::Unreachable,
        _ => {}
    }
    fail
}
