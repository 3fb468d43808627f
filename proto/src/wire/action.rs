//! Orders from the controller to an agent, and their encoding in a frame as a code and a value.

use super::Capabilities;

/// Options of a copy out (the library's copy of allocations from VRAM to host memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// Whether the agent retains the host copy after the restore, so that the next copy out skips
    /// unchanged memory. Requires [`Capabilities::RETAINS_HOST_COPY`].
    pub keep: bool,
    /// Whether the driver's checkpoint follows this copy out. A copier may then copy the memory
    /// during the checkpoint, and the phase becomes CopiedOut before all memory has left the GPU.
    /// Requires [`Capabilities::PREFAULTS`].
    pub then_checkpoint: bool,
    /// Whether the restore verifies by checksums that the memory is unchanged. Requires
    /// [`Capabilities::CHECKS`].
    pub check: bool,
    /// Whether the content is copied to memory of the node's host pool. If false, the memory is
    /// that of the process. Requires [`Capabilities::USES_HOST_POOL`].
    pub host_pool: bool,
    /// Whether the agent frees VRAM piece by piece while it still copies, because a container waits
    /// for it. Before the agent frees the first piece, it sends
    /// [`AgentMessage::Releasing`](super::message::AgentMessage::Releasing). Requires
    /// [`Capabilities::RELEASES_EARLY`].
    pub release_early: bool,
}

impl CopyOptions {
    /// Returns the capabilities that the library must have for these options.
    #[must_use]
    pub const fn requires(self) -> Capabilities {
        let keep = if self.keep { Capabilities::RETAINS_HOST_COPY.0 } else { 0 };
        let then_checkpoint = if self.then_checkpoint { Capabilities::PREFAULTS.0 } else { 0 };
        let check = if self.check { Capabilities::CHECKS.0 } else { 0 };
        let host_pool = if self.host_pool { Capabilities::USES_HOST_POOL.0 } else { 0 };
        let release_early = if self.release_early { Capabilities::RELEASES_EARLY.0 } else { 0 };
        Capabilities(keep | then_checkpoint | check | host_pool | release_early)
    }

    fn code(self) -> u32 {
        let own = (self.keep, self.then_checkpoint, self.check);
        let code = COPY_OUT_CODES.iter().find(|way| way.1 == own).map_or(9, |way| way.0);
        let to_host_pool = if self.host_pool { TO_HOST_POOL } else { 0 };
        let release_early = if self.release_early { RELEASE_EARLY } else { 0 };
        code | to_host_pool | release_early
    }

    fn from_code(code: u32) -> Option<CopyOptions> {
        let own = code & !(TO_HOST_POOL | RELEASE_EARLY);
        let (_, (keep, then_checkpoint, check)) =
            *COPY_OUT_CODES.iter().find(|way| way.0 == own)?;
        let (host_pool, release_early) = (code & TO_HOST_POOL != 0, code & RELEASE_EARLY != 0);
        Some(CopyOptions { keep, then_checkpoint, check, host_pool, release_early })
    }
}

/// The code of each combination of the options `keep`, `then_checkpoint` and `check`. Codes 9 and 10
/// were defined first, later 12 and 13, and last 14 to 17. An older library decodes only the codes
/// that were defined before its release.
const COPY_OUT_CODES: [(u32, (bool, bool, bool)); 8] = [
    (9, (false, false, false)),
    (10, (true, false, false)),
    (12, (false, true, false)),
    (13, (true, true, false)),
    (14, (false, false, true)),
    (15, (true, false, true)),
    (16, (false, true, true)),
    (17, (true, true, true)),
];
/// The bit that a copy out to the host pool adds to its code.
const TO_HOST_POOL: u32 = 1 << 8;
/// The bit that a copy out with [`CopyOptions::release_early`] adds to its code.
const RELEASE_EARLY: u32 = 1 << 9;

