//! Tests of modes (when a container may be offloaded), annotations, and the reasons that the
//! controller shows.

use affinode_e2e::{
    cli::ContainerRow,
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};

use crate::{
    offload::{EAGER, MANUAL, wait_gpu_empty, wait_vram_used},
    recovery::shoot_controller,
};

/// Runs a container in each mode. Without a request, only mode `eager` may offload it. In all other
/// modes the container must stay resident and show the reason.
#[test]
fn ineligible_container_stays_with_reason() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    for (mode, reason) in
        [("manual", "mode-manual"), ("off", "mode-off"), ("pressure", "no-pressure")]
    {
        let spec = Worker::spec(mode, USUAL, 32).annotation("affinode.io/offload", mode);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        until(&format!("the reason of mode {mode}"), || {
            let row = world.cli().container(mode)?;
            Ok(row.filter(|row| row.state == "Idle" && row.reason == reason))
        })?;
        let row = world.cli().known(mode)?;
        assert_eq!(row.offloads, 0, "{row:?}");
    }
    Ok(())
}

#[test]
fn an_operator_moves_it_out_and_back() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "asked", 32)?;
    world.cli().move_out("asked")?;
    wait_gpu_empty(&world)?;
    world.cli().run(&["restore", "asked"])?;
    wait_vram_used(&world, |used| used > 0)?;
    let moved = |row: &ContainerRow| (row.offloads, row.restores) == (1, 1);
    world.cli().wait_for("asked", "to have one offload and one restore", moved)?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn invalid_annotation_uses_default() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let spec = Worker::spec("bad", USUAL, 32).annotation("affinode.io/idle-timeout", "soon");
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    let row = world.cli().wait_for_state("bad", "Offloaded")?;
    assert!(
        row.warnings.iter().any(|line| line.contains("idle-timeout") && line.contains("soon")),
        "{row:?}"
    );
    world.cli().wait_for_event("the annotation", |event| event.kind == "annotation")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Checks that the engine `checkpoint` refuses to offload a container with managed memory, which
/// the driver cannot checkpoint. The refusal must come before the process is changed.
#[test]
fn managed_memory_is_never_checkpointed() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start_as(
        &world,
        Worker::spec("uvm", USUAL, 32)
            .annotation("affinode.io/offload", "manual")
            .annotation("affinode.io/engine", "checkpoint"),
    )?;
    worker.wait_filled()?;
    worker.call("managed")?;
    let said = world.cli().offload("uvm")?;
    assert_eq!((said.done, said.reason.as_str()), (false, "managed-memory"), "{said:?}");
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn disabled_library_runs_unmanaged() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let spec = Worker::spec("alone", USUAL, 32).env("AFFINODE_DISABLE", "1");
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    assert!(worker.verify()?);
    let row = world.cli().known("alone")?;
    assert!(row.processes.is_empty(), "{row:?}");
    let output = world.cli().output(&["offload", "alone"])?;
    assert_eq!(output.status.code(), Some(1));
    assert!(worker.verify()?);
    Ok(())
}

/// Checks that operator overrides, such as a pin, also apply after a restart of the controller.
/// Events must report the overrides.
#[test]
fn a_pin_and_the_switch_outlive_the_controller() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "chosen", 32)?;
    world.cli().move_out("chosen")?;
    // The pin must restore the container, which is offloaded.
    world.cli().run(&["pin", "chosen"])?;
    wait_vram_used(&world, |used| used > 0)?;
    assert_eq!(world.cli().run(&["auto-offload", "off"])?, "auto-offload is off\n");
    until("events about both requests", || {
        let told = world.cli().events()?;
        Ok((told.iter().filter(|event| event.kind == "request").count() == 2).then_some(()))
    })?;

    // The process starts with the engine `checkpoint`, so none of its memory can be copied.
    let eager = EAGER.replace("[policy]", "[policy]\nengine = \"checkpoint\"");
    std::fs::write(world.dir().join("affinode/config.toml"), eager)?;
    shoot_controller(&world)?;
    let waits_for = |reason: &str| {
        until(&format!("the reason {reason}"), || {
            let row = world.cli().container("chosen")?;
            Ok(row.filter(|row| row.state == "Idle" && row.reason == reason))
        })
    };
    waits_for("pinned")?;
    assert!(!world.cli().offload("chosen")?.done);
    world.cli().run(&["unpin", "chosen"])?;
    waits_for("auto-offload-off")?;
    world.cli().run(&["auto-offload", "on"])?;
    world.cli().wait_for_state("chosen", "Offloaded")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Returns the value of a setting and the origin of the value, from a row of `affinode policy
/// show`.
fn value_of(world: &Testbed, container: &str, name: &str) -> Result<(String, String)> {
    let said = world.cli().run(&["policy", "show", container, "--no-headers"])?;
    let rows = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut of_name = rows.filter(|row| row.get(1) == Some(&name));
    let row = of_name.next().with_context(|| format!("no {name} in:\n{said}"))?;
    Ok((row[2].to_owned(), row[3].to_owned()))
}

/// Sets the node's policy, shows it with its origin, and resets it. The policy must still apply
/// after a restart of the controller. An invalid value must change nothing.
#[test]
fn a_policy_is_set_shown_and_taken_back() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let spec = Worker::spec("ruled", USUAL, 32).annotation("affinode.io/priority", "4");
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    assert_eq!(value_of(&world, "ruled", "priority")?, ("4".into(), "annotation".into()));
    assert_eq!(value_of(&world, "ruled", "mode")?, ("manual".into(), "node".into()));
    assert_eq!(value_of(&world, "ruled", "on_oom")?, ("fail".into(), "default".into()));

    world.cli().run(&["policy", "set", "on_oom=wait", "minimum_residency=3s"])?;
    assert_eq!(value_of(&world, "ruled", "on_oom")?, ("wait".into(), "node".into()));
    for bad in ["on_oom=often", "colour=red", "idle_timeout=soon"] {
        let refused = world.cli().output(&["policy", "set", "minimum_residency=9s", bad])?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains(bad.split_once('=').map_or(bad, |(name, _)| name)), "{said}");
    }
    shoot_controller(&world)?;
    until("the container to be listed again", || world.cli().container("ruled"))?;
    assert_eq!(value_of(&world, "ruled", "on_oom")?, ("wait".into(), "node".into()));
    assert_eq!(value_of(&world, "ruled", "minimum_residency")?, ("3s".into(), "node".into()));
    world.cli().run(&["policy", "unset", "on_oom"])?;
    assert_eq!(value_of(&world, "ruled", "on_oom")?, ("fail".into(), "default".into()));
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn a_reload_with_an_invalid_file_changes_nothing() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "steady", 32)?;
    world.cli().known("steady")?;
    let file = world.dir().join("affinode/config.toml");
    let text = std::fs::read_to_string(&file)?;
    std::fs::write(&file, format!("{text}\n[policy.colour]\nred = 1\n"))?;
    let refused = world.cli().output(&["reload"])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("colour"), "{said}");
    assert_eq!(value_of(&world, "steady", "mode")?, ("manual".into(), "node".into()));
    std::fs::write(&file, text.replace("manual", "off"))?;
    world.cli().run(&["reload"])?;
    assert_eq!(value_of(&world, "steady", "mode")?, ("off".into(), "node".into()));
    assert!(worker.verify()?);
    Ok(())
}
