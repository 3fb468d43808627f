//! A grant: the right of one container to be restored, or to make an allocation that found no VRAM
//! before.
//!
//! ```text
//! queue ──VRAM promised in the ledger──> Holding ──all hold──> AwaitingCopiers ──none moves──> Proving ──NVML: free──> Granted
//!   ^                                       ^                        │                           │ not free
//!   │                                       └──a process registers───┴───────────────────────────┤
//!   └────────────────────────────────────────────────────────────────────────────────────────────┘  promise given up, tried again
//! ```
//!
//! From the stage Holding until the grant ends, managed processes must not take VRAM on the grant's
//! GPUs. VRAM that is proven free therefore stays free until the driver has taken it. A process
//! that registers meanwhile receives the order to pause its allocations before its registration is
//! confirmed.
//!
//! A process that cannot pause its allocations, or does not report, delays a grant once
//! (`holds.rs`). NVML's sample includes the VRAM that such a process takes, and the VRAM of
//! unmanaged processes.
//!
//! Processes end their holds by themselves if the controller was silent for too long or if the copy
//! takes far longer than expected. From then on the grant is in doubt: a running restore keeps its
//! promise of VRAM, but no further restore is started.

use std::collections::BTreeSet;

use super::{Millis, ProcessId};

/// Stage of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waits until these processes pause their allocations.
    Holding(BTreeSet<ProcessId>),
    /// Waits until no copier is starting or ending.
    AwaitingCopiers,
    /// Waits for the NVML sample with this number.
    Proving(u64),
    /// The VRAM is proven free: restores may run.
    Granted,
}

impl Stage {
    /// Whether all awaited processes have paused their allocations, but the VRAM is not proven free
    /// yet.
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self, Stage::AwaitingCopiers | Stage::Proving(_))
    }
}

/// A grant in progress.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Current stage of the grant.
    pub stage: Stage,
    /// Processes that were ordered to pause their allocations.
    pub held: BTreeSet<ProcessId>,
    /// Once granted: the processes whose VRAM was promised and proven free.
    pub covers: BTreeSet<ProcessId>,
    /// UUIDs of the GPUs whose VRAM is granted.
    pub uuids: BTreeSet<String>,
    /// When the grant began.
    pub since: Millis,
    /// Whether the grant was taken over from the journal of an earlier controller. A restore may be
    /// running under it. No other restore is started under it.
    pub recalled: bool,
    /// Whether other processes may have ended their pauses of allocations since the grant began, so
    /// that the proof of free VRAM may be wrong.
    pub doubted: bool,
    /// Number of times that NVML had to be read again because a process registered during the
    /// proof.
    pub restarts: u32,
    /// Process and ticket of the waiting allocation that is made under this grant. `None`: the
    /// grant is only for a restore.
    pub want: Option<(ProcessId, u64)>,
}

impl Grant {
    /// Creates a grant that begins now. A grant that begins as `Granted` was taken over from the
    /// journal.
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
            restarts: 0,
            want: None,
        }
    }

    /// Whether restores may be started.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        self.stage == Stage::Granted && !self.recalled
    }
}
