//! The state of a node as `kubectl affinode status` and `check` show it: the health, its reason, and
//! the figures of the controller's reply.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::node_figures::NodeFigures;

/// Maximum length of the reason for a node's health, in characters.
const WHY_CHARS: usize = 300;

/// Health of a node, as the replies of its agent and controller show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum NodeHealth {
    /// The controller replies and can read all GPUs of the node.
    Serving,
    /// The agent replies, but no controller runs. A controller starts with the first GPU container.
    Resting,
    /// The controller replies but cannot read all GPUs of the node.
    Troubled,
    /// The agent reports that containerd does not serve the runtime.
    NotServed,
    /// The agent did not reply, or its reply is invalid.
    Unreachable,
}

/// A node with its health and its figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeRow {
    /// Name of the node object.
    pub name: String,
    /// Health of the node.
    pub health: NodeHealth,
    /// Reason for this health. Empty: the health needs no explanation.
    pub why: String,
    /// Time of the agent's reply, in milliseconds since 1970. `None`: there was no reply.
    pub seen_unix_ms: Option<i64>,
    /// Time since when nothing has used a GPU of the node. `None`: the node does not have the label
    /// for this.
    pub gpus_idle_since: Option<String>,
    /// Figures in the reply. `None`: the reply had none.
    pub figures: Option<NodeFigures>,
}

/// Result of a request to the agent of a node. `Ok(Some)`: the agent replied with the node's
/// figures. `Ok(None)`: the agent replied that no controller runs on the node now. `Err`: the agent
/// sent no valid reply. The text states why.
type NodeReply = Result<Option<NodeFigures>, String>;

impl NodeRow {
    /// Creates the row of a node from two sources: the reply of its agent, and the state that the
    /// agent has published in the node's annotation. The published state determines whether the
    /// node serves the runtime.
    pub fn new(name: &str, reply: NodeReply, state: &str) -> NodeRow {
        let mut row = NodeRow::replied(name, reply);
        if state.starts_with("served") {
            // The runtime may be served with a configuration other than the cluster's.
            if state != "served" && row.why.is_empty() {
                row.why = state.to_owned();
            }
        } else if row.health != NodeHealth::Unreachable {
            row.health = NodeHealth::NotServed;
            row.why = state.to_owned();
        } else if !state.is_empty() {
            row.why = format!("{}; last published state: {state}", row.why);
        }
        row
    }

    /// Creates the row of a node from its agent's reply alone, without the published state.
    fn replied(name: &str, reply: NodeReply) -> NodeRow {
        let seen_unix_ms = reply.is_ok().then(|| Timestamp::now().as_millisecond());
        let (health, why, figures) = match reply {
            Ok(None) => {
                let why = "no controller runs; a controller starts with the first GPU container";
                (NodeHealth::Resting, why.to_owned(), None)
            }
            Ok(Some(figures)) => match figures.gpu_error.clone() {
                Some(why) => (NodeHealth::Troubled, why, Some(figures)),
                None => (NodeHealth::Serving, String::new(), Some(figures)),
            },
            Err(why) => (NodeHealth::Unreachable, why.chars().take(WHY_CHARS).collect(), None),
        };
        let name = name.to_owned();
        NodeRow { name, health, why, seen_unix_ms, gpus_idle_since: None, figures }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_and_published_state_make_the_health() {
        let figures = |gpu_error: Option<&str>| {
            let gpu_error = gpu_error.map(str::to_owned);
            Ok(Some(NodeFigures { gpu_error, ..NodeFigures::default() }))
        };
        let other = "served, but the cluster's configuration is not in use: why";
        let gone = || Err("no reply".to_owned());
        for (reply, state, health, why) in [
            (figures(None), "served", NodeHealth::Serving, ""),
            (figures(None), other, NodeHealth::Serving, other),
            (figures(Some("NVML fails")), "served", NodeHealth::Troubled, "NVML fails"),
            (figures(None), "not installed: x", NodeHealth::NotServed, "not installed: x"),
            (Ok(None), "not installed: x", NodeHealth::NotServed, "not installed: x"),
            (gone(), "served", NodeHealth::Unreachable, "no reply"),
            (gone(), "", NodeHealth::Unreachable, "no reply"),
            (gone(), "retired", NodeHealth::Unreachable, "no reply; last published state: retired"),
        ] {
            let is_reply = reply.is_ok();
            let row = NodeRow::new("one", reply, state);
            assert_eq!((row.health, &*row.why), (health, why), "{state}");
            assert_eq!(row.seen_unix_ms.is_some(), is_reply, "{state}");
        }
        let resting = NodeRow::new("one", Ok(None), "served");
        assert_eq!((resting.health, resting.figures), (NodeHealth::Resting, None));
        let long = NodeRow::new("one", Err("x".repeat(10_000)), "served");
        assert_eq!(long.why.len(), WHY_CHARS);
    }
}
