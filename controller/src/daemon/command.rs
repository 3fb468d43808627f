//! The commands that the actor receives from the APIs.

use affinode_proto::api::control::{
    ActionResponse, Announcement, HintResponse, ListResponse, PolicyResponse, PolicyValue,
};
use tokio::sync::oneshot;

use crate::{
    call_trace::CallSource,
    config::ReloadedConfig,
    core::{Key, Request, hints::Hint},
    jobs,
};

/// A command of the control API or the HTTP API, with the channel of its response.
#[derive(Debug)]
pub enum Command {
    /// A container was created. Response: its invalid annotations.
    Announce(Box<Announcement>, oneshot::Sender<Result<Vec<String>, String>>),
    /// A container was deleted: key and generation.
    Withdraw(String, u64),
    /// The state of the node with all GPUs and containers.
    List(oneshot::Sender<ListResponse>),
    /// The processes of these containers, or of all, that are connected.
    Sights(Option<Vec<Key>>, oneshot::Sender<Vec<CallSource>>),
    /// The key of the container with this name, or an instruction if there is not exactly one.
    Find(String, oneshot::Sender<Result<Key, String>>),
    /// Offload or restore the container with this name.
    Act(String, Request, oneshot::Sender<ActionResponse>),
    /// Pin (`true`) or unpin the container with this name; the third value is the author of the
    /// request.
    Pin(String, bool, String, oneshot::Sender<ActionResponse>),
    /// Turn automatic offloads on or off; the second value is the author of the request. Response:
    /// whether that is a change, or the reason why it cannot be stored.
    AutoOffload(bool, String, oneshot::Sender<Result<bool, String>>),
    /// Read the configuration again. Response: whether something changed.
    Reload(oneshot::Sender<Result<ReloadedConfig, String>>),
    /// A hint that the container with this name is idle or busy; the third value is its author.
    Hint(String, Hint, String, oneshot::Sender<Result<HintResponse, String>>),
    /// The policy of all containers, or of the one with this name.
    Policy(String, oneshot::Sender<Result<PolicyResponse, String>>),
    /// Change values of the node's policy; an empty value removes it. Response: the values in
    /// effect.
    SetPolicy(Vec<(String, String)>, oneshot::Sender<Result<Vec<PolicyValue>, String>>),
    /// A user requests a job.
    Job(jobs::JobRequest, jobs::JobUser, oneshot::Sender<jobs::JobReply>),
}
