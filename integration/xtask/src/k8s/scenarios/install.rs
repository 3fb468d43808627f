//! Checks of `helm install`. A node on which the runtime is available gets a label. Any other node
//! must report the reason.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};

use super::{
    LABEL, NAMESPACE, NODE, RELEASE, SMALL_MIB, agent_pod, is_labelled, plugin, release,
    rolled_out, step, wait_state,
};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Text in the broken configuration of a node. The error about the configuration contains this
/// text.
const BROKEN: &str = "missing.toml";

/// Returns the node whose containerd configuration the test breaks, which is the last node. With
/// the broken configuration, containerd would not start again. Returns `None` if the cluster has
/// only one node.
fn broken<'a, 'p>(plane: &'p Plane<'a>) -> Option<&'p Node<'a>> {
    plane.nodes()[1..].last()
}

/// Installs Affinode on all nodes. If there are several nodes, one has a broken configuration and
/// must report why Affinode is not installed. The runtime must become available on all other nodes.
pub fn all_but_the_broken(plane: &Plane<'_>) -> Result<()> {
    step("helm install");
    release::load_image(plane, plane.world().artifacts())?;
    if let Some(node) = broken(plane) {
        let text = fs::read_to_string(node.config_file())?;
        fs::write(node.config_file(), text.replace("*.toml", BROKEN))?;
    }
    another_has_the_first(plane)?;
    for node in plane.nodes() {
        match broken(plane).is_some_and(|broken| broken.name == node.name) {
            true => says_why_not(plane, node)?,
            false => serves(plane, node)?,
        }
    }
    Ok(())
}

/// Checks that an agent does not install on a node that has another installation. Two installations
/// on one node would undo each other's changes.
fn another_has_the_first(plane: &Plane<'_>) -> Result<()> {
    let first = plane.first();
    let before = fs::read(first.config_file())?;
    containerd::run(plane.kubectl().args(["annotate", "node", NODE, "affinode.io/agent=a/b"]))?;
    release::helm(plane, &["install", RELEASE, "-n", NAMESPACE])?;
    plane.until("the agent to leave the node to another", || {
        let pod = agent_pod(plane, first)?;
        let pod = pod["metadata"]["name"].as_str().context("the agent's pod has no name")?;
        let said = plane.kubectl().args(["-n", NAMESPACE, "logs", pod]).output()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        Ok(said.contains("a/b manages this node").then_some(()))
    })?;
    ensure!(
        fs::read(first.config_file())? == before,
        "the agent changed a node of another installation"
    );
    containerd::run(plane.kubectl().args(["annotate", "node", NODE, "affinode.io/agent-"]))?;
    output::note("a node of another installation is left alone, until that one is gone");
    Ok(())
}

/// Checks that the node gets its label, but not before the runtime is available on it.
pub fn serves(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    let name = &node.name;
    let state = wait_state(plane, name, |state| state.starts_with("installed"))?;
    output::note(&format!("{name}: {state}; it has no label, and pods of the class wait"));
    waits_for_the_label(plane, node)?;
    output::note("containerd is restarted");
    node.restart_containerd()?;
    wait_state(plane, name, |state| state == "served")?;
    plane.until("the label", || Ok(is_labelled(plane, name)?.then_some(())))?;
    output::note(&format!("{name} says: served; label {LABEL}=true"));
    Ok(())
}

fn waits_for_the_label(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    ensure!(
        !is_labelled(plane, &node.name)?,
        "the node has the label, but containerd does not serve the runtime yet"
    );
    let mut early = node.gpu_pod("early", SMALL_MIB)?;
    early["spec"]["runtimeClassName"] = "affinode".into();
    plane.apply(&early)?;
    plane.until("a pod of the class to find no node", || {
        let pod = plane.get(&["pod", "early"])?;
        Ok((pod["status"]["conditions"][0]["reason"] == "Unschedulable").then_some(()))
    })?;
    containerd::run(plane.kubectl().args(["delete", "pod", "early"])).map(|_| ())
}

/// Checks that the node agent reports in the node object why it cannot install, and that `kubectl
/// affinode status` shows the reason.
fn says_why_not(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step("A node whose containerd would not start again with its configuration");
    let name = &node.name;
    let before = fs::read(node.config_file())?;
    let state = wait_state(plane, name, |state| state.starts_with("not installed"))?;
    ensure!(state.contains(BROKEN), "the state does not contain the reason: {state}");
    ensure!(
        fs::read(node.config_file())? == before,
        "the agent changed a configuration that it could not parse"
    );
    waits_for_the_label(plane, node)?;
    output::note(&format!("{name} says: {state}"));
    let row = plugin::row(plane, name, |row| row["health"] == "NotServed")?;
    ensure!(
        row["why"].as_str().is_some_and(|why| why.contains("not installed")),
        "expected the reason `not installed`: {row}"
    );
    plugin::row(plane, NODE, |row| row["health"] == "Resting")?;
    output::note(&format!("{name} is unchanged, without label; kubectl affinode: NotServed"));
    Ok(())
}

/// Repairs the broken configuration, and checks that the node agent tries the installation again.
pub fn the_broken(plane: &Plane<'_>) -> Result<()> {
    let Some(node) = broken(plane) else { return rolled_out(plane) };
    step("The node's configuration is repaired");
    let text = fs::read_to_string(node.config_file())?;
    fs::write(node.config_file(), text.replace(BROKEN, "*.toml"))?;
    serves(plane, node)?;
    rolled_out(plane)
}

/// Upgrades the chart with an invalid policy, with which a controller would not start. Every node
/// must keep its earlier configuration and report this.
pub fn a_bad_policy_is_not_taken(plane: &Plane<'_>) -> Result<()> {
    step("helm upgrade --set policy.mode=sometimes");
    release::helm(plane, &["upgrade", RELEASE, "-n", NAMESPACE, "--set=policy.mode=sometimes"])?;
    for node in plane.nodes() {
        let name = &node.name;
        let state = wait_state(plane, name, |state| {
            state.starts_with("served, but the cluster's configuration")
        })?;
        output::note(&format!("{name} says: {state}"));
    }
    Ok(())
}
