//! Tests of `affinode install` on nodes of k3s and rke2. Both write containerd's configuration
//! again at each start, so the installer adds the handler to the source of that configuration.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use affinode_e2e::{
    containerd,
    cri::{self, Cri},
    image,
    installed::{Installation, another_build},
    processes::Process,
    release::Line,
    testbed::{Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Context, Result, ensure};

use crate::{
    matrix::{self, on_every_containerd},
    offload::{EAGER, wait_gpu_empty},
};

on_every_containerd!(
    TestbedConfig::default().rancher(true).config(EAGER);
    the_handler_outlives_every_new_configuration,
    offloaded_container_survives_upgrade,
);

const HANDLER: &str = "test-idle";
const NEWER: &str = "config-v3.toml.tmpl";
const THEIRS: &str = "# theirs\n{{ template \"base\" . }}\n";

/// Installs on a node whose containerd configuration imports no folder. The handler must be added
/// to the template of k3s or rke2. Newer versions of k3s and rke2 import a folder, but only with
/// containerd 2.
#[test]
fn template_gets_handler_without_imports() -> Result<()> {
    let Some(world) = matrix::world(Line::V2, TestbedConfig::default().rancher(false))? else {
        return Ok(());
    };
    the_handler_outlives_every_new_configuration(&world)?;
    // The template for the other configuration version is not changed.
    fs::write(world.containerd().config_file().with_file_name(NEWER), THEIRS)?;
    world.restart_containerd()?;
    the_handler_outlives_every_new_configuration(&world)
}

/// Installs on a node whose template is for containerd before 2.0. From such a template, k3s and
/// rke2 generate a configuration in the old form, which imports another folder. So the handler must
/// be added to the template.
#[test]
fn old_template_gets_the_handler() -> Result<()> {
    let Some(world) = matrix::world(Line::V2, TestbedConfig::default().rancher(true))? else {
        return Ok(());
    };
    fs::write(world.containerd().config_file().with_file_name("config.toml.tmpl"), THEIRS)?;
    world.restart_containerd()?;
    the_handler_outlives_every_new_configuration(&world)?;
    let place = Installation::new(&world, &world.prefix(), HANDLER)?;
    let said = place.done("install", &["--dry-run"])?;
    // containerd 2 runs the shim's `-info` only with this setting.
    ensure!(
        said.contains("config.toml.tmpl") && said.contains("runtime_path"),
        "expected `config.toml.tmpl` and `runtime_path` in: {said}"
    );
    Ok(())
}

/// Installs on a node whose containerd configuration does not import the folder with the handler.
/// The installer must report this and keep the folder. Neither an older k3s nor a user's complete
/// template imports the folder.
#[test]
fn unimported_folder_is_reported_and_kept() -> Result<()> {
    let Some(world) = matrix::world(Line::V2, TestbedConfig::default().rancher(true))? else {
        return Ok(());
    };
    let place = Installation::new(&world, &world.prefix(), HANDLER)?;
    let config = world.containerd().config_file();
    let (said, _) = place.restarted(|| place.done("install", &[]))?;
    ensure!(
        said.contains("config-v3.toml.d/affinode.toml"),
        "expected `config-v3.toml.d/affinode.toml` in: {said}"
    );
    let text = fs::read_to_string(&config)?;
    let import = text
        .lines()
        .find(|line| line.starts_with("imports"))
        .context("the configuration has no import")?;
    fs::write(config.with_file_name(NEWER), text.replace(import, ""))?;
    world.restart_containerd()?;
    let said = place.run("status", &[])?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure!(
        said.contains("does not read this file"),
        "expected `does not read this file` in: {said}"
    );
    let (said, restarts) = place.restarted(|| place.done("install", &[]))?;
    ensure!(said.contains(NEWER) && restarts == 1, "{restarts} restarts: {said}");
    let said = place.done("status", &[])?;
    ensure!(said.contains("served by containerd"), "expected `served by containerd` in: {said}");
    place.restarted(|| place.done("uninstall", &[]))?;
    ensure!(fs::read_to_string(config.with_file_name(NEWER))? == text.replace(import, ""));
    ensure!(!config.with_file_name("config-v3.toml.d").exists(), "a folder is left");
    Ok(())
}

