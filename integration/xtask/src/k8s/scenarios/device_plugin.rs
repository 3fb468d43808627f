//! Checks of the device plugin, by which each pod gets a seat (a right to use a GPU).

mod full;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::{
    agent_log, dra,
    pods::{self, Pod},
    sharing, step, uninstall,
};
use crate::{
    k8s::{control_plane::Plane, node::Node},
    output,
};

/// Name of the resource by which a pod requests a seat.
const RESOURCE: &str = "affinode.io/gpu";
/// Number of seats of each GPU. Only one of the three pods fits on the GPU at a time. The contents
/// of the other two are in host memory, and a machine that runs this check has enough of it.
const SEATS: usize = 3;
/// VRAM in MiB that the program of a pod fills. Two programs do not fit on the GPU of 1,024 MiB.
const FILLED_MIB: u32 = 580;
/// Folder on a node that contains the sockets of the kubelet and of device plugins, and the
/// kubelet's record of the devices that pods have.
const SOCKETS: &str = "/var/lib/kubelet/device-plugins";
const ENDPOINT: &str = "gpu.affinode.io.sock";

/// Installs Affinode with the device plugin, and runs three pods on one GPU. Each pod must get a
/// seat and keep it when the kubelet or the node agent restarts. A fourth pod must wait until a
/// seat is free.
pub fn pods_take_seats(plane: &Plane<'_>) -> Result<()> {
    step("helm install --set devicePlugin.enabled=true");
    dra::install_sharing(plane, &format!("devicePlugin.enabled=true,devicePlugin.seats={SEATS}"))?;
    for node in plane.nodes() {
        offers_seats(plane, node, None)?;
    }
    let node = plane.first();
    sharing::second_plugin_is_told(plane, node)?;
    let mut seated = all_seats(plane, node)?;
    let waiting = one_finds_no_seat(plane, node)?;
    dra::take_turns(node, &mut seated)?;
    kubelet_restarts(plane, node, &mut seated)?;
    agent_is_killed(plane, node, &mut seated)?;
    // An allocation fails if a pod that is not idle has the VRAM.
    seated.iter().try_for_each(|pod| pod.is_offloaded())?;
    let first = seated.remove(0);
    seated.push(seat_is_given_back(plane, node, first, &waiting)?);
    seated.into_iter().try_for_each(Pod::delete)?;
    full::full_gpu_takes_no_pod(plane, node)?;
    uninstall::all(plane)?;
    nothing_is_left(plane)
}

fn endpoint(node: &Node<'_>) -> PathBuf {
    node.path(&format!("{SOCKETS}/{ENDPOINT}"))
}

/// Returns the inode number and the modification time of a socket's file, which change when the
/// socket is replaced. Returns `None` if the file does not exist.
fn identity(path: &Path) -> Option<(u64, i64, i64)> {
    let data = fs::symlink_metadata(path).ok()?;
    Some((data.ino(), data.mtime(), data.mtime_nsec()))
}

/// Returns the number of seats of the node that pods can have, as the kubelet reports it.
fn allocatable(plane: &Plane<'_>, node: &Node<'_>) -> Result<String> {
    let object = plane.get(&["node", &node.name])?;
    Ok(object["status"]["allocatable"][RESOURCE].as_str().unwrap_or("0").to_owned())
}

/// Waits until the node offers its seats. `earlier` identifies an earlier socket of the plugin. If
/// it is given, the wait continues until the plugin has replaced this socket.
fn offers_seats(
    plane: &Plane<'_>,
    node: &Node<'_>,
    earlier: Option<(u64, i64, i64)>,
) -> Result<()> {
    let offered = plane.until(&format!("the seats of {}", node.name), || {
        let now = identity(&endpoint(node));
        let count = allocatable(plane, node)? == SEATS.to_string();
        Ok((count && now.is_some() && now != earlier).then_some(()))
    });
    offered.with_context(|| agent_log(plane))?;
    output::note(&format!("{}: {SEATS} {RESOURCE} of one GPU", node.name));
    Ok(())
}

/// Returns the manifest of a pod that requests a seat and names no runtime class.
fn seated(node: &Node<'_>, name: &str) -> Result<Value> {
    let mut pod = node.gpu_pod(name, FILLED_MIB)?;
    pod["metadata"]["annotations"]["affinode.io/keep-alive"] = "fixed".into();
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {RESOURCE: "1"}});
    Ok(pod)
}

/// Returns the seats that are assigned to pods in the kubelet's record. The kubelet reads this
/// record when it starts.
fn recorded(node: &Node<'_>) -> Result<BTreeSet<String>> {
    let file = node.path(&format!("{SOCKETS}/kubelet_internal_checkpoint"));
    let record: Value = serde_json::from_slice(&fs::read(file)?)?;
    let entries = record["Data"]["PodDeviceEntries"].as_array().cloned().unwrap_or_default();
    let ours = entries.iter().filter(|entry| entry["ResourceName"] == RESOURCE);
    let by_numa_node = ours.filter_map(|entry| entry["DeviceIDs"].as_object());
    let ids = by_numa_node.flat_map(|ids| ids.values()).filter_map(Value::as_array).flatten();
    Ok(ids.filter_map(Value::as_str).map(str::to_owned).collect())
}

