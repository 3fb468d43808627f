//! Effects: the actions that the node decides on and the controller executes.

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
    /// Start time of the process, in clock ticks since boot.
    pub start_ticks: u64,
    /// VRAM that the process held at its offload and needs for its restore.
    pub offloaded: Vec<DeviceBytes>,
    /// UUID of the target GPU of a migration in progress. `None`: the process is restored on its
    /// own GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// The step that a journal record announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JournalStep {
    /// The processes are being offloaded, or are offloaded.
    Checkpoint,
    /// The processes are being restored and may be taking VRAM.
    Restore,
}

/// A journal record of a container. The controller writes it before each step that moves memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The step that is about to begin.
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
    /// Amount of VRAM that was moved, in bytes. 0: no VRAM was moved.
    pub bytes: u64,
    /// Duration of the move, in milliseconds.
    pub elapsed_ms: Millis,
}

/// One action of the controller. Effects are executed in the given order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to an agent. If the message cannot be sent, the connection is closed.
    Send(ProcessId, ControllerMessage),
    /// Remove the process: stop watching its pidfd and reading its counters.
    Drop(ProcessId),
    /// Write the journal record of a container; `None` removes the record. The record must be on
    /// disk before the next effect is executed.
    Journal(Key, Option<Record>),
    /// Read GPUs, cgroups and process states. Report the result with [`super::Input::Surveyed`].
    Survey {
        /// The container whose offload needs the readings.
        key: Key,
        /// Host pid of each process, and the bytes that it would move to host memory; 0 if unknown.
        processes: Vec<(u32, u64)>,
    },
    /// Read the GPUs now, to prove that the VRAM of the container's grant is free. Report the
    /// result with [`super::Input::Proven`] and the same number.
    Prove(Key, u64),
    /// Recall the VRAM allowances of processes, then read their pending bytes, then the GPUs. Report
    /// the result with [`super::Input::VramRead`].
    ReadVram {
        /// The container with a VRAM limit.
        key: Key,
        /// Number of the recall.
        epoch: u64,
        /// All processes of the container.
        processes: Vec<ProcessId>,
    },
    /// Start a copier on a GPU.
    StartCopier {
        /// Number of the new copier.
        copier: CopierId,
        /// UUID of the copier's GPU.
        gpu: String,
    },
    /// Give a process a connection to a copier. If that fails, report
    /// [`super::Input::NotAttached`].
    AttachCopier {
        /// Number of the copier.
        copier: CopierId,
        /// Number of the process.
        process: ProcessId,
        /// Maximum memory that the process may copy out, in bytes.
        most_bytes: u64,
        /// Dedup domain. The copier may share content between processes with the same number. 0: no
        /// sharing.
        domain: u64,
    },
    /// Order a copier to copy the memory of a process back into VRAM that is granted and proven
    /// free.
    FillMemory {
        /// Number of the copier.
        copier: CopierId,
        /// The process that was ordered to restore.
        process: ProcessId,
        /// Granted VRAM in bytes.
        most_bytes: u64,
    },
    /// Order a copier to take no VRAM except for [`Effect::FillMemory`], or withdraw this order.
    HoldCopier {
        /// Number of the copier.
        copier: CopierId,
        /// True: VRAM is being proven free or taken, so the copier must wait. False: the copier
        /// continues as usual.
        on: bool,
    },
    /// End a copier. When its process has exited, report [`super::Input::CopierExited`].
    EndCopier {
        /// Number of the copier.
        copier: CopierId,
        /// Why the copier is ended, for the log.
        why: CopierEnd,
    },
    /// Order a process to cancel its copy out and to undo the copied part.
    TurnBack(ProcessId),
    /// End a process if its pid and start time still match. Sends SIGTERM, or SIGKILL with
    /// `by_force`.
    End {
        /// The process to end.
        identity: Identity,
        /// Whether the process received SIGTERM before and did not end.
        by_force: bool,
    },
    /// Answer a waiting request with this response.
    Answer(CommandId, ActionResult),
    /// Publish a change of a container's state.
    Changed(Change),
    /// Publish an event. The publisher adds its number and time.
    Publish(Box<NodeEvent>),
}
