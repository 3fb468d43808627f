//! A simulated process: its phase, its memory and its waiting calls.

use std::collections::VecDeque;

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, ProcessFlags,
    counters::CounterSnapshot,
    message::{Action, AgentMessage, ControllerMessage},
};

use crate::{
    Input, ProcessId,
    input::{Identity, SwapStatus},
};

/// A simulated process with its agent and its VRAM.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    /// Number that identifies the process's container.
    pub container: usize,
    /// Pid of the process on the host.
    pub pid: u32,
    /// Index of the process's GPU. For an offloaded process: index of the GPU from which it was
    /// offloaded.
    pub gpu: usize,
    /// Phase of the process, as the agent reports it.
    pub phase: Phase,
    /// VRAM of the process when it is on the GPU, in bytes.
    pub size: u64,
    /// The part of the VRAM that the agent can copy, in bytes.
    pub swappable: u64,
    /// Whether the process's contexts release local memory (stacks of GPU threads) after a copy
    /// out. This local memory is half of the VRAM that the agent cannot copy.
    pub has_local_memory: bool,
    /// Capabilities of the process's library.
    pub capabilities: Capabilities,
    /// Whether the part that the agent can copy is in host memory now.
    pub copied_out: bool,
    /// Messages of the controller that the agent has not handled yet.
    pub inbox: VecDeque<ControllerMessage>,
    /// Whether the agent lost its connection while it executed an order. It registers again after
    /// the order.
    pub orphaned: bool,
    /// Whether the agent received the Welcome of its present connection.
    pub welcomed: bool,
    /// Number of times that the gate has closed.
    pub generation: u64,
    /// Number of CUDA calls that passed the gate.
    pub calls: u64,
    /// Number of CUDA calls in progress.
    pub inflight: u64,
    /// Whether a call waits at the gate.
    pub wants: bool,
    /// Whether the process pauses its allocations.
    pub held: bool,
    /// Whether the process uses peer access, because of which it cannot be moved.
    pub fixed: bool,
    /// Hazards of allocations that must stay on the GPU. Only the other allocations are offloaded.
    pub in_part: Hazards,
    /// Whether a tool, such as a profiler, is in the process, so that the driver must not
    /// checkpoint it.
    pub tools: bool,
    /// Whether the process has prefaulted host memory that it has not used yet.
    pub prepared: bool,
    /// Amount of the process's prefaulted or retained host memory, in bytes.
    pub kept: u64,
    /// Host memory that the copy out in progress still needs, in bytes.
    pub filling: u64,
    /// Further flags that the process's counters show.
    pub notes: ProcessFlags,
    /// Number of chunks of offloaded content that are on disk.
    pub disk_chunks: u32,
    /// The allocation that found no VRAM and waits for it. `None`: no allocation waits.
    pub asking: Option<Asking>,
    /// Number of allocations that have waited for VRAM.
    pub tickets: u64,
    /// Whether the process received an order to pause its allocations on its present connection.
    pub held_here: bool,
    /// Number by which the controller identifies the process. `None`: it has not registered yet.
    pub known_as: Option<ProcessId>,
    /// VRAM that the copy out in progress has freed so far, in bytes. `None`: no copy out that frees
    /// VRAM early is in progress.
    pub released: Option<u64>,
    /// Whether only half of the memory that the agent can copy is in host memory, because a copy out
    /// failed after it had freed VRAM.
    pub partly_out: bool,
    /// When the copy in in progress began to wait for VRAM, in milliseconds. `None`: none waits.
    pub awaits_vram_since: Option<u64>,
    /// How the process reacts to an order to pause its allocations, if it does not follow such
    /// orders. `None`: it follows them.
    pub refuses: Option<Refusal>,
}

/// Reaction of a simulated process that does not follow an order to pause its allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The process reports Busy, because a call is inside the driver.
    Busy,
    /// The process sends no report on the order.
    Silent,
}

/// An allocation of a simulated process that found no VRAM and waits for it.
#[derive(Clone, Copy, Debug)]
pub struct Asking {
    /// Size of the allocation in bytes.
    pub bytes: u64,
    /// Number of failed attempts after the first.
    pub attempts: u32,
    /// Whether the controller ordered the process to try the allocation again.
    pub goes_ahead: bool,
}

impl Agent {
    /// VRAM that the process holds now, in bytes.
    #[must_use]
    pub fn on_device(&self) -> u64 {
        match self.phase {
            Phase::Checkpointed => 0,
            Phase::CopiedOut => self.size - self.copied_out_bytes() - self.local_memory_bytes(),
            _ => self.size - self.released.unwrap_or(0),
        }
    }

    /// Facts about the process that make a checkpoint unsafe.
    #[must_use]
    pub fn hazards(&self) -> Hazards {
        let fixed = if self.fixed { Hazards::PEER_ACCESS.0 } else { 0 };
        let tools = if self.tools { Hazards::TOOLS.0 } else { 0 };
        Hazards(fixed | self.in_part.0 | tools)
    }

    /// Whether the context of the process stays on the GPU because the driver must not checkpoint
    /// it.
    #[must_use]
    pub fn keeps_context(&self) -> bool {
        self.hazards().intersects(Hazards::KEEPS_CONTEXT)
    }

    /// Local memory (stacks of GPU threads) that the process's contexts released, in bytes.
    #[must_use]
    pub fn local_memory_bytes(&self) -> u64 {
        let has_left = self.has_local_memory && self.copied_out && !self.partly_out;
        if has_left { (self.size - self.swappable) / 2 } else { 0 }
    }

