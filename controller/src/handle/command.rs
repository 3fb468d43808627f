//! Defines the commands that the actor (the task that drives the controller) receives from the
//! APIs.

use std::{fs::File, io, path::PathBuf, sync::Arc};

use affinode_core::{InvalidKey, Key, ProcessId, Request, hints::Hint, view::FindError};
use affinode_proto::api::control::{
    ActionResponse, Announcement, HintResponse, ListResponse, PolicyResponse, PolicyValue,
};
use tokio::sync::{mpsc, oneshot};

use crate::{
    agents::OutgoingFrame,
    config::{Config, ReloadedConfig},
    jobs,
};

/// Reason why the actor did not execute a command. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The key in a container's announcement is invalid.
    #[error(transparent)]
    Key(#[from] InvalidKey),
    /// The agent socket of the container cannot be created.
    #[error("container {id}: cannot create the socket for the container's processes")]
    Socket {
        /// Id of the container whose socket cannot be created.
        id: String,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The operator override (such as a pin) cannot be stored.
    #[error("cannot store the operator override in {}", folder.display())]
    Override {
        /// Run directory, in which the override is stored.
        folder: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// A process whose CUDA calls can be traced. This value does not keep the connection of the
/// process's agent open.
#[derive(Clone, Debug)]
pub struct CallSource {
    /// Number of the connection to the process's agent.
    pub id: ProcessId,
    /// Key of the process's container.
    pub key: Key,
    /// Name of the process's container.
    pub container: String,
    /// Pid of the process on the node.
    pub pid: u32,
    /// Name of the process's program.
    pub command: String,
    /// File with the process's shared counters and call ring.
    pub page: Arc<File>,
    /// Queue of messages to the process's agent. `None` if the library in the process cannot record
    /// calls.
    pub outbox: Option<mpsc::WeakSender<OutgoingFrame>>,
}

/// A command from the control API or the HTTP API, with the channel for its response.
#[derive(Debug)]
pub enum Command {
    /// Announces a container that was created. The response has warnings about its invalid
    /// annotations.
    Announce(Box<Announcement>, oneshot::Sender<Result<Vec<String>, CommandError>>),
    /// Withdraws a container that was deleted. The values are the container's key and generation.
    Withdraw(String, u64),
    /// Responds immediately, which shows that the actor handles commands.
    Ping(oneshot::Sender<()>),
    /// Returns the state of the node with all GPUs and containers.
    List(oneshot::Sender<ListResponse>),
    /// Returns those processes of these containers that are connected to the controller. If the
    /// list is `None`, the processes of all containers are returned.
    Sights(Option<Vec<Key>>, oneshot::Sender<Vec<CallSource>>),
    /// Returns the key of the container with this name. If no container or several containers have
    /// the name, the error describes how to name one.
    Find(String, oneshot::Sender<Result<Key, FindError>>),
    /// Offloads or restores the container with this name.
    Act(String, Request, oneshot::Sender<ActionResponse>),
    /// Pins (`true`) or unpins (`false`) the container with this name. The third value names the
    /// author of the request.
    Pin(String, bool, String, oneshot::Sender<ActionResponse>),
    /// Turns automatic offloads of the node on or off. The second value names the author of the
    /// request. The response tells whether the setting has changed, or why it cannot be stored.
    AutoOffload(bool, String, oneshot::Sender<Result<bool, CommandError>>),
    /// Applies a configuration that was read again. The response tells whether a value has changed,
    /// and which changes apply only when the controller starts next.
    Reload(Box<Config>, oneshot::Sender<ReloadedConfig>),
    /// Reports that the container with this name is idle or busy (a hint). The third value names
    /// the author of the hint.
    Hint(String, Hint, String, oneshot::Sender<Result<HintResponse, FindError>>),
    /// Returns the policy of the container with this name, or of all containers if the name is
    /// empty.
    Policy(String, oneshot::Sender<Result<PolicyResponse, FindError>>),
    /// Applies a configuration that was read again after these changes of the node's policy were
    /// stored. An empty value means that the setting was removed. The response has the resulting
    /// values.
    SetPolicy(Box<Config>, Vec<(String, String)>, oneshot::Sender<Vec<PolicyValue>>),
    /// Requests a job (a program without a container) for a user.
    Job(jobs::JobRequest, jobs::JobUser, oneshot::Sender<jobs::JobReply>),
}
