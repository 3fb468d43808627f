//! What is shown, step by step; each fails when it is not seen.

mod agent;
mod fleet;
mod inject;
mod pods;
mod systemd;

use std::{fs, path::PathBuf};

use affinode_e2e::containerd;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    crds,
    plane::{NODE, Plane},
    release::{self, NAMESPACE, RELEASE},
};
use crate::say;

/// The label of a node that serves the runtime.
const LABEL: &str = "affinode.io/runtime";
/// The label of a pod that says where its GPU memory is.
const GPU_STATE: &str = "affinode.io/gpu-state";
/// And its condition.
const RESIDENT: &str = "affinode.io/GpuResident";
/// Where an agent says how its node stands.
const STATE: &str = "affinode.io/state";
/// VRAM of a pod that fits anywhere.
const SMALL_MIB: u32 = 32;
/// What there is of Affinode in a cluster after `helm uninstall`: nothing.
const KINDS: &str = "all,configmaps,serviceaccounts,roles,rolebindings,clusterroles,\
    clusterrolebindings,runtimeclasses,mutatingwebhookconfigurations,\
    mutatingadmissionpolicies,mutatingadmissionpolicybindings,secrets,\
    validatingadmissionpolicies,validatingadmissionpolicybindings,\
    poddisruptionbudgets,networkpolicies";
/// Everything that can be turned on, with the webhook in place of the policy, which is the default.
const ALL_ON: &str = "inject.by=webhook,fleet.enabled=true,fleet.replicas=2,fleet.tlsSecret=papers,\
    fleet.hosts={fleet.example},node.tlsSecret=papers,networkPolicy.enabled=true,\
    serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus,alertRules.enabled=true,\
    dashboards.enabled=true,serviceAccount.name=agents,image.tag=x";

/// All of it.
pub fn all(plane: &Plane<'_>) -> Result<()> {
    // As GPU feature discovery would.
    containerd::run(plane.kubectl().args(["label", "node", NODE, "nvidia.com/gpu.present=true"]))?;
    let before = Before::look(plane)?;
    chart_is_sound(plane)?;
    install(plane, &before)?;
    agent::changes_its_own_alone(plane)?;
    inject::by_policy(plane)?;
    let pod = pods::comes_and_goes(plane)?;
    agent::shows_metrics(plane)?;
    fleet::shows_nodes(plane)?;
    pods::who_waits_is_told(plane)?;
    pods::who_stays_is_told(plane)?;
    a_bad_policy_is_not_taken(plane)?;
    inject::by_webhook(plane)?;
    uninstall_waits_for_pods(plane)?;
    pod.delete()?;
    let ended = pods::ended_long_ago(plane)?;
    uninstall(plane)?;
    ended.says_nothing()?;
    nothing_is_left(plane, &before)?;
    systemd::restarts(plane)?;
    nothing_is_left(plane, &before)
}

fn step(text: &str) {
    say::step(text);
}

/// What the node was like before.
struct Before {
    config: Vec<u8>,
    labels: Vec<String>,
    annotations: Vec<String>,
}

impl Before {
    fn look(plane: &Plane<'_>) -> Result<Self> {
        let node = plane.get(&["node", NODE])?;
        Ok(Self {
            config: fs::read(config_file(plane))?,
            labels: keys(&node["metadata"]["labels"]),
            annotations: keys(&node["metadata"]["annotations"]),
        })
    }
}

fn config_file(plane: &Plane<'_>) -> PathBuf {
    plane.world().dir().join("containerd.toml")
}

