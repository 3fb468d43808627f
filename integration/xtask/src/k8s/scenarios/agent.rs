//! Checks of a node agent: its rights in the cluster, and the metrics that it serves.

use std::time::Duration;

use affinode_e2e::{containerd, image, wait::until_within};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{GPU_STATE, NAMESPACE, NODE, RESIDENT, agent_pod, fetch, step};
use crate::{k8s::control_plane::Plane, output};

pub const PORT: u16 = 9411;

/// Checks what an agent's token permits. The agent may change Affinode's labels of its own node. It
/// may not change other labels or annotations, other nodes, or taints.
pub fn changes_its_own_alone(plane: &Plane<'_>) -> Result<()> {
    step("An agent's token changes only Affinode's labels and annotations");
    let pod = agent_pod(plane, plane.first())?;
    let pod = pod["metadata"]["name"].as_str().context("the agent's pod has no name")?;
    let token = containerd::run(plane.kubectl().args([
        "-n",
        NAMESPACE,
        "create",
        "token",
        "affinode-node",
        "--bound-object-kind=Pod",
        &format!("--bound-object-name={pod}"),
    ]))?;
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "nowhere"},
    }))?;
    let tried = |what: &[&str]| -> Result<String> {
        let token = format!("--token={}", token.trim());
        let output = plane.kubectl().arg(&token).args(what).output()?;
        let told = if output.status.success() { output.stdout } else { output.stderr };
        Ok(String::from_utf8_lossy(&told).trim().to_owned())
    };
    let own = tried(&["label", "node", NODE, "affinode.io/tried=true"])?;
    ensure!(own.contains("labeled"), "the agent cannot label its own node: {own}");
    for (what, why) in [
        (["label", "node", NODE, "example.com/tried=true"], "labels of affinode.io alone"),
        (["annotate", "node", NODE, "example.com/tried=true"], "annotations of affinode.io alone"),
        (["label", "node", "nowhere", "affinode.io/tried=true"], "its own node alone"),
        (["taint", "node", NODE, "affinode.io/tried=true:NoSchedule"], "no node's spec"),
    ] {
        let said = tried(&what)?;
        ensure!(said.contains(why), "expected {why:?} for {what:?}, got {said}");
    }
    pods_of_its_node_alone(plane, token.trim())?;
    containerd::run(plane.kubectl().args(["label", "node", NODE, "affinode.io/tried-"]))?;
    containerd::run(plane.kubectl().args(["delete", "node", "nowhere"]))?;
    output::note("its own node's label: allowed; other labels, annotations, nodes, taints: denied");
    output::note(
        "its own pods' label and condition: allowed; their other fields, pods of other nodes: denied",
    );
    Ok(())
}

/// Checks what an agent's token permits for pods. The agent may change one label and one condition
/// of pods on its own node. It may not change anything else of these pods, or pods of other nodes.
fn pods_of_its_node_alone(plane: &Plane<'_>, token: &str) -> Result<()> {
    let pod = |name: &str, node: &str| {
        plane.apply(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{
                "name": "main", "image": image::PLAIN, "imagePullPolicy": "Never",
                "command": ["sleep", "infinity"],
            }]},
        }))
    };
    pod("here", NODE)?;
    pod("there", "nowhere")?;
    plane.until("a pod to run", || {
        let pod = plane.get(&["pod", "here"])?;
        Ok((pod["status"]["phase"] == "Running").then_some(()))
    })?;
    let tried = |path: &str, patch: Value| -> Result<String> {
        let mut curl = plane.world().keeper().command("curl".as_ref());
        curl.args(["--silent", "--insecure", "--request", "PATCH"]);
        curl.args(["--header", "Content-Type: application/strategic-merge-patch+json"]);
        curl.arg("--header").arg(format!("Authorization: Bearer {token}"));
        curl.arg("--data").arg(patch.to_string());
        let pods = "https://10.96.0.1/api/v1/namespaces/default/pods";
        let answer: Value =
            serde_json::from_str(&containerd::run(curl.arg(format!("{pods}/{path}")))?)?;
        Ok(answer["message"].as_str().unwrap_or("taken").to_owned())
    };
    let condition =
        |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "False"}]}});
    let label = |name: &str| json!({"metadata": {"labels": {name: "Active"}}});
    for (path, patch, said) in [
        ("here/status", condition(RESIDENT), "taken"),
        ("here/status", label(GPU_STATE), "taken"),
        ("here/status", condition("Ready"), "conditions Affinode changes"),
        ("here/status", label("app"), "labels Affinode changes"),
        ("here/status", json!({"status": {"phase": "Failed"}}), "status Affinode changes"),
        ("here/status", json!({"status": {"podIP": "10.98.0.250"}}), "status Affinode changes"),
        ("here/status", json!({"metadata": {"annotations": {"a": "b"}}}), "annotations"),
        ("there/status", label(GPU_STATE), "its own node alone"),
        ("here", label(GPU_STATE), "forbidden"),
    ] {
        let answer = tried(path, patch.clone())?;
        ensure!(answer.contains(said), "patch {patch} of {path}: expected {said:?}, got {answer}");
    }
    for name in ["here", "there"] {
        let delete = ["delete", "pod", name, "--grace-period=0", "--force"];
        containerd::run(plane.kubectl().args(delete))?;
    }
    Ok(())
}

