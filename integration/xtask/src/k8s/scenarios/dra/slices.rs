//! Checks of the ResourceSlices, in which the node agents publish the GPUs of their nodes.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{DRIVER, claim_files};
use crate::{
    k8s::{
        VRAM_BYTES,
        control_plane::Plane,
        node::Node,
        release::NAMESPACE,
        scenarios::{agent_log, agent_pod},
    },
    output,
};

/// Waits until the ResourceSlice of a node is published, and returns it. If `earlier` is given,
/// waits for a slice with another UID than `earlier`.
pub fn published(plane: &Plane<'_>, node: &Node<'_>, earlier: Option<&Value>) -> Result<Value> {
    let uid = |slice: &Value| slice["metadata"]["uid"].clone();
    let selector = format!("spec.driver={DRIVER},spec.nodeName={}", node.name);
    let found = plane.until(&format!("the ResourceSlice of {}", node.name), || {
        let slices = plane.get(&["resourceslices", "--field-selector", &selector])?;
        let slice = slices["items"].get(0).cloned();
        Ok(slice.filter(|slice| earlier.is_none_or(|earlier| uid(earlier) != uid(slice))))
    });
    found.with_context(|| agent_log(plane))
}

pub fn gpus_are_published(plane: &Plane<'_>) -> Result<()> {
    for node in plane.nodes() {
        let slice = published(plane, node, None)?;
        let device = &slice["spec"]["devices"][0];
        ensure!(device["allowMultipleAllocations"] == true, "the GPU is not shared: {device}");
        let memory = &device["capacity"]["memory"];
        ensure!(
            memory["value"] == format!("{}Gi", VRAM_BYTES >> 29)
                && memory["requestPolicy"]["default"] == format!("{}Gi", VRAM_BYTES >> 30),
            "expected twice the VRAM, and the VRAM as default: {memory}"
        );
        let attribute = |name: &str, kind: &str| device["attributes"][name][kind].clone();
        ensure!(
            attribute("type", "string") == "gpu"
                && attribute("cudaComputeCapability", "version") == "9.0.0"
                && attribute("uuid", "string").as_str().is_some_and(|it| it.starts_with("GPU-")),
            "attributes are missing: {device}"
        );
    }
    let shown = ["get", "resourceslices", "-o", "wide"];
    output::out(&containerd::run(plane.kubectl().args(shown))?);
    Ok(())
}

/// Checks that an agent's token does not permit the creation of a ResourceSlice for another node or
/// for another driver.
pub fn foreign_slices_are_refused(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    let pod = agent_pod(plane, node)?;
    let pod = pod["metadata"]["name"].as_str().context("the agent's pod has no name")?;
    let bound = format!("--bound-object-name={pod}");
    let token = ["-n", NAMESPACE, "create", "token", "affinode-node", "--bound-object-kind=Pod"];
    let token = containerd::run(plane.kubectl().args(token).arg(bound))?;
    let file = plane.dir().join("slice.json");
    for (driver, of, said) in [
        (DRIVER, "elsewhere", "its own node alone"),
        ("gpu.example.com", node.name.as_str(), "its own driver alone"),
    ] {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": {"name": "foreign"},
            "spec": {
                "driver": driver, "nodeName": of, "devices": [{"name": "gpu"}],
                "pool": {"name": of, "generation": 1, "resourceSliceCount": 1},
            },
        });
        fs::write(&file, slice.to_string())?;
        let mut create = plane.kubectl();
        create.arg(format!("--token={}", token.trim())).args(["create", "-f"]).arg(&file);
        let output = create.output()?;
        let answer = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(answer.contains(said), "expected {said:?}, got {answer}");
    }
    output::note("an agent cannot create slices of other nodes and drivers");
    Ok(())
}

/// Checks that after `helm uninstall` no slice, socket or file of the driver is left.
pub fn nothing_is_left(plane: &Plane<'_>) -> Result<()> {
    for node in plane.nodes() {
        let left = claim_files(node)?;
        ensure!(left.is_empty(), "{} has files of claims: {left:?}", node.name);
        for socket in
            ["plugins_registry/gpu.affinode.io-reg.sock", "plugins/gpu.affinode.io/dra.sock"]
        {
            let path = node.path(&format!("/var/lib/kubelet/{socket}"));
            ensure!(!path.exists(), "{} still has {socket}", node.name);
        }
        fs::remove_file(node.path("/etc/cdi/nvidia.json"))?;
    }
    let slices = plane.get(&["resourceslices"])?;
    ensure!(slices["items"].as_array().is_some_and(Vec::is_empty), "slices are left: {slices}");
    output::note("no slice, socket or CDI file of the driver is left");
    Ok(())
}
