//! The chart's default: containerd is restarted by the agent, through systemd. This node has a
//! `systemctl` that asks us to restart it, as it would.

use std::{fs, os::unix::fs::PermissionsExt};

use affinode_e2e::containerd;
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;

use super::{NAMESPACE, RELEASE, agent_log, release, step, wait_state};
use crate::{k8s::plane::Plane, say};

/// Installs and uninstalls with two restarts that nobody else sees to.
pub fn restarts(plane: &Plane<'_>) -> Result<()> {
    step("helm install, with restarts of containerd through systemctl");
    let tools = plane.world().dir().join("tools");
    fs::create_dir_all(&tools)?;
    let (asked, done) = (tools.join("asked"), tools.join("done"));
    let script = format!(
        "#!/bin/sh\n[ \"$*\" = 'restart containerd' ] || exit 64\n\
         : > {asked}; while [ ! -e {done} ]; do sleep 0.1; done; rm {done}\n",
        asked = asked.display(),
        done = done.display(),
    );
    let systemctl = tools.join("systemctl");
    fs::write(&systemctl, script)?;
    fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755))?;
    let restart = || -> Result<()> {
        plane
            .until("systemctl to be asked", || Ok(asked.exists().then_some(())))
            .with_context(|| agent_log(plane))?;
        plane.world().containerd().stop(Signal::SIGTERM)?;
        plane.world().start_containerd()?;
        fs::remove_file(&asked)?;
        Ok(fs::write(&done, "")?)
    };
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin", tools.display());
    let environment = json!([{"name": "PATH", "value": path}]);
    let environment = format!("--set-json=node.extraEnv={environment}");
    let set = ["install", RELEASE, "-n", NAMESPACE, "--set=node.restart=systemd", &environment];
    release::helm(plane, &set)?;
    restart()?;
    wait_state(plane, |state| state == "served")?;
    say::note("containerd was restarted once, and serves the runtime");
    step("helm uninstall, likewise");
    let mut helm = plane.helm();
    helm.args(["uninstall", RELEASE, "-n", NAMESPACE, "--timeout=240s"]);
    let uninstall = std::thread::spawn(move || containerd::run(&mut helm));
    restart()?;
    let ended = uninstall.join().map_err(|_| anyhow::anyhow!("the thread that runs helm"))?;
    ended.map(|_| ()).with_context(|| agent_log(plane))
}