fn keys(object: &Value) -> Vec<String> {
    object.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

/// Before anything is installed: helm's own look, the schema, and the API server's.
fn chart_is_sound(plane: &Plane<'_>) -> Result<()> {
    step("helm lint, values.schema.json, and a dry run by the API server");
    release::helm(plane, &["lint", "--strict"])?;
    for wrong in ["node.restart=sometimes", "node.port=0", "imagee.tag=x", "runtimeClass.name=A_b"]
    {
        let said = plane
            .helm()
            .args(["template", "x"])
            .arg(release::chart())
            .args(["--set", wrong])
            .output()?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(said.contains("schema"), "the schema takes {wrong}: {said}");
    }
    release::helm(
        plane,
        &["install", RELEASE, "-n", NAMESPACE, "--create-namespace", "--dry-run=server"],
    )?;
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    for definition in crds::all() {
        plane.apply(&definition)?;
    }
    let established = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
    containerd::run(plane.kubectl().args(established))?;
    let every = format!("--set={ALL_ON}");
    let taken = [is_taken(plane, &[])?, is_taken(plane, &[&every])?];
    let kinds = taken.concat();
    for kind in ["servicemonitor", "prometheusrule", "poddisruptionbudget", "networkpolicy"] {
        ensure!(kinds.iter().any(|object| object.starts_with(kind)), "no {kind}: {kinds:?}");
    }
    containerd::run(plane.kubectl().args(["delete", "crd", "--all"]))?;
    let [usual, all] = taken.map(|objects| objects.len());
    say::note(&format!("the API server takes {usual} objects, and {all} with all that can be on"));
    Ok(())
}

/// The objects of the chart that the API server would take as they are, by kind and name.
fn is_taken(plane: &Plane<'_>, set: &[&str]) -> Result<Vec<String>> {
    let served = ["ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"]
        .map(|kind| format!("--api-versions=admissionregistration.k8s.io/v1/{kind}"));
    let mut words = vec!["template", RELEASE, "-n", NAMESPACE];
    words.extend(served.iter().map(String::as_str));
    words.extend(set);
    let file = plane.world().dir().join("rendered.yaml");
    fs::write(&file, release::helm(plane, &words)?)?;
    let dry = ["apply", "--dry-run=server", "--validate=strict", "-o", "name", "-f"];
    let said = containerd::run(plane.kubectl().args(dry).arg(&file))?;
    Ok(said.lines().map(str::to_owned).collect())
}

/// An answer by HTTPS, over the pod network, with an account's token.
fn fetch(plane: &Plane<'_>, url: &str, token: Option<&str>) -> Result<(u16, String)> {
    let mut curl = plane.world().keeper().command("curl".as_ref());
    curl.args(["--silent", "--insecure", "--write-out", "\n%{http_code}", url]);
    if let Some(token) = token {
        curl.arg("--header").arg(format!("Authorization: Bearer {}", token.trim()));
    }
    let said = containerd::run(&mut curl)?;
    let (text, code) = said.rsplit_once('\n').context("curl")?;
    Ok((code.parse()?, text.to_owned()))
}

/// The label must not come before the runtime is served.
fn install(plane: &Plane<'_>, before: &Before) -> Result<()> {
    step("helm install");
    release::load_image(plane)?;
    // As if another installation had the node: two would undo each other's work.
    containerd::run(plane.kubectl().args(["annotate", "node", NODE, "affinode.io/agent=a/b"]))?;
    release::helm(plane, &["install", RELEASE, "-n", NAMESPACE])?;
    plane.until("the agent to leave the node to another", || {
        let log = ["-n", NAMESPACE, "logs", "daemonset/affinode-node"];
        let said = plane.kubectl().args(log).output()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        Ok(said.contains("a/b looks after this node").then_some(()))
    })?;
    ensure!(fs::read(config_file(plane))? == before.config, "it touched another's node");
    containerd::run(plane.kubectl().args(["annotate", "node", NODE, "affinode.io/agent-"]))?;
    say::note("a node that another installation looks after is left alone, until that is gone");
    let state = wait_state(plane, |state| state.starts_with("installed"))?;
    let node = plane.get(&["node", NODE])?;
    ensure!(node["metadata"]["labels"][LABEL].is_null(), "the label was there before the runtime");
    say::note(&format!("the node says: {state}; it has no label, and pods of the class wait"));
    let mut early = plane.gpu_pod("early", SMALL_MIB)?;
    early["spec"]["runtimeClassName"] = "affinode".into();
    plane.apply(&early)?;
    plane.until("a pod of the class to find no node", || {
        let pod = plane.get(&["pod", "early"])?;
        Ok((pod["status"]["conditions"][0]["reason"] == "Unschedulable").then_some(()))
    })?;
    containerd::run(plane.kubectl().args(["delete", "pod", "early"]))?;
    say::note("containerd is restarted");
    plane.world().containerd().stop(Signal::SIGTERM)?;
    plane.world().start_containerd()?;
    wait_state(plane, |state| state == "served")?;
    plane.until("the label", || {
        let node = plane.get(&["node", NODE])?;
        Ok((node["metadata"]["labels"][LABEL] == "true").then_some(()))
    })?;
    let ready = ["-n", NAMESPACE, "rollout", "status", "daemonset/affinode-node", "--timeout=120s"];
    containerd::run(plane.kubectl().args(ready))?;
    say::note(&format!("the node says: served; label {LABEL}=true"));
    Ok(())
}

/// A controller does not start with a configuration that it does not understand.
fn a_bad_policy_is_not_taken(plane: &Plane<'_>) -> Result<()> {
    step("helm upgrade --set policy.mode=sometimes");
    release::helm(plane, &["upgrade", RELEASE, "-n", NAMESPACE, "--set=policy.mode=sometimes"])?;
    let state = wait_state(plane, |state| state.starts_with("served, with another"))?;
    say::note(&format!("the node says: {state}"));
    Ok(())
}

fn wait_state(plane: &Plane<'_>, is_it: impl Fn(&str) -> bool) -> Result<String> {
    plane
        .until("the node's agent", || {
            let node = plane.get(&["node", NODE])?;
            let state = node["metadata"]["annotations"][STATE].as_str().unwrap_or_default();
            Ok(is_it(state).then(|| state.to_owned()))
        })
        .with_context(|| agent_log(plane))
}

fn agent_log(plane: &Plane<'_>) -> String {
    let log = ["-n", NAMESPACE, "logs", "daemonset/affinode-node", "--tail=30"];
    let describe = ["-n", NAMESPACE, "describe", "pods"];
    [&log[..], &describe[..]]
        .iter()
        .filter_map(|words| plane.kubectl().args(*words).output().ok())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .collect()
}

/// Nobody loses a shim: an uninstallation that would take it away changes nothing.
fn uninstall_waits_for_pods(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall, while a pod of the class runs");
    let words = ["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=120s"];
    let output = plane.helm().args(words).output()?;
    if output.status.success() {
        bail!("it was uninstalled below a running pod");
    }
    let logs = ["-n", NAMESPACE, "logs", "job/affinode-uninstall", "--tail=3"];
    let said = containerd::run(plane.kubectl().args(logs))?;
    ensure!(said.contains("end their containers first"), "{said}");
    say::note(said.trim().lines().last().unwrap_or_default());
    wait_state(plane, |state| state == "served")?;
    say::note("all of it is as it was: the node says: served");
    Ok(())
}

fn uninstall(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall");
    containerd::run(plane.helm().args(["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=180s"]))
        .map(|_| ())
        .with_context(|| agent_log(plane))
}

fn nothing_is_left(plane: &Plane<'_>, before: &Before) -> Result<()> {
    let node = plane.get(&["node", NODE])?;
    let after = &node["metadata"];
    let labels = keys(&after["labels"]);
    ensure!(labels == before.labels, "labels are left: {labels:?}");
    let annotations = keys(&after["annotations"]);
    let left: Vec<_> = annotations.iter().filter(|key| !before.annotations.contains(key)).collect();
    ensure!(left.is_empty(), "annotations are left: {left:?}");
    ensure!(fs::read(config_file(plane))? == before.config, "containerd's configuration differs");
    let world = plane.world().dir();
    for gone in [
        "prefix/bin/affinode",
        "prefix/lib/affinode",
        "affinode/conf.d",
        "state-affinode/install.json",
    ] {
        ensure!(!world.join(gone).exists(), "{gone} is left on the node");
    }
    plane.until("the controller to end", || {
        Ok(plane.world().controller()?.is_none().then_some(()))
    })?;
    plane.until("the agents' pods to go", || {
        let text = containerd::run(plane.kubectl().args([
            "get",
            KINDS,
            "-A",
            "-l",
            "app.kubernetes.io/instance=affinode",
            "-o",
            "name",
        ]))?;
        Ok(text.trim().is_empty().then_some(()))
    })?;
    say::note(
        "the cluster has no object of it, the node no label, annotation or file; \
               containerd's configuration is byte for byte as before",
    );
    Ok(())
}
