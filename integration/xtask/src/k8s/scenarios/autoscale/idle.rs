//! Checks of the label of nodes whose GPUs nothing uses.

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::server::Server;
use crate::{
    k8s::{
        control_plane::Plane,
        files,
        scenarios::{agent_log, step},
    },
    output,
};

/// Time without use after which a node gets the label, in the chart's values of this test.
pub const IDLE_AFTER: &str = "15s";
/// Label of a node whose GPUs nothing uses, and annotation with the time since when this holds.
const LABEL: &str = "affinode.io/gpus-idle";
const SINCE: &str = "affinode.io/gpus-idle-since";

/// Waits until the node of the server has the label. Then the server makes a call, and the node must
/// lose the label, and get it again with a later time.
pub fn nodes_are_named(plane: &Plane<'_>, server: &mut Server<'_>) -> Result<()> {
    step(&format!("Nothing uses the GPU of {} for {IDLE_AFTER}", server.node()));
    let first = until_labelled(plane, server.node())?;
    let named = ["get", "nodes", "-o", "name", "-l", &format!("{LABEL}=true")];
    let named = containerd::run(plane.kubectl().args(named))?;
    output::note(&format!("label {LABEL}=true since {first}; nodes with it: {}", named.trim()));
    let mut status = plane.plugin(files::ADMIN)?;
    let shown = containerd::run(status.args(["status", "-o", "json"]))?;
    let shown: Value = serde_json::from_str(&shown)?;
    let rows = shown["nodes"].as_array().context("kubectl affinode status lists no nodes")?;
    let is_shown = |row: &Value| row["name"] == server.node() && row["gpus_idle_since"] == *first;
    ensure!(rows.iter().any(is_shown), "kubectl affinode status does not show {first}: {shown}");
    server.call()?;
    server.is_back()?;
    plane.until("the label to be removed", || {
        Ok(since(plane, server.node())?.is_none().then_some(()))
    })?;
    output::note("the server makes a call, and the label is removed");
    let second = until_labelled(plane, server.node())?;
    ensure!(second > first, "the label is set again, but for {second}, first {first}");
    output::note(&format!("set again: since {second}"));
    Ok(())
}

fn until_labelled(plane: &Plane<'_>, node: &str) -> Result<String> {
    plane
        .until(&format!("the label {LABEL} of {node}"), || since(plane, node))
        .with_context(|| agent_log(plane))
}

/// Returns since when nothing uses the GPUs of the node, if the node has the label.
fn since(plane: &Plane<'_>, node: &str) -> Result<Option<String>> {
    let metadata = plane.get(&["node", node])?["metadata"].clone();
    let since = metadata["annotations"][SINCE].as_str().map(str::to_owned);
    ensure!(
        since.is_some() == (metadata["labels"][LABEL] == "true"),
        "label and annotation of {node} disagree: {metadata}"
    );
    Ok(since)
}
