//! A process of the tests: where its agent is, what it holds, what it waits for.

use std::collections::VecDeque;

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, ProcessFlags, counters::CounterSnapshot,
    message::ControllerMessage,
};

use super::{super::ProcessId, world::ENGINES};

/// A process with its agent and its share of the device.
pub(super) struct Agent {
    pub(super) container: usize,
    pub(super) pid: u32,
    /// The device that it has its memory on, or left.
    pub(super) gpu: usize,
    pub(super) phase: Phase,
    /// VRAM that it holds when it is on the device.
    pub(super) size: u64,
    /// The part of it that the agent can copy.
    pub(super) swappable: u64,
    /// What its library can do.
    pub(super) capabilities: Capabilities,
    /// That part is in host memory.
    pub(super) copied_out: bool,
    /// What came on its connection and was not looked at yet.
    pub(super) inbox: VecDeque<ControllerMessage>,
    /// Lost its controller in the middle of something: says Hello when that is done.
    pub(super) orphaned: bool,
    pub(super) welcomed: bool,
    pub(super) generation: u64,
    pub(super) calls: u64,
    pub(super) wants: bool,
    pub(super) held: bool,
    /// It uses managed memory: it cannot be moved.
    pub(super) fixed: bool,
    /// A tool is in the process: the driver must not checkpoint it.
    pub(super) tools: bool,
    /// It was told to make host memory ready, and has not used that.
    pub(super) prepared: bool,
    /// What of host memory it has ready or has kept, in bytes.
    pub(super) kept: u64,
    /// What its copy out has still to touch of host memory, in bytes.
    pub(super) filling: u64,
    /// What its page says beside.
    pub(super) notes: ProcessFlags,
    /// The allocation that waits for room, outside the driver.
    pub(super) asking: Option<Asking>,
    pub(super) tickets: u64,
    /// Told to hold on this connection.
    pub(super) held_here: bool,
    /// The number under which the controller watches it.
    pub(super) known_as: ProcessId,
    /// It never says that it holds its allocations.
    pub(super) refuses: Option<Refusal>,
}

/// What a process says in place of "done" when it holds its allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// That a call is inside the driver.
    Busy,
    /// It sends no report.
    Silent,
}

impl Agent {
    pub(super) fn on_device(&self) -> u64 {
        match self.phase {
            Phase::Checkpointed => 0,
            Phase::CopiedOut => self.size - self.swappable,
            _ => self.size,
        }
    }

    pub(super) fn hazards(&self) -> Hazards {
        let fixed = if self.fixed { Hazards::MANAGED_MEMORY.0 } else { 0 };
        let tools = if self.tools { Hazards::TOOLS.0 } else { 0 };
        Hazards(fixed | tools)
    }

    pub(super) fn copied_out_bytes(&self) -> u64 {
        if self.copied_out { self.swappable } else { 0 }
    }

    pub(super) fn takes(&mut self, bytes: u64) {
        self.size += bytes;
        if ENGINES[self.container] != "checkpoint" {
            self.swappable += bytes - bytes / 4;
        }
    }
}

/// An allocation that found no memory.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    pub(super) bytes: u64,
    pub(super) attempts: u32,
    /// Told that there is room.
    pub(super) goes_ahead: bool,
}

pub(super) fn page(agent: &Agent) -> CounterSnapshot {
    CounterSnapshot {
        phase: agent.phase,
        waiters: u32::from(agent.wants),
        hazards: agent.hazards(),
        generation: agent.generation,
        allocated_bytes: agent.size,
        allocations: 1,
        swappable_bytes: agent.swappable,
        copied_out_bytes: agent.copied_out_bytes(),
        notes: agent.notes,
        call_cost_ps: 0,
        held_us: 0,
        kept_bytes: agent.kept,
        filling_bytes: agent.filling,
        calls: agent.calls,
        polls: 0,
        inflight: 0,
        last_hook: 0,
    }
}
