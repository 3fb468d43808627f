//! A grant: the right of one container to allocate a stated amount of VRAM, for its restore or for
//! an allocation that found no VRAM before.
//!
//! ```text
//! queue ──VRAM promised in the ledger──> Holding ──all hold──> AwaitingCopiers ──none moves──> Proving ──NVML: free──> Granted
//!   ^                                       ^                        │                           │ not free
//!   │                                       └──a process registers───┴───────────────────────────┤
//!   └────────────────────────────────────────────────────────────────────────────────────────────┘  promise given up, tried again
//! ```
//!
//! From the stage Holding until the grant ends, managed processes must not allocate VRAM on the
//! grant's GPUs (they hold). VRAM that is proven free therefore stays free until the driver has
//! allocated it. A process that registers meanwhile receives the order to pause its allocations
//! before its registration is confirmed.
//!
//! A process that cannot pause its allocations, or does not report, delays a grant once
//! (`holds.rs`). NVML's sample includes the VRAM that such a process allocates, and the VRAM of
//! unmanaged processes.
//!
//! The holds can end before the restore does. Processes end them by themselves if the controller
//! sent nothing for too long. The controller ends them if the restore takes far longer than
//! expected. From then on the grant is in doubt: a running restore keeps its promise of VRAM, but
//! no further restore is started.

use std::collections::BTreeSet;

use super::{Millis, ProcessId};

/// Stage of a grant, the right of a container to allocate a stated amount of VRAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The grant waits until these processes have paused their allocations.
    Holding(BTreeSet<ProcessId>),
    /// The grant waits until no copier (Affinode's copying process on a GPU) is starting or ending.
    AwaitingCopiers,
    /// The grant waits for the NVML sample with this number, which shows whether the VRAM is free.
    Proving(u64),
    /// The VRAM is proven free, so restores may run.
    Granted,
}

impl Stage {
    /// Whether all awaited processes have paused their allocations, but the VRAM is not yet proven
    /// free.
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self, Stage::AwaitingCopiers | Stage::Proving(_))
    }
}

/// A grant in progress: the right of a container to allocate a stated amount of VRAM.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Current stage of the grant.
    pub stage: Stage,
    /// Processes that were ordered to pause their allocations for this grant.
    pub held: BTreeSet<ProcessId>,
    /// Processes that the grant covers: the VRAM for their restore was promised and proven free.
    /// Set when the grant reaches the stage `Granted`.
    pub covers: BTreeSet<ProcessId>,
    /// UUIDs of the GPUs whose VRAM is granted.
    pub uuids: BTreeSet<String>,
    /// When the grant began.
    pub since: Millis,
    /// Whether the grant was recovered from the journal of an earlier controller. A restore that
    /// the earlier controller ordered may be running. No other restore is started under this grant.
    pub recalled: bool,
    /// Whether the proof of free VRAM may be wrong, because other processes may have resumed their
    /// allocations since the grant began.
    pub doubted: bool,
    /// Whether the other processes may allocate again although the restore has not ended. The grant
    /// then only keeps its promise of VRAM.
    pub is_released: bool,
    /// Number of times that the proof was repeated because a process registered meanwhile.
    pub restarts: u32,
    /// The waiting allocation that the grant serves: its process and its ticket. `None`: the grant
    /// serves only a restore.
    pub want: Option<(ProcessId, u64)>,
    /// Whether the proof counted VRAM that other containers are still freeing. The restore then
    /// waits for it.
    pub awaits_vram: bool,
}

impl Grant {
    /// Creates a grant in this stage. A grant that is created in the stage `Granted` counts as
    /// recovered from the journal.
    #[must_use]
    pub fn new(stage: Stage, uuids: BTreeSet<String>, since: Millis) -> Grant {
        Grant {
            recalled: stage == Stage::Granted,
            stage,
            held: BTreeSet::new(),
            covers: BTreeSet::new(),
            uuids,
            since,
            doubted: false,
            is_released: false,
            restarts: 0,
            want: None,
            awaits_vram: false,
        }
    }

    /// Whether the VRAM is proven free, so that restores may be started.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        self.stage == Stage::Granted && !self.recalled
    }
}
