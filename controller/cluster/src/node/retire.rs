//! Takes Affinode off all nodes, before the rest of the installation goes: what `helm uninstall`
//! runs first.
//!
//! ```text
//!  nodes of ours ──may it go?──> no container runs ──on all──> agents take it off ──all did──> agents' DaemonSet goes
//!                                   │ on one some do, or the time is over  │ one could not          └──> pods' labels, nodes' annotations go
//!                                   └──> wishes are taken back, exit 1     └──> the same; agents install again
//! ```

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, Pod},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams},
};
use tokio::time::Instant;

use super::{
    node_labels::{
        AGENT, ANNOTATIONS, NOT_RETIRED, NodeLabels, READY, RETIRE, RETIRED, STATE, may_go, must_go,
    },
    pod_condition::LABEL,
    pods,
};
use crate::error_chain;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pods that are asked for at a time.
const PAGE: u32 = 100;
/// Nodes that are named in an error.
const NAMED: usize = 10;

/// What to take off.
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
    /// How long nodes are waited for.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

/// Why it is still there. Agents go on then as if nothing had been asked.
#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    /// No runtime: the machine is out of something.
    #[error("cannot start threads; is a limit of processes or memory reached?")]
    Start(#[source] std::io::Error),
    /// The API server.
    #[error("cannot take the nodes' agents away at the API server")]
    Cluster(#[from] kube::Error),
    /// Nodes that did not.
    #[error(
        "Affinode stays as it is, because of {}. End the pods of its runtime class, or bring these nodes back, and try again",
        .0.join("; ")
    )]
    Nodes(Vec<String>),
    /// The agents' pods do not end.
    #[error(
        "the agents' pods did not end in time: `kubectl get pods --all-namespaces -l app.kubernetes.io/component=node` shows them; end them, and try again"
    )]
    Pods,
}

/// Takes it off everywhere, or nowhere.
///
/// # Errors
/// [`RetireError`].
pub fn run(options: &RetireOptions) -> Result<(), RetireError> {
    // Whoever installed one before us installed the same.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(RetireError::Start)?
        .block_on(retire(options))
}

async fn retire(options: &RetireOptions) -> Result<(), RetireError> {
    let client = Client::try_default().await?;
    let deadline = Instant::now() + options.timeout;
    let names: Vec<String> =
        ours(&client, options).await?.iter().map(ResourceExt::name_any).collect();
    tracing::info!("{} nodes are asked", names.len());
    for name in &names {
        let wish = [
            // What it said when it was asked before is over.
            (STATE, Some("asked to be taken off".to_owned())),
            (RETIRE, Some(may_go(&options.installation))),
        ];
        NodeLabels::new(client.clone(), name).annotate(&wish).await?;
    }
    if let Err(error) = taken_off(&client, options, &names, deadline).await {
        for name in &names {
            let taken_back =
                NodeLabels::new(client.clone(), name).annotate(&[(RETIRE, None)]).await;
            if let Err(error) = taken_back {
                tracing::warn!("the wish stays at node {name}: {}", error_chain::chain(&error));
            }
        }
        return Err(error);
    }
    tracing::info!("nothing of Affinode is left on the nodes");
    agents_gone(&client, options, deadline).await?;
    clear_pods(&client, &names).await?;
    let none = ANNOTATIONS.map(|name| (name, None));
    for name in &names {
        NodeLabels::new(client.clone(), name).annotate(&none).await?;
    }
    Ok(())
}

/// The nodes that agents of this installation look after.
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

/// Nothing is touched on any node before all have said that they may be.
async fn taken_off(
    client: &Client,
    options: &RetireOptions,
    names: &[String],
    deadline: Instant,
) -> Result<(), RetireError> {
    all_say(READY, client, options, deadline).await?;
    tracing::info!("no container runs: it is taken off all of them");
    for name in names {
        let wish = [(RETIRE, Some(must_go(&options.installation)))];
        NodeLabels::new(client.clone(), name).annotate(&wish).await?;
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

/// Pods that have ended stay in the cluster for a while: they keep nothing of ours.
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
                tracing::warn!("pod {namespace}/{name} keeps label {LABEL}: {why}");
            }
        }
        if page.continue_token.is_none() {
            return Ok(());
        }
    }
}

/// They would install again what they have just taken off.
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
