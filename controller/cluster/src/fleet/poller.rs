//! Polls all nodes while the page is in use: several at a time, each for at most a few seconds. A
//! request for the page gets the last known state, and never waits for a node.
//!
//! ```text
//!  Asking ──reply──>  Serving | Resting (no controller yet) | Troubled (sees no GPU)
//!     └──none, or an error──> Unreachable: the reason, the last figures, and their time
//!  NotServed: the agent reports that containerd does not serve the runtime
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use hyper::{Method, StatusCode, header::HeaderValue};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use super::{
    agent_client::{AgentRequest, ask, body, said},
    discovery::{KnownNode, NODES, Nodes},
    summary::{self, FleetSummary},
};
use crate::{error_chain, node::NO_CONTROLLER};

/// Maximum number of nodes that are polled at the same time.
const MAX_CONCURRENT_POLLS: usize = 16;
/// Time limit for an agent's reply.
const TIME: Duration = Duration::from_secs(3);
/// Minimum time between the starts of two polling rounds.
const PACE: Duration = Duration::from_secs(5);
/// Minimum time between two polling rounds, for each node of the fleet. A larger fleet is therefore
/// polled less often.
const PACE_EACH: Duration = Duration::from_millis(10);
/// Time without a request for the list after which polling stops.
const POLLER_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of a reason, in characters.
const WHY_CHARS: usize = 300;

/// Health of a node as the page shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum NodeHealth {
    /// The node has appeared, and has not been polled yet.
    #[default]
    Asking,
    /// The controller replies and sees its GPUs.
    Serving,
    /// The agent replies, but no controller runs. A controller starts with the first GPU container.
    Resting,
    /// The controller replies but sees no GPU.
    Troubled,
    /// The agent reports that containerd does not serve the runtime.
    NotServed,
    /// There was no valid reply.
    Unreachable,
}

/// A node as the page shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeRow {
    /// Name of the node object.
    pub name: String,
    /// Health at the last poll.
    pub health: NodeHealth,
    /// Reason for this health. Empty: the health needs no explanation.
    pub why: String,
    /// Time of the agent's last reply, in milliseconds since 1970. `None`: no reply since this
    /// program started.
    pub seen_unix_ms: Option<i64>,
    /// Figures in the last reply. `None`: the reply had none.
    pub figures: Option<FleetSummary>,
}

/// The list of all nodes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ListedNode {
    /// Time of the list, in milliseconds since 1970.
    pub unix_ms: i64,
    /// Number of nodes that are not listed, because there are more than `NODES`.
    pub left_out: usize,
    /// The listed nodes, by name.
    pub nodes: Vec<NodeRow>,
}

/// Polls the agents and keeps their last replies.
pub struct FleetPoller {
    nodes: Nodes,
    token_file: PathBuf,
    seen: Mutex<BTreeMap<String, NodeRow>>,
    looked: Mutex<Option<Instant>>,
    look: Notify,
}

impl FleetPoller {
    /// Creates a poller. Polling starts with the first request for the list.
    #[must_use]
    pub fn new(nodes: Nodes, token_file: PathBuf) -> FleetPoller {
        FleetPoller {
            nodes,
            token_file,
            seen: Mutex::default(),
            looked: Mutex::default(),
            look: Notify::new(),
        }
    }

    /// Returns the last known state of all nodes. Each call makes the poller continue for
    /// [`POLLER_IDLE_TIMEOUT`].
    pub fn listed(&self) -> ListedNode {
        *lock(&self.looked) = Some(Instant::now());
        self.look.notify_one();
        let known = (self.nodes)();
        let left_out = known.len().saturating_sub(NODES);
        let seen = lock(&self.seen);
        let nodes = known.into_iter().take(NODES).map(|node| row(node, &seen)).collect();
        ListedNode { unix_ms: now_ms(), left_out, nodes }
    }

    /// Polls the nodes until the async runtime ends. It pauses while no client requests the list.
    pub async fn run(self: Arc<Self>) {
        loop {
            let begun = Instant::now();
            let asked = self.round().await;
            let asked = u32::try_from(asked).unwrap_or(u32::MAX);
            let next = PACE.max(PACE_EACH.saturating_mul(asked));
            tokio::time::sleep_until(begun + next).await;
            let fresh = |at: Instant| at.elapsed() < POLLER_IDLE_TIMEOUT;
            while !lock(&self.looked).is_some_and(fresh) {
                self.look.notified().await;
            }
        }
    }

