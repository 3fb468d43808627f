//! Removes Affinode from all nodes, before the other objects of the installation are removed. This
//! is the first step of `helm uninstall`.
//!
//! ```text
//!  own nodes ──check request──> no container runs ──on all──> agents uninstall ──all done──> agents' DaemonSet deleted
//!                                   │ some run, or timeout             │ one failed          └──> nodes' annotations, pods' labels removed
//!                                   └──> requests withdrawn, exit 1   └──> the same; agents install again
//! ```
//!
//! A node that joins meanwhile is asked too. If an error occurs after the agents' end, a further run
//! finds no DaemonSet of agents, and only removes annotations and labels.
//!
//! Each request has a time limit. If this program is killed, the agents continue after the limit as
//! if the removal had not been requested.

use std::time::Duration;

use clap::Args;
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{Node, Pod},
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams},
    core::PartialObjectMeta,
};
use tokio::time::Instant;

use super::{
    node_labels::{
        AGENT, EXCLUDED, NOT_RETIRED, NodeLabels, READY, RETIRE, RETIRE_UNTIL, RETIRED, STATE,
        may_go, must_go,
    },
    pod_condition::LABEL,
    pods,
};
use crate::{api_client, error_chain};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time for which a request applies after the deadline of the removal. In this time the agents end,
/// or the requests are withdrawn. The time also exceeds the difference between the clocks of two
/// nodes.
const REQUEST_MARGIN: SignedDuration = SignedDuration::from_mins(1);
/// Number of pods per request to the API server.
const PAGE: u32 = 100;
/// State of a node whose agent has not followed the request yet.
const REQUESTED: &str = "removal requested";
/// Maximum number of nodes that an error names.
const NAMED: usize = 10;

/// Options of the removal.
#[derive(Args, Clone, Debug)]
pub struct RetireOptions {
    /// The installation in the cluster: namespace/name.
    #[arg(long, value_name = "NAME")]
    installation: String,
    /// Name of the agents' DaemonSet.
    #[arg(long, value_name = "NAME")]
    daemon_set: String,
    /// Namespace of the agents' DaemonSet.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE")]
    namespace: String,
    /// Maximum time until all nodes have removed Affinode and the agents' pods have ended.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

/// Reason why the removal is not complete. If nodes refuse the removal, Affinode stays installed.
/// The agents then continue as if the removal had not been requested.
#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    /// The async runtime could not be started: a resource of the machine is exhausted.
    #[error(
        "cannot start a thread; check the limits of processes (ulimit -u, pids cgroup) and memory"
    )]
    Start(#[source] std::io::Error),
    /// A request to the API server failed.
    #[error(
        "cannot remove Affinode from the nodes, or its annotations, because a request to the API server failed; try again"
    )]
    Cluster(#[from] kube::Error),
    /// These nodes refused the removal, or did not complete it in time.
    #[error(
        "Affinode stays installed, because these nodes still need it or cannot be reached: {}. Delete the pods that use Affinode's runtime class, or make the nodes reachable, then try again",
        .0.join("; ")
    )]
    Nodes(Vec<String>),
    /// Pods of the agents still run at the deadline.
    #[error(
        "the agents' pods did not end in time: `kubectl get pods --all-namespaces -l app.kubernetes.io/component=node` shows them; end them, and try again"
    )]
    Pods,
}

/// Removes Affinode from all nodes of the installation, if all agents can remove it. If a node fails
/// after that, the others install Affinode again.
///
/// # Errors
/// [`RetireError`]: Affinode stays installed, or its removal is not complete.
pub fn run(options: &RetireOptions) -> Result<(), RetireError> {
    // An error only means that the same provider is installed already.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(RetireError::Start)?
        .block_on(retire(options))
}

async fn retire(options: &RetireOptions) -> Result<(), RetireError> {
    remove_all(api_client::connect().await?, options).await
}

async fn remove_all(client: Client, options: &RetireOptions) -> Result<(), RetireError> {
    let deadline = Instant::now() + options.timeout;
    let until = request_end(options.timeout);
    let removal = NodeRemoval { client, options, until, deadline };
    match removal.agents().get_opt(&options.daemon_set).await? {
        // An earlier attempt deleted the agents, or an administrator did.
        None => tracing::info!("no agent runs, so only labels and annotations are removed"),
        Some(set) => {
            if set.metadata.deletion_timestamp.is_none() {
                removal.take_off().await?;
                tracing::info!("Affinode has been removed from all nodes");
            }
            removal.wait_for_end(set.uid()).await?;
        }
    }
    removal.clear_nodes().await
}

