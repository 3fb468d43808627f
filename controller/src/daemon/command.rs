//! The commands that the actor receives from the APIs.

use std::{io, path::PathBuf};

use affinode_core::{InvalidKey, Key, Request, hints::Hint, view::FindError};
use affinode_proto::api::control::{
    ActionResponse, Announcement, HintResponse, ListResponse, PolicyResponse, PolicyValue,
};
use tokio::sync::oneshot;

use crate::{
    call_trace::CallSource,
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
    #[error("container {id}: cannot create its socket")]
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
        /// The run directory, in which it is stored.
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

/// A command of the control API or the HTTP API, with the channel of its response.
#[derive(Debug)]
pub enum Command {
    /// A container was created. Response: its invalid annotations.
    Announce(Box<Announcement>, oneshot::Sender<Result<Vec<String>, CommandError>>),
    /// A container was deleted: key and generation.
    Withdraw(String, u64),
    /// The state of the node with all GPUs and containers.
    List(oneshot::Sender<ListResponse>),
    /// The connected processes of these containers; `None`: of all containers.
    Sights(Option<Vec<Key>>, oneshot::Sender<Vec<CallSource>>),
    /// The key of the container with this name. If there is not exactly one, the error describes
    /// how to name it.
    Find(String, oneshot::Sender<Result<Key, FindError>>),
    /// Offload or restore the container with this name.
    Act(String, Request, oneshot::Sender<ActionResponse>),
    /// Pin (`true`) or unpin the container with this name; the third value is the author of the
    /// request.
    Pin(String, bool, String, oneshot::Sender<ActionResponse>),
    /// Turn automatic offloads on or off; the second value is the author of the request. Response:
    /// whether that is a change, or the reason why it cannot be stored.
    AutoOffload(bool, String, oneshot::Sender<Result<bool, CommandError>>),
    /// Read the configuration again. Response: whether something changed.
    Reload(oneshot::Sender<Result<ReloadedConfig, CommandError>>),
    /// A hint that the container with this name is idle or busy; the third value is its author.
    Hint(String, Hint, String, oneshot::Sender<Result<HintResponse, FindError>>),
    /// The policy of all containers, or of the one with this name.
    Policy(String, oneshot::Sender<Result<PolicyResponse, FindError>>),
    /// Change values of the node's policy. An empty value removes the setting of that name.
    /// Response: the values in effect.
    SetPolicy(Vec<(String, String)>, oneshot::Sender<Result<Vec<PolicyValue>, CommandError>>),
    /// A user requests a job.
    Job(jobs::JobRequest, jobs::JobUser, oneshot::Sender<jobs::JobReply>),
}
