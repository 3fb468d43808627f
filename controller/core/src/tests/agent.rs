//! A simulated process of the tests: its phase, its memory and its waiting calls.

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
    /// Index of the GPU on which the process's memory is, or was before its offload.
    pub(super) gpu: usize,
    pub(super) phase: Phase,
    /// VRAM of the process when it is on the GPU, in bytes.
    pub(super) size: u64,
    /// The part of the VRAM that the agent can copy, in bytes.
    pub(super) swappable: u64,
    /// Whether the process's contexts release local memory after a copy out. It is half of the VRAM
    /// that the agent cannot copy.
    pub(super) has_local_memory: bool,
    /// Capabilities of the process's library.
    pub(super) capabilities: Capabilities,
    /// Whether the part that the agent can copy is in host memory now.
    pub(super) copied_out: bool,
    /// Messages that arrived on the agent's connection and were not handled yet.
    pub(super) inbox: VecDeque<ControllerMessage>,
    /// Whether the process lost its controller during an order. It registers again after the order.
    pub(super) orphaned: bool,
    pub(super) welcomed: bool,
    pub(super) generation: u64,
    pub(super) calls: u64,
    pub(super) wants: bool,
    pub(super) held: bool,
    /// Whether the process uses peer access, so that it cannot be moved.
    pub(super) fixed: bool,
    /// Hazards of allocations that stay on the GPU. Only the part that the agent can copy is
    /// offloaded.
    pub(super) in_part: Hazards,
    /// Whether a tool is in the process, so that the driver must not checkpoint it.
    pub(super) tools: bool,
    /// Whether the process was ordered to prefault host memory, and has not used that memory yet.
    pub(super) prepared: bool,
    /// Prefaulted or retained host memory, in bytes.
    pub(super) kept: u64,
    /// Host memory that the copy out in progress still needs, in bytes.
    pub(super) filling: u64,
    /// Further flags in the process's counters.
    pub(super) notes: ProcessFlags,
    /// The allocation that waits for VRAM, outside the driver.
    pub(super) asking: Option<Asking>,
    pub(super) tickets: u64,
    /// Whether the process was ordered on this connection to pause its allocations.
    pub(super) held_here: bool,
    /// The controller's number for the process.
    pub(super) known_as: ProcessId,
    /// How the process refuses to pause its allocations. `None`: it does not refuse.
    pub(super) refuses: Option<Refusal>,
}

/// Reaction of a process that does not report `Done` to an order to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The process reports Busy: a call is inside the driver.
    Busy,
    /// The process sends no report.
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

    /// Whether the driver must not checkpoint the process, although its memory can be copied.
    pub(super) fn keeps_context(&self) -> bool {
        self.hazards().intersects(Hazards::KEEPS_CONTEXT)
    }

    pub(super) fn copied_out_bytes(&self) -> u64 {
        if self.copied_out { self.swappable } else { 0 }
    }

    /// VRAM of local memory that the process's contexts released, in bytes.
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

/// An allocation that found no VRAM.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    pub(super) bytes: u64,
    pub(super) attempts: u32,
    /// Whether the process was ordered to try the allocation again.
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
