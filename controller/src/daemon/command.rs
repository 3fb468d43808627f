//! What comes to the actor from its API.

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

/// What the API asks the actor.
#[derive(Debug)]
pub enum Command {
    /// A container exists. Answer: annotations that were not understood.
    Announce(Box<Announcement>, oneshot::Sender<Result<Vec<String>, String>>),
    /// A container is gone.
    Withdraw(String, u64),
    /// Everything.
    List(oneshot::Sender<ListResponse>),
    /// The connected processes of these containers, or all.
    Sights(Option<Vec<Key>>, oneshot::Sender<Vec<CallSource>>),
    /// The container that is named, or what to do instead.
    Find(String, oneshot::Sender<Result<Key, String>>),
    /// Offload or restore the container that is named.
    Act(String, Request, oneshot::Sender<ActionResponse>),
    /// Keep the container that is named on the GPU, or no longer; who asked.
    Pin(String, bool, String, oneshot::Sender<ActionResponse>),
    /// Whether anything is offloaded without being asked for; who asked. Answer: whether
    /// that is a change, or why it cannot be kept.
    AutoOffload(bool, String, oneshot::Sender<Result<bool, String>>),
    /// Read the configuration again. Answer: whether something changed.
    Reload(oneshot::Sender<Result<ReloadedConfig, String>>),
    /// The container that is named is said to be idle or busy; who says so.
    Hint(String, Hint, String, oneshot::Sender<Result<HintResponse, String>>),
    /// The policy of all containers, or of the one that is named.
    Policy(String, oneshot::Sender<Result<PolicyResponse, String>>),
    /// Change values of the node's policy; an empty value takes it back. Answer: what holds.
    SetPolicy(Vec<(String, String)>, oneshot::Sender<Result<Vec<PolicyValue>, String>>),
    /// A user wants to run a job.
    Job(jobs::JobRequest, jobs::JobUser, oneshot::Sender<jobs::JobReply>),
}
