//! Tests of `affinode install` and `uninstall` with each release of containerd. After the
//! installation, pods can use the handler. After the uninstallation, all files are as before.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use affinode_e2e::{
    cri::{self, Cri},
    installed::{self, Installation},
    release::Line,
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result, ensure};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::Signal,
};

use crate::{
    matrix::{self, on_every_containerd},
    offload::MANUAL,
};

on_every_containerd!(
    TestbedConfig::default().cri();
    install_serve_uninstall_restores_node,
);

const HANDLER: &str = "test-idle";

fn place(world: &Testbed) -> Result<Installation<'_>> {
    Installation::new(world, &world.dir().join("installed"), HANDLER)
}

fn install_serve_uninstall_restores_node(world: &Testbed) -> Result<()> {
    let place = place(world)?;
    let original = fs::read(place.config())?;
    let unchanged = || Ok::<_, anyhow::Error>(fs::read(place.config())? == original);
    let shim = place.shim();

    let said = place.done("install", &["--dry-run"])?;
    ensure!(
        said.contains("runtimes.\"test-idle\"]") && said.contains("systemctl"),
        "expected `runtimes.\"test-idle\"]` and `systemctl` in: {said}"
    );
    ensure!(unchanged()? && !shim.exists(), "the dry run has changed the node");

    let (_, restarts) = place.restarted(|| place.done("install", &[]))?;
    ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
    ensure!(shim.is_file() && place.file("lib/affinode/libaffinode_preload.so").is_file());
    let installed = fs::read(place.handler_file())?;
    let own = place.handler_file() != place.config();
    ensure!(if own { unchanged()? } else { installed.starts_with(&original) && !unchanged()? });
    let said = place.done("install", &["--restart-mode", "none"])?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    ensure!(fs::read(place.handler_file())? == installed);

    let said = place.done("status", &[])?;
    ensure!(
        said.contains("served by containerd") && !said.contains("since"),
        "expected `served by containerd` and no change: {said}"
    );

    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("installed", &world.cgroup_parent(), world.dir());
    let id = cri.run_pod(&pod, HANDLER)?;
    cri.remove_pod(&id)?;
    // The pod's shim ends a moment later. Until then, no uninstallation is possible.
    until("the pod's shim to end", || {
        let said = place.run("uninstall", &["--dry-run"])?;
        Ok(said.status.success().then_some(()))
    })?;

    let said = place.done("uninstall", &["--dry-run"])?;
    ensure!(
        said.contains("restore") && shim.exists(),
        "a dry run must print the restore and keep the shim: {said}"
    );
    place.restarted(|| place.done("uninstall", &[]))?;
    ensure!(unchanged()?, "the uninstallation did not restore the configuration");
    ensure!(
        !own || !place.handler_file().exists(),
        "the uninstallation did not remove the file of the handler"
    );
    let left = [place.file(""), place.state("")].into_iter().filter(|folder| folder.exists());
    ensure!(left.count() == 0, "the uninstallation did not remove its folders");
    let said = place.refused("uninstall", &[])?;
    ensure!(
        said.contains("no record of an installation"),
        "expected `no record of an installation` in: {said}"
    );
    let said = place.refused("status", &[])?;
    ensure!(said.contains("nothing is installed"), "expected `nothing is installed` in: {said}");
    Ok(())
}

