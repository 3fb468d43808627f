//! Tests of the systemd unit that `affinode install` writes. A simulated systemd keeps a controller
//! running, through upgrades, until an operator stops the unit.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use affinode_e2e::{
    installed::{self, Installation},
    testbed::{Testbed, TestbedConfig},
    unit::SimulatedSystemd,
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::offload::MANUAL;

struct Place<'a> {
    world: &'a Testbed,
    installation: Installation<'a>,
    systemd: SimulatedSystemd<'a>,
}

impl<'a> Place<'a> {
    fn new(world: &'a Testbed) -> Result<Self> {
        let installation = Installation::new(world, &world.prefix(), "test-idle")?;
        let systemd = SimulatedSystemd::new(world, &installation)?;
        Ok(Self { world, installation, systemd })
    }

    /// Runs the command `affinode` with the environment variables of the testbed's installation.
    fn run(&self, verb: &str, more: &[&str]) -> Result<Output> {
        let unit = format!("--controller-unit={}", self.systemd.units().display());
        let mut arguments = vec![];
        if verb == "install" {
            arguments.push(unit.as_str());
        }
        if verb != "status" {
            arguments.extend(["--restart-mode", "none"]);
        }
        let mut command: Command = self.installation.command(verb, &[&arguments, more].concat())?;
        command.env("AFFINODE_RUN_DIR", self.world.cli().run_dir());
        command.env("AFFINODE_CONFIG", self.world.dir().join("affinode/config.toml"));
        command.env("AFFINODE_LIB_DIR", self.world.prefix().join("lib/affinode"));
        self.systemd.answering(|| Ok(command.output()?))
    }

    fn done(&self, verb: &str, more: &[&str]) -> Result<String> {
        let output = self.run(verb, more)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "affinode {verb} failed: {said}{error}");
        Ok(said)
    }

    fn refused(&self, verb: &str) -> Result<String> {
        let output = self.run(verb, &[])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "affinode {verb}: {:?}: {said}", output.status);
        Ok(said)
    }

    /// Waits until the unit's controller replies to the command `affinode`. Returns the
    /// controller's pid.
    fn unit_serves(&self) -> Result<i32> {
        let unit = self.systemd.pid().context("the unit does not run")?;
        until("the unit's controller to serve", || {
            let now = self.world.cli().ps_now().ok();
            Ok(now.filter(|now| now.controller_pid == unit).map(|_| unit))
        })
    }
}

