//! How all nodes are: asked in turn for as long as somebody looks, a few at a time, each for a few
//! seconds at most. Who looks is shown what is known, and never waits for a node.
//!
//! ```text
//!  Asking ──answer──> Serving | Resting (no controller yet) | Troubled (sees no GPU)
//!     └──none, or a no──> Unreachable: why, and what was seen last, and when
//!  NotServed: the agent says that containerd does not serve the runtime
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{Method, Response, StatusCode, header::HeaderValue};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use super::{
    agent_client::{AgentReply, AgentRequest, ask},
    discovery::{KnownNode, NODES, Nodes},
    summary::{self, FleetSummary},
};
use crate::{error_chain, node::NO_CONTROLLER};

/// Nodes that are asked at a time.
const MAX_CONCURRENT_POLLS: usize = 16;
/// Time for an answer.
const TIME: Duration = Duration::from_secs(3);
/// Bytes of an answer.
const BODY_BYTES: usize = 2 << 20;
/// A round begins no sooner after the one before it began.
const PACE: Duration = Duration::from_secs(5);
/// And in large fleets by so much later for each node.
const PACE_EACH: Duration = Duration::from_millis(10);
/// After so long without a look nobody is asked any more.
const POLLER_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Characters of a reason.
const WHY_CHARS: usize = 300;

/// How a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum NodeHealth {
    /// It has not been asked yet.
    #[default]
    Asking,
    /// Its controller answers.
    Serving,
    /// Its agent answers; there is no controller until a GPU container comes.
    Resting,
    /// Its controller answers, and sees no GPU.
    Troubled,
    /// Its agent says that the runtime is not served.
    NotServed,
    /// No answer, or none that is of use.
    Unreachable,
}

/// A node, as the page has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeRow {
    /// Its name.
    pub name: String,
    /// How it is.
    pub health: NodeHealth,
    /// Why, where there is something to say.
    pub why: String,
    /// When its agent answered last, milliseconds since 1970; nothing: not since we look.
    pub seen_unix_ms: Option<i64>,
    /// What it said then.
    pub figures: Option<FleetSummary>,
}

/// All of them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ListedNode {
    /// Now, milliseconds since 1970.
    pub unix_ms: i64,
    /// Nodes that are more than we show.
    pub left_out: usize,
    /// The others, by name.
    pub nodes: Vec<NodeRow>,
}

/// Who asks.
pub struct FleetPoller {
    nodes: Nodes,
    token_file: PathBuf,
    seen: Mutex<BTreeMap<String, NodeRow>>,
    looked: Mutex<Option<Instant>>,
    look: Notify,
}

impl FleetPoller {
    /// Nobody is asked before somebody looks.
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

    /// What is known now. It is renewed for as long as this is called.
    pub fn listed(&self) -> ListedNode {
        *lock(&self.looked) = Some(Instant::now());
        self.look.notify_one();
        let known = (self.nodes)();
        let left_out = known.len().saturating_sub(NODES);
        let seen = lock(&self.seen);
        let nodes = known.into_iter().take(NODES).map(|node| row(node, &seen)).collect();
        ListedNode { unix_ms: now_ms(), left_out, nodes }
    }

    /// Asks for ever.
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

    /// Asks every node once, and says how many there are.
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
                    let heard = match token {
                        Ok(token) => timeout(2 * TIME, hear(&node, token))
                            .await
                            .unwrap_or_else(|_| Err(format!("no whole answer in {:?}", 2 * TIME))),
                        Err(why) => Err(why),
                    };
                    let mut seen = lock(&self.seen);
                    let row = seen.entry(node.name.clone()).or_default();
                    note(row, node, heard);
                }
            })
            .await;
        count
    }
}

/// What an agent said: figures, or that there is no controller.
type Heard = Result<Option<FleetSummary>, String>;

fn note(row: &mut NodeRow, node: KnownNode, heard: Heard) {
    row.name = node.name;
    match heard {
        Ok(figures) => {
            row.seen_unix_ms = Some(now_ms());
            (row.health, row.why) = match figures.as_ref().map(|f| &f.gpu_error) {
                None => (
                    NodeHealth::Resting,
                    "its controller starts with its first GPU container".into(),
                ),
                Some(Some(why)) => (NodeHealth::Troubled, why.clone()),
                Some(None) => (NodeHealth::Serving, String::new()),
            };
            row.figures = figures;
        }
        Err(why) => {
            row.health = NodeHealth::Unreachable;
            row.why = why.chars().take(WHY_CHARS).collect();
        }
    }
}

/// What the agent says of the runtime is newer than what was asked.
fn row(node: KnownNode, seen: &BTreeMap<String, NodeRow>) -> NodeRow {
    let mut row = seen.get(&node.name).cloned().unwrap_or_default();
    row.name = node.name;
    if node.state.starts_with("served") {
        // It may be served with another configuration than the cluster's.
        if node.state != "served" && row.why.is_empty() {
            row.why = node.state;
        }
        return row;
    }
    if row.health != NodeHealth::Unreachable {
        row.health = NodeHealth::NotServed;
        row.why = node.state;
    } else if !node.state.is_empty() {
        row.why = format!("{}; it said last: {}", row.why, node.state);
    }
    row
}

async fn hear(node: &KnownNode, authorization: HeaderValue) -> Heard {
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
        return Err(format!("its agent says {status}: {}", said(&body)));
    }
    summary::read(&body).map(Some).map_err(|error| format!("its answer is no node: {error}"))
}

async fn body(answer: Response<AgentReply>) -> Result<Vec<u8>, String> {
    match Limited::new(answer.into_body(), BODY_BYTES).collect().await {
        Ok(body) => Ok(body.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(format!("its answer has more than {BODY_BYTES} bytes"))
        }
        Err(error) => Err(format!("its answer ended early: {error}")),
    }
}

/// `{"error": "…"}`, or text.
fn said(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct NodeReply {
        error: String,
    }
    match serde_json::from_slice::<NodeReply>(body) {
        Ok(said) => said.error,
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(WHY_CHARS)]).trim().to_owned(),
    }
}

/// The kubelet renews it.
fn bearer(file: &Path) -> Result<HeaderValue, String> {
    let token = std::fs::read_to_string(file)
        .map_err(|error| format!("our own token in {} cannot be read: {error}", file.display()))?;
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| format!("what is in {} is no token", file.display()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