    /// Polls each node once. Returns the number of nodes.
    pub async fn round(&self) -> usize {
        let known: Vec<KnownNode> = (self.nodes)().into_iter().take(NODES).collect();
        let names: BTreeSet<&str> = known.iter().map(|node| node.name.as_str()).collect();
        lock(&self.seen).retain(|name, _| names.contains(name.as_str()));
        let token = bearer(&self.token_file);
        let count = known.len();
        stream::iter(known)
            .for_each_concurrent(MAX_CONCURRENT_POLLS, |node| {
                let token = token.clone();
                async move {
                    let received = match token {
                        Ok(token) => {
                            timeout(2 * TIME, receive(&node, token)).await.unwrap_or_else(|_| {
                                Err(format!(
                                    "the node's agent sent no complete reply within {:?}",
                                    2 * TIME
                                ))
                            })
                        }
                        Err(why) => Err(why),
                    };
                    let mut seen = lock(&self.seen);
                    let row = seen.entry(node.name.clone()).or_default();
                    row.name = node.name;
                    row.note(received);
                }
            })
            .await;
        count
    }
}

/// An agent's reply: the figures, or `None` if the node has no controller now.
type PollResult = Result<Option<FleetSummary>, String>;

impl NodeRow {
    /// Enters an agent's reply into this row.
    pub fn note(&mut self, received: PollResult) {
        match received {
            Ok(figures) => {
                self.seen_unix_ms = Some(now_ms());
                (self.health, self.why) = match figures.as_ref().map(|f| &f.gpu_error) {
                    None => (
                        NodeHealth::Resting,
                        "no controller runs; a controller starts with the first GPU container"
                            .into(),
                    ),
                    Some(Some(why)) => (NodeHealth::Troubled, why.clone()),
                    Some(None) => (NodeHealth::Serving, String::new()),
                };
                self.figures = figures;
            }
            Err(why) => {
                self.health = NodeHealth::Unreachable;
                self.why = why.chars().take(WHY_CHARS).collect();
            }
        }
    }

    /// Records the state that the node agent has published in the node's annotation. This state is
    /// newer than the agent's last reply, so it determines whether the node counts as serving the
    /// runtime.
    pub fn published(&mut self, state: String) {
        if state.starts_with("served") {
            // The runtime may be served with a configuration other than the cluster's.
            if state != "served" && self.why.is_empty() {
                self.why = state;
            }
        } else if self.health != NodeHealth::Unreachable {
            self.health = NodeHealth::NotServed;
            self.why = state;
        } else if !state.is_empty() {
            self.why = format!("{}; last published state: {state}", self.why);
        }
    }
}

/// Returns the row of a node: the last polled row, corrected by the state that the agent has
/// published in the node's annotation. The published state is newer than the agent's last reply.
fn row(node: KnownNode, seen: &BTreeMap<String, NodeRow>) -> NodeRow {
    let mut row = seen.get(&node.name).cloned().unwrap_or_default();
    row.name = node.name;
    row.published(node.state);
    row
}

async fn receive(node: &KnownNode, authorization: HeaderValue) -> PollResult {
    let question = AgentRequest {
        method: Method::GET,
        path: "/api/v1/node",
        authorization,
        more: Vec::new(),
        time: TIME,
    };
    let answer = ask(node, question).await.map_err(|error| error_chain::chain(&error))?;
    let (status, absent) = (answer.status(), answer.headers().contains_key(NO_CONTROLLER));
    if status == StatusCode::SERVICE_UNAVAILABLE && absent {
        return Ok(None);
    }
    let body = body(answer).await?;
    if status != StatusCode::OK {
        return Err(format!("the node's agent returned {status}: {}", said(&body)));
    }
    summary::read(&body)
        .map(Some)
        .map_err(|error| format!("cannot parse the agent's reply as the state of a node: {error}"))
}

/// Returns the header with this program's token. The kubelet renews the token, so the file is read
/// before each round.
fn bearer(file: &Path) -> Result<HeaderValue, String> {
    let token = std::fs::read_to_string(file).map_err(|error| {
        format!("cannot read this program's token in {}: {error}", file.display())
    })?;
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| format!("{} does not contain a valid token", file.display()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
