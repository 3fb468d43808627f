//! `kubectl affinode offload` and `restore`: moves containers of pods.

use std::{io::Write, time::Duration};

use affinode_cli::format;
use affinode_controller::schema::{self, Action};
use affinode_proto::state::State;
use clap::Args;
use futures_util::{StreamExt, stream};
use hyper::{Method, StatusCode};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::{Api, api::PostParams};
use serde::Serialize;

use super::{
    access::ClusterAccess,
    agent_client,
    agents::{AgentAnswer, ClusterAgents},
    error::{ExitStatus, PluginError},
    output::{self, NodeOutcome, OutputFormat},
    ps::{self, ContainerList},
    select::{ContainerFilter, NodeContainer},
};
use crate::error_chain::chain;

/// Maximum number of moves that the command requests at the same time. A controller accepts more
/// concurrent moves than this.
const MAX_CONCURRENT_MOVES: usize = 4;
/// Time limit for a move. The agent's own time limit is shorter, so the agent replies first.
const MOVE: Duration = Duration::from_secs(630);

/// Options that select the containers to move.
#[derive(Args, Clone, Debug)]
pub struct MoveArgs {
    /// Containers to move: POD or POD/CONTAINER in the selected namespace, or
    /// NAMESPACE/POD/CONTAINER as `kubectl affinode ps -o name` prints it. POD means all containers
    /// of the pod.
    #[arg(required_unless_present = "all", conflicts_with = "all", value_parser = target)]
    containers: Vec<TargetName>,
    /// Move all containers of the namespace that match the other options. With -A: the containers
    /// of all namespaces.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filter: ContainerFilter,
    /// Move nothing: print which containers would be moved, and whether the user has the right.
    #[arg(long)]
    dry_run: bool,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    pub output: OutputFormat,
}

/// Name of a pod, or of one of its containers, as the user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TargetName {
    namespace: Option<String>,
    pod: String,
    container: Option<String>,
}

fn target(text: &str) -> Result<TargetName, String> {
    let parts: Vec<&str> = text.split('/').collect();
    let owned = |part: &str| Some(part.to_owned());
    let (namespace, pod, container) = match parts[..] {
        [pod] => (None, pod, None),
        [pod, container] => (None, pod, owned(container)),
        [namespace, pod, container] => (owned(namespace), pod, owned(container)),
        _ => return Err("expected POD, POD/CONTAINER or NAMESPACE/POD/CONTAINER".to_owned()),
    };
    if parts.iter().any(|part| part.is_empty()) {
        return Err(
            "a part of the name is empty; expected POD, POD/CONTAINER or NAMESPACE/POD/CONTAINER"
                .to_owned(),
        );
    }
    Ok(TargetName { namespace, pod: pod.to_owned(), container })
}

impl TargetName {
    fn names(&self, container: &schema::Container, namespace: &str) -> bool {
        container.pod == self.pod
            && container.pod_namespace == self.namespace.as_deref().unwrap_or(namespace)
            && self.container.as_ref().is_none_or(|name| *name == container.container)
    }
}

impl std::fmt::Display for TargetName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = [self.namespace.as_ref(), Some(&self.pod), self.container.as_ref()];
        let parts: Vec<&str> = parts.into_iter().flatten().map(String::as_str).collect();
        f.write_str(&parts.join("/"))
    }
}

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveVerb {
    /// From VRAM to host memory.
    Offload,
    /// From host memory to VRAM.
    Restore,
}

impl MoveVerb {
    fn word(self) -> &'static str {
        match self {
            MoveVerb::Offload => "offload",
            MoveVerb::Restore => "restore",
        }
    }

    fn done(self) -> &'static str {
        match self {
            MoveVerb::Offload => "offloaded",
            MoveVerb::Restore => "restored",
        }
    }

    /// Returns whether `--all` selects a container in this state. A container in another state
    /// needs no move, or cannot be moved now.
    fn means(self, state: Option<State>) -> bool {
        match self {
            MoveVerb::Offload => matches!(state, Some(State::Active | State::Idle)),
            MoveVerb::Restore => state == Some(State::Offloaded),
        }
    }
}

