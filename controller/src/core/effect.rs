//! What the node wants done.

use affinode_proto::{
    api::control::Event, reason::Reason, state::State, wire::message::ControllerMessage,
};
use serde::{Deserialize, Serialize};

use super::{
    Answer, CommandId, DeviceBytes, Key, Millis, ProcessId, input::Identity, node::text_of,
};

/// A process in the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Host pid.
    pub pid: u32,
    /// Start time in clock ticks.
    pub start_ticks: u64,
    /// VRAM that it held when it was moved out, and needs to come back.
    pub away: Vec<DeviceBytes>,
    /// UUID of the GPU that it may be restored on just now, if that is another than it left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// What is written before a destructive step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `checkpoint` or `restore`.
    pub step: String,
    /// Every process of the container that is away, or about to be.
    pub processes: Vec<RecordedProcess>,
}

/// A container is in another state from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub key: Key,
    /// Its name for people.
    pub container: String,
    /// Until now.
    pub from: State,
    /// From now on.
    pub to: State,
    /// Why.
    pub reason: Reason,
    /// More about that, if there is more.
    pub detail: String,
    /// VRAM that was moved, in bytes, where some was.
    pub bytes: u64,
    /// How long that took.
    pub elapsed_ms: Millis,
}

impl From<Change> for Event {
    fn from(change: Change) -> Event {
        Event {
            kind: "state".into(),
            key: change.key.to_string(),
            container: change.container,
            from: change.from.to_string(),
            to: change.to.to_string(),
            reason: change.reason.to_string(),
            text: text_of(change.reason, &change.detail),
            bytes: change.bytes,
            elapsed_ms: change.elapsed_ms,
            ..Event::default()
        }
    }
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
    /// Have a process make host memory ready for its leaving, where a copier can copy it out; or no
    /// longer.
    Prepare {
        /// Which.
        process: ProcessId,
        /// Or no longer.
        on: bool,
    },
    /// End a process, if it is still the one that is meant: ask it to, or kill it.
    End {
        /// Which.
        identity: Identity,
        /// It was asked before and did not.
        by_force: bool,
    },
    /// Answer a request.
    Answer(CommandId, Answer),
    /// Publish that a container is in another state.
    Changed(Change),
    /// Publish (the sequence number is set by the publisher).
    Publish(Box<Event>),
}
