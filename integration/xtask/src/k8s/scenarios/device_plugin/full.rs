//! Checks of the seats of a GPU that is full of VRAM that no offload can free.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{RESOURCE, SEATS, allocatable, finds_no_seat, seated};
use crate::{
    k8s::{
        control_plane::Plane,
        node::Node,
        scenarios::{SMALL_MIB, agent_log, pods::Pod, step},
    },
    output,
};

/// VRAM in MiB that the pod fills that must stay: over 90 % of the VRAM of 1,024 MiB.
const FIXED_MIB: u32 = 940;

/// Runs a pod whose policy keeps it on the GPU, and which fills the GPU. The node must then offer
/// no seat but that of the pod, and the kubelet must show this seat as healthy. A further pod must
/// wait until the first pod is deleted.
pub fn full_gpu_takes_no_pod(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step(&format!("A pod with the mode off fills the GPU of {}", node.name));
    let mut manifest = seated(node, "fixed")?;
    manifest["metadata"]["annotations"]["affinode.io/offload"] = "off".into();
    manifest["spec"]["containers"][0]["command"] = command(node, "fixed", FIXED_MIB)?;
    let fixed = Pod::start(plane, node, "fixed", &manifest)?;
    offers(plane, node, 1)?;
    let pod = plane.get(&["pod", "fixed"])?;
    let resources = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"];
    let seat = &resources[0]["resources"][0];
    ensure!(
        resources[0]["name"] == RESOURCE && seat["health"] == "Healthy",
        "the seat of the pod is not shown as healthy: {resources}"
    );
    output::note(&format!("only the seat of this pod is offered, and it is {}", seat["health"]));
    let mut late = seated(node, "late")?;
    late["spec"]["containers"][0]["command"] = command(node, "late", SMALL_MIB)?;
    plane.apply(&late)?;
    let why = finds_no_seat(plane, "late")?;
    output::note(&format!("a further pod waits: {why}"));
    fixed.delete()?;
    offers(plane, node, SEATS)?;
    let late = Pod::start(plane, node, "late", &late)?;
    output::note("all seats are offered again, and the further pod runs");
    late.delete()
}

/// Returns the command of a pod whose program fills an amount of VRAM.
fn command(node: &Node<'_>, name: &str, vram_mib: u32) -> Result<Value> {
    Ok(node.gpu_pod(name, vram_mib)?["spec"]["containers"][0]["command"].clone())
}

/// Waits until the node offers this number of seats.
fn offers(plane: &Plane<'_>, node: &Node<'_>, seats: usize) -> Result<()> {
    let offered = plane.until(&format!("{} to offer {seats} seats", node.name), || {
        Ok((allocatable(plane, node)? == seats.to_string()).then_some(()))
    });
    offered.with_context(|| agent_log(plane))
}