/// Result of a move.
#[derive(Debug, Serialize)]
struct MoveResult {
    node: String,
    container: String,
    /// Status of the move: `done`, `refused`, `unreachable`, `failed`, or `planned` in a dry run.
    status: &'static str,
    /// Reason for the status of the move if it is not `done`.
    why: String,
    #[serde(flatten)]
    action: Action,
    #[serde(skip)]
    exit: ExitStatus,
}

#[derive(Serialize)]
struct MoveList<'a> {
    results: &'a [MoveResult],
    nodes: &'a [NodeOutcome],
}

/// Moves the containers, and prints a line for each.
///
/// # Errors
/// [`PluginError`]: no container was moved.
pub async fn run(
    access: &ClusterAccess,
    verb: MoveVerb,
    asked: &MoveArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let agents = ClusterAgents::find(access, asked.filter.node.as_deref()).await?;
    // A name may contain a namespace, so the containers of all namespaces are listed.
    let mut every = asked.filter.clone();
    every.all_namespaces = true;
    let filter = if asked.all { &asked.filter } else { &every };
    let list = ps::list(&agents, filter, &access.namespace).await;
    let mut exit = output::outcome(&list.nodes);
    let chosen = choose(access, verb, asked, &list, &mut exit);
    if asked.dry_run {
        may(access, verb).await?;
    }
    let mut results = Vec::new();
    let moves = chosen.into_iter().map(|found| async {
        match asked.dry_run {
            true => planned(found),
            false => request(&agents, verb, found).await,
        }
    });
    let mut moves = stream::iter(moves).buffered(MAX_CONCURRENT_MOVES);
    while let Some(result) = moves.next().await {
        exit = exit.max(result.exit);
        tell(out, verb, asked, &result)?;
        results.push(result);
    }
    if results.is_empty() && exit == ExitStatus::Done {
        output::say(&format!("there is no container to {}", verb.word()));
    }
    if asked.output == OutputFormat::Json {
        output::json(out, &MoveList { results: &results, nodes: &list.nodes })?;
    }
    Ok(exit)
}

/// Returns the containers that the user selected. If a name matches no container, prints a message
/// and makes `exit` at least [`ExitStatus::Failed`].
fn choose<'l>(
    access: &ClusterAccess,
    verb: MoveVerb,
    asked: &MoveArgs,
    list: &'l ContainerList,
    exit: &mut ExitStatus,
) -> Vec<&'l NodeContainer> {
    if asked.all {
        let means = |found: &&NodeContainer| verb.means(State::parse(&found.container.state));
        return list.containers.iter().filter(means).collect();
    }
    for name in &asked.containers {
        let named = |found: &NodeContainer| name.names(&found.container, &access.namespace);
        if !list.containers.iter().any(named) {
            let namespace = name.namespace.as_deref().unwrap_or(&access.namespace);
            output::say(&format!("no GPU container {name} was found in namespace {namespace}"));
            *exit = (*exit).max(ExitStatus::Failed);
        }
    }
    let named = |found: &&NodeContainer| {
        asked.containers.iter().any(|name| name.names(&found.container, &access.namespace))
    };
    list.containers.iter().filter(named).collect()
}

/// Checks with the API server that the user may request moves in this direction. Each agent checks
/// the same right again.
async fn may(access: &ClusterAccess, verb: MoveVerb) -> Result<(), PluginError> {
    let path = format!("/affinode/v1/containers/{}", verb.word());
    if has_right(access, "post", &path).await? {
        return Ok(());
    }
    Err(PluginError::Refused(format!(
        "the move would be refused: the user may not post {path}; ClusterRole affinode-operator \
         grants this right"
    )))
}

/// Returns whether the API server allows the user to send a request with this HTTP verb and path to
/// the agents.
///
/// # Errors
/// [`PluginError`]: the API server did not reply, or refused the review.
pub async fn has_right(
    access: &ClusterAccess,
    verb: &str,
    path: &str,
) -> Result<bool, PluginError> {
    let attributes =
        NonResourceAttributes { path: Some(path.to_owned()), verb: Some(verb.to_owned()) };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            non_resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(access.client.clone());
    let review = reviews.create(&PostParams::default(), &review).await;
    let review = review.map_err(PluginError::api("check the user's rights"))?;
    Ok(review.status.is_some_and(|status| status.allowed))
}

