//! `affinode install` and `uninstall` on each containerd: a handler that pods can name, and
//! afterwards every byte as it was.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use affinode_e2e::{
    until::until,
    world::{Recipe, World},
};
use anyhow::{Context, Result, ensure};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::Signal,
};

use crate::{
    cri::{self, Cri},
    matrix::on_every_containerd,
};

on_every_containerd!(
    Recipe::default().cri();
    a_node_is_installed_serves_pods_and_is_as_it_was,
);

const HANDLER: &str = "test-idle";

/// An installation of a world's own.
struct Place<'a> {
    world: &'a World,
    folder: PathBuf,
    config: PathBuf,
}

impl<'a> Place<'a> {
    fn new(world: &'a World) -> Result<Place<'a>> {
        let folder = world.dir().join("installed");
        fs::create_dir_all(folder.join("tools"))?;
        let config = world.dir().join("containerd.toml");
        Ok(Place { world, folder, config })
    }

    fn command(&self, verb: &str, more: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.world.artifacts().bin("affinode")?);
        command.arg(verb).arg("--containerd").arg(self.world.containerd().socket());
        command.arg("--state-dir").arg(self.folder.join("state"));
        let usual = [
            ("--prefix", self.folder.as_path()),
            ("--from", self.world.artifacts().root()),
            ("--runtime-name", Path::new(HANDLER)),
        ];
        let known = if verb == "install" { 3 } else { 1 };
        for (option, value) in usual.into_iter().take(known) {
            if !more.contains(&option) {
                command.arg(option).arg(value);
            }
        }
        let path = std::env::var("PATH").unwrap_or_default();
        let tools = self.folder.join("tools");
        command.env("PATH", format!("{}:{path}", tools.display()));
        command.args(more);
        Ok(command)
    }

    fn run(&self, verb: &str, more: &[&str]) -> Result<Output> {
        Ok(self.command(verb, more)?.output()?)
    }

    fn done(&self, verb: &str, more: &[&str]) -> Result<String> {
        let output = self.run(verb, more)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        Ok(said)
    }

    fn refused(&self, verb: &str, more: &[&str]) -> Result<String> {
        let output = self.run(verb, more)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{:?}: {said}", output.status);
        Ok(said)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A systemctl that says so, and does this.
    fn systemctl(&self, script: &str) -> Result<()> {
        let tool = self.file("tools/systemctl");
        let text = format!("#!/bin/sh\n[ \"$*\" = 'restart containerd' ] || exit 64\n{script}\n");
        fs::write(&tool, text)?;
        Ok(fs::set_permissions(&tool, fs::Permissions::from_mode(0o755))?)
    }
}

/// Runs it while a systemctl asks for restarts, as systemd would carry them out.
fn with_restarts<T>(
    place: &Place<'_>,
    restarts: usize,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T>
where
    T: Send,
{
    let (asked, done) = (place.file("asked"), place.file("done"));
    let wait = format!(
        ": > {}; while [ ! -e {} ]; do sleep 0.05; done; rm {}",
        asked.display(),
        done.display(),
        done.display()
    );
    place.systemctl(&wait)?;
    thread::scope(|scope| {
        let worker = scope.spawn(work);
        for _ in 0..restarts {
            until("systemctl to be asked", || Ok(asked.exists().then_some(())))?;
            place.world.containerd().stop(Signal::SIGTERM)?;
            place.world.start_containerd()?;
            fs::remove_file(&asked)?;
            fs::write(&done, "")?;
        }
        worker.join().map_err(|_| anyhow::anyhow!("the command's thread panicked"))?
    })
}

fn a_node_is_installed_serves_pods_and_is_as_it_was(world: &World) -> Result<()> {
    let place = Place::new(world)?;
    let original = fs::read(&place.config)?;
    let unchanged = || Ok::<_, anyhow::Error>(fs::read(&place.config)? == original);
    let shim = place.file("bin/containerd-shim-affinode-v1");

    let said = place.done("install", &["--dry-run"])?;
    ensure!(said.contains("runtimes.\"test-idle\"]") && said.contains("systemctl"), "{said}");
    ensure!(unchanged()? && !shim.exists(), "a dry run changed something");

    with_restarts(&place, 1, || place.done("install", &[]))?;
    ensure!(shim.is_file() && place.file("lib/affinode/libaffinode_preload.so").is_file());
    let installed = fs::read(&place.config)?;
    ensure!(installed.starts_with(&original) && installed != original);
    let said = place.done("install", &["--restart-mode", "none"])?;
    ensure!(said.contains("nothing to do"), "{said}");
    ensure!(fs::read(&place.config)? == installed);

    let said = place.done("status", &[])?;
    ensure!(said.contains("served by containerd") && !said.contains("since"), "{said}");

    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("installed", &world.cgroup_parent(), world.dir());
    let id = cri.run_pod(&pod, HANDLER)?;
    cri.remove_pod(&id)?;

    let said = place.done("uninstall", &["--dry-run"])?;
    ensure!(said.contains("restore") && shim.exists(), "{said}");
    with_restarts(&place, 1, || place.done("uninstall", &[]))?;
    ensure!(unchanged()?, "the configuration is not as it was");
    ensure!(!shim.exists() && !place.file("lib/affinode").exists());
    let said = place.refused("uninstall", &[])?;
    ensure!(said.contains("no record of an installation"), "{said}");
    let said = place.refused("status", &[])?;
    ensure!(said.contains("nothing is installed"), "{said}");
    Ok(())
}

/// As a container of the node does it: containerd, its configuration and the place of the files
/// cannot be seen from there.
#[test]
fn a_node_is_installed_from_a_container_of_it() -> Result<()> {
    let world = Recipe::default().cri().world()?;
    let place = Place::new(&world)?;
    let original = fs::read(&place.config)?;
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
    ensure!(place.file("bin/containerd-shim-affinode-v1").is_file());
    ensure!(fs::read(&place.config)? != original);
    let out = inside("status", &[])?;
    ensure!(String::from_utf8_lossy(&out.stdout).contains("restart containerd"), "{out:?}");
    let out = inside("uninstall", &["--restart-mode", "none"])?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    ensure!(fs::read(&place.config)? == original);
    ensure!(!place.file("bin/containerd-shim-affinode-v1").exists());
    let out = place.run("status", &["--host-root", "/nonexistent"])?;
    ensure!(String::from_utf8_lossy(&out.stderr).contains("the node's root"), "{out:?}");
    Ok(())
}

/// Whatever fails, containerd's file is what it was, and who reads the error knows why.
#[test]
fn what_goes_wrong_leaves_the_configuration_as_it_was() -> Result<()> {
    let world = Recipe::default().cri().world()?;
    let place = Place::new(&world)?;
    let original = fs::read(&place.config)?;
    let refused = |more: &[&str], why: &str| -> Result<()> {
        let said = place.refused("install", more)?;
        ensure!(said.contains(why), "{said} does not tell of {why}");
        ensure!(fs::read(&place.config)? == original, "{why}: the configuration has changed");
        ensure!(!place.file("bin/affinode").exists(), "{why}: a file was left behind");
        ensure!(!place.file("state/install.json").exists(), "{why}: a record was left behind");
        Ok(())
    };
    place.systemctl("echo 'the unit is masked' >&2; exit 1")?;
    refused(&[], "the unit is masked")?;
    refused(&["--runtime-name", "a]b"], "no name for a runtime")?;
    refused(&["--runtime-name", "affinode"], "already")?;
    refused(&["--from", "/nonexistent"], "cargo xtask build")?;
    refused(&["--prefix", "/proc/affinode"], "/proc/affinode")?;

    let lock = fs::File::options().write(true).open(place.file("state/install.lock"))?;
    let held = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, errno)| errno)
        .context("nobody else holds it")?;
    refused(&["--restart-mode", "none"], "another affinode install")?;
    drop(held);

