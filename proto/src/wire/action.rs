//! Orders to an agent, and their encoding in a frame: a code and a value.

use super::Capabilities;

/// Options of a copy out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// The host copy is retained after the restore, so that unchanged memory is not copied again.
    /// Requires [`Capabilities::RETAINS_HOST_COPY`].
    pub keep: bool,
    /// True: a checkpoint follows, and a copier may copy while it runs. The phase is then CopiedOut
    /// before all memory has left the GPU. Requires [`Capabilities::PREFAULTS`].
    pub then_checkpoint: bool,
    /// The restore verifies that the memory is unchanged. Requires
    /// [`Capabilities::CHECKS`].
    pub check: bool,
}

impl CopyOptions {
    /// Capabilities that the library must have for these options.
    #[must_use]
    pub const fn requires(self) -> Capabilities {
        let keep = if self.keep { Capabilities::RETAINS_HOST_COPY.0 } else { 0 };
        let then_checkpoint = if self.then_checkpoint { Capabilities::PREFAULTS.0 } else { 0 };
        let check = if self.check { Capabilities::CHECKS.0 } else { 0 };
        Capabilities(keep | then_checkpoint | check)
    }
}

/// One code per combination of options. Codes 9 and 10 were defined first, later 12 and 13, and
/// last 14 to 17. An older library decodes only the codes that were defined before its release.
const COPY_OUT_CODES: [(u32, CopyOptions); 8] = [
    (9, CopyOptions { keep: false, then_checkpoint: false, check: false }),
    (10, CopyOptions { keep: true, then_checkpoint: false, check: false }),
    (12, CopyOptions { keep: false, then_checkpoint: true, check: false }),
    (13, CopyOptions { keep: true, then_checkpoint: true, check: false }),
    (14, CopyOptions { keep: false, then_checkpoint: false, check: true }),
    (15, CopyOptions { keep: true, then_checkpoint: false, check: true }),
    (16, CopyOptions { keep: false, then_checkpoint: true, check: true }),
    (17, CopyOptions { keep: true, then_checkpoint: true, check: true }),
];

/// An order to an agent about its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open → Closed: let new calls wait at the gate, and wait until calls in progress have ended.
    /// After the deadline the outcome is Busy and the gate is open again.
    Close {
        /// Time for calls in progress to return, in milliseconds.
        deadline_ms: u32,
    },
    /// Closed → Open: release the waiting calls.
    Open,
    /// Closed → Locked: call `cuCheckpointProcessLock`.
    Lock {
        /// Timeout of the driver's lock, in milliseconds.
        timeout_ms: u32,
    },
    /// Closed → CopiedOut: wait for the GPU's work, copy swappable memory to host memory and free
    /// it on the GPU. Requires [`Capabilities::AWAITS_WORK`]. From Locked, the agent unlocks the
    /// process instead of waiting. On an error no memory was freed, and the phase is Closed.
    CopyOut {
        /// Largest VRAM that the process holds on one GPU, in bytes. The agent uses it for a
        /// restore without a controller.
        vram_bytes: u64,
        /// Options of the copy out.
        how: CopyOptions,
    },
    /// Locked → Checkpointed: call `cuCheckpointProcessCheckpoint`. CopiedOut → Checkpointed: lock
    /// the process, then make the same call. If a copier copies the memory out, the agent waits
    /// until it has finished. If the copier does not copy, the process is restored.
    Checkpoint {
        /// Largest VRAM that the process holds on one GPU, in bytes. The agent uses it for a
        /// restore without a controller.
        vram_bytes: u64,
    },
    /// Checkpointed → Locked: call `cuCheckpointProcessRestore`. With copied-out memory:
    /// Checkpointed → Closed, by unlock and copy in. Without a checkpoint: CopiedOut → Closed, by
    /// copy in.
    ///
    /// Sent only with VRAM reserved and proven free, and executed at most
    /// [`PROOF_TTL_MS`](super::message::PROOF_TTL_MS) after the decision: a driver restore without
    /// free VRAM loses the process.
    Restore,
    /// Like [`Action::Restore`] of a checkpointed process, but the process's GPU is exchanged with
    /// another GPU of the same model. Both fields are positions in the list that was sent before in
    /// [`ControllerMessage::Gpus`](super::message::ControllerMessage::Gpus). Requires
    /// [`super::ProcessFlags::MOVABLE`].
    RestoreOnGpu {
        /// Position of the GPU that the process was on.
        from: u8,
        /// Position of the GPU on which the process is restored.
        to: u8,
    },
    /// Locked → Closed: call `cuCheckpointProcessUnlock`.
    Unlock,
    /// Let new calls that may take VRAM wait at the gate, and wait until such calls in progress
    /// have ended. The phase stays Open.
    HoldAllocations {
        /// Time for such calls in progress to return, in milliseconds. If they do not, the outcome
        /// is Busy and new calls do not wait.
        deadline_ms: u32,
    },
    /// Ends [`Action::HoldAllocations`]: the waiting calls continue.
    ReleaseAllocations,
}

impl Action {
    /// Whether the order takes VRAM. Such an order needs a grant.
    #[must_use]
    pub const fn is_restore(self) -> bool {
        matches!(self, Action::Restore | Action::RestoreOnGpu { .. })
    }

    /// Capabilities that the library must have to execute the order.
    #[must_use]
    pub const fn requires(self) -> Capabilities {
        match self {
            Action::CopyOut { how, .. } => how.requires(),
            _ => Capabilities(0),
        }
    }

    /// Code and value for a frame.
    pub(super) fn code(self) -> (u32, u64) {
        match self {
            Action::Close { deadline_ms } => (1, u64::from(deadline_ms)),
            Action::Open => (2, 0),
            Action::Lock { timeout_ms } => (3, u64::from(timeout_ms)),
            Action::Checkpoint { vram_bytes } => (4, vram_bytes),
            Action::Restore => (5, 0),
            Action::Unlock => (6, 0),
            Action::HoldAllocations { deadline_ms } => (7, u64::from(deadline_ms)),
            Action::ReleaseAllocations => (8, 0),
            Action::CopyOut { vram_bytes, how } => {
                let code = COPY_OUT_CODES.iter().find(|way| way.1 == how).map_or(9, |way| way.0);
                (code, vram_bytes)
            }
            Action::RestoreOnGpu { from, to } => (11, u64::from(from) | u64::from(to) << 8),
        }
    }

    /// The action of a frame; `None` if the code is unknown.
    pub(super) fn from_code(code: u32, value: u64) -> Option<Action> {
        // Milliseconds fit in 32 bits; greater values are clamped.
        let ms = u32::try_from(value).unwrap_or(u32::MAX);
        Some(match code {
            1 => Action::Close { deadline_ms: ms },
            2 => Action::Open,
            3 => Action::Lock { timeout_ms: ms },
            4 => Action::Checkpoint { vram_bytes: value },
            5 => Action::Restore,
            6 => Action::Unlock,
            7 => Action::HoldAllocations { deadline_ms: ms },
            8 => Action::ReleaseAllocations,
            11 => Action::RestoreOnGpu { from: value as u8, to: (value >> 8) as u8 },
            _ => {
                let (_, how) = *COPY_OUT_CODES.iter().find(|way| way.0 == code)?;
                Action::CopyOut { vram_bytes: value, how }
            }
        })
    }
}
