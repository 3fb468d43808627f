//! Checks of how the cluster shows that GPUs are shared by other means than Affinode's.

pub mod nvidia_plugin;

use std::{fs, os::unix::net::UnixListener};

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{NAMESPACE, RELEASE, agent_log, release, step, wait_state};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Label of a node with the program that offers its GPUs.
const OFFERED_BY: &str = "affinode.io/gpus-offered-by";
/// Annotation of a node with the kinds of GPU sharing.
const SHARING: &str = "affinode.io/gpu-sharing";
/// Socket of a node as NVIDIA's device plugin makes it.
const NVIDIA_SOCKET: &str = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock";

/// The device plugin of the nodes offers each GPU twice, as NVIDIA's plugin does with time-slicing.
/// Checks that the node object, an event and the notes of the chart tell it.
pub fn time_slicing_is_told(plane: &Plane<'_>) -> Result<()> {
    step("Time-slicing of the device plugin is told");
    let node = plane.first();
    shows(plane, node, "the annotation", |metadata| {
        metadata["annotations"][SHARING] == "time-slicing"
    })?;
    let told = event(plane, node, "AffinodeGPUTimeSlicing")?;
    ensure!(told.contains("docs/gpu-sharing.md#time-slicing"), "the event does not help: {told}");
    output::note(&format!("event of {}: {told}", node.name));
    let upgrade = ["upgrade", RELEASE, "-n", NAMESPACE, "--dry-run=server"];
    let notes = release::helm(plane, &upgrade)?;
    let line = notes.lines().find(|line| line.trim_start().starts_with("time-slicing:"));
    let line = line.with_context(|| format!("the notes do not name time-slicing: {notes}"))?;
    ensure!(line.contains(&node.name), "the notes do not name {}: {line}", node.name);
    output::note(&format!("notes of the chart:{line}"));
    Ok(())
}

/// Listens on a node that offers seats at a socket like that of NVIDIA's device plugin. Checks that
/// the cluster then shows that the GPUs are offered twice, and no longer shows it afterwards.
pub fn second_plugin_is_told(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step(&format!("A second device plugin on {} is told", node.name));
    let is_own = |metadata: &Value| metadata["labels"][OFFERED_BY] == "affinode-plugin";
    shows(plane, node, "the label", is_own)?;
    let socket = node.path(NVIDIA_SOCKET);
    let listener =
        UnixListener::bind(&socket).with_context(|| format!("cannot make {}", socket.display()))?;
    shows(plane, node, "both plugins", |metadata| metadata["labels"][OFFERED_BY] == "several")?;
    let told = event(plane, node, "AffinodeGPUOfferedTwice")?;
    output::note(&format!("event of {}: {told}", node.name));
    let state = wait_state(plane, &node.name, |state| state.contains("offer the same GPUs"))?;
    output::note(&format!("{} says: {state}", node.name));
    drop(listener);
    fs::remove_file(&socket)?;
    shows(plane, node, "one plugin", is_own)?;
    wait_state(plane, &node.name, |state| state == "served").map(|_| ())
}

/// Waits until the metadata of a node object satisfies `is_it`.
fn shows(
    plane: &Plane<'_>,
    node: &Node<'_>,
    what: &str,
    is_it: impl Fn(&Value) -> bool,
) -> Result<()> {
    let shown = plane.until(&format!("{what} of {}", node.name), || {
        let object = plane.get(&["node", &node.name])?;
        Ok(is_it(&object["metadata"]).then_some(()))
    });
    shown.with_context(|| agent_log(plane))
}

/// Waits for an event of a node with this reason, and returns its message.
fn event(plane: &Plane<'_>, node: &Node<'_>, reason: &str) -> Result<String> {
    let selector = format!("reason={reason},involvedObject.name={}", node.name);
    plane.until(&format!("the event {reason}"), || {
        let mut kubectl = plane.kubectl();
        kubectl.args(["get", "events", "-A", "--field-selector", &selector]);
        kubectl.args(["-o", "jsonpath={.items[0].message}"]);
        let message = containerd::run(&mut kubectl).unwrap_or_default();
        Ok((!message.is_empty()).then_some(message))
    })
}