/// Checks that the installer also adds the handler to a file that overrides containerd's main file.
/// NVIDIA's toolkit writes such a file. With containerd 1.x, this file replaces the whole section
/// of the main file.
#[test]
fn overriding_file_gets_the_handler() -> Result<()> {
    for line in [Line::V1_6, Line::V1_7] {
        let Some(world) = matrix::world(line, TestbedConfig::default().node())? else { continue };
        let place = Installation::new(&world, &world.prefix(), HANDLER)?;
        let folder = world.dir().join("conf.d");
        let covering = folder.join("99-nvidia.toml");
        let text = fs::read_to_string(place.config())?;
        let section = text
            .find("[plugins.\"io.containerd.grpc.v1.cri\"]")
            .context("the file has no section of the CRI plugin")?;
        fs::write(&covering, format!("version = 2\n{}", &text[section..]))?;
        let import = format!("version = 2\nimports = [\"{}/*.toml\"]\n", folder.display());
        fs::write(place.config(), text.replacen("version = 2\n", &import, 1))?;
        let before = (fs::read(place.config())?, fs::read(&covering)?);
        let restart = || {
            world.containerd().stop(Signal::SIGTERM)?;
            world.start_containerd()
        };
        restart()?;
        let (said, _) = place.restarted(|| place.done("install", &[]))?;
        ensure!(
            said.contains("99-nvidia.toml") && said.contains("containerd.toml"),
            "expected `99-nvidia.toml` and `containerd.toml` in: {said}"
        );
        let said = place.done("status", &[])?;
        ensure!(
            said.contains("served by containerd"),
            "expected `served by containerd` in: {said}"
        );
        let cri = Cri::connect(&world.containerd().socket())?;
        for handler in [HANDLER, "runc"] {
            let pod = cri::pod(handler, &world.cgroup_parent(), world.dir());
            let id = cri.run_pod(&pod, handler)?;
            cri.remove_pod(&id)?;
        }
        // NVIDIA's toolkit creates its file from containerd's own file, so that file must contain
        // the handler, too.
        fs::remove_file(&covering)?;
        restart()?;
        let said = place.done("status", &[])?;
        ensure!(
            said.contains("served by containerd"),
            "expected `served by containerd` in: {said}"
        );
        // An older copy of the toolkit's file, without the handler, gets the handler again.
        fs::write(&covering, &before.1)?;
        restart()?;
        let said = String::from_utf8(place.run("status", &[])?.stdout)?;
        ensure!(
            said.contains("not in any configuration file of containerd"),
            "expected `not in any configuration file of containerd` in: {said}"
        );
        place.restarted(|| place.done("install", &[]))?;
        place.done("status", &[])?;
        place.restarted(|| place.done("uninstall", &[]))?;
        ensure!(
            (fs::read(place.config())?, fs::read(&covering)?) == before,
            "the uninstallation did not restore both files"
        );
    }
    Ok(())
}

/// Runs the installer in a container of the node, from which containerd, its configuration and the
/// installed files are not directly visible. The installer must change the node, and the
/// uninstaller must restore the node's configuration.
#[test]
fn a_node_is_installed_from_a_container_of_it() -> Result<()> {
    let world = TestbedConfig::default().cri().world()?;
    let place = place(&world)?;
    let original = fs::read(place.config())?;
    let root = format!("/proc/{}/root", world.keeper().pid());
    let inside = |verb: &str, more: &[&str]| -> Result<Output> {
        let own = place.command(verb, &[&["--host-root", &root], more].concat())?;
        let script = format!("mount -t tmpfs none {} && exec \"$@\"", world.dir().display());
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh"]);
        command.arg(own.get_program()).args(own.get_args());
        Ok(command.output()?)
    };
    let out = inside("install", &["--restart-mode", "none"])?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    ensure!(place.shim().is_file());
    ensure!(fs::read(place.config())? != original);
    let out = inside("status", &[])?;
    ensure!(
        String::from_utf8_lossy(&out.stdout).contains("restart containerd"),
        "expected `restart containerd` in: {out:?}"
    );
    let out = inside("uninstall", &["--restart-mode", "none"])?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    ensure!(fs::read(place.config())? == original);
    ensure!(!place.shim().exists());
    let out = place.run("status", &["--host-root", "/nonexistent"])?;
    ensure!(
        String::from_utf8_lossy(&out.stderr).contains("the node's root"),
        "expected `the node's root` in: {out:?}"
    );
    Ok(())
}

