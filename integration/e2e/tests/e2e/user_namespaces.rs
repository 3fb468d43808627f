//! Tests of GPU pods with a user namespace (`hostUsers: false`).

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use affinode_e2e::{
    artifacts::Artifacts,
    cri::{self, Cri},
    release::Line,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    matrix,
    offload::{EAGER, wait_gpu_empty},
};

const WORKER_MIB: u64 = 64;
/// CNI plugin, as a shell script, that gives the pod no network connection.
const ALONE: &str = r#"#!/bin/sh
[ "$CNI_COMMAND" = ADD ] || exit 0
echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'"$CNI_NETNS"'"}],
  "ips":[{"address":"192.0.2.1/32","interface":0}]}'
"#;

#[test]
fn goes_when_idle_and_comes_back_when_called() -> Result<()> {
    if !Artifacts::find()?.own_users_runc_dir().join("runc").is_file() {
        let why = "no runc with user namespaces: `cargo xtask deps` builds it where Go is";
        affinode_test_notes::skip("go-runc", why);
        return Ok(());
    }
    let recipe = TestbedConfig::default().cri().config(EAGER).own_users();
    let Some(world) = matrix::world(Line::V2, recipe)? else { return Ok(()) };
    offload_and_wake(&world).inspect_err(|_| world.show_logs())
}

fn offload_and_wake(world: &Testbed) -> Result<()> {
    network(world)?;
    let cri = Cri::connect(&world.containerd().socket())?;
    for handler in ["runc", "affinode"] {
        assert!(cri.features(handler)?.user_namespaces, "{handler}");
    }
    let mut pod = cri::pod("own-users", &world.cgroup_parent(), world.dir());
    let (mut container, mut lines) = cri::gpu_container(world, "main", WORKER_MIB)?;
    cri::of_own_users(&mut pod, &mut container);
    let mut last = None;
    let pod_id = until("the network to be ready", || {
        let run = cri.run_pod(&pod, "affinode");
        Ok(run.map_err(|error| last = Some(error)).ok())
    })
    .with_context(|| format!("last output: {last:?}"))?;
    let id = cri.run_container(&pod_id, &container, &pod)?;

    let row = world.cli().wait_for_state(&id, "Offloaded")?;
    assert!(
        row.offloaded_bytes >= WORKER_MIB * MIB,
        "expected {WORKER_MIB} MiB offloaded: {row:?}"
    );
    wait_gpu_empty(world)?;
    // The process is root in the container, and an unprivileged user on the host.
    let pid = row.process()?.pid;
    assert_eq!(fs::metadata(format!("/proc/{pid}"))?.uid(), cri::OWN_USERS.host_id);
    let said = cri.exec(&id, &["/bin/sh", "-c", "id -u; cat /proc/self/maps"])?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.starts_with("0\n") && said.contains("affinode_preload"), "{said}");

    lines.send("verify")?;
    for command in ["open", "fill", "verify"] {
        let line = lines.receive()?;
        assert!(line.contains(&format!("\"command\":\"{command}\",\"result\":0")), "{line}");
    }
    world.cli().wait_for(&id, "to have one restore", |row| row.restores == 1)?;
    // The process can write its hints and read its pressure file, too.
    let hint = "echo busy > /.affinode/run/hint && cat /.affinode/run/pressure";
    let told = cri.exec(&id, &["/bin/sh", "-c", hint])?;
    assert_eq!(told.exit_code, 0, "{}", String::from_utf8_lossy(&told.stderr));
    cri.remove_container(&id)?;
    cri.remove_pod(&pod_id)
}

/// Installs a network plugin. Pods with a user namespace need it, because they also have a network
/// namespace.
fn network(world: &Testbed) -> Result<()> {
    let cni = world.dir().join("cni");
    let plugin = |name: &str| {
        let file = cni.join("bin").join(name);
        fs::write(&file, ALONE)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))
    };
    for folder in ["bin", "net.d"] {
        fs::create_dir_all(cni.join(folder))?;
    }
    // containerd also needs a plugin to activate the loopback interface.
    for name in ["alone", "loopback"] {
        plugin(name)?;
    }
    let network = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "alone"}]});
    let file: &Path = &cni.join("net.d/10-pods.conflist");
    Ok(fs::write(file, network.to_string())?)
}
