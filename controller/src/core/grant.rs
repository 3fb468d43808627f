//! The right of one container to be restored, or to make an allocation that found no memory.
//!
//! ```text
//! queue ──room promised in the ledger──> Holding ──all hold allocations──> Proving ──NVML says free──> Granted
//!   ^                                       ^                                 │ not free
//!   │                                       └───────────one joins─────────────┤
//!   └─────────────────────────────────────────────────────────────────────────┘  promise given up, tried again
//! ```
//!
//! From Holding to the end, no managed process may take VRAM of the devices concerned, so what
//! is proven free stays free until the driver has taken it. A process that joins meanwhile is
//! told to hold before it is welcomed. A process that cannot hold, or says nothing, is waited for
//! once (`holds.rs`): what it takes the proof sees, as what unmanaged processes take. Holds may lapse: of a controller that was silent
//! for too long, and when the copy takes far longer than it should. From then on the grant
//! is in doubt: a restore that runs keeps its promise, none is started.

use std::collections::BTreeSet;

use super::{Millis, ProcessId};

/// How far a grant has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waits for these processes to hold their allocations.
    Holding(BTreeSet<ProcessId>),
    /// Waits for NVML's answer to the question of this number.
    Proving(u64),
    /// Restores may run.
    Granted,
}

/// A grant in progress.
#[derive(Clone, Debug)]
pub struct Grant {
    /// How far it is.
    pub stage: Stage,
    /// Processes that were told to hold their allocations.
    pub held: BTreeSet<ProcessId>,
    /// Processes whose VRAM was promised and proven, once it is granted.
    pub covers: BTreeSet<ProcessId>,
    /// Devices that it concerns.
    pub uuids: BTreeSet<String>,
    /// When it began.
    pub since: Millis,
    /// Begun by an earlier controller: the restore may be running, none is started.
    pub recalled: bool,
    /// Holds may have lapsed since it began.
    pub doubted: bool,
    /// How often a process that joined was waited for before NVML was asked anew.
    pub restarts: u32,
    /// The process, and the ticket of its allocation, that room is meant for as well.
    pub want: Option<(ProcessId, u64)>,
}

impl Grant {
    /// A grant that begins now.
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
