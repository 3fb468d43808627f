//! The checks on a test cluster, in order. Each check fails if its expected result is not observed.

mod agent;
mod autoscale;
mod chart;
mod device_plugin;
mod dra;
mod inject;
mod install;
mod nodes;
mod persona;
mod plugin;
mod pods;
mod sharing;
mod systemd;
mod uninstall;

use affinode_e2e::containerd;
use anyhow::{Context, Result};

use super::{
    Part,
    control_plane::{NODE, Plane},
    node::Node,
    release::{self, NAMESPACE, RELEASE},
};
use crate::output;

/// Label of a node on which Affinode's runtime is available.
const LABEL: &str = "affinode.io/runtime";
/// Label of a pod that shows whether its GPU memory is resident or offloaded.
const GPU_STATE: &str = "affinode.io/gpu-state";
/// Condition of a pod that is true if its GPU memory is resident.
const RESIDENT: &str = "affinode.io/GpuResident";
/// Annotation of a node in which the node agent reports the node's state.
const STATE: &str = "affinode.io/state";
/// VRAM in MiB of a small pod, which fits on any node.
const SMALL_MIB: u32 = 32;

/// Runs the checks of one part, or of all parts. They run on the first node unless a check names
/// another.
pub fn run(plane: &Plane<'_>, only: Option<Part>) -> Result<()> {
    for node in plane.nodes() {
        // The label is set as GPU feature discovery would set it.
        let label = ["label", "node", &node.name, "nvidia.com/gpu.present=true"];
        containerd::run(plane.kubectl().args(label))?;
    }
    let before = uninstall::Before::look(plane)?;
    let runs = |part| only.is_none_or(|only| only == part);
    if runs(Part::Chart) {
        of_the_chart(plane, &before)?;
    }
    if runs(Part::Dra) {
        dra::pods_share_a_gpu(plane)?;
        uninstall::left_nothing(plane, &before)?;
    }
    if runs(Part::Autoscale) {
        autoscale::waits_scale_a_deployment(plane)?;
        uninstall::left_nothing(plane, &before)?;
    }
    if runs(Part::DevicePlugin) {
        device_plugin::pods_take_seats(plane)?;
        uninstall::left_nothing(plane, &before)?;
    }
    Ok(())
}

fn of_the_chart(plane: &Plane<'_>, before: &uninstall::Before) -> Result<()> {
    chart::is_sound(plane)?;
    install::all_but_the_broken(plane)?;
    agent::changes_its_own_alone(plane)?;
    sharing::time_slicing_is_told(plane)?;
    inject::by_policy(plane)?;
    let pod = pods::comes_and_goes(plane, plane.first(), "trainer")?;
    agent::shows_metrics(plane)?;
    install::the_broken(plane)?;
    sharing::nvidia_plugin::is_told(plane)?;
    let mut pods = vec![pod];
    pods.extend(nodes::others_serve(plane)?);
    plugin::shows_and_moves(plane)?;
    pods::waiting_pod_is_reported(plane)?;
    pods::staying_pod_is_reported(plane)?;
    install::a_bad_policy_is_not_taken(plane)?;
    inject::by_webhook(plane)?;
    nodes::upgrade(plane, &mut pods)?;
    nodes::an_agent_ends(plane, &mut pods)?;
    let first = pods.swap_remove(0);
    pods.into_iter().try_for_each(pods::Pod::delete)?;
    uninstall::waits_for_pods(plane)?;
    uninstall::one(plane)?;
    first.delete()?;
    let ended = pods::ended_long_ago(plane)?;
    uninstall::all(plane)?;
    ended.says_nothing()?;
    uninstall::left_nothing(plane, before)?;
    systemd::restarts(plane)?;
    uninstall::left_nothing(plane, before)?;
    persona::platform_engineer(plane)?;
    uninstall::left_nothing(plane, before)
}

fn step(text: &str) {
    output::step(text);
}

/// Sends an HTTPS request over the pod network. The token of an account is sent if one is given.
fn fetch(plane: &Plane<'_>, url: &str, token: Option<&str>) -> Result<(u16, String)> {
    let mut curl = plane.world().keeper().command("curl".as_ref());
    curl.args(["--silent", "--insecure", "--write-out", "\n%{http_code}", url]);
    if let Some(token) = token {
        curl.arg("--header").arg(format!("Authorization: Bearer {}", token.trim()));
    }
    let said = containerd::run(&mut curl)?;
    let (text, code) =
        said.rsplit_once('\n').context("cannot find the status in the output of curl")?;
    Ok((code.parse()?, text.to_owned()))
}

fn wait_state(plane: &Plane<'_>, node: &str, is_it: impl Fn(&str) -> bool) -> Result<String> {
    let mut last = String::new();
    plane
        .until(&format!("the agent of {node}"), || {
            let node = plane.get(&["node", node])?;
            let state = node["metadata"]["annotations"][STATE].as_str().unwrap_or_default();
            state.clone_into(&mut last);
            Ok(is_it(state).then(|| state.to_owned()))
        })
        .with_context(|| format!("the output of the last attempt: {last}\n{}", agent_log(plane)))
}

/// Whether the node has the label `LABEL`, which means that Affinode's runtime is available on the
/// node.
fn is_labelled(plane: &Plane<'_>, node: &str) -> Result<bool> {
    Ok(plane.get(&["node", node])?["metadata"]["labels"][LABEL] == "true")
}

/// Returns the pod of the node agent that runs on a node.
fn agent_pod(plane: &Plane<'_>, node: &Node<'_>) -> Result<serde_json::Value> {
    let there = format!("spec.nodeName={}", node.name);
    let agents = ["pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=node"];
    plane.until("an agent", || {
        let found = plane.get(&[&agents[..], &["--field-selector", &there]].concat())?;
        let pods = found["items"].as_array().cloned().unwrap_or_default();
        // Two pods exist while one replaces the other.
        Ok(pods.into_iter().find(|pod| pod["metadata"]["deletionTimestamp"].is_null()))
    })
}

fn agent_log(plane: &Plane<'_>) -> String {
    let agents = ["-l", "app.kubernetes.io/component=node", "--prefix", "--tail=30"];
    let log = [&["-n", NAMESPACE, "logs"], &agents[..]].concat();
    let describe = ["-n", NAMESPACE, "describe", "pods"];
    [&log[..], &describe[..]]
        .iter()
        .filter_map(|words| plane.kubectl().args(*words).output().ok())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .collect()
}

/// Waits until the pods of all node agents match the chart that was installed last.
fn rolled_out(plane: &Plane<'_>) -> Result<()> {
    let ready = ["-n", NAMESPACE, "rollout", "status", "daemonset/affinode-node", "--timeout=240s"];
    containerd::run(plane.kubectl().args(ready)).map(|_| ()).with_context(|| agent_log(plane))
}
