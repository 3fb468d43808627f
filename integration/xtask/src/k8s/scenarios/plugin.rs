//! Checks of `kubectl affinode`, run by an account that has only the chart's roles.

use std::{fs, time::Duration};

use affinode_e2e::{containerd, wait::until_within};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{GPU_STATE, NAMESPACE, step};
use crate::{
    k8s::{control_plane::Plane, files},
    output,
};

/// Maximum time until a new right of the account takes effect. The node agents cache a denial for
/// 10 s.
const RIGHT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time until `kubectl affinode status` shows a node in the expected state.
const ROW_TIMEOUT: Duration = Duration::from_secs(90);
/// Name of the account, and of its role bindings.
const ACCOUNT: &str = "plugin";
/// File name of the account's kubeconfig, in the cluster's folder.
const KUBECONFIG: &str = "plugin.json";
/// Option of kubectl that names the account as the subject of a role binding.
const SUBJECT: &str = "--serviceaccount=default:plugin";

/// Output of a command: exit status, standard output and standard error.
type Printed = (i32, String, String);

/// Checks what the account may do with `kubectl affinode`: nothing without a role, show pods as a
/// viewer, and also move pods as an operator.
pub fn shows_and_moves(plane: &Plane<'_>) -> Result<()> {
    step("kubectl affinode, by an account with the chart's roles");
    account(plane)?;
    let (status, _, said) = run(plane, &["ps", "-A"])?;
    ensure!(status == 3, "an account without a role: exit status {status}: {said}");
    output::note(&format!("without a role: {}", said.trim()));
    let connect = ["-n", NAMESPACE, "create", "rolebinding", ACCOUNT, "--role=affinode-kubectl"];
    containerd::run(plane.kubectl().args(connect).arg(SUBJECT))?;
    bind(plane, "viewer")?;
    let list = until(plane, &["ps", "-A", "-o", "json"], 0)?;
    let pod = every_pod_is_listed(plane, &serde_json::from_str(&list)?)?;
    let (_, table, _) = run(plane, &["ps", "-A"])?;
    output::out(&table);
    let (status, table, said) = run(plane, &["status"])?;
    ensure!(
        status == 0 && table.contains("all"),
        "expected exit status 0 and a row `all`, got {status}: {table} {said}"
    );
    output::out(&table);
    every_node_serves(plane)?;
    every_pod_is_reported(plane)?;
    let (status, _, said) = run(plane, &["offload", &pod])?;
    ensure!(status == 3 && said.contains("may not post"), "a viewer moved a pod: {status} {said}");
    output::note(&format!("a viewer may not move: {}", said.trim()));
    bind(plane, "operator")?;
    for (verb, done) in [("restore", "is restored"), ("offload", "is offloaded")] {
        let said = until(plane, &[verb, &pod], 0)?;
        ensure!(said.contains(done), "{verb}: {said}");
        output::note(said.trim());
    }
    let list: Value = serde_json::from_str(&until(plane, &["ps", "-o", "json"], 0)?)?;
    let found = containers(&list).find(|c| c["pod"] == *pod).context("the pod is not listed")?;
    ensure!(found["state"] == "Offloaded", "{found}");
    for binding in ["viewer", "operator"] {
        let name = format!("{ACCOUNT}-{binding}");
        containerd::run(plane.kubectl().args(["delete", "clusterrolebinding", &name]))?;
    }
    containerd::run(plane.kubectl().args(["-n", NAMESPACE, "delete", "rolebinding", ACCOUNT]))?;
    containerd::run(plane.kubectl().args(["delete", "serviceaccount", ACCOUNT])).map(|_| ())
}

/// Creates the account, and a kubeconfig for it.
fn account(plane: &Plane<'_>) -> Result<()> {
    containerd::run(plane.kubectl().args(["create", "serviceaccount", ACCOUNT]))?;
    let token = containerd::run(plane.kubectl().args(["create", "token", ACCOUNT]))?;
    let admin = fs::read(plane.dir().join(files::ADMIN))?;
    let mut config: Value = serde_json::from_slice(&admin)?;
    config["users"][0]["user"]["token"] = token.trim().into();
    Ok(fs::write(plane.dir().join(KUBECONFIG), config.to_string())?)
}

fn bind(plane: &Plane<'_>, role: &str) -> Result<()> {
    let (name, role) = (format!("{ACCOUNT}-{role}"), format!("--clusterrole=affinode-{role}"));
    let bind = ["create", "clusterrolebinding", &name, &role, SUBJECT];
    containerd::run(plane.kubectl().args(bind)).map(|_| ())
}

fn run(plane: &Plane<'_>, words: &[&str]) -> Result<Printed> {
    run_as(plane, KUBECONFIG, words)
}

fn run_as(plane: &Plane<'_>, kubeconfig: &str, words: &[&str]) -> Result<Printed> {
    let output = plane.plugin(kubeconfig)?.args(words).output()?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok((output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr)))
}

