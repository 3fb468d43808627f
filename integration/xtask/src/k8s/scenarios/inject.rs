//! Checks that GPU pods get the runtime class automatically, from the admission policy or from the
//! webhook.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{NAMESPACE, RELEASE, SMALL_MIB, agent_log, release, step};
use crate::{k8s::control_plane::Plane, output};

/// Checks that GPU pods get the runtime class from the admission policy, which the chart uses on
/// this API server.
pub fn by_policy(plane: &Plane<'_>) -> Result<()> {
    step("GPU pods get the class by an admission policy");
    let policies = plane.get(&["mutatingadmissionpolicies"])?;
    ensure!(
        policies["items"][0]["metadata"]["name"] == RELEASE,
        "the cluster has no MutatingAdmissionPolicy {RELEASE}: {policies}"
    );
    pods_get_the_class(plane, "asks-policy")
}

/// Checks that GPU pods get the runtime class from the webhook, as on API servers without admission
/// policies.
pub fn by_webhook(plane: &Plane<'_>) -> Result<()> {
    step("helm upgrade --set inject.by=webhook: GPU pods get the class by the webhook");
    let upgrade =
        ["upgrade", RELEASE, "-n", NAMESPACE, "--set=inject.by=webhook,policy.priority=7"];
    release::helm(plane, &upgrade)?;
    let ready =
        ["-n", NAMESPACE, "rollout", "status", "deployment/affinode-webhook", "--timeout=180s"];
    containerd::run(plane.kubectl().args(ready)).with_context(|| agent_log(plane))?;
    let policies = plane.get(&["mutatingadmissionpolicies"])?;
    ensure!(
        policies["items"].as_array().is_some_and(Vec::is_empty),
        "the cluster still has a MutatingAdmissionPolicy: {policies}"
    );
    pods_get_the_class(plane, "asks-webhook")?;
    let logs = ["-n", NAMESPACE, "logs", "deployment/affinode-webhook", "--all-pods=true"];
    let said = containerd::run(plane.kubectl().args(logs))?;
    let line = said
        .lines()
        .find(|line| line.contains("asks-webhook"))
        .context("the webhook logged nothing about the pod asks-webhook")?;
    output::note(&format!("the webhook says: {line}"));
    plane.until("the node's controller to have the new policy", || {
        let said = plane.world().cli().run(&["policy"])?;
        Ok(said.lines().any(|line| line.contains("priority") && line.contains('7')).then_some(()))
    })?;
    output::note("the node's controller has the upgraded policy");
    Ok(())
}

/// Checks which pods get the runtime class: exactly the pods that request a GPU and do not opt out.
fn pods_get_the_class(plane: &Plane<'_>, name: &str) -> Result<()> {
    let class = |pod: &Value| -> Result<Value> {
        let file = plane.world().dir().join("pod.json");
        fs::write(&file, pod.to_string())?;
        let dry = ["create", "--dry-run=server", "-o", "json", "-f"];
        let made = containerd::run(plane.kubectl().args(dry).arg(file))?;
        Ok(serde_json::from_str::<Value>(&made)?["spec"].take())
    };
    let asks = plane.first().gpu_pod(name, SMALL_MIB)?;
    // A new webhook or policy takes effect at the API server after a moment.
    let spec = plane.until("a GPU pod to get the class", || {
        let spec = class(&asks)?;
        Ok((spec["runtimeClassName"] == "affinode").then_some(spec))
    })?;
    ensure!(
        spec["overhead"]["memory"] == "16Mi",
        "expected the overhead of the runtime class: {spec}"
    );
    let mut declines = asks.clone();
    declines["metadata"]["labels"] = json!({"affinode.io/inject": "ignore"});
    let mut without = asks.clone();
    without["spec"]["containers"][0]["resources"] = json!({});
    for (pod, what) in [(declines, "a pod that opts out"), (without, "a pod without a GPU")] {
        let spec = class(&pod)?;
        ensure!(spec["runtimeClassName"].is_null(), "{what} has got the runtime class: {spec}");
    }
    output::note(
        "a GPU pod gets class and overhead; a pod that opts out and one without a GPU are unchanged",
    );
    Ok(())
}
