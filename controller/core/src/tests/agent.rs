//! A simulated process for tests: its phase, its memory and its waiting calls.

use std::collections::VecDeque;

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, ProcessFlags, counters::CounterSnapshot,
    message::ControllerMessage,
};

use super::{super::ProcessId, world::ENGINES};

/// A simulated process with its agent and its VRAM.
pub(super) struct Agent {
    pub(super) container: usize,
    pub(super) pid: u32,
    /// Index of the process's GPU. For an offloaded process: index of the GPU from which it was
    /// offloaded.
    pub(super) gpu: usize,
    pub(super) phase: Phase,
    /// VRAM of the process when it is on the GPU, in bytes.
    pub(super) size: u64,
    /// The part of the VRAM that the agent can copy, in bytes.
    pub(super) swappable: u64,
    /// Whether the process's contexts release local memory (stacks of GPU threads) after a copy
    /// out. This local memory is half of the VRAM that the agent cannot copy.
    pub(super) has_local_memory: bool,
    /// Capabilities of the process's library.
    pub(super) capabilities: Capabilities,
    /// Whether the part that the agent can copy is in host memory now.
    pub(super) copied_out: bool,
    /// Messages of the controller that the agent has not handled yet.
    pub(super) inbox: VecDeque<ControllerMessage>,
    /// Whether the agent lost its connection while it executed an order. It registers again after
    /// the order.
    pub(super) orphaned: bool,
    pub(super) welcomed: bool,
    pub(super) generation: u64,
    pub(super) calls: u64,
    pub(super) wants: bool,
    pub(super) held: bool,
    /// Whether the process uses peer access, because of which it cannot be moved.
    pub(super) fixed: bool,
    /// Hazards of allocations that must stay on the GPU. Only the other allocations are offloaded.
    pub(super) in_part: Hazards,
    /// Whether a tool, such as a profiler, is in the process, so that the driver must not
    /// checkpoint it.
    pub(super) tools: bool,
    /// Whether the process has prefaulted host memory that it has not used yet.
    pub(super) prepared: bool,
    /// Amount of the process's prefaulted or retained host memory, in bytes.
    pub(super) kept: u64,
    /// Host memory that the copy out in progress still needs, in bytes.
    pub(super) filling: u64,
    /// Flags in the process's counters, in addition to the other fields.
    pub(super) notes: ProcessFlags,
    /// The allocation that found no VRAM and waits for it. `None`: no allocation waits.
    pub(super) asking: Option<Asking>,
    pub(super) tickets: u64,
    /// Whether the process received an order to pause its allocations on its present connection.
    pub(super) held_here: bool,
    /// Number by which the controller identifies the process.
    pub(super) known_as: ProcessId,
    /// How the process reacts to an order to pause its allocations, if it does not follow such
    /// orders. `None`: it follows them.
    pub(super) refuses: Option<Refusal>,
}

/// Reaction of a simulated process that does not follow an order to pause its allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The process reports Busy, because a call is inside the driver.
    Busy,
    /// The process sends no report on the order.
    Silent,
}

impl Agent {
    pub(super) fn on_device(&self) -> u64 {
        match self.phase {
            Phase::Checkpointed => 0,
            Phase::CopiedOut => self.size - self.swappable - self.local_memory_bytes(),
            _ => self.size,
        }
    }

    pub(super) fn hazards(&self) -> Hazards {
        let fixed = if self.fixed { Hazards::PEER_ACCESS.0 } else { 0 };
        let tools = if self.tools { Hazards::TOOLS.0 } else { 0 };
        Hazards(fixed | self.in_part.0 | tools)
    }

    /// Whether the context of the process stays on the GPU because the driver must not checkpoint
    /// it.
    pub(super) fn keeps_context(&self) -> bool {
        self.hazards().intersects(Hazards::KEEPS_CONTEXT)
    }

    pub(super) fn copied_out_bytes(&self) -> u64 {
        if self.copied_out { self.swappable } else { 0 }
    }

    /// Local memory (stacks of GPU threads) that the process's contexts released, in bytes.
    pub(super) fn local_memory_bytes(&self) -> u64 {
        let has_left = self.has_local_memory && self.copied_out;
        if has_left { (self.size - self.swappable) / 2 } else { 0 }
    }

    pub(super) fn takes(&mut self, bytes: u64) {
        self.size += bytes;
        if ENGINES[self.container] != "checkpoint" {
            self.swappable += bytes - bytes / 4;
        }
    }
}

/// An allocation of a simulated process that found no VRAM and waits for it.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    pub(super) bytes: u64,
    pub(super) attempts: u32,
    /// Whether the controller ordered the process to try the allocation again.
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
