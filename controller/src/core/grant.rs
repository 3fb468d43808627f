//! A grant: the right of one container to be restored, or to make an allocation that found no VRAM.
//!
//! ```text
//! queue ──VRAM promised in the ledger──> Holding ──all hold──> AwaitingCopiers ──none moves──> Proving ──NVML: free──> Granted
//!   ^                                       ^                        │                           │ not free
//!   │                                       └──a process registers───┴───────────────────────────┤
//!   └────────────────────────────────────────────────────────────────────────────────────────────┘  promise given up, tried again
//! ```
//!
//! From the stage Holding until the grant ends, no managed process may take VRAM on its GPUs. So
//! VRAM that is proven free stays free until the driver has taken it. A process that registers
//! meanwhile is ordered to hold its allocations before its registration is confirmed.
//!
//! A process that cannot hold, or does not report, delays a grant once (`holds.rs`). NVML's sample
//! shows the VRAM that such a process takes, like that of unmanaged processes.
//!
//! Holds may end by themselves when the controller was silent for too long, or when the copy takes
//! far longer than expected. From then on the grant is in doubt: a running restore keeps its
//! promise, but no restore is started.

use std::collections::BTreeSet;

use super::{Millis, ProcessId};

/// Stage of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waits for these processes to hold their allocations.
    Holding(BTreeSet<ProcessId>),
    /// Waits until no copier starts or ends.
    AwaitingCopiers,
    /// Waits for the NVML sample with this number.
    Proving(u64),
    /// The VRAM is proven free: restores may run.
    Granted,
}

impl Stage {
    /// Whether all awaited processes hold their allocations, and the VRAM is not proven free yet.
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
    /// Processes that were ordered to hold their allocations.
    pub held: BTreeSet<ProcessId>,
    /// Once granted: the processes whose VRAM was promised and proven.
    pub covers: BTreeSet<ProcessId>,
    /// UUIDs of the GPUs concerned.
    pub uuids: BTreeSet<String>,
    /// When the grant began.
    pub since: Millis,
    /// Whether the grant was taken over from the journal of an earlier controller. A restore may be
    /// running, and no other is started.
    pub recalled: bool,
    /// Whether holds may have ended since the grant began.
    pub doubted: bool,
    /// Number of times that NVML had to be read again because a process registered during the
    /// proof.
    pub restarts: u32,
    /// The waiting allocation that the grant is also for: its process and ticket.
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
