//! What the agent is told to do with its own process, and its place in an order's frame: a code and
//! a value.

/// How memory is parked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// The copy is kept after the return, so that what has not changed by the next time is not
    /// copied again. Only of a library that has [`super::Capabilities::RETAINS_HOST_COPY`].
    pub keep: bool,
    /// A checkpoint is to follow, beside which a copier may copy: the process is Parked then before
    /// all of it has left the device. Only of a library that has [`super::Capabilities::PREFAULTS`].
    pub then_checkpoint: bool,
    /// The return looks whether everything is as it was. Only of a library that has
    /// [`super::Capabilities::CHECKS`].
    pub check: bool,
}

/// Each in its own way: earlier libraries know the first two, and those after them four.
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

/// What the agent is told to do with its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open → Closed: hold new calls, wait for calls in progress. Past the deadline: Busy, open again.
    Close {
        /// How long calls in progress are waited for.
        deadline_ms: u32,
    },
    /// Closed → Open: let callers go on.
    Open,
    /// Closed → Locked: `cuCheckpointProcessLock`.
    Lock {
        /// Passed to the driver.
        timeout_ms: u32,
    },
    /// Locked → Parked: unlock, then copy what can be carried to host memory and give the
    /// device memory back. On an error nothing was given back, and the phase is Closed.
    CopyOut {
        /// The most VRAM held on one device, for a later return without a controller.
        vram_bytes: u64,
        /// How.
        how: CopyOptions,
    },
    /// Locked → Away: `cuCheckpointProcessCheckpoint`. Parked → Away: lock, then the same. What a
    /// copier copies beside it is waited for; where it does not, the process comes home again.
    Checkpoint {
        /// The most VRAM held on one device, for a later return without a controller.
        vram_bytes: u64,
    },
    /// Away → Locked: `cuCheckpointProcessRestore`; with parked memory Away → Closed: unlock,
    /// then bring it back. Parked → Closed. Only with VRAM reserved and proven free, and not
    /// later than [`PROOF_TTL_MS`](super::message::PROOF_TTL_MS) after the order was decided on; of the driver's restore
    /// that is what the life of the process depends on.
    Restore,
    /// Away, then as [`Action::Restore`]: where the process had memory on one GPU, it has it on
    /// another of the same kind from then on, and the other way round. Both are places in the
    /// list of the [`ControllerMessage::Gpus`](super::message::ControllerMessage::Gpus) before. Only of a process whose page says
    /// [`super::ProcessFlags::MOVABLE`].
    RestoreOnGpu {
        /// Where it was.
        from: u8,
        /// Where it is to be.
        to: u8,
    },
    /// Locked → Closed: `cuCheckpointProcessUnlock`.
    Unlock,
    /// Hold calls that may take VRAM, and wait for those in progress; phase stays Open.
    HoldAllocations {
        /// How long such calls in progress are waited for. Past it: Busy, not held.
        deadline_ms: u32,
    },
    /// End of [`Action::HoldAllocations`].
    ReleaseAllocations,
}

impl Action {
    /// Whether it takes VRAM that was promised to the process.
    #[must_use]
    pub const fn is_restore(self) -> bool {
        matches!(self, Action::Restore | Action::RestoreOnGpu { .. })
    }

    /// As a frame has it.
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

    /// From a frame; `None`: there is no such action.
    pub(super) fn from_code(code: u32, value: u64) -> Option<Action> {
        // Milliseconds fit 32 bits; more is the longest that fits.
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
