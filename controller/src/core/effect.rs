//! What the node wants done.

use affinode_proto::{api::control::Event, wire::message::ControllerMessage};
use serde::{Deserialize, Serialize};

use super::{Answer, CommandId, DeviceBytes, Key, ProcessId, input::Identity};

/// A process in the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Host pid.
    pub pid: u32,
    /// Start time in clock ticks.
    pub start_ticks: u64,
    /// VRAM that it held when it was moved out, and needs to come back.
    pub away: Vec<DeviceBytes>,
}

/// What is written before a destructive step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `checkpoint` or `restore`.
    pub step: String,
    /// Every process of the container that is away, or about to be.
    pub processes: Vec<RecordedProcess>,
}

/// Something to do, in the order given.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send to an agent. A connection that does not take it is cut.
    Send(ProcessId, ControllerMessage),
    /// Forget the process: watch no pidfd, read no page.
    Drop(ProcessId),
    /// Write the record, or remove it when `None`. Must be on disk before the next effect.
    Journal(Key, Option<Record>),
    /// Read devices, cgroups and process states; answer with [`super::Input::Surveyed`].
    Survey {
        /// The container.
        key: Key,
        /// Host pids and the VRAM bytes that would move to host memory, 0 when not known.
        processes: Vec<(u32, u64)>,
    },
    /// Read devices now; answer with [`super::Input::Proven`] of the same number.
    Prove(Key, u64),
    /// End a process, if it is still the one that is meant: ask it to, or kill it.
    End {
        /// Which.
        identity: Identity,
        /// It was asked before and did not.
        by_force: bool,
    },
    /// Answer a request.
    Answer(CommandId, Answer),
    /// Publish (the sequence number is set by the publisher).
    Publish(Event),
}