/// An order from the controller to an agent about the agent's own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Closes the gate (phase Open → Closed): new CUDA calls wait, and the agent waits until calls
    /// in progress have ended. If the deadline passes, the outcome is Busy and the gate is open
    /// again.
    Close {
        /// Time for CUDA calls in progress to return, in milliseconds.
        deadline_ms: u32,
    },
    /// Opens the gate (phase Closed → Open), so that the waiting CUDA calls continue.
    Open,
    /// Locks the process (phase Closed → Locked) with `cuCheckpointProcessLock`.
    Lock {
        /// Timeout of the driver's lock, in milliseconds.
        timeout_ms: u32,
    },
    /// Copies swappable memory to host memory and frees it on the GPU (phase Closed → CopiedOut).
    /// The agent first waits for the GPU's work, which requires [`Capabilities::AWAITS_WORK`]. If
    /// the phase is Locked, the agent unlocks the process instead of waiting. On an error no memory
    /// was freed, and the phase is Closed. There is one exception: with
    /// [`CopyOptions::release_early`], the driver can fail after the agent has freed memory. The
    /// phase is then CopiedOut, and the other memory is still on the GPU.
    CopyOut {
        /// Largest amount of VRAM that the process holds on any one GPU, in bytes. The agent uses
        /// it if it must restore the process without a controller.
        vram_bytes: u64,
        /// Options of the copy out, such as whether the host copy is retained.
        how: CopyOptions,
    },
    /// Checkpoints the process with `cuCheckpointProcessCheckpoint` (phase Locked → Checkpointed).
    /// If the phase is CopiedOut, the agent locks the process first. If the agent has exported
    /// memory to a copier, it waits after the checkpoint until the copier has copied the memory. If
    /// the copier fails, the outcome is [`NotCopied`](super::message::Outcome::NotCopied).
    Checkpoint {
        /// Largest amount of VRAM that the process holds on any one GPU, in bytes. The agent uses
        /// it if it must restore the process without a controller.
        vram_bytes: u64,
    },
    /// Restores the process. The steps depend on the phase. Checkpointed → Locked: the agent calls
    /// `cuCheckpointProcessRestore`. Checkpointed with copied-out memory → Closed: it then also
    /// unlocks the process and copies the memory in. CopiedOut → Closed: it only copies the memory
    /// in.
    ///
    /// The controller sends this order only when VRAM is reserved and proven free. The agent
    /// executes it at most [`PROOF_TTL_MS`](super::message::PROOF_TTL_MS) after the decision,
    /// because a driver restore without free VRAM loses the process.
    Restore,
    /// Copies memory in (phase CopiedOut → Closed) while another process frees the VRAM by a copy
    /// out with [`CopyOptions::release_early`]. Where [`Action::Restore`] fails because VRAM is
    /// short, this order waits until [`AWAIT_VRAM_MS`](super::message::AWAIT_VRAM_MS) after the decision.
    /// Requires [`Capabilities::RELEASES_EARLY`].
    RestoreAsFreed,
    /// Restores a checkpointed process like [`Action::Restore`], but on another GPU of the same
    /// model. The driver exchanges the process's GPU with the new GPU. Both fields are positions in
    /// the list from [`ControllerMessage::Gpus`](super::message::ControllerMessage::Gpus), which
    /// was sent before. Requires [`super::ProcessFlags::MOVABLE`].
    RestoreOnGpu {
        /// Position of the GPU that the process was on before the offload.
        from: u8,
        /// Position of the GPU on which the process is restored.
        to: u8,
    },
    /// Unlocks the process (phase Locked → Closed) with `cuCheckpointProcessUnlock`.
    Unlock,
    /// Pauses allocations: new CUDA calls that may allocate VRAM wait at the gate, and the agent
    /// waits until such calls in progress have ended. The phase stays Open.
    HoldAllocations {
        /// Time for allocating calls in progress to return, in milliseconds. If they do not return,
        /// the outcome is Busy and new calls do not wait.
        deadline_ms: u32,
    },
    /// Ends the pause of [`Action::HoldAllocations`], so that the waiting calls continue.
    ReleaseAllocations,
}

impl Action {
    /// Returns whether the order allocates VRAM and therefore needs a grant from the controller.
    #[must_use]
    pub const fn is_restore(self) -> bool {
        matches!(self, Action::Restore | Action::RestoreAsFreed | Action::RestoreOnGpu { .. })
    }

    /// Returns the capabilities that the library must have to execute the order.
    #[must_use]
    pub const fn requires(self) -> Capabilities {
        match self {
            Action::CopyOut { how, .. } => how.requires(),
            Action::RestoreAsFreed => Capabilities::RELEASES_EARLY,
            _ => Capabilities(0),
        }
    }

    /// Encodes the action as a code and a value for a frame.
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
            Action::CopyOut { vram_bytes, how } => (how.code(), vram_bytes),
            Action::RestoreAsFreed => (18, 0),
            Action::RestoreOnGpu { from, to } => (11, u64::from(from) | u64::from(to) << 8),
        }
    }

    /// Decodes the action from a frame's code and value. Returns `None` if the code is unknown.
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
            18 => Action::RestoreAsFreed,
            11 => Action::RestoreOnGpu { from: value as u8, to: (value >> 8) as u8 },
            _ => Action::CopyOut { vram_bytes: value, how: CopyOptions::from_code(code)? },
        })
    }
}