    // A file that containerd would not read again is not edited on top.
    let broken = [original.as_slice(), b"\nimports = 3\n[plugins\n"].concat();
    fs::write(&place.config, &broken)?;
    let said = place.refused("install", &["--restart-mode", "none"])?;
    ensure!(said.contains("does not understand"), "{said}");
    ensure!(fs::read(&place.config)? == broken);
    fs::write(&place.config, &original)?;

    // What is not as it was installed, or not yet served, is told.
    place.done("install", &["--restart-mode", "none"])?;
    let status = || -> Result<String> {
        let output = place.run("status", &[])?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let said = status()?;
    ensure!(said.contains("restart containerd") && !said.contains("missing"), "{said}");
    fs::remove_file(place.file("bin/affinode"))?;
    fs::write(place.file("lib/affinode/libaffinode_preload.so"), "other")?;
    fs::write(&place.config, &original)?;
    let said = status()?;
    ensure!(said.contains("missing: run") && said.contains("take it out by hand"), "{said}");
    ensure!(said.matches("changed since").count() == 2, "{said}");
    place.done("install", &["--restart-mode", "none"])?;
    place.done("uninstall", &["--restart-mode", "none"])?;

    // Killed after the record was written, an installation can be taken off all the same.
    place.done("install", &["--restart-mode", "none"])?;
    fs::remove_file(place.file("bin/affinode"))?;
    fs::write(&place.config, &original)?;
    place.done("uninstall", &["--restart-mode", "none"])?;
    ensure!(fs::read(&place.config)? == original);
    ensure!(!place.file("bin/containerd-shim-affinode-v1").exists());

    // What somebody changed since is left to them.
    place.done("install", &["--restart-mode", "none"])?;
    let text = fs::read_to_string(&place.config)?;
    fs::write(&place.config, text.replace("affinode.io/*", "*"))?;
    let said = place.refused("uninstall", &["--restart-mode", "none"])?;
    ensure!(said.contains("by hand"), "{said}");
    Ok(())
}

/// A shim that runs would be lost with its file.
#[test]
fn a_node_whose_containers_run_is_not_uninstalled() -> Result<()> {
    let world = Recipe::default().cri().world()?;
    let place = Place::new(&world)?;
    place.done("install", &["--restart-mode", "none"])?;
    let shim = place.file("bin/containerd-shim-affinode-v1");
    // As good as one: the installed file runs, waiting for its options.
    let mut running =
        Command::new(&shim).arg("-info").stdin(std::process::Stdio::piped()).spawn()?;
    until("the shim to run", || {
        let exe = fs::read_link(format!("/proc/{}/exe", running.id()))?;
        Ok((exe == Path::new(&shim)).then_some(()))
    })?;
    let said = place.refused("uninstall", &["--restart-mode", "none"])?;
    ensure!(said.contains("1 shim runs of Affinode"), "{said}");
    ensure!(shim.exists());
    // Asked to wait for its end, it does.
    let mut waiting =
        place.command("uninstall", &["--restart-mode", "none", "--drain", "10m"])?.spawn()?;
    until("the command to begin", || {
        let lock = fs::File::options().write(true).open(place.file("state/install.lock"))?;
        Ok(Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_err().then_some(()))
    })?;
    ensure!(waiting.try_wait()?.is_none() && shim.exists(), "it did not wait");
    running.kill()?;
    running.wait()?;
    ensure!(waiting.wait()?.success());
    ensure!(!shim.exists());
    // A controller that no container needs any more is the same program, and no obstacle.
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
