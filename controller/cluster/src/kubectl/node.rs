//! `kubectl affinode node`: excludes nodes from Affinode, includes them again, and waits until
//! Affinode is removed from excluded nodes.

use std::{io::Write, time::Duration};

use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{
    access::ClusterAccess,
    error::{ExitStatus, PluginError},
    output,
};
use crate::node::node_labels::{EXCLUDE, EXCLUDED, STATE};

/// Interval between two checks of a node from which Affinode is being removed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Exclude nodes from Affinode, or include them again. The user needs the right to patch nodes,
/// which no role of the Helm chart grants.
#[derive(Args, Clone, Debug)]
pub struct NodeArgs {
    #[command(subcommand)]
    verb: NodeVerb,
}

#[derive(Clone, Debug, Subcommand)]
enum NodeVerb {
    /// Set the label affinode.io/exclude on nodes. Affinode is then not installed there. If it is
    /// installed already, the node's agent removes it after the last container of Affinode has
    /// ended.
    Exclude(NodeNames),
    /// Remove the label affinode.io/exclude from nodes. Affinode is then installed there again.
    Include(NodeNames),
    /// Exclude nodes like `node exclude`, and wait until Affinode is removed from them.
    Retire {
        #[command(flatten)]
        nodes: NodeNames,
        /// Maximum time to wait, for example 90s or 10m. If this time passes, the nodes stay
        /// excluded.
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
        timeout: Duration,
    },
}

#[derive(Args, Clone, Debug)]
struct NodeNames {
    /// Names of the nodes.
    #[arg(required = true, value_name = "NODE")]
    names: Vec<String>,
}

/// Excludes or includes the nodes, one after the other, as the command line requests.
///
/// # Errors
/// [`PluginError`]: a node could not be changed. The nodes after it in the list are unchanged.
pub async fn run(
    access: &ClusterAccess,
    asked: &NodeArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let api: Api<Node> = Api::all(access.client.clone());
    let (nodes, excluded) = match &asked.verb {
        NodeVerb::Exclude(nodes) | NodeVerb::Retire { nodes, .. } => (nodes, true),
        NodeVerb::Include(nodes) => (nodes, false),
    };
    for name in &nodes.names {
        label(&api, name, excluded).await?;
        writeln!(out, "node {name} is {}", if excluded { "excluded" } else { "included" })?;
    }
    let NodeVerb::Retire { timeout, .. } = asked.verb else { return Ok(ExitStatus::Done) };
    let deadline = Instant::now() + timeout;
    let mut exit = ExitStatus::Done;
    for name in &nodes.names {
        match removed(&api, name, deadline).await? {
            Ok(()) => writeln!(out, "Affinode is removed from node {name}")?,
            Err(state) => {
                output::say(&format!("node {name} still has Affinode; its state: {state}"));
                exit = ExitStatus::Failed;
            }
        }
    }
    Ok(exit)
}

async fn label(api: &Api<Node>, name: &str, excluded: bool) -> Result<(), PluginError> {
    let value = if excluded { json!("true") } else { Value::Null };
    let patch = Patch::Merge(json!({ "metadata": { "labels": { EXCLUDE: value } } }));
    let patched = api.patch_metadata(name, &PatchParams::default(), &patch).await;
    patched.map_err(PluginError::api(format!("patch node {name}")))?;
    Ok(())
}

/// Waits until the agent reports that Affinode is removed from the node. The inner `Err` means that
/// the deadline has passed. It contains the state that the agent reported last.
async fn removed(
    api: &Api<Node>,
    name: &str,
    deadline: Instant,
) -> Result<Result<(), String>, PluginError> {
    loop {
        let node: PartialObjectMeta<Node> =
            api.get_metadata(name).await.map_err(PluginError::api(format!("get node {name}")))?;
        match node.annotations().get(STATE) {
            Some(state) if state == EXCLUDED => return Ok(Ok(())),
            // No agent has ever managed the node.
            None => return Ok(Ok(())),
            Some(state) if Instant::now() >= deadline => return Ok(Err(state.clone())),
            Some(_) => sleep(LOOK_EVERY).await,
        }
    }
}
