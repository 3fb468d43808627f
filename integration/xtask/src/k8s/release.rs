//! Creates a release of Affinode in the form that a cluster uses: an image with the programs, and
//! the chart.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use affinode_e2e::{
    artifacts::{Artifacts, workspace_dir},
    containerd,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    control_plane::{NODE, Plane},
    node::HOME,
};
use crate::package;

/// Kubernetes namespace of the installation.
pub const NAMESPACE: &str = "affinode-system";
/// Name of the helm release.
pub const RELEASE: &str = "affinode";

/// Name of a symbolic link in the node's folder that points to the node's root folder.
const ROOT: &str = "root";

pub fn chart() -> PathBuf {
    workspace_dir().join("config/helm/affinode")
}

/// Builds the release image from the programs of a build, and imports it on all nodes.
pub fn load_image(plane: &Plane<'_>, artifacts: &Artifacts) -> Result<()> {
    let archive = plane.world().dir().join("affinode-image.tar");
    fs::write(&archive, package::image_of(artifacts)?)?;
    for node in plane.nodes() {
        node.world.containerd().import(node.world.keeper(), "k8s.io", &archive)?;
    }
    fs::remove_file(&archive).context("cannot remove the image archive")
}

/// Returns a path below a node's folder, with a variable in place of the node's name. In each node
/// agent's pod, the variable is replaced by the name of the agent's node.
fn of_each(plane: &Plane<'_>, below: &str) -> Result<String> {
    let folder = plane.world().dir().display().to_string();
    let common =
        folder.strip_suffix(NODE).context("the node's folder does not end with the node's name")?;
    Ok(format!("{common}$(NODE_NAME)/{below}"))
}

/// Returns the path of a node's root folder, as a container of that node sees it. The path leads
/// through a symbolic link in the node's folder.
fn host_root(plane: &Plane<'_>) -> Result<String> {
    for node in plane.nodes() {
        let link = node.world.dir().join(ROOT);
        if !link.exists() {
            // The first process of a node is its testbed's supervisor.
            symlink(format!("/proc/{}/root", node.world.keeper().pid()), link)?;
        }
    }
    Ok(format!("/proc/{}/root{}", std::process::id(), of_each(plane, ROOT)?))
}

/// Returns the chart's values for this cluster. Its nodes have no systemd.
fn values(plane: &Plane<'_>) -> Result<Value> {
    let place = |below: &str| format!("{HOME}/{below}");
    Ok(json!({
        // The name in the image's archive.
        "image": {"repository": "affinode/affinode", "pullPolicy": "Never"},
        // Helm reads the numbers of a file as floats.
        "policy": {
            "mode": "eager", "idle_timeout": "2s", "priority": 3,
            "namespace": [{"name": "elsewhere", "priority": -3, "minimum_vram_mib": 1024}],
        },
        "node": {
            "restart": "none",
            "hostRoot": host_root(plane)?,
            "containerdSocket": place("containerd.sock"),
            // An agent sees the processes of all nodes. The path of the shim's file therefore
            // contains the node's folder, so that an agent recognises the shims of its own node.
            "prefix": of_each(plane, "prefix")?,
            "stateDir": place("state-affinode"),
            "runDir": place("run"),
            "configDir": place("affinode"),
            "drain": "2s",
            // A node whose configuration is broken keeps its place in the rollout, so all nodes may
            // be updated at once.
            "rollout": {"maxConcurrent": plane.nodes().len()},
        },
        // On a cluster of one node, a second replica would stay pending.
        "inject": {"webhook": {"replicas": plane.nodes().len().min(2)}},
        "dashboards": {"enabled": true},
    }))
}

/// Writes the values for this cluster into a file, and returns its path.
pub fn values_file(plane: &Plane<'_>) -> Result<PathBuf> {
    let file = plane.world().dir().join("values.json");
    fs::write(&file, values(plane)?.to_string())?;
    Ok(file)
}

/// Runs helm with these arguments, on the chart with the values for this cluster.
pub fn helm(plane: &Plane<'_>, words: &[&str]) -> Result<String> {
    let file = values_file(plane)?;
    containerd::run(plane.helm().args(words).arg(chart()).arg("--values").arg(file))
}
