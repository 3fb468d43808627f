//! Effects: the actions that the node decides on and the controller executes.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{message::ControllerMessage, vram_view::VramView},
};
use serde::{Deserialize, Serialize};

use super::{
    ActionResult, CommandId, DeviceBytes, Key, Millis, ProcessId,
    copiers::{CopierEnd, CopierId},
    copy_watch::TurnBackCause,
    driver_limit::DriverLimitOrder,
    event::NodeEvent,
    host_memory::HostNeed,
    input::Identity,
};

/// Entry of a journal record: one process that is offloaded or about to be offloaded.
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

/// The step of an offload or restore that a journal record announces. The record is written before
/// the step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JournalStep {
    /// The processes are being offloaded, or are offloaded.
    Checkpoint,
    /// The processes are being restored, so the driver may be allocating VRAM for them.
    Restore,
}

/// A journal record of a container. The controller writes it before each step that moves memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The step that is about to begin.
    pub step: JournalStep,
    /// Every process of the container that is offloaded or about to be offloaded.
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
    /// Duration of the offload or restore, in milliseconds.
    pub elapsed_ms: Millis,
}

/// One action of the controller. Effects are executed in the given order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to an agent (the library's thread in a CUDA process). If the message cannot
    /// be sent, close the connection.
    Send(ProcessId, ControllerMessage),
    /// Remove the process from the controller: stop watching its pidfd and reading its counters.
    Drop(ProcessId),
    /// Write the journal record of a container; `None` removes the record. The record must be on
    /// disk before the next effect is executed.
    Journal(Key, Option<Record>),
    /// Read GPUs, cgroups and process states (a survey). Report the result with
    /// [`super::Input::Surveyed`].
    Survey {
        /// The container whose offload needs the readings.
        key: Key,
        /// The processes that the offload moves.
        processes: Vec<HostNeed>,
        /// Whether the content may be copied to the host pool.
        host_pool: bool,
    },
    /// Set how much memory of the host pool a process may use, in bytes. 0 ends an earlier
    /// permission. First connect the process to the host pool if it is not connected. If that
    /// fails, the process's next copy out fails for lack of host memory.
    AllowHostPool {
        /// The process that copies its memory out.
        process: ProcessId,
        /// Permitted memory in bytes.
        bytes: u64,
        /// The part of the permitted memory that the process has already, in bytes.
        kept_bytes: u64,
    },
    /// End the connection of a process to the host pool, and its permission. Its next permission
    /// makes a new connection.
    LeaveHostPool(ProcessId),
    /// Permit a disk file of this size to an offloaded process in the host pool, and then order the
    /// process to move its content to the file. If the host pool does not run, send no order.
    StoreOnDisk {
        /// The offloaded process whose content moves to the file.
        process: ProcessId,
        /// Maximum size of the disk file, in bytes.
        bytes: u64,
    },
    /// Permit no further content in the disk file of a process, because its disk step took too long.
    StopDisk(ProcessId),
    /// Read the GPUs now to prove that the VRAM of the container's grant is free. The number
    /// identifies this reading. If `with_processes` is true, read the VRAM of each process too, for
    /// which NVML needs more time. Report the result with [`super::Input::Proven`] and the same
    /// number.
    Prove {
        /// The container with the grant.
        key: Key,
        /// Number of the reading.
        number: u64,
        /// Whether the VRAM of each process is needed.
        with_processes: bool,
    },
    /// Read how much VRAM a container with a limit uses. First recall the VRAM allowances of its
    /// processes: the amounts that they may allocate without a message to the controller. Then read
    /// the pending bytes, which are allocations begun under the recalled allowances. Then read the
    /// GPUs. Report the result with [`super::Input::VramRead`].
    ReadVram {
        /// The container with a VRAM limit.
        key: Key,
        /// Number that identifies this recall of allowances. The result contains the same number.
        epoch: u64,
        /// All processes of the container.
        processes: Vec<ProcessId>,
    },
    /// Recall the VRAM allowances of processes: no process may begin another allocation under an
    /// earlier allowance. An allowance is the amount of VRAM that a process may allocate without a
    /// message to the controller.
    RecallVram {
        /// Number that identifies this recall.
        epoch: u64,
        /// All processes of a container with a VRAM limit.
        processes: Vec<ProcessId>,
    },
    /// Write the file that shows a container its VRAM under a limit. If `views` is empty, the
    /// container has no limit, so remove the file.
    ShowVram {
        /// The container with a VRAM limit.
        key: Key,
        /// VRAM of the container on each GPU.
        views: Vec<VramView>,
    },
    /// Set, lift or remove the limit of a container's VRAM that the driver enforces. Execute these
    /// orders, [`Effect::Survey`] and [`Effect::Prove`] one after another, in their order. Report
    /// the result with [`super::Input::DriverLimited`].
    LimitInDriver(DriverLimitOrder),
    /// Start a copier on a GPU.
    StartCopier {
        /// Id of the new copier.
        copier: CopierId,
        /// UUID of the copier's GPU.
        gpu: String,
    },
    /// Send a process a connection to a copier. If that fails, report
    /// [`super::Input::NotAttached`].
    AttachCopier {
        /// Id of the copier.
        copier: CopierId,
        /// Id of the process at the controller.
        process: ProcessId,
        /// Maximum memory that the process may copy out, in bytes.
        most_bytes: u64,
        /// Number of the process's dedup domain. The copier may share identical content between
        /// processes with the same number. 0: no sharing.
        domain: u64,
    },
    /// Order a copier to copy a process's memory back into VRAM. The VRAM for this copy is granted
    /// to the process's container and proven free.
    FillMemory {
        /// Id of the copier.
        copier: CopierId,
        /// The process that was ordered to restore.
        process: ProcessId,
        /// Amount of granted VRAM, in bytes. The copier must not exceed it.
        most_bytes: u64,
    },
    /// Order a copier to allocate VRAM only for [`Effect::FillMemory`], or withdraw this order.
    HoldCopier {
        /// Id of the copier.
        copier: CopierId,
        /// True: VRAM is being proven free or allocated for a grant, so the copier must wait.
        /// False: the copier continues as usual.
        on: bool,
    },
    /// End a copier. When its process has exited, report [`super::Input::CopierExited`].
    EndCopier {
        /// Id of the copier.
        copier: CopierId,
        /// Why the copier is ended, for the log.
        why: CopierEnd,
    },
    /// Order a process to cancel its copy out and to undo the copied part.
    TurnBack(ProcessId, TurnBackCause),
    /// End a process, if its pid and start time still match. The signal is SIGTERM, or SIGKILL with
    /// `by_force`.
    End {
        /// The process to end.
        identity: Identity,
        /// Whether to send SIGKILL, because the process received SIGTERM before and did not end.
        by_force: bool,
    },
    /// Send the response to an operator's request that waits for it.
    Answer(CommandId, ActionResult),
    /// Publish a change of a container's state.
    Changed(Change),
    /// Publish an event. The publisher adds its number and time.
    Publish(Box<NodeEvent>),
}
