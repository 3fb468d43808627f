//! Checks of a GPU that is full of VRAM that no offload can free, and of the health of devices.

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{claiming, finds_no_gpu, slices, template};
use crate::{
    k8s::{
        control_plane::Plane,
        node::Node,
        scenarios::{pods::Pod, step},
    },
    output,
};

/// Taint of a GPU that is full.
const FULL_TAINT: &str = "gpu.affinode.io/full";
/// VRAM in MiB that the pod fills that must stay: over 90 % of the VRAM of 1,024 MiB.
const FIXED_MIB: u32 = 940;

/// Runs a pod whose policy keeps it on the GPU, and which fills the GPU. Its device must be shown
/// as healthy, and the GPU must get a taint. A pod with a small claim, for which the capacity
/// suffices, must wait until the first pod is deleted.
pub fn full_gpu_takes_no_pod(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    step(&format!("A pod with the mode off fills the GPU of {}", node.name));
    template(plane, "fixed", "1Gi", &json!({"offload": "off"}))?;
    template(plane, "late", "64Mi", &json!({"offload": "eager"}))?;
    let mut manifest = claiming(node, "fixed", "fixed")?;
    let small = node.gpu_pod("fixed", FIXED_MIB)?;
    manifest["spec"]["containers"][0]["command"] =
        small["spec"]["containers"][0]["command"].clone();
    let fixed = Pod::start(plane, node, "fixed", &manifest)?;
    device_is_healthy(plane)?;
    has_taint(plane, node, true)?;
    let late = claiming(node, "late", "late")?;
    plane.apply(&late)?;
    let why = finds_no_gpu(plane, "late")?;
    output::note(&format!("a pod with a claim of 64Mi waits: {why}"));
    containerd::run(plane.kubectl().args(["delete", "pod", "late"]))?;
    fixed.delete()?;
    has_taint(plane, node, false)?;
    for name in ["fixed", "late"] {
        containerd::run(plane.kubectl().args(["delete", "resourceclaimtemplate", name]))?;
    }
    output::note("the taint is gone with the pod");
    Ok(())
}

/// Checks that the kubelet shows the health of the pod's GPU, as the driver reports it.
fn device_is_healthy(plane: &Plane<'_>) -> Result<()> {
    let health = plane.until("the health of the pod's GPU", || {
        let pod = plane.get(&["pod", "fixed"])?;
        let resources = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"];
        let device = &resources[0]["resources"][0];
        let known = device["health"].as_str().filter(|health| *health != "Unknown");
        Ok(known.map(str::to_owned))
    })?;
    ensure!(health == "Healthy", "the GPU is {health}");
    output::note("the status of the pod shows its GPU as Healthy");
    Ok(())
}

/// Waits until the device of a node has the taint of a full GPU, or no longer has it.
fn has_taint(plane: &Plane<'_>, node: &Node<'_>, expected: bool) -> Result<()> {
    let what = if expected { "the taint of the full GPU" } else { "the GPU to have no taint" };
    let found = plane.until(what, || {
        let slice = slices::published(plane, node, None)?;
        let taint = slice["spec"]["devices"][0]["taints"][0].clone();
        let is_full = taint["key"] == FULL_TAINT && taint["effect"] == "NoSchedule";
        Ok((is_full == expected).then_some(()))
    });
    found.with_context(|| super::agent_log(plane))
}