/// Repeats a `kubectl affinode` command until it ends with this exit status. Returns its output.
fn until(plane: &Plane<'_>, words: &[&str], wanted: i32) -> Result<String> {
    let mut last = String::new();
    let what = format!("kubectl affinode {} to end with {wanted}", words.join(" "));
    let said = until_within(RIGHT_TIMEOUT, &what, || {
        let (status, out, said) = run(plane, words)?;
        last = format!("exit status {status}: {out}{said}");
        Ok((status == wanted).then_some(out))
    });
    said.with_context(|| last)
}

/// Returns the row of a node in the output of `kubectl affinode status`, run by an administrator.
/// Waits until the row satisfies `is_it`.
pub fn row(plane: &Plane<'_>, node: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
    let mut last = String::new();
    let what = format!("kubectl affinode status to show the expected state of {node}");
    let row = until_within(ROW_TIMEOUT, &what, || {
        let words = ["status", "--node", node, "-o", "json"];
        let (_, out, said) = run_as(plane, files::ADMIN, &words)?;
        let status: Value = serde_json::from_str(&out).unwrap_or_default();
        last = format!("{out}{said}");
        let row = &status["nodes"][0];
        Ok(is_it(row).then(|| row.clone()))
    });
    row.with_context(|| format!("the last output was {last}"))
}

/// Checks that `kubectl affinode status` shows each node as serving, with one simulated GPU and one
/// container.
fn every_node_serves(plane: &Plane<'_>) -> Result<()> {
    let (_, out, said) = run(plane, &["status", "-o", "json"])?;
    let status: Value = serde_json::from_str(&out).with_context(|| said)?;
    for node in plane.nodes() {
        let mut rows = status["nodes"].as_array().into_iter().flatten();
        let row = rows.find(|row| row["name"] == *node.name);
        let row = row.with_context(|| format!("{} is not in {status}", node.name))?;
        let figures = &row["figures"];
        let containers = ["resident", "offloaded"].map(|key| figures[key].as_u64().unwrap_or(0));
        ensure!(
            row["health"] == "Serving" && figures["gpus"] == 1 && figures["simulated"] == true,
            "expected a node that serves with one simulated GPU: {row}"
        );
        ensure!(containers.iter().sum::<u64>() == 1, "expected one container: {row}");
    }
    Ok(())
}

fn containers(list: &Value) -> impl Iterator<Item = &Value> {
    list["containers"].as_array().into_iter().flatten()
}

/// Checks that `kubectl affinode report` lists every pod with the pod's node, and with the GPU time
/// that the pod's offload has freed.
fn every_pod_is_reported(plane: &Plane<'_>) -> Result<()> {
    let report: Value = serde_json::from_str(&until(plane, &["report", "-A", "-o", "json"], 0)?)?;
    let pods = plane.get(&["pods", "-l", GPU_STATE])?;
    for pod in pods["items"].as_array().context("kubectl printed no list of pods")? {
        let name = &pod["metadata"]["name"];
        let mut rows = report["rows"].as_array().into_iter().flatten();
        let row = rows.find(|row| row["pod"] == *name);
        let row = row.with_context(|| format!("{name} is not in the report {report}"))?;
        ensure!(row["node"] == pod["spec"]["nodeName"], "{name} is on another node: {row}");
        let freed = row["returned_gpu_seconds"].as_f64().unwrap_or_default();
        ensure!(freed > 0.0, "{name} was offloaded, but the report shows nothing freed: {row}");
    }
    let (status, table, said) = run(plane, &["report", "-A", "--by", "node"])?;
    ensure!(status == 0, "expected exit status 0, got {status}: {said}");
    output::out(&table);
    Ok(())
}

/// Checks that the list of `kubectl affinode ps` has the pods of the cluster. Returns the name of
/// one pod.
fn every_pod_is_listed(plane: &Plane<'_>, list: &Value) -> Result<String> {
    let pods = plane.get(&["pods", "-l", GPU_STATE])?;
    let pods = pods["items"].as_array().context("a list of pods")?;
    for pod in pods {
        let name = &pod["metadata"]["name"];
        let found = containers(list).find(|container| container["pod"] == *name);
        let found = found.with_context(|| format!("{name} is not in {list}"))?;
        ensure!(found["node"] == pod["spec"]["nodeName"], "{name} is on another node: {found}");
    }
    let nodes = list["nodes"].as_array().map_or(0, Vec::len);
    ensure!(nodes == plane.nodes().len(), "{nodes} nodes: {list}");
    output::note(&format!("{} pods of {nodes} nodes are listed", pods.len()));
    let first = pods.first().context("the cluster has no GPU pod")?;
    Ok(first["metadata"]["name"].as_str().context("a pod has no name")?.to_owned())
}
