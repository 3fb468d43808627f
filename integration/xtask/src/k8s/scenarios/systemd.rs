//! Checks that node agents restart containerd through systemd, which is the default of the chart.
//! Each node has a fake `systemctl`, which sends each request of the node agent to this program.

use std::{
    fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command, thread, time::Duration,
};

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{NAMESPACE, RELEASE, agent_log, release, step, wait_state};
use crate::{
    k8s::{
        control_plane::Plane,
        node::{HOME, Node},
    },
    output,
};

/// Text in the reported state of a node that has not installed Affinode yet, because it waits until
/// the installations on other nodes are complete.
const TURN: &str = "waits for its turn";
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Installs Affinode on one node after the other, and uninstalls it. containerd must be restarted
/// exactly twice on each node.
pub fn restarts(plane: &Plane<'_>) -> Result<()> {
    step("helm install, one node at a time, with restarts of containerd through systemctl");
    plane.nodes().iter().try_for_each(systemctl)?;
    let paced = "--set=node.rollout.maxConcurrent=1";
    let set = ["install", RELEASE, "-n", NAMESPACE, paced];
    let through_systemd = options();
    let through_systemd: Vec<&str> = through_systemd.iter().map(String::as_str).collect();
    release::helm(plane, &[&set[..], &through_systemd].concat())?;
    restart_one_by_one(plane)?;
    for node in plane.nodes() {
        wait_state(plane, &node.name, |state| state == "served")?;
    }
    output::note("containerd was restarted once on each node, and serves the runtime");
    uninstall(plane)
}

/// Returns the helm options that make the node agents call the fake `systemctl`.
pub fn options() -> [String; 2] {
    let path = format!("{HOME}/tools:/usr/local/bin:/usr/bin:/bin");
    [
        "--set=node.restart=systemd".to_owned(),
        format!("--set-json=node.extraEnv={}", json!([{"name": "PATH", "value": path}])),
    ]
}

/// Uninstalls Affinode. containerd must be restarted once on each node.
pub fn uninstall(plane: &Plane<'_>) -> Result<()> {
    step("helm uninstall, with restarts of containerd through systemctl");
    let mut helm = plane.helm();
    helm.args(["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=240s"]);
    let uninstall = thread::spawn(move || run(helm));
    restart_each_once(plane, || Ok(uninstall.is_finished()))?;
    uninstall
        .join()
        .map_err(|_| anyhow::anyhow!("the thread that runs helm"))?
        .with_context(|| agent_log(plane))
}

fn run(mut command: Command) -> Result<()> {
    containerd::run(&mut command).map(|_| ())
}

fn signs(node: &Node<'_>) -> [PathBuf; 2] {
    ["asked", "done"].map(|name| node.world.dir().join("tools").join(name))
}

/// Writes the script that is used in place of `systemctl`. It sends a request to this program and
/// waits for the reply.
pub fn systemctl(node: &Node<'_>) -> Result<()> {
    let [asked, done] = signs(node);
    for left in [&asked, &done].into_iter().filter(|file| file.exists()) {
        fs::remove_file(left)?;
    }
    let tools = node.world.dir().join("tools");
    fs::create_dir_all(&tools)?;
    let script = format!(
        "#!/bin/sh\n[ \"$*\" = 'restart containerd' ] || exit 64\n\
         : > {asked}; while [ ! -e {done} ]; do sleep 0.1; done; rm {done}\n",
        asked = asked.display(),
        done = done.display(),
    );
    let file = tools.join("systemctl");
    fs::write(&file, script)?;
    Ok(fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?)
}

/// Executes one restart of containerd on each node, as the node agents request them. At each
/// request, all other nodes that still lack their restart must report that they wait. None of these
/// nodes may have requested a restart as well.
fn restart_one_by_one(plane: &Plane<'_>) -> Result<()> {
    let mut waiting: Vec<&Node<'_>> = plane.nodes().iter().collect();
    while !waiting.is_empty() {
        let asking = plane
            .until("an agent to call systemctl", || {
                Ok(waiting.iter().position(|node| signs(node)[0].exists()))
            })
            .with_context(|| agent_log(plane))?;
        let node = waiting.remove(asking);
        for other in &waiting {
            let state = wait_state(plane, &other.name, |state| state.contains(TURN))?;
            ensure!(
                !signs(other)[0].exists(),
                "containerd of {} and {} would be restarted at the same time",
                node.name,
                other.name
            );
            output::note(&format!("{} is installed; {} says: {state}", node.name, other.name));
        }
        restart(node)?;
        wait_state(plane, &node.name, |state| state == "served")?;
    }
    none_asks(plane)
}

/// Checks that no node agent is requesting a restart of containerd through `systemctl`.
pub fn none_asks(plane: &Plane<'_>) -> Result<()> {
    for node in plane.nodes() {
        ensure!(!signs(node)[0].exists(), "containerd of {} would be restarted again", node.name);
    }
    Ok(())
}

/// Executes the restart of containerd that a node's agent has requested.
fn restart(node: &Node<'_>) -> Result<()> {
    let [asked, done] = signs(node);
    node.restart_containerd()?;
    fs::remove_file(&asked)?;
    Ok(fs::write(&done, "")?)
}

/// Restarts containerd once on each node, as soon as the node's agent calls `systemctl`. Fails if
/// `over` returns true before all nodes had their restart.
pub fn restart_each_once(plane: &Plane<'_>, over: impl Fn() -> Result<bool>) -> Result<()> {
    let mut restarted = vec![false; plane.nodes().len()];
    while restarted.contains(&false) {
        ensure!(!over()?, "systemctl was not called on every node\n{}", agent_log(plane));
        for (node, restarted) in plane.nodes().iter().zip(&mut restarted) {
            if signs(node)[0].exists() {
                ensure!(!*restarted, "containerd of node {} was restarted twice", node.name);
                *restarted = true;
                restart(node)?;
            }
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