fn all_seats<'a>(plane: &'a Plane<'a>, node: &'a Node<'a>) -> Result<Vec<Pod<'a>>> {
    step(&format!("As many pods on one GPU of {} as it has seats", node.name));
    let mut pods = Vec::new();
    for number in 1..=SEATS {
        let name = format!("seat-{number}");
        let mut pod = Pod::start(plane, node, &name, &seated(node, &name)?)?;
        pod.is_moved_out().with_context(|| pods::describe(plane, &name))?;
        pods.push(pod);
    }
    let seats = recorded(node)?;
    ensure!(seats.len() == SEATS, "expected {SEATS} seats in the kubelet's record: {seats:?}");
    output::note(&format!("all run, each with one of {seats:?}"));
    Ok(pods)
}

fn one_finds_no_seat<'a>(plane: &'a Plane<'a>, node: &'a Node<'a>) -> Result<Value> {
    let pod = seated(node, "seat-more")?;
    plane.apply(&pod)?;
    let why = finds_no_seat(plane, "seat-more")?;
    output::note(&format!("one more waits: {why}"));
    Ok(pod)
}

/// Waits until the scheduler finds no seat for a pod, and returns the scheduler's reason.
fn finds_no_seat(plane: &Plane<'_>, name: &str) -> Result<String> {
    let why = plane.until(&format!("{name} to find no seat"), || {
        let pod = plane.get(&["pod", name])?;
        let condition = &pod["status"]["conditions"][0];
        let waits = condition["reason"] == "Unschedulable";
        Ok(waits.then(|| condition["message"].as_str().unwrap_or_default().to_owned()))
    })?;
    ensure!(why.contains(&format!("Insufficient {RESOURCE}")), "another reason: {why}");
    Ok(why)
}

/// Restarts the kubelet, and checks that pods keep their seats. A kubelet removes the sockets of
/// all plugins when it starts, so the plugin must register again.
fn kubelet_restarts(plane: &Plane<'_>, node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step("The kubelet is killed and starts again");
    let (before, socket) = (recorded(node)?, identity(&endpoint(node)));
    node.restart_kubelet(plane)?;
    offers_seats(plane, node, socket)?;
    pods.iter().try_for_each(Pod::accepts_commands)?;
    pods.iter_mut().try_for_each(Pod::comes_back)?;
    still_full(plane, node, &before)?;
    output::note("the plugin registered again, the pods go on with their seats");
    Ok(())
}

fn agent_is_killed(plane: &Plane<'_>, node: &Node<'_>, pods: &mut [Pod<'_>]) -> Result<()> {
    step("The node agent is killed");
    let (before, socket) = (recorded(node)?, identity(&endpoint(node)));
    let agents = node.world.processes("affinode-cluster node")?;
    kill(agents.first().context("no agent runs on the node")?.pid, Signal::SIGKILL)?;
    offers_seats(plane, node, socket)?;
    pods.iter_mut().try_for_each(Pod::comes_back)?;
    still_full(plane, node, &before)?;
    output::note("a new agent offers the seats, the pods go on with theirs");
    Ok(())
}

/// Checks that pods have the same seats as before, and that one more pod gets no seat.
fn still_full(plane: &Plane<'_>, node: &Node<'_>, before: &BTreeSet<String>) -> Result<()> {
    let now = recorded(node)?;
    ensure!(now == *before, "the seats of pods changed from {before:?} to {now:?}");
    let more = plane.get(&["pod", "seat-more"])?;
    ensure!(more["status"]["phase"] == "Pending", "a pod without a seat runs: {more}");
    Ok(())
}

fn seat_is_given_back<'a>(
    plane: &'a Plane<'a>,
    node: &'a Node<'a>,
    pod: Pod<'a>,
    waiting: &Value,
) -> Result<Pod<'a>> {
    step("A pod is deleted, and the waiting one gets its seat");
    pod.delete()?;
    let mut next = Pod::start(plane, node, "seat-more", waiting)?;
    next.is_moved_out().with_context(|| pods::describe(plane, "seat-more"))?;
    next.comes_back()?;
    Ok(next)
}

/// Checks that after `helm uninstall` no node offers a seat, and no socket of the plugin is left.
fn nothing_is_left(plane: &Plane<'_>) -> Result<()> {
    for node in plane.nodes() {
        let socket = endpoint(node);
        plane
            .until("the plugin's socket to be removed", || Ok((!socket.exists()).then_some(())))?;
        plane.until("the node to offer no seats", || {
            Ok((allocatable(plane, node)? == "0").then_some(()))
        })?;
        fs::remove_file(node.path("/etc/cdi/nvidia.json"))?;
    }
    let pods = containerd::run(plane.kubectl().args(["get", "pods", "-o", "name"]))?;
    ensure!(pods.trim().is_empty(), "pods are left: {pods}");
    output::note("no socket and no seat of the plugin is left");
    Ok(())
}
