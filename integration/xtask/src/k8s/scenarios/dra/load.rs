//! Checks that the scheduler prefers a GPU that nothing uses, by the class of load that the driver
//! publishes.

use std::fs;

use affinode_e2e::{artifacts::workspace_dir, containerd, image};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{claiming, slices, template};
use crate::{
    k8s::{
        control_plane::Plane,
        node::Node,
        scenarios::{pods::Pod, step},
    },
    output,
};

/// Template of claims in the example, and the amount of memory in it, which is too large for the
/// GPUs of the test.
const EXAMPLE: &str = "gpu-24gi-idle-first";
const EXAMPLE_MEMORY: &str = "24Gi";
/// Template of claims for the same amount, without a preference.
const PLAIN: &str = "load-plain";
const MEMORY: &str = "64Mi";
/// Number of pods that are scheduled with each template.
const REPETITIONS: usize = 4;
/// Requests of the pod that makes an idle node less attractive to the scheduler. They are small
/// enough that the preference of the claim outweighs them.
const BALLAST: [(&str, &str); 2] = [("cpu", "200m"), ("memory", "1Gi")];

/// Keeps the GPU of the first node in use, and makes the other nodes less attractive to the
/// scheduler. Pods with a claim without a preference must then come to the first node, and pods with
/// the claim of the example must come to other nodes, each time.
pub fn idle_gpu_is_preferred(plane: &Plane<'_>) -> Result<()> {
    let node = plane.first();
    let others = &plane.nodes()[1..];
    if others.is_empty() {
        return Ok(());
    }
    step(&format!("A pod uses the GPU of {}, and claims prefer an idle GPU", node.name));
    templates(plane)?;
    let mut worker = claiming(node, "worker", PLAIN)?;
    let small = node.gpu_pod("worker", super::SMALL_MIB)?;
    worker["spec"]["containers"][0]["command"] = small["spec"]["containers"][0]["command"].clone();
    // The container is active until this time has passed since its last call.
    worker["metadata"]["annotations"] = json!({"affinode.io/idle-timeout": "1h"});
    let mut worker = Pod::start(plane, node, "worker", &worker)?;
    worker.has_filled()?;
    until_load(plane, node, "shared")?;
    for other in others {
        until_load(plane, other, "idle")?;
        ballast(plane, other)?;
    }
    let plain = placed(plane, PLAIN)?;
    ensure!(
        plain.iter().all(|place| *place == node.name),
        "without a preference, the scheduler must choose {}, it chose {plain:?}",
        node.name
    );
    output::note(&format!("without a preference: {}", plain.join(", ")));
    let preferring = placed(plane, EXAMPLE)?;
    ensure!(
        preferring.iter().all(|place| *place != node.name),
        "the claim of the example must avoid {}, the scheduler chose {preferring:?}",
        node.name
    );
    output::note(&format!("with the claim of the example: {}", preferring.join(", ")));
    for other in others {
        let name = format!("ballast-{}", other.name);
        containerd::run(plane.kubectl().args(["delete", "pod", &name]))?;
    }
    worker.delete()?;
    until_load(plane, node, "idle")?;
    for name in [EXAMPLE, PLAIN] {
        containerd::run(plane.kubectl().args(["delete", "resourceclaimtemplate", name]))?;
    }
    output::note(&format!("the pod is deleted, and the GPU of {} is idle again", node.name));
    Ok(())
}

/// Creates the template of the example, for a smaller amount, and a template without a preference.
fn templates(plane: &Plane<'_>) -> Result<()> {
    template(plane, PLAIN, MEMORY, &json!({"offload": "eager"}))?;
    let file = "config/kubernetes/sharing/affinode-dra-idle-first.yaml";
    let text = fs::read_to_string(workspace_dir().join(file))
        .with_context(|| format!("cannot read {file}"))?;
    let (text, _) = text.split_once("\n---\n").context("the example has no second object")?;
    ensure!(text.contains(EXAMPLE_MEMORY), "the example does not request {EXAMPLE_MEMORY}");
    let small = plane.dir().join("idle-first.yaml");
    fs::write(&small, text.replace(EXAMPLE_MEMORY, MEMORY))?;
    let apply = ["apply", "--validate=strict", "-f"];
    containerd::run(plane.kubectl().args(apply).arg(&small)).map(|_| ())
}

/// Waits until the device of a node is published with this class of load.
fn until_load(plane: &Plane<'_>, node: &Node<'_>, wanted: &str) -> Result<()> {
    let found = plane.until(&format!("the load {wanted} of {}", node.name), || {
        let slice = slices::published(plane, node, None)?;
        let load = &slice["spec"]["devices"][0]["attributes"]["load"]["string"];
        Ok((*load == wanted).then_some(()))
    });
    found.with_context(|| super::agent_log(plane))?;
    output::note(&format!("{}: load = {wanted}", node.name));
    Ok(())
}

/// Starts a pod without a GPU on a node.
fn ballast(plane: &Plane<'_>, node: &Node<'_>) -> Result<()> {
    let name = format!("ballast-{}", node.name);
    let requests: Value = BALLAST.iter().map(|(name, amount)| (*name, *amount)).collect();
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node.name},
            "containers": [{
                "name": "main", "image": image::PLAIN, "imagePullPolicy": "Never",
                "command": ["sleep", "infinity"], "resources": {"requests": requests},
            }],
            "terminationGracePeriodSeconds": 0,
        },
    }))?;
    plane.until(&format!("pod {name} to run"), || {
        Ok((plane.get(&["pod", &name])?["status"]["phase"] == "Running").then_some(()))
    })
}

/// Schedules pods with claims of this template, one after the other, and returns their nodes. The
/// pods make no CUDA call, so the load of the GPUs does not change.
fn placed(plane: &Plane<'_>, template: &str) -> Result<Vec<String>> {
    let mut places = Vec::new();
    for number in 1..=REPETITIONS {
        let name = format!("{template}-{number}");
        let mut pod = claiming(plane.first(), &name, template)?;
        pod["spec"]["nodeSelector"] = json!({});
        pod["spec"]["containers"][0]["command"] = json!(["sleep", "infinity"]);
        plane.apply(&pod)?;
        let place = plane
            .until(&format!("pod {name} to run"), || {
                let pod = plane.get(&["pod", &name])?;
                let is_running = pod["status"]["phase"] == "Running";
                Ok(pod["spec"]["nodeName"].as_str().filter(|_| is_running).map(str::to_owned))
            })
            .with_context(|| super::pods::describe(plane, &name))?;
        places.push(place);
        containerd::run(plane.kubectl().args(["delete", "pod", &name]))?;
    }
    Ok(places)
}
