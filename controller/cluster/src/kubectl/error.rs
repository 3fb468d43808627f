//! Errors of the plugin, and the exit status of each.

use std::io;

use kube::config::{InferConfigError, KubeconfigError};

use super::agent_client::AgentClientError;
use crate::error_chain::ApiError;

/// Exit status of a command. If requests to several nodes have different results, the command exits
/// with the status among them that comes last in this enum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ExitStatus {
    /// The command did what was requested.
    #[default]
    Done = 0,
    /// The API server, an agent or a controller refused the request.
    Refused = 3,
    /// The API server or a node cannot be reached.
    Unreachable = 4,
    /// The command failed for another reason.
    Failed = 1,
}

impl ExitStatus {
    /// Returns the word for this status in JSON output.
    pub fn as_str(self) -> &'static str {
        match self {
            ExitStatus::Done => "done",
            ExitStatus::Refused => "refused",
            ExitStatus::Unreachable => "unreachable",
            ExitStatus::Failed => "failed",
        }
    }
}

/// Reason why a command, or its request to one node, did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The async runtime could not be started.
    #[error(
        "cannot start a thread; check the limits of processes (ulimit -u, pids cgroup) and memory"
    )]
    Start(#[source] io::Error),
    /// The kubeconfig is missing or invalid, or does not contain the requested context.
    #[error("cannot use the kubeconfig; check --kubeconfig, --context and `kubectl config view`")]
    Kubeconfig(#[from] KubeconfigError),
    /// There is neither a kubeconfig nor a service account.
    #[error("no cluster is configured; set --kubeconfig or KUBECONFIG")]
    NoConfig(#[source] Box<InferConfigError>),
    /// The credentials of the kubeconfig's user cannot be used.
    #[error("cannot use the credentials of the kubeconfig's user")]
    User(#[source] ApiError),
    /// The user has no token that an agent could review.
    #[error(
        "the kubeconfig's user has no token, and the node agents do not accept a client certificate; use a context with a token, or --service-account NAMESPACE/NAME"
    )]
    NoToken,
    /// The kubeconfig's user impersonates another user.
    #[error(
        "the kubeconfig's user impersonates another user, and the node agents accept no impersonation; use a context without `as`"
    )]
    Impersonates,
    /// The API server refused a request.
    #[error(
        "the API server refused to {what}: {message}; the user needs the rights of Role affinode-kubectl and ClusterRole affinode-viewer (docs/kubernetes.md)"
    )]
    Denied {
        /// The request in words, such as list nodes.
        what: String,
        /// The message that the API server sent.
        message: String,
    },
    /// The API server does not have the requested object, or considers the request invalid.
    #[error("cannot {0}")]
    Api(String, #[source] ApiError),
    /// The API server did not reply.
    #[error("cannot {0}; check that the API server can be reached")]
    NoApiServer(String, #[source] ApiError),
    /// No node of the cluster has an agent.
    #[error(
        "no node of this cluster has an agent of Affinode; docs/kubernetes.md shows the installation"
    )]
    NoAgents,
    /// The node that the user named does not exist, or has no agent.
    #[error("node {0} does not exist, or has no agent of Affinode")]
    NoNode(String),
    /// The node has no running agent pod.
    #[error("no pod of the agent runs on the node")]
    NoAgent,
    /// The port-forward ended with an error.
    #[error("the port-forward to pod {pod} failed: {why}")]
    Forward {
        /// Name of the agent's pod.
        pod: String,
        /// The message that the kubelet sent.
        why: String,
    },
    /// The request could not be sent to the agent, or the agent did not reply.
    #[error(transparent)]
    Agent(#[from] AgentClientError),
    /// The agent or its controller refused the request.
    #[error("{0}")]
    Refused(String),
    /// The agent replied with an error, because it got no reply from its controller.
    #[error("the node's agent replied {status}: {text}")]
    NoController {
        /// HTTP status of the agent's reply.
        status: u16,
        /// Text of the agent's reply.
        text: String,
    },
    /// The reply of an agent or a controller is not the expected result.
    #[error("{0}")]
    Reply(String),
    /// Standard output cannot be written.
    #[error("cannot write to standard output")]
    Print(#[from] io::Error),
    /// The result cannot be written as JSON.
    #[error("cannot encode the output as JSON")]
    Json(#[from] serde_json::Error),
}

impl PluginError {
    /// Returns a function that converts an error of the kube library. `what` is the failed request
    /// in words, such as `list nodes`.
    pub fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> PluginError {
        let what = what.into();
        move |error| match error {
            kube::Error::Api(status) if matches!(status.code, 401 | 403) => {
                PluginError::Denied { what, message: status.message.clone() }
            }
            kube::Error::Api(ref status) if status.code < 500 => {
                PluginError::Api(what, ApiError(error))
            }
            error => PluginError::NoApiServer(what, ApiError(error)),
        }
    }

    /// Returns the exit status of a command that ends with this error.
    pub fn status(&self) -> ExitStatus {
        match self {
            PluginError::Denied { .. } | PluginError::Refused(_) => ExitStatus::Refused,
            PluginError::NoApiServer(..)
            | PluginError::NoAgent
            | PluginError::Forward { .. }
            | PluginError::Agent(_)
            | PluginError::NoController { .. } => ExitStatus::Unreachable,
            _ => ExitStatus::Failed,
        }
    }
}