fn in_place(case: impl FnOnce(&Place<'_>) -> Result<()>) -> Result<()> {
    let world = TestbedConfig::default().node().config(MANUAL).world()?;
    let outcome = Place::new(&world).and_then(|place| case(&place));
    outcome.inspect_err(|_| world.show_logs())
}

#[test]
fn installed_unit_keeps_a_controller() -> Result<()> {
    in_place(|place| {
        let said = place.done("install", &[])?;
        ensure!(
            said.contains("systemctl enable --now affinode-controller"),
            "expected `systemctl enable --now affinode-controller` in: {said}"
        );
        ensure!(place.systemd.calls() == ["daemon-reload", "enable --now affinode-controller"]);
        ensure!(place.systemd.is_enabled());
        let first = place.unit_serves()?;
        let node = place.world.cli().ps()?;
        ensure!(node.containers.is_empty(), "expected a node without containers: {node:?}");
        place.world.cli().gpu()?;
        let said = place.done("install", &[])?;
        ensure!(
            said.contains("nothing to do") && place.systemd.calls().is_empty(),
            "expected `nothing to do` and no change: {said}"
        );

        let mut worker = Worker::start(place.world, "worker", 64)?;
        place.world.cli().move_out("worker")?;
        ensure!(place.unit_serves()? == first, "a second controller was started");
        let build = tempfile::tempdir()?;
        installed::another_build(place.world.artifacts(), build.path())?;
        upgrade(place, build.path(), &mut worker)?;
        operator_stops(place, build.path(), &mut worker)?;

        ensure!(place.refused("uninstall")?.contains("1 shim runs"));
        ensure!(place.systemd.pid().is_some() && place.systemd.calls().is_empty());
        place.world.remove_containers()?;
        let said = place.done("uninstall", &["--drain", "1m"])?;
        ensure!(
            said.contains("systemctl disable --now affinode-controller"),
            "expected `systemctl disable --now affinode-controller` in: {said}"
        );
        ensure!(place.systemd.pid().is_none() && !place.systemd.is_enabled());
        ensure!(
            !place.systemd.units().exists(),
            "the uninstallation did not remove the folder of the unit"
        );
        ensure!(!place.world.prefix().exists() && !place.installation.state("").exists());
        Ok(())
    })
}

/// Installs another build of Affinode's programs while a container is offloaded. systemd must
/// replace the controller, and the container's memory must be unchanged. The same installation a
/// second time must change nothing.
fn upgrade(place: &Place<'_>, build: &Path, worker: &mut Worker) -> Result<()> {
    let old = place.unit_serves()?;
    let from = build.display().to_string();
    let said = place.done("install", &["--from", &from])?;
    ensure!(
        said.contains("systemctl try-restart affinode-controller"),
        "expected `systemctl try-restart affinode-controller` in: {said}"
    );
    ensure!(!said.contains("end the controller"), "systemd replaces it: {said}");
    ensure!(place.systemd.calls() == ["try-restart affinode-controller"]);
    ensure!(place.unit_serves()? != old, "the old controller serves");
    place.world.cli().wait_for_state("worker", "Offloaded")?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    let said = place.done("install", &["--from", &from])?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    Ok(())
}

/// Stops the unit as an operator does. The unit must stay stopped, and the container's shim must
/// start a controller. After the unit is started again, the shim's controller must continue to run,
/// and the unit's controller must wait until it ends.
fn operator_stops(place: &Place<'_>, build: &Path, worker: &mut Worker) -> Result<()> {
    place.world.cli().move_out("worker")?;
    let old = place.unit_serves()?;
    place.systemd.call("stop affinode-controller")?;
    let shims = until("the shim's controller to serve", || {
        let now = place.world.cli().ps_now().ok().map(|node| node.controller_pid);
        Ok(now.filter(|pid| *pid != old))
    })?;
    place.world.cli().wait_for_state("worker", "Offloaded")?;
    let status = place.run("status", &[])?;
    let said = String::from_utf8_lossy(&status.stdout);
    ensure!(
        said.contains("stopped, so shims start the controller"),
        "expected `stopped, so shims start the controller` in: {said}"
    );
    ensure!(
        said.contains(&format!("the controller runs: process {shims}")),
        "expected the controller of process {shims} in: {said}"
    );
    let said = place.done("install", &["--from", &build.display().to_string()])?;
    ensure!(
        said.contains("nothing to do") && place.systemd.pid().is_none(),
        "expected `nothing to do` and no change: {said}"
    );

    place.systemd.call("start affinode-controller")?;
    place.systemd.wait_for_waiting()?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    place.world.cli().move_out("worker")?;
    ensure!(place.world.cli().ps()?.controller_pid == shims, "two controllers");
    kill(Pid::from_raw(shims), Signal::SIGKILL)?;
    place.unit_serves()?;
    place.world.cli().wait_for_state("worker", "Offloaded")?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    let _ = place.systemd.calls();
    Ok(())
}

/// Installs on a machine where an operator has written a unit of the same name. Affinode must
/// refuse the installation, and must change and remove only files that it wrote itself.
#[test]
fn unit_of_an_operator_stays() -> Result<()> {
    in_place(|place| {
        let file = place.systemd.unit();
        fs::create_dir_all(place.systemd.units())?;
        fs::write(&file, "# mine\n")?;
        ensure!(place.refused("install")?.contains("is not Affinode's"));
        ensure!(fs::read_to_string(&file)? == "# mine\n" && !place.installation.shim().exists());
        fs::remove_file(&file)?;

        place.systemd.break_on(Some("enable --now affinode-controller"));
        let said = place.refused("install")?;
        ensure!(
            said.contains("shims start the controller") && said.contains("journalctl"),
            "{said}"
        );
        ensure!(place.installation.shim().exists(), "the shim was not installed");
        ensure!(
            place.done("status", &[]).is_err(),
            "`affinode status` accepts an incomplete installation"
        );
        place.systemd.break_on(None);
        place.done("install", &[])?;
        place.unit_serves()?;

        edited(&file)?;
        let status = String::from_utf8(place.run("status", &[])?.stdout)?;
        ensure!(
            status.contains("install and uninstall leave the file as it is"),
            "expected `install and uninstall leave the file as it is` in: {status}"
        );
        let before = fs::read(&file)?;
        let said = place.done("install", &[])?;
        ensure!(
            said.contains("nothing to do") && fs::read(&file)? == before,
            "expected `nothing to do` and no change: {said}"
        );
        let said = place.done("uninstall", &[])?;
        ensure!(
            said.contains("it was changed") && fs::read(&file)? == before,
            "expected `it was changed`, and the file kept: {said}"
        );
        ensure!(place.systemd.pid().is_none() && !place.systemd.is_enabled());
        Ok(())
    })
}

fn edited(file: &Path) -> Result<()> {
    let text = fs::read_to_string(file)?;
    Ok(fs::write(file, text + "# mine\n")?)
}