/// The removal of one installation from the nodes.
struct NodeRemoval<'a> {
    client: Client,
    options: &'a RetireOptions,
    /// Time until which the agents follow the requests, in the format of RFC 3339.
    until: String,
    deadline: Instant,
}

impl NodeRemoval<'_> {
    fn agents(&self) -> Api<DaemonSet> {
        Api::namespaced(self.client.clone(), &self.options.namespace)
    }

    /// Removes Affinode from all nodes, and deletes the agents' DaemonSet. If that fails, withdraws the
    /// requests.
    async fn take_off(&self) -> Result<(), RetireError> {
        let done = self.ask_agents().await;
        if done.is_err() {
            self.withdraw().await;
        }
        done
    }

    /// Asks all nodes whether Affinode can be removed, and waits until all have agreed. Then requests
    /// the removal, and waits until all nodes have completed it. No node is changed before that
    /// request.
    async fn ask_agents(&self) -> Result<(), RetireError> {
        tracing::info!("asking the nodes whether Affinode can be removed");
        self.all_say(READY, &may_go(&self.options.installation)).await?;
        tracing::info!(
            "all nodes: no container of Affinode runs, so the agents now get the request to remove \
             Affinode"
        );
        self.all_say(RETIRED, &must_go(&self.options.installation)).await?;
        // An agent that still runs would install Affinode again.
        let name = &self.options.daemon_set;
        match self.agents().delete(name, &DeleteParams::foreground()).await {
            Err(error) if !is_missing(&error) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Makes this request to all nodes of the installation, also to those that join meanwhile, and
    /// waits until all have this state.
    async fn all_say(&self, state: &str, request: &str) -> Result<(), RetireError> {
        loop {
            let mut left = Vec::new();
            for node in self.nodes().await? {
                let name = node.name_any();
                if !self.has_request(&node, request) {
                    self.ask(&name, request).await?;
                    left.push((name, REQUESTED.to_owned()));
                    continue;
                }
                let present = node.annotations().get(STATE).map_or("unknown", String::as_str);
                if present != state {
                    left.push((name, present.to_owned()));
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            let refused = left.iter().any(|(_, state)| state.starts_with(NOT_RETIRED));
            if refused || Instant::now() > self.deadline {
                let told =
                    left.into_iter().take(NAMED).map(|(name, state)| format!("{name}: {state}"));
                return Err(RetireError::Nodes(told.collect()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Returns the nodes that agents of this installation manage.
    async fn nodes(&self) -> kube::Result<Vec<PartialObjectMeta<Node>>> {
        let api: Api<Node> = Api::all(self.client.clone());
        let nodes = api.list_metadata(&ListParams::default()).await?.items;
        let is_ours = |node: &PartialObjectMeta<Node>| {
            node.annotations().get(AGENT) == Some(&self.options.installation)
        };
        Ok(nodes.into_iter().filter(is_ours).collect())
    }

    /// Returns whether a node has this request of this removal. The time limit distinguishes it from a
    /// request of an earlier removal.
    fn has_request(&self, node: &PartialObjectMeta<Node>, request: &str) -> bool {
        let value = |name: &str| node.annotations().get(name).map(String::as_str);
        value(RETIRE) == Some(request) && value(RETIRE_UNTIL) == Some(&self.until)
    }

    async fn ask(&self, node: &str, request: &str) -> kube::Result<()> {
        let wish = [
            // Replaces the state that an earlier request left.
            (STATE, Some(REQUESTED.to_owned())),
            (RETIRE, Some(request.to_owned())),
            (RETIRE_UNTIL, Some(self.until.clone())),
        ];
        existing(NodeLabels::new(self.client.clone(), node).annotate(&wish).await)
    }

    /// Withdraws the requests. If that fails, the agents continue after the time limit.
    async fn withdraw(&self) {
        let nodes = match self.nodes().await {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::warn!(
                    "nodes: cannot withdraw the requests, which apply until {}: {}",
                    self.until,
                    error_chain::chain(&error)
                );
                return;
            }
        };
        for node in nodes {
            let name = node.name_any();
            let none = [(RETIRE, None), (RETIRE_UNTIL, None)];
            let labels = NodeLabels::new(self.client.clone(), &name);
            if let Err(error) = existing(labels.annotate(&none).await) {
                tracing::warn!(
                    "node {name}: cannot withdraw the request, which applies until {}: {}",
                    self.until,
                    error_chain::chain(&error)
                );
            }
        }
    }

    /// Waits until the pods of the agents' deleted DaemonSet have ended. `set`: its uid.
    async fn wait_for_end(&self, set: Option<String>) -> Result<(), RetireError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.options.namespace);
        let is_agent = |pod: &PartialObjectMeta<Pod>| {
            pod.owner_references().iter().any(|owner| Some(&owner.uid) == set.as_ref())
        };
        loop {
            match pods.list_metadata(&ListParams::default()).await {
                Ok(pods) if !pods.iter().any(is_agent) => return Ok(()),
                Ok(_) => {}
                Err(error) => tracing::warn!(
                    "agents: cannot list the pods, and try again: {}",
                    error_chain::chain(&error)
                ),
            }
            if Instant::now() > self.deadline {
                return Err(RetireError::Pods);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Removes the labels and annotations of the agents from all nodes and their pods. If a node cannot
    /// be changed, changes the others nevertheless.
    async fn clear_nodes(&self) -> Result<(), RetireError> {
        let nodes = self.nodes().await?;
        let mut failed = None;
        for node in &nodes {
            let name = node.name_any();
            let state = node.annotations().get(STATE).map_or("unknown", String::as_str);
            if state != RETIRED && state != EXCLUDED {
                tracing::warn!(
                    "node {name}: Affinode may still be installed (state: {state}), and no agent \
                     runs that could remove it: run `affinode uninstall` on the node"
                );
            }
            let cleared = NodeLabels::new(self.client.clone(), &name).clear().await;
            if let Err(error) = existing(cleared) {
                tracing::warn!(
                    "node {name}: cannot remove labels and annotations: {}",
                    error_chain::chain(&error)
                );
                failed = Some(error);
            }
        }
        let names: Vec<String> = nodes.iter().map(ResourceExt::name_any).collect();
        if let Err(error) = self.clear_pods(&names).await {
            tracing::warn!(
                "pods: cannot remove label {LABEL} from all pods: {}",
                error_chain::chain(&error)
            );
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Removes Affinode's label and condition from the pods of these nodes. Ended pods are included,
    /// because they stay in the cluster for some time.
    async fn clear_pods(&self, nodes: &[String]) -> kube::Result<()> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let mut page = ListParams::default().labels(LABEL).limit(PAGE);
        loop {
            let found = pods.list(&page).await?;
            page.continue_token =
                found.metadata.continue_.clone().filter(|token| !token.is_empty());
            for pod in found {
                let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
                if !node.is_some_and(|node| nodes.contains(node)) {
                    continue;
                }
                let patch = pods::clear(&pod.uid().unwrap_or_default());
                let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
                if let Err(why) = pods::write(&self.client, &namespace, &name, patch).await {
                    tracing::warn!("pod {namespace}/{name}: cannot remove label {LABEL}: {why}");
                }
            }
            if page.continue_token.is_none() {
                return Ok(());
            }
        }
    }
}

/// Ignores the error that an object does not exist, such as a node that was deleted meanwhile.
fn existing(done: kube::Result<()>) -> kube::Result<()> {
    done.or_else(|error| if is_missing(&error) { Ok(()) } else { Err(error) })
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Returns the time until which the agents follow a request of this removal, in the format of RFC
/// 3339.
fn request_end(timeout: Duration) -> String {
    let time = SignedDuration::try_from(timeout).unwrap_or(SignedDuration::MAX);
    let time = time.saturating_add(REQUEST_MARGIN);
    let end = Timestamp::now().saturating_add(time).unwrap_or(Timestamp::MAX);
    Timestamp::from_second(end.as_second()).unwrap_or(end).to_string()
}

#[cfg(test)]
mod tests;