fn planned(found: &NodeContainer) -> MoveResult {
    let c = &found.container;
    let action = Action {
        state: c.state.clone(),
        reason: c.reason.clone(),
        reason_text: c.reason_text.clone(),
        bytes: c.vram_bytes.max(c.offloaded_bytes),
        ..Action::default()
    };
    result(found, ExitStatus::Done, String::new(), action, "planned")
}

fn result(
    found: &NodeContainer,
    exit: ExitStatus,
    why: String,
    action: Action,
    status: &'static str,
) -> MoveResult {
    let (node, container) = (found.node.clone(), found.container.name.clone());
    MoveResult { node, container, status, why: format::safe(&why), action, exit }
}

async fn request(agents: &ClusterAgents<'_>, verb: MoveVerb, found: &NodeContainer) -> MoveResult {
    let outcome = ask(agents, verb, found).await;
    match outcome {
        Ok(action) if action.done => {
            result(found, ExitStatus::Done, String::new(), action, ExitStatus::Done.as_str())
        }
        Ok(action) => {
            let (exit, why) = (ExitStatus::Refused, action.reason_text.clone());
            result(found, exit, why, action, exit.as_str())
        }
        Err(error) => {
            let exit = error.status();
            result(found, exit, chain(&error), Action::default(), exit.as_str())
        }
    }
}

async fn ask(
    agents: &ClusterAgents<'_>,
    verb: MoveVerb,
    found: &NodeContainer,
) -> Result<Action, PluginError> {
    let node = agents.nodes.iter().find(|node| node.name == found.node);
    let node = node.ok_or_else(|| PluginError::NoNode(found.node.clone()))?;
    let path = format!("/api/v1/containers/{}/{}", found.container.key, verb.word());
    match agents.ask(node, Method::POST, &path, MOVE).await? {
        AgentAnswer::Controller(StatusCode::OK | StatusCode::CONFLICT, body) => {
            serde_json::from_slice(&body).map_err(|error| {
                PluginError::Reply(format!(
                    "the controller's reply does not have the form of a move's result: {error}"
                ))
            })
        }
        AgentAnswer::Controller(_, body) => Err(PluginError::Reply(agent_client::said(&body))),
        AgentAnswer::NoController => Err(PluginError::Reply(
            "no controller runs on the node, so the container has ended".to_owned(),
        )),
    }
}

fn tell(
    out: &mut dyn Write,
    verb: MoveVerb,
    asked: &MoveArgs,
    result: &MoveResult,
) -> Result<(), PluginError> {
    let name = format::safe(&result.container);
    if result.exit != ExitStatus::Done {
        let state = match result.action.state.as_str() {
            "" => String::new(),
            state => format!(" ({})", format::safe(state)),
        };
        // The pin is stored although the restore failed. The text says both.
        match result.action.pinned {
            true => output::say(&format!("{name}{state}: {}", result.why)),
            false => {
                output::say(&format!("{name} was not {}{state}: {}", verb.done(), result.why));
            }
        }
        return Ok(());
    }
    let (bytes, ms) = (result.action.bytes, result.action.elapsed_ms);
    match asked.output {
        OutputFormat::Json => Ok(()),
        OutputFormat::Name => Ok(writeln!(out, "{name}")?),
        OutputFormat::Table | OutputFormat::Wide if asked.dry_run => {
            let state = format::safe(&result.action.state);
            let (done, bytes) = (verb.done(), format::bytes(bytes));
            Ok(writeln!(out, "{name} would be {done}: {state}, {bytes}, node {}", result.node)?)
        }
        OutputFormat::Table | OutputFormat::Wide if bytes > 0 => {
            let (bytes, time) = (format::bytes(bytes), format::duration(ms));
            Ok(writeln!(out, "{name} is {}, {bytes} in {time}", verb.done())?)
        }
        OutputFormat::Table | OutputFormat::Wide => Ok(writeln!(out, "{name} is {}", verb.done())?),
    }
}
