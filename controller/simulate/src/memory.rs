//! The memory of a simulated process: what is on the GPU, and how long each order takes.
//!
//! ```text
//! Resident ──CopyOut──> Copied ──Checkpoint──> CopiedAndCheckpointed
//!    └────────────────Checkpoint────────────> Checkpointed
//! ```

use affinode_core::{Millis, input::SwapStatus, policy::Engine};
use affinode_proto::wire::{Phase, message::Action};

use super::Calibration;

/// Duration of an order that moves no memory: close, lock, unlock or open.
pub(super) const STEP_MS: Millis = 1;

/// The level of an offload: which part of a process's memory is off the GPU, and how it was moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OffloadLevel {
    /// All memory is on the GPU.
    #[default]
    Resident,
    /// All memory except the CUDA context is off the GPU. The library copied it.
    Copied,
    /// All memory is off the GPU. The library copied it, and then the driver checkpointed the CUDA
    /// context.
    CopiedAndCheckpointed,
    /// All memory is off the GPU. Only the driver's checkpoint moved it.
    Checkpointed,
}

/// The memory of one process, and the part that is on the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessMemory {
    vram_bytes: u64,
    copyable_bytes: u64,
    pub(super) level: OffloadLevel,
}

impl ProcessMemory {
    /// Creates the memory of a resident process. The VRAM includes the CUDA context, as in NVML's
    /// readings.
    pub(super) fn new(vram_bytes: u64, costs: &Calibration) -> ProcessMemory {
        ProcessMemory {
            vram_bytes,
            copyable_bytes: vram_bytes.saturating_sub(costs.context_bytes),
            level: OffloadLevel::Resident,
        }
    }

    /// Returns the memory of the process in the state after an offload with this engine. All memory
    /// is off the GPU, including the CUDA context.
    pub(super) fn offloaded(self, engine: Engine) -> ProcessMemory {
        let level = match engine {
            Engine::Copy | Engine::Full | Engine::Auto if self.copyable_bytes > 0 => {
                OffloadLevel::CopiedAndCheckpointed
            }
            _ => OffloadLevel::Checkpointed,
        };
        ProcessMemory { level, ..self }
    }

    /// Amount of memory that the library can copy, in bytes. The costs of offloads and restores
    /// depend on it.
    pub(super) fn copyable_bytes(&self) -> u64 {
        self.copyable_bytes
    }

    /// VRAM that the process released by its offload, in bytes.
    pub(super) fn gone_bytes(&self) -> u64 {
        match self.level {
            OffloadLevel::Resident => 0,
            OffloadLevel::Copied => self.copyable_bytes,
            OffloadLevel::CopiedAndCheckpointed | OffloadLevel::Checkpointed => self.vram_bytes,
        }
    }

    /// VRAM that the process holds now, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        self.vram_bytes - self.gone_bytes()
    }

    /// Returns the swap status that the process's agent reports.
    pub(super) fn swap(&self) -> SwapStatus {
        let is_copied =
            matches!(self.level, OffloadLevel::Copied | OffloadLevel::CopiedAndCheckpointed);
        SwapStatus {
            swappable_bytes: self.copyable_bytes,
            copied_out_bytes: if is_copied { self.copyable_bytes } else { 0 },
            ..SwapStatus::default()
        }
    }

    /// Duration of an order that begins now, in milliseconds.
    pub(super) fn order_ms(&self, action: Action, costs: &Calibration) -> Millis {
        let bytes = self.copyable_bytes;
        match (action, self.level) {
            (Action::CopyOut { .. }, _) => costs.copy.offload_ms(bytes),
            (Action::Checkpoint { .. }, OffloadLevel::Copied) => costs.context_checkpoint_ms(bytes),
            (Action::Checkpoint { .. }, _) => costs.checkpoint.offload_ms(bytes),
            (Action::Restore, OffloadLevel::Copied) => costs.copy.restore_ms(bytes),
            (Action::Restore, OffloadLevel::CopiedAndCheckpointed) => costs.full_restore_ms(bytes),
            (Action::Restore, _) => costs.checkpoint.restore_ms(bytes),
            _ => STEP_MS,
        }
    }

    /// Executes an order that moves memory, and returns the phase of the process after it.
    pub(super) fn execute_order(&mut self, action: Action) -> Phase {
        let (level, phase) = match (action, self.level) {
            (Action::CopyOut { .. }, _) => (OffloadLevel::Copied, Phase::CopiedOut),
            (Action::Checkpoint { .. }, OffloadLevel::Copied) => {
                (OffloadLevel::CopiedAndCheckpointed, Phase::Checkpointed)
            }
            (Action::Checkpoint { .. }, _) => (OffloadLevel::Checkpointed, Phase::Checkpointed),
            // The driver leaves a restored process locked. After a copy in, the agent has already
            // unlocked it.
            (_, OffloadLevel::Checkpointed) => (OffloadLevel::Resident, Phase::Locked),
            _ => (OffloadLevel::Resident, Phase::Closed),
        };
        self.level = level;
        phase
    }
}
