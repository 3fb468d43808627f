//! Checks of the chart's default, with which the agent restarts containerd through systemd. Each
//! node has a `systemctl` that sends the request to this program.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use affinode_e2e::containerd;
use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{NAMESPACE, RELEASE, agent_log, release, step, wait_state};
use crate::{
    k8s::{
        control_plane::{Plane, START_TIMEOUT},
        node::{HOME, Node},
    },
    output,
};

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Installs and uninstalls, with exactly two restarts on each node.
pub fn restarts(plane: &Plane<'_>) -> Result<()> {
    step("helm install, with restarts of containerd through systemctl");
    plane.nodes().iter().try_for_each(systemctl)?;
    let path = format!("{HOME}/tools:/usr/local/bin:/usr/bin:/bin");
    let environment =
        format!("--set-json=node.extraEnv={}", json!([{"name": "PATH", "value": path}]));
    let set = ["install", RELEASE, "-n", NAMESPACE, "--set=node.restart=systemd", &environment];
    release::helm(plane, &set)?;
    let deadline = Instant::now() + START_TIMEOUT;
    restart_each_once(plane, || Ok(Instant::now() > deadline))?;
    for node in plane.nodes() {
        wait_state(plane, &node.name, |state| state == "served")?;
    }
    output::note("containerd was restarted once on each node, and serves the runtime");
    step("helm uninstall, likewise");
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

/// Writes the script in place of `systemctl`. It sends a request and waits for the reply.
fn systemctl(node: &Node<'_>) -> Result<()> {
    let [asked, done] = signs(node);
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

/// Executes one restart of containerd for each node, as soon as the node's agent requests it.
/// Returns when all nodes were restarted.
fn restart_each_once(plane: &Plane<'_>, over: impl Fn() -> Result<bool>) -> Result<()> {
    let mut restarted = vec![false; plane.nodes().len()];
    while restarted.contains(&false) {
        ensure!(!over()?, "systemctl was not called on every node\n{}", agent_log(plane));
        for (node, restarted) in plane.nodes().iter().zip(&mut restarted) {
            let [asked, done] = signs(node);
            if asked.exists() {
                ensure!(!*restarted, "containerd of node {} was restarted twice", node.name);
                *restarted = true;
                node.restart_containerd()?;
                fs::remove_file(&asked)?;
                fs::write(&done, "")?;
            }
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
