//! Test of an installation whose folders are not the default ones. containerd's environment does
//! not contain the paths of the folders, so Affinode's programs must find them without it.

use std::{fs, process::Command};

use affinode_e2e::{
    installed::{self, Installation},
    testbed::TestbedConfig,
    worker::Worker,
};
use anyhow::{Result, ensure};

use crate::offload::MANUAL;

/// Path of the file that lists the folders of the installation, relative to the prefix.
const PATHS: &str = "share/affinode/paths.conf";
const NO_RESTART: [&str; 2] = ["--restart-mode", "none"];

#[test]
fn programs_find_moved_folders() -> Result<()> {
    let world = TestbedConfig::default().node().without_folders().config(MANUAL).world()?;
    let place = Installation::new(&world, &world.prefix(), "test-moved")?;
    let config = world.dir().join("affinode/config.toml").display().to_string();
    let run_dir = world.cli().run_dir().display().to_string();
    let moved = [&NO_RESTART[..], &["--run-dir", &run_dir, "--config", &config]].concat();
    place.done("install", &moved)?;
    // The installed command must find the controller without any option or variable.
    let ps = || -> Result<String> {
        let output =
            Command::new(place.file("bin/affinode")).args(["ps", "-o", "wide"]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().registered("worker")?;
    let said = ps()?;
    // The mode `manual` comes from the moved configuration. The default mode is `auto`.
    ensure!(said.contains("default/worker") && said.contains(" manual "), "{said}");
    world.cli().move_out("worker")?;
    ensure!(worker.verify()?);

    // A second controller in another run directory would grant the same VRAM again, so the
    // installer must refuse.
    let other = world.dir().join("other-run").display().to_string();
    let elsewhere = [&NO_RESTART[..], &["--run-dir", &other]].concat();
    let written = fs::read_to_string(place.file(PATHS))?;
    let refused = place.refused("install", &elsewhere)?;
    ensure!(refused.contains("cannot change the run directory"), "{refused}");
    ensure!(fs::read_to_string(place.file(PATHS))? == written, "the folders have changed");

    // An upgrade keeps the folders without new options.
    let build = tempfile::tempdir()?;
    installed::another_build(world.artifacts(), build.path())?;
    let newer = build.path().display().to_string();
    let from = [&NO_RESTART[..], &["--from", &newer]].concat();
    place.done("install", &from)?;
    ensure!(fs::read_to_string(place.file(PATHS))? == written, "{written}");
    world.cli().move_out("worker")?;
    ensure!(worker.verify()?);
    let mut second = Worker::start(&world, "second", 64)?;
    world.cli().move_out("second")?;
    ensure!(second.verify()?);

    world.remove_containers()?;
    place.done("uninstall", &[&NO_RESTART[..], &["--drain", "1m"]].concat())?;
    ensure!(!place.file("share").exists() && !place.shim().exists());
    Ok(())
}