/// Checks that metrics can be fetched as Prometheus does: over the pod network, with an account's
/// token.
pub fn shows_metrics(plane: &Plane<'_>) -> Result<()> {
    step("Metrics through the agent");
    let pod = agent_pod(plane, plane.first())?;
    let address = pod["status"]["podIP"].as_str().context("the agent's pod has no address")?;
    let url = format!("https://{address}:{PORT}/metrics");
    let kubectl = |words: &[&str]| containerd::run(plane.kubectl().args(words));
    kubectl(&["create", "serviceaccount", "prometheus"])?;
    let token = kubectl(&["create", "token", "prometheus"])?;
    let scrape = |token: Option<&str>| fetch(plane, &url, token);
    let (none, _) = scrape(None)?;
    let (stranger, _) = scrape(Some(&token))?;
    ensure!(
        (none, stranger) == (401, 403),
        "expected 401 without a token and 403 without the right, got {none} and {stranger}"
    );
    kubectl(&[
        "create",
        "clusterrolebinding",
        "prometheus",
        "--clusterrole=affinode-viewer",
        "--serviceaccount=default:prometheus",
    ])?;
    // The agent caches a denial for 10 s, so the request is repeated.
    let mut last = (0, String::new());
    let text = until_within(Duration::from_secs(60), "the account to be allowed", || {
        last = scrape(Some(&token))?;
        Ok((last.0 == 200).then(|| last.1.clone()))
    });
    let text = text.with_context(|| format!("the last reply has status {}: {}", last.0, last.1))?;
    for line in [
        "affinode_controller_up 1",
        "affinode_agent_install_state{state=\"served\"} 1",
        "affinode_agent_gpu_sharing{kind=\"time-slicing\"} 1",
        "affinode_agent_gpu_sharing{kind=\"offered-twice\"} 0",
    ] {
        ensure!(
            text.lines().any(|known| known == line),
            "the metrics do not contain {line}: {text}"
        );
    }
    resting_node_is_up(plane, &token)?;
    kubectl(&["delete", "clusterrolebinding", "prometheus"])?;
    kubectl(&["delete", "serviceaccount", "prometheus"])?;
    let line = text
        .lines()
        .find(|line| {
            line.starts_with("affinode_container_cuda_calls_total{")
                && line.contains("pod=\"trainer\"")
        })
        .with_context(|| format!("the metrics contain no calls of the pod: {text}"))?;
    output::note("without a token: 401; account without the right: 403; account with it:");
    output::note(line);
    let node = plane.until("the node's annotation of VRAM", || {
        let node = plane.get(&["node", NODE])?;
        let seen = &node["metadata"]["annotations"]["affinode.io/reclaimable-vram-bytes"];
        Ok(seen.as_str().map(str::to_owned))
    })?;
    output::note(&format!("annotation affinode.io/reclaimable-vram-bytes: {node}"));
    Ok(())
}

/// Checks that metrics can be fetched from a node on which no container has run yet. Such a node
/// has no controller, and its metrics must show this.
fn resting_node_is_up(plane: &Plane<'_>, token: &str) -> Result<()> {
    let Some(node) = plane.nodes()[1..].last() else { return Ok(()) };
    let pod = agent_pod(plane, node)?;
    let address = pod["status"]["podIP"].as_str().context("the agent's pod has no address")?;
    let (code, text) = fetch(plane, &format!("https://{address}:{PORT}/metrics"), Some(token))?;
    let resting = text.lines().any(|line| line == "affinode_controller_up 0");
    ensure!(
        code == 200 && resting,
        "expected status 200 and affinode_controller_up 0, got {code}: {text}"
    );
    output::note(&format!("{}, without a controller: 200, affinode_controller_up 0", node.name));
    Ok(())
}