/// Causes several failures of the installation. After each one, containerd's configuration file
/// must be unchanged, and the error must contain the reason.
#[test]
fn failed_install_keeps_configuration() -> Result<()> {
    let world = TestbedConfig::default().cri().world()?;
    let place = place(&world)?;
    let original = fs::read(place.config())?;
    let refused = |more: &[&str], why: &str| -> Result<()> {
        let said = place.refused("install", more)?;
        ensure!(said.contains(why), "expected `{why}` in: {said}");
        ensure!(fs::read(place.config())? == original, "{why}: the configuration has changed");
        ensure!(!place.file("bin/affinode").exists(), "{why}: a file was left behind");
        ensure!(!place.state("install.json").exists(), "{why}: a record was left behind");
        Ok(())
    };
    place.systemctl("echo 'the unit is masked' >&2; exit 1")?;
    refused(&[], "the unit is masked")?;
    refused(&["--runtime-name", "a]b"], "invalid runtime name")?;
    refused(&["--runtime-name", "runc"], "runs another program")?;
    refused(&["--from", "/nonexistent"], "cargo xtask build")?;
    refused(&["--prefix", "/proc/affinode"], "/proc/affinode")?;

    fs::create_dir_all(place.state(""))?;
    let lock = fs::File::create(place.state("install.lock"))?;
    let held = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, errno)| errno)
        .context("another process holds the lock")?;
    refused(&["--restart-mode", "none"], "another affinode install")?;
    drop(held);

    // The installer does not edit a file that containerd cannot parse.
    let broken = [original.as_slice(), b"\nimports = 3\n[plugins\n"].concat();
    fs::write(place.config(), &broken)?;
    let said = place.refused("install", &["--restart-mode", "none"])?;
    ensure!(
        said.contains("cannot read its configuration"),
        "expected `cannot read its configuration` in: {said}"
    );
    ensure!(fs::read(place.config())? == broken);
    fs::write(place.config(), &original)?;

    // Installed files that have changed are reported. A handler that containerd does not serve yet
    // is reported, too.
    place.done("install", &["--restart-mode", "none"])?;
    let status = || -> Result<String> {
        let output = place.run("status", &[])?;
        ensure!(output.status.code() == Some(1), "expected exit status 1, got {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let said = status()?;
    ensure!(
        said.contains("restart containerd") && !said.contains("missing"),
        "expected only the advice to restart containerd: {said}"
    );
    fs::remove_file(place.file("bin/affinode"))?;
    fs::write(place.file("lib/affinode/libaffinode_preload.so"), "other")?;
    fs::write(place.config(), &original)?;
    let said = status()?;
    ensure!(
        said.contains("missing: run")
            && said.contains("not in any configuration file of containerd"),
        "{said}"
    );
    ensure!(said.matches("changed since").count() == 1, "expected one changed file in: {said}");
    place.done("install", &["--restart-mode", "none"])?;
    place.done("uninstall", &["--restart-mode", "none"])?;

    // An installation that was killed after it wrote its record can be removed.
    place.done("install", &["--restart-mode", "none"])?;
    fs::remove_file(place.file("bin/affinode"))?;
    fs::write(place.config(), &original)?;
    place.done("uninstall", &["--restart-mode", "none"])?;
    ensure!(fs::read(place.config())? == original);
    ensure!(!place.shim().exists());

    // A handler that was changed by hand must be replaced. An uninstallation must remove only the
    // handler from the file.
    place.done("install", &["--restart-mode", "none"])?;
    let text = fs::read_to_string(place.config())?;
    let (before, block) = text.split_at(original.len());
    let changed = format!("{before}{}", block.replace("affinode.io/*", "*"));
    fs::write(place.config(), &changed)?;
    let said = place.done("install", &["--restart-mode", "none"])?;
    ensure!(
        said.contains("- handler test-idle") && said.contains("restart containerd"),
        "expected `- handler test-idle` and `restart containerd` in: {said}"
    );
    fs::write(place.config(), changed + "# of the operator\n")?;
    place.done("uninstall", &["--restart-mode", "none"])?;
    let left = fs::read_to_string(place.config())?;
    ensure!(
        left.starts_with(std::str::from_utf8(&original)?),
        "the original configuration was not restored: {left}"
    );
    ensure!(
        left.contains("# of the operator") && !left.contains("test-idle"),
        "expected `# of the operator` and not `test-idle` in: {left}"
    );
    Ok(())
}

/// Installs on a node where an operator has written the handler by hand, as in config/containerd.
/// The installation must record the handler, and the uninstallation must remove it.
#[test]
fn a_handler_that_is_there_is_used() -> Result<()> {
    let world = TestbedConfig::default().cri().world()?;
    let place = Installation::new(&world, &world.dir().join("installed"), "affinode")?;
    let original = fs::read(place.config())?;
    let (said, restarts) = place.restarted(|| place.done("install", &[]))?;
    ensure!(said.contains("use handler affinode in") && restarts == 0, "{restarts}: {said}");
    ensure!(fs::read(place.config())? == original);
    let said = place.done("status", &[])?;
    ensure!(said.contains("served by containerd"), "expected `served by containerd` in: {said}");
    let (_, restarts) = place.restarted(|| place.done("uninstall", &[]))?;
    let left = fs::read_to_string(place.config())?;
    ensure!(restarts == 1 && !left.contains("runtimes.affinode"), "{restarts}: {left}");
    Ok(())
}

/// Installs under another handler name while a shim runs. containerd must keep the handler of the
/// old name, because the shim's pod can still start containers.
#[test]
fn renamed_handler_stays_while_a_shim_runs() -> Result<()> {
    let world = TestbedConfig::default().cri().world()?;
    let place = place(&world)?;
    let original = fs::read(place.config())?;
    let renamed = ["--restart-mode", "none", "--runtime-name", "newer"];
    let has = |name: &str| -> Result<bool> {
        Ok(fs::read_to_string(place.config())?.contains(&format!("runtimes.\"{name}\"]")))
    };
    place.done("install", &["--restart-mode", "none"])?;
    // The installed shim runs without a pod. It waits for its options on standard input.
    let mut running =
        Command::new(place.shim()).arg("-info").stdin(std::process::Stdio::piped()).spawn()?;
    until("the shim to run", || {
        let exe = fs::read_link(format!("/proc/{}/exe", running.id()))?;
        Ok((exe == place.shim()).then_some(()))
    })?;
    place.done("install", &renamed)?;
    ensure!(has(HANDLER)? && has("newer")?);
    let said = place.done("install", &renamed)?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    let status = || -> Result<String> { Ok(String::from_utf8(place.run("status", &[])?.stdout)?) };
    ensure!(status()?.contains("kept for running shims"), "{}", status()?);
    running.kill()?;
    running.wait()?;
    world.restart_containerd()?;
    ensure!(status()?.contains("the handler's settings differ"), "{}", status()?);
    place.done("install", &renamed)?;
    ensure!(!has(HANDLER)? && has("newer")?);
    ensure!(!status()?.contains(HANDLER), "{}", status()?);
    place.done("uninstall", &["--restart-mode", "none"])?;
    ensure!(fs::read(place.config())? == original);
    Ok(())
}

/// Checks that an uninstallation is refused while a shim runs, because it would delete the shim's
/// program file.
#[test]
fn uninstall_is_refused_while_containers_run() -> Result<()> {
    let world = TestbedConfig::default().cri().world()?;
    let place = place(&world)?;
    place.done("install", &["--restart-mode", "none"])?;
    let shim = place.shim();
    // The installed shim runs without a pod. It waits for its options on standard input.
    let mut running =
        Command::new(&shim).arg("-info").stdin(std::process::Stdio::piped()).spawn()?;
    until("the shim to run", || {
        let exe = fs::read_link(format!("/proc/{}/exe", running.id()))?;
        Ok((exe == Path::new(&shim)).then_some(()))
    })?;
    let said = place.refused("uninstall", &["--restart-mode", "none"])?;
    ensure!(said.contains("1 shim runs,"), "expected `1 shim runs,` in: {said}");
    ensure!(shim.exists());
    // With `--drain`, the uninstallation waits until the containers have ended.
    let mut waiting =
        place.command("uninstall", &["--restart-mode", "none", "--drain", "10m"])?.spawn()?;
    until("the command to begin", || {
        fs::create_dir_all(place.state(""))?;
        let lock = fs::File::create(place.state("install.lock"))?;
        Ok(Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_err().then_some(()))
    })?;
    ensure!(
        waiting.try_wait()?.is_none() && shim.exists(),
        "the uninstallation did not wait for the running shim"
    );
    running.kill()?;
    running.wait()?;
    ensure!(waiting.wait()?.success());
    ensure!(!shim.exists());
    // A controller without containers runs from the same program file, but does not prevent the
    // uninstallation.
    place.done("install", &["--restart-mode", "none"])?;
    let run_dir = place.file("run");
    let mut controller =
        Command::new(&shim).arg("controller").env("AFFINODE_RUN_DIR", &run_dir).spawn()?;
    until("the controller to run", || Ok(run_dir.join("control.sock").exists().then_some(())))?;
    place.done("uninstall", &["--restart-mode", "none"])?;
    ensure!(!shim.exists() && controller.try_wait()?.is_none());
    controller.kill()?;
    controller.wait()?;
    Ok(())
}

/// Upgrades while containers run. These containers must keep their shim and library, but the new
/// controller must replace the old controller.
#[test]
fn upgrade_replaces_the_running_controller() -> Result<()> {
    let world = TestbedConfig::default().node().config(MANUAL).world()?;
    let place = Installation::new(&world, &world.prefix(), HANDLER)?;
    place.done("install", &["--restart-mode", "none"])?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().move_out("worker")?;
    let runs = || -> Result<Option<(i32, PathBuf)>> {
        let Some(controller) = world.controller()? else { return Ok(None) };
        let exe = fs::read_link(format!("/proc/{}/exe", controller.pid));
        Ok(exe.ok().map(|exe| (controller.pid.as_raw(), exe)))
    };
    let (old, exe) = runs()?.context("no controller is running")?;
    ensure!(exe == place.shim(), "expected the installed shim as the controller, got {exe:?}");
    let build = tempfile::tempdir()?;
    installed::another_build(world.artifacts(), build.path())?;
    let from = build.path().display().to_string();
    let more = ["--restart-mode", "none", "--from", from.as_str()];
    let said = place.done("install", &more)?;
    ensure!(
        said.contains("end the controller") && !said.contains("restart"),
        "expected the advice to end the controller: {said}"
    );
    // The old shim starts the controller version that is installed now.
    until("the new controller", || {
        let now = runs()?;
        Ok(now.filter(|(pid, exe)| *pid != old && *exe == place.shim()))
    })?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    world.cli().move_out("worker")?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    let said = place.done("install", &more)?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    Ok(())
}
