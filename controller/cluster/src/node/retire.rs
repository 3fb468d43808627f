//! Removes Affinode from all nodes, before the other objects of the installation are removed. This
//! is the first step of `helm uninstall`.
//!
//! ```text
//!  own nodes ──check request──> no container runs ──on all──> agents uninstall ──all done──> agents' DaemonSet deleted
//!                                   │ some run, or timeout             │ one failed          └──> pods' labels, nodes' annotations removed
//!                                   └──> requests withdrawn, exit 1   └──> the same; agents install again
//! ```
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
};
use tokio::time::Instant;

use super::{
    node_labels::{
        AGENT, ANNOTATIONS, NOT_RETIRED, NodeLabels, READY, RETIRE, RETIRE_UNTIL, RETIRED, STATE,
        may_go, must_go,
    },
    pod_condition::LABEL,
    pods,
};
use crate::error_chain;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time for which a request applies after the deadline of the removal. In this time the agents end,
/// or the requests are withdrawn. The time also exceeds the difference between the clocks of two
/// nodes.
const REQUEST_MARGIN: SignedDuration = SignedDuration::from_mins(1);
/// Number of pods per request to the API server.
const PAGE: u32 = 100;
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
    #[error("cannot remove Affinode from the nodes, because a request to the API server failed")]
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
    remove_all(Client::try_default().await?, options).await
}

async fn remove_all(client: Client, options: &RetireOptions) -> Result<(), RetireError> {
    let deadline = Instant::now() + options.timeout;
    let until = request_end(options.timeout);
    let names: Vec<String> =
        ours(&client, options).await?.iter().map(ResourceExt::name_any).collect();
    tracing::info!("requesting the removal of Affinode from {} nodes", names.len());
    if let Err(error) = taken_off(&client, options, &names, &until, deadline).await {
        for name in &names {
            let none = [(RETIRE, None), (RETIRE_UNTIL, None)];
            if let Err(error) = annotate(&client, name, &none).await {
                tracing::warn!(
                    "node {name}: cannot remove annotation {RETIRE}, which applies until {until}: {}",
                    error_chain::chain(&error)
                );
            }
        }
        return Err(error);
    }
    tracing::info!("Affinode has been removed from all nodes");
    agents_gone(&client, options, deadline).await?;
    clear_pods(&client, &names).await?;
    let none = ANNOTATIONS.map(|name| (name, None));
    for name in &names {
        let labels = NodeLabels::new(client.clone(), name);
        labels.idle_since(None).await?;
        labels.gpu_sharing(None, None).await?;
        labels.annotate(&none).await?;
    }
    Ok(())
}

/// Returns the time until which the agents follow a request of this removal, in the format of RFC
/// 3339.
fn request_end(timeout: Duration) -> String {
    let time = SignedDuration::try_from(timeout).unwrap_or(SignedDuration::MAX);
    let time = time.saturating_add(REQUEST_MARGIN);
    let end = Timestamp::now().saturating_add(time).unwrap_or(Timestamp::MAX);
    Timestamp::from_second(end.as_second()).unwrap_or(end).to_string()
}

/// Sets annotations of a node. A node that no longer exists is no error.
async fn annotate(
    client: &Client,
    name: &str,
    values: &[(&str, Option<String>)],
) -> kube::Result<()> {
    match NodeLabels::new(client.clone(), name).annotate(values).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => done,
    }
}

/// Returns the names of the nodes that agents of this installation manage.
async fn ours(
    client: &Client,
    options: &RetireOptions,
) -> kube::Result<Vec<kube::core::PartialObjectMeta<Node>>> {
    let api: Api<Node> = Api::all(client.clone());
    let nodes = api.list_metadata(&ListParams::default()).await?.items;
    let is_ours = |node: &kube::core::PartialObjectMeta<Node>| {
        node.annotations().get(AGENT) == Some(&options.installation)
    };
    Ok(nodes.into_iter().filter(is_ours).collect())
}

/// Asks all nodes whether Affinode can be removed, and waits until all have agreed. Then requests the
/// removal, and waits until all nodes have completed it. No node is changed before that request.
async fn taken_off(
    client: &Client,
    options: &RetireOptions,
    names: &[String],
    until: &str,
    deadline: Instant,
) -> Result<(), RetireError> {
    for name in names {
        let wish = [
            // Replaces the state that an earlier request left.
            (STATE, Some("removal requested".to_owned())),
            (RETIRE, Some(may_go(&options.installation))),
            (RETIRE_UNTIL, Some(until.to_owned())),
        ];
        annotate(client, name, &wish).await?;
    }
    all_say(READY, client, options, deadline).await?;
    tracing::info!(
        "all nodes: no container of Affinode runs, so the agents now get the request to remove \
         Affinode"
    );
    for name in names {
        let wish = [
            (RETIRE, Some(must_go(&options.installation))),
            (RETIRE_UNTIL, Some(until.to_owned())),
        ];
        annotate(client, name, &wish).await?;
    }
    all_say(RETIRED, client, options, deadline).await
}

async fn all_say(
    word: &str,
    client: &Client,
    options: &RetireOptions,
    deadline: Instant,
) -> Result<(), RetireError> {
    loop {
        let mut left = Vec::new();
        for node in ours(client, options).await? {
            let state = node.annotations().get(STATE).map_or("unknown", String::as_str);
            if state != word {
                left.push((node.name_any(), state.to_owned()));
            }
        }
        let refused = left.iter().any(|(_, state)| state.starts_with(NOT_RETIRED));
        if left.is_empty() {
            return Ok(());
        }
        if refused || Instant::now() > deadline {
            let told = left.into_iter().take(NAMED).map(|(name, state)| format!("{name}: {state}"));
            return Err(RetireError::Nodes(told.collect()));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Removes Affinode's label and condition from the pods of these nodes. Ended pods are included,
/// because they stay in the cluster for some time.
async fn clear_pods(client: &Client, nodes: &[String]) -> Result<(), RetireError> {
    let pods: Api<Pod> = Api::all(client.clone());
    let mut page = ListParams::default().labels(LABEL).limit(PAGE);
    loop {
        let found = pods.list(&page).await?;
        page.continue_token = found.metadata.continue_.clone().filter(|token| !token.is_empty());
        for pod in found {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            if !node.is_some_and(|node| nodes.contains(node)) {
                continue;
            }
            let patch = pods::clear(&pod.uid().unwrap_or_default());
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            if let Err(why) = pods::write(client, &namespace, &name, patch).await {
                tracing::warn!("pod {namespace}/{name}: cannot remove label {LABEL}: {why}");
            }
        }
        if page.continue_token.is_none() {
            return Ok(());
        }
    }
}

/// Deletes the agents' DaemonSet and waits until its pods have ended. An agent that still runs
/// would install Affinode again.
async fn agents_gone(
    client: &Client,
    options: &RetireOptions,
    deadline: Instant,
) -> Result<(), RetireError> {
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), &options.namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), &options.namespace);
    let Some(set) = sets.get_opt(&options.daemon_set).await? else { return Ok(()) };
    sets.delete(&options.daemon_set, &DeleteParams::foreground()).await?;
    let uid = set.uid();
    loop {
        let mine = |pod: &kube::core::PartialObjectMeta<Pod>| {
            pod.owner_references().iter().any(|owner| Some(&owner.uid) == uid.as_ref())
        };
        if !pods.list_metadata(&ListParams::default()).await?.iter().any(mine) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(RetireError::Pods);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests;