fn the_handler_outlives_every_new_configuration(world: &Testbed) -> Result<()> {
    let place = Installation::new(world, &world.prefix(), HANDLER)?;
    let config = world.containerd().config_file();
    let folder = config.parent().unwrap_or(Path::new("/"));
    let before = files(folder)?;
    let plan = place.done("install", &["--dry-run"])?;
    ensure!(
        plan.contains("config-v3.toml.d/affinode.toml") || plan.contains(".tmpl"),
        "expected `config-v3.toml.d/affinode.toml` or `.tmpl` in: {plan}"
    );
    // k3s and rke2 detect NVIDIA's runtime themselves. Affinode's handler is a copy of that
    // runtime's handler.
    ensure!(
        plan.contains("nvidia-container-runtime"),
        "expected `nvidia-container-runtime` in: {plan}"
    );
    ensure!(files(folder)? == before, "the dry run has changed the node");
    let (_, restarts) = place.restarted(|| place.done("install", &[]))?;
    ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
    let said = place.done("install", &[])?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("installed", &world.cgroup_parent(), world.dir());
    let forever = ["/bin/sleep", "infinity"].map(str::to_owned);
    let sleeper = cri::container("sleeper", image::PLAIN, &forever);
    for handler in ["runc", HANDLER] {
        let id = cri.run_pod(&pod, handler)?;
        let container = cri.run_container(&id, &sleeper, &pod)?;
        // The restart imitates another program that restarts k3s or rke2.
        world.restart_containerd()?;
        let cri = Cri::connect(&world.containerd().socket())?;
        ensure!(cri.exec(&container, &["/bin/echo", "still"])?.stdout == b"still\n");
        cri.remove_pod(&id)?;
    }
    // The command must find the containerd of k3s or rke2, even if other containerd processes run.
    let mut status = Command::new(world.artifacts().bin("affinode")?);
    status.args(["status", "--state-dir"]).arg(place.state("")).arg("--prefix").arg(world.prefix());
    let said = containerd::run(status.env_remove("CONTAINERD_ADDRESS"))?;
    ensure!(said.contains("served by containerd"), "expected `served by containerd` in: {said}");
    let (_, restarts) = place.restarted(|| place.done("uninstall", &[]))?;
    ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
    ensure!(
        files(folder)? == before,
        "the uninstallation did not restore the folder of the configuration: {:?}",
        fs::read_dir(folder)?
    );
    Ok(())
}

fn offloaded_container_survives_upgrade(world: &Testbed) -> Result<()> {
    let place = Installation::new(world, &world.prefix(), HANDLER)?;
    place.restarted(|| place.done("install", &[]))?;
    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("offloaded", &world.cgroup_parent(), world.dir());
    let pod_id = cri.run_pod(&pod, HANDLER)?;
    let (config, mut lines) = cri::gpu_container(world, "worker", 32)?;
    let id = cri.run_container(&pod_id, &config, &pod)?;
    world.cli().wait_for_state(&id, "Offloaded")?;
    wait_gpu_empty(world)?;
    world.restart_containerd()?;
    let newer = world.dir().join("newer");
    fs::create_dir(&newer)?;
    another_build(world.artifacts(), &newer)?;
    let from = newer.display().to_string();
    let (_, restarts) = place.restarted(|| place.done("install", &["--from", &from]))?;
    ensure!(restarts == 0, "the upgrade requested {restarts} restarts");
    until("a controller of the new build", || {
        let controller = world.controller()?;
        let exe = |process: Process| fs::read_link(format!("/proc/{}/exe", process.pid)).ok();
        Ok((controller.and_then(exe) == Some(place.shim())).then_some(()))
    })?;
    world.cli().wait_for_state(&id, "Offloaded")?;
    lines.send("verify")?;
    for command in ["open", "fill", "verify"] {
        let line = lines.receive()?;
        ensure!(
            line.contains(&format!("\"command\":\"{command}\",\"result\":0")),
            "expected success of {command}, got {line}"
        );
    }
    let cri = Cri::connect(&world.containerd().socket())?;
    cri.remove_pod(&pod_id)?;
    place.restarted(|| place.done("uninstall", &["--drain", "1m"]))?;
    ensure!(!place.shim().exists(), "the shim is left");
    Ok(())
}

fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut seen = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let content = if path.is_file() { fs::read(&path)? } else { Vec::new() };
        seen.insert(path.display().to_string(), content);
    }
    Ok(seen)
}
