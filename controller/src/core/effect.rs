//! Effects: what the controller executes for the node.

use affinode_proto::{reason::Reason, state::State, wire::message::ControllerMessage};
use serde::{Deserialize, Serialize};

use super::{
    ActionResult, CommandId, DeviceBytes, Key, Millis, ProcessId,
    copiers::{CopierEnd, CopierId},
    event::NodeEvent,
    input::Identity,
};

/// A process in a journal record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Pid on the host.
    pub pid: u32,
    /// Start time in clock ticks.
    pub start_ticks: u64,
    /// VRAM that it held at its offload and needs for its restore.
    pub offloaded: Vec<DeviceBytes>,
    /// UUID of the GPU of a migration in progress, if it is another than its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// What is about to happen to the processes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JournalStep {
    /// They are being offloaded, or are offloaded.
    Checkpoint,
    /// They may be taking VRAM.
    Restore,
}

/// A journal record: written before each step that moves memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// What is about to happen to them.
    pub step: JournalStep,
    /// Every process of the container that is offloaded or about to be.
    pub processes: Vec<RecordedProcess>,
}

/// A change of a container's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Key of the container.
    pub key: Key,
    /// Name of the container for users.
    pub container: String,
    /// State before the change.
    pub from: State,
    /// State after the change.
    pub to: State,
    /// Reason of the change.
    pub reason: Reason,
    /// Detail of the reason; may be empty.
    pub detail: String,
    /// VRAM that was moved, in bytes; 0 if none was.
    pub bytes: u64,
    /// Duration of the move, in milliseconds.
    pub elapsed_ms: Millis,
}

/// One thing to do. Effects are executed in the order given.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to an agent. A connection that does not accept it is cut.
    Send(ProcessId, ControllerMessage),
    /// Forget the process: stop watching its pidfd and reading its counters.
    Drop(ProcessId),
    /// Write the record; `None` removes it. It must be on disk before the next effect.
    Journal(Key, Option<Record>),
    /// Read GPUs, cgroups and process states; report with [`super::Input::Surveyed`].
    Survey {
        /// The container to survey.
        key: Key,
        /// Host pids and the bytes that would move to host memory; 0 if unknown.
        processes: Vec<(u32, u64)>,
    },
    /// Read the GPUs now; report with [`super::Input::Proven`] and the same number.
    Prove(Key, u64),
    /// Start a copier on a GPU.
    StartCopier {
        /// The new copier.
        copier: CopierId,
        /// UUID of its GPU.
        gpu: String,
    },
    /// Give a process a connection to a copier. Report with [`super::Input::NotAttached`] that it
    /// has none.
    AttachCopier {
        /// The copier.
        copier: CopierId,
        /// The process.
        process: ProcessId,
        /// Maximum that the process may copy out, in bytes.
        most_bytes: u64,
        /// Dedup domain: content may be shared with processes of the same number. 0: no sharing.
        domain: u64,
    },
    /// Tell a copier that VRAM is granted and proven for a process: fill its memory.
    FillMemory {
        /// The copier.
        copier: CopierId,
        /// The process that was ordered to restore.
        process: ProcessId,
        /// Granted VRAM in bytes.
        most_bytes: u64,
    },
    /// Tell a copier to take no VRAM except what [`Effect::FillMemory`] orders, or that it may again.
    HoldCopier {
        /// The copier.
        copier: CopierId,
        /// True: VRAM is being proven or taken. False: it may go on.
        on: bool,
    },
    /// End a copier. Report with [`super::Input::CopierExited`] that its process has exited.
    EndCopier {
        /// The copier.
        copier: CopierId,
        /// Why it ends, for the log.
        why: CopierEnd,
    },
    /// Order a process to stop its copy out between two steps and to undo it.
    TurnBack(ProcessId),
    /// End a process, if pid and start time still match: SIGTERM, or SIGKILL by force.
    End {
        /// The process to end.
        identity: Identity,
        /// Whether it was asked before and did not end.
        by_force: bool,
    },
    /// Answer a request with a response.
    Answer(CommandId, ActionResult),
    /// Publish a change of a container's state.
    Changed(Change),
    /// Publish an event. The publisher sets its number and time.
    Publish(Box<NodeEvent>),
}
