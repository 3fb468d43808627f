//! The commands that the actor receives from the APIs.

use std::{fs::File, io, path::PathBuf, sync::Arc};

use affinode_core::{InvalidKey, Key, ProcessId, Request, hints::Hint, view::FindError};
use affinode_proto::api::control::{
    ActionResponse, Announcement, HintResponse, ListResponse, PolicyResponse, PolicyValue,
};
use tokio::sync::{mpsc, oneshot};

use crate::{
    agents::OutgoingFrame,
    config::{ConfigError, ReloadedConfig, SetError},
    jobs,
};

/// Reason why a command was not carried out. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The announced key is invalid.
    #[error(transparent)]
    Key(#[from] InvalidKey),
    /// The socket for the container's processes cannot be created.
    #[error("container {id}: cannot create the socket for the container's processes")]
    Socket {
        /// Id of the container.
        id: String,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The operator's override cannot be stored.
    #[error("cannot store the operator override in {}", folder.display())]
    Override {
        /// The run directory, in which the override is stored.
        folder: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The configuration is invalid or cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The change of the node's policy is invalid or cannot be stored.
    #[error(transparent)]
    Set(#[from] SetError),
}

/// A process whose calls can be read. This value does not keep the connection of the process's
/// agent open.
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
    /// Queue to the process's agent. `None`: the library in the process cannot record calls.
    pub outbox: Option<mpsc::WeakSender<OutgoingFrame>>,
}

/// A command of the control API or the HTTP API, with the channel of its response.
#[derive(Debug)]
pub enum Command {
    /// A container was created. Response: warnings about its invalid annotations.
    Announce(Box<Announcement>, oneshot::Sender<Result<Vec<String>, CommandError>>),
    /// A container was deleted. The values are the container's key and generation.
    Withdraw(String, u64),
    /// Returns the state of the node with all GPUs and containers.
    List(oneshot::Sender<ListResponse>),
    /// Returns the connected processes of these containers. `None`: of all containers.
    Sights(Option<Vec<Key>>, oneshot::Sender<Vec<CallSource>>),
    /// Finds the key of the container with this name. If no container or several containers have
    /// the name, the error describes how to name one.
    Find(String, oneshot::Sender<Result<Key, FindError>>),
    /// Offload or restore the container with this name.
    Act(String, Request, oneshot::Sender<ActionResponse>),
    /// Pin (`true`) or unpin (`false`) the container with this name. The third value is the author
    /// of the request.
    Pin(String, bool, String, oneshot::Sender<ActionResponse>),
    /// Turn automatic offloads on or off. The second value is the author of the request. Response:
    /// whether the setting has changed, or the reason why it cannot be stored.
    AutoOffload(bool, String, oneshot::Sender<Result<bool, CommandError>>),
    /// Read the configuration again. Response: whether a value has changed, and which changes apply
    /// only at the next start.
    Reload(oneshot::Sender<Result<ReloadedConfig, CommandError>>),
    /// A hint that the container with this name is idle or busy. The third value is the author of
    /// the hint.
    Hint(String, Hint, String, oneshot::Sender<Result<HintResponse, FindError>>),
    /// Returns the policy of the container with this name. Empty name: of all containers.
    Policy(String, oneshot::Sender<Result<PolicyResponse, FindError>>),
    /// Change values of the node's policy. An empty value removes the setting of that name.
    /// Response: the values in effect.
    SetPolicy(Vec<(String, String)>, oneshot::Sender<Result<Vec<PolicyValue>, CommandError>>),
    /// A user requests a job.
    Job(jobs::JobRequest, jobs::JobUser, oneshot::Sender<jobs::JobReply>),
}
