//! Tests of the setting `control.view_group`. Members of this group can read the controller's state
//! with the command line, but cannot change anything.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Output, Stdio},
};

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Result, ensure};

use crate::offload::MANUAL;

/// Group id that the configuration names.
const GROUP: u32 = 60_100;
/// Id of a user without any right except that of its group.
const USER: u32 = 60_101;

/// Runs the command `affinode` as an unprivileged user whose group has this id.
fn as_user(world: &Testbed, group: u32, arguments: &[&str]) -> Result<Output> {
    let mut command = world.cli().command(arguments);
    Ok(command.uid(USER).gid(group).stdin(Stdio::null()).output()?)
}

#[test]
fn group_members_look_and_change_nothing() -> Result<()> {
    let config = format!("{MANUAL}\n[control]\nview_group = \"{GROUP}\"\n");
    let world = TestbedConfig::default().config(&config).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Idle")?;
    let mode = |name: &str| -> Result<u32> {
        let file = fs::metadata(world.cli().run_dir().join(name))?;
        Ok(file.permissions().mode() & 0o777)
    };
    until("the group's socket", || Ok((mode("view.sock")? == 0o660).then_some(())))?;
    ensure!(mode("control.sock")? == 0o600, "the other socket is root's");

    for looks in [&["ps"][..], &["events"], &["policy", "show", "worker"], &["report"]] {
        let output = as_user(&world, GROUP, looks)?;
        ensure!(output.status.success() && !output.stdout.is_empty(), "{looks:?}: {output:?}");
    }
    for changes in [
        &["offload", "worker"][..],
        &["restore", "worker"],
        &["pin", "worker"],
        &["hint", "worker", "idle"],
        &["auto-offload", "off"],
        &["policy", "set", "mode=off"],
        &["reload"],
    ] {
        let output = as_user(&world, GROUP, changes)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let refused = output.status.code() == Some(1) && said.contains("this command needs root");
        ensure!(refused, "{changes:?}: {output:?}");
    }
    let output = as_user(&world, GROUP + 7, &["ps"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && said.contains("control.view_group"),
        "expected exit status 1 and `control.view_group`: {output:?}"
    );

    let row = world.cli().known("worker")?;
    ensure!(row.offloads == 0, "the container was offloaded: {row:?}");
    ensure!(worker.verify()?);
    Ok(())
}