    /// Memory that is in host memory now, in bytes.
    #[must_use]
    pub fn copied_out_bytes(&self) -> u64 {
        match (self.copied_out, self.partly_out) {
            (false, _) => 0,
            (true, true) => self.swappable / 2,
            (true, false) => self.swappable,
        }
    }

    /// The process's memory, as its agent reports it.
    #[must_use]
    pub fn swap(&self) -> SwapStatus {
        SwapStatus {
            swappable_bytes: self.swappable,
            copied_out_bytes: self.copied_out_bytes(),
            local_memory_bytes: self.local_memory_bytes(),
            ..SwapStatus::default()
        }
    }

    /// The process's present counters.
    #[must_use]
    pub fn page(&self) -> CounterSnapshot {
        CounterSnapshot {
            phase: self.phase,
            waiters: u32::from(self.wants),
            hazards: self.hazards(),
            generation: self.generation,
            allocated_bytes: self.size,
            allocations: 1,
            swappable_bytes: self.swappable,
            copied_out_bytes: self.swap().copied_out_bytes,
            notes: self.notes,
            kept_bytes: self.kept,
            filling_bytes: self.filling,
            disk_chunks: self.disk_chunks,
            calls: self.calls,
            inflight: self.inflight,
            ..CounterSnapshot::default()
        }
    }

    /// Connects the process, and returns the input that registers it under this number.
    pub fn joined(&mut self, id: ProcessId) -> Input {
        (self.orphaned, self.welcomed, self.held_here) = (false, false, false);
        self.known_as = Some(id);
        Input::Joined {
            key: super::key(self.container),
            process: id,
            identity: Identity {
                pid: self.pid,
                start_ticks: 1,
                command: "test".into(),
                memory_cgroup: format!("/pod/c{}", self.container),
            },
            phase: self.phase,
            generation: self.generation,
            hazards: if self.keeps_context() { self.hazards() } else { Hazards::default() },
            capabilities: self.capabilities,
            swap: self.swap(),
        }
    }

    /// Makes a CUDA call. If the call waits at the gate, returns the message that wakes the
    /// container.
    pub fn call(&mut self) -> Option<AgentMessage> {
        if self.phase == Phase::Open {
            // A process whose allocation waits may have other threads, which make this call.
            self.calls += 1;
            return None;
        }
        self.wants = true;
        let wake = AgentMessage::Wake { generation: self.generation, waiters: 1, hook: 1 };
        (!self.orphaned).then_some(wake)
    }

    /// Begins to move the offloaded content to disk.
    pub fn begin_disk_step(&mut self) {
        self.notes.0 &= !ProcessFlags::DISK_FAILED.0;
        self.notes.0 |= ProcessFlags::STORING_ON_DISK.0;
    }

    /// Ends the disk step with this number of chunks on disk. `has_failed`: not all content is there.
    pub fn end_disk_step(&mut self, chunks: u32, has_failed: bool) {
        self.notes.0 &= !ProcessFlags::STORING_ON_DISK.0;
        self.notes.0 |= if has_failed { ProcessFlags::DISK_FAILED.0 } else { 0 };
        self.disk_chunks = chunks;
    }

    /// Phase of the process after this order. Asserts that the order fits the present phase.
    #[must_use]
    pub fn phase_after(&self, action: Action) -> Phase {
        let was = self.phase;
        let restored = if self.copied_out { Phase::Closed } else { Phase::Locked };
        let (fits, to) = match action {
            Action::Close { .. } => (was == Phase::Open, Phase::Closed),
            Action::Open => (was == Phase::Closed, Phase::Open),
            Action::Lock { .. } => (was == Phase::Closed, Phase::Locked),
            Action::CopyOut { .. } => {
                let awaits = self.capabilities.contains(Capabilities::AWAITS_WORK);
                (was == Phase::Locked || (awaits && was == Phase::Closed), Phase::CopiedOut)
            }
            Action::Checkpoint { .. } => {
                (matches!(was, Phase::Locked | Phase::CopiedOut), Phase::Checkpointed)
            }
            Action::RestoreOnGpu { from, to } => {
                assert_eq!((usize::from(from), usize::from(to)), (self.gpu, 1 - self.gpu));
                (was == Phase::Checkpointed, restored)
            }
            Action::RestoreAsFreed => (was == Phase::CopiedOut, restored),
            Action::Restore if self.copied_out => (was.is_offloaded(), restored),
            Action::Restore => (was == Phase::Checkpointed, restored),
            Action::Unlock if self.copied_out => (was == Phase::Locked, Phase::CopiedOut),
            Action::Unlock => (was == Phase::Locked, Phase::Closed),
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => (true, was),
        };
        assert!(fits, "{action:?} is not allowed in phase {was:?}");
        to
    }

    /// Executes an order without a failure.
    pub fn execute(&mut self, action: Action) {
        self.phase = self.phase_after(action);
        if action.is_restore() {
            self.end_disk_step(0, false);
            self.notes.0 &= !ProcessFlags::DISK_FAILED.0;
        }
        match action {
            Action::Close { .. } => self.generation += 1,
            Action::Open => self.wants = false, // Its caller went through.
            Action::CopyOut { .. } => {
                (self.copied_out, self.prepared, self.released) = (true, false, None);
                self.notes.0 &= !ProcessFlags::PREFAULTED_HOST_POOL.0;
            }
            Action::Restore | Action::RestoreAsFreed => {
                (self.copied_out, self.partly_out) = (false, false);
            }
            Action::RestoreOnGpu { to, .. } => {
                (self.copied_out, self.partly_out) = (false, false);
                self.gpu = usize::from(to);
            }
            Action::HoldAllocations { .. } => (self.held, self.held_here) = (true, true),
            Action::ReleaseAllocations => (self.held, self.held_here) = (false, false),
            _ => {}
        }
    }
}
