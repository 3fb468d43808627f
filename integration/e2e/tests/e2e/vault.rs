//! Home through the vault: who it fills, and what becomes of those whose vault is gone.

use affinode_e2e::{
    until::until,
    worker::{USUAL, Worker},
    world::{MIB, Recipe, World},
};
use anyhow::{Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    ipc,
    offload::{MANUAL, wait_gpu_empty},
    recovery::shoot_controller,
};

const WORKER_MIB: u64 = 320;

fn config() -> String {
    MANUAL.replace("[policy]", "[vault]\nenabled = true\n[policy]\nengine = \"fast\"")
}

/// Moves it out, and waits until a vault holds its memory.
fn move_out(world: &World, id: &str) -> Result<i32> {
    world.cli().move_out(id)?;
    until("a vault that holds its memory", || {
        let gpu = world.cli().gpu()?;
        Ok((gpu.vault_pid != 0 && gpu.vault_holds > 0).then_some(gpu.vault_pid))
    })
}

/// Out and home until the vault was in time.
fn filled_once(world: &World, worker: &mut Worker) -> Result<()> {
    let before = world.cli().gpu()?.vault_fills;
    for _ in 0..4 {
        move_out(world, "worker")?;
        assert!(worker.verify()?);
        if world.cli().gpu()?.vault_fills > before {
            return Ok(());
        }
    }
    bail!("in four rounds the vault has filled nobody")
}

#[test]
fn a_process_comes_home_through_the_vault_again_and_again() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start(&world, "worker", WORKER_MIB)?;
    // A vault that gets no turn for half a second is not waited for.
    for round in 1..=12 {
        move_out(&world, "worker")?;
        // The vault's own context is what is in use.
        wait_gpu_empty(&world)?;
        assert!(world.cli().gpu()?.vault_vram_bytes > 0);
        worker.call("touch")?;
        assert!(worker.verify()?, "round {round}");
        let row = world.cli().known("worker")?;
        assert!(row.vram_bytes >= WORKER_MIB * MIB, "{row:?}");
        assert_eq!(row.processes[0].carried_bytes, WORKER_MIB * MIB, "it can leave again");
        if world.cli().gpu()?.vault_fills == 3 {
            return Ok(());
        }
    }
    bail!("in 12 rounds the vault has filled it {} times", world.cli().gpu()?.vault_fills)
}

#[test]
fn a_process_whose_vault_was_killed_comes_home_by_itself() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start(&world, "worker", WORKER_MIB)?;
    for _ in 0..2 {
        let vault = move_out(&world, "worker")?;
        kill(Pid::from_raw(vault), Signal::SIGKILL)?;
        until(
            "the vault to be gone",
            || Ok((world.cli().gpu()?.vault_pid != vault).then_some(())),
        )?;
        worker.call("touch")?;
        assert!(worker.verify()?);
        assert_eq!(world.cli().gpu()?.vault_fills, 0);
    }
    // And the next one serves.
    filled_once(&world, &mut worker)
}

#[test]
fn a_process_whose_vault_is_stopped_comes_home_by_itself() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start(&world, "worker", WORKER_MIB)?;
    let vault = Pid::from_raw(move_out(&world, "worker")?);
    kill(vault, Signal::SIGSTOP)?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    kill(vault, Signal::SIGCONT)?;
    // It finds out that nobody waits for it any more, and takes nothing.
    let after = until("the vault to let go", || {
        Ok(Some(world.cli().gpu()?).filter(|gpu| gpu.vault_pending == 0 && gpu.vault_holds == 0))
    })?;
    assert_eq!(after.vault_fills, 0);
    assert!(after.vram_used_bytes < 2 * WORKER_MIB * MIB, "{after:?}");
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn memory_of_a_vaults_making_is_copied_out_whatever_the_engine_is_now() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start(&world, "worker", WORKER_MIB)?;
    filled_once(&world, &mut worker)?;
    // From now on all leave through the driver's checkpoint, after which it would be lost; and
    // the next controller knows of who made its memory by the page alone.
    let driver = config().replace("engine = \"fast\"", "engine = \"driver\"");
    std::fs::write(world.dir().join("affinode/config.toml"), driver)?;
    shoot_controller(&world)?;
    world.cli().move_out("worker")?;
    let row = world.cli().known("worker")?;
    assert_eq!(row.engine, "driver");
    assert_eq!(row.processes[0].parked_bytes, WORKER_MIB * MIB, "copied all the same: {row:?}");
    assert!(worker.verify()?);
    Ok(())
}

/// A process whose memory is such that no vault can make it says so after the first time.
#[test]
fn no_vault_is_started_again_for_who_has_no_use_for_it() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut shared = pieces(&world, "shared", "1")?;
    world.cli().move_out("shared")?;
    let vault = world.cli().gpu()?.vault_pid;
    assert_ne!(vault, 0, "nobody knew");
    assert!(shared.verify()?);
    kill(Pid::from_raw(vault), Signal::SIGKILL)?;
    until("the vault to be gone", || Ok((world.cli().gpu()?.vault_pid == 0).then_some(())))?;
    world.cli().move_out("shared")?;
    assert_eq!(world.cli().gpu()?.vault_pid, 0);
    assert!(shared.verify()?);
    // Who has is served.
    let mut plain = pieces(&world, "worker", "0")?;
    filled_once(&world, &mut plain)
}

/// A program that maps its memory by itself, made to be exported in these ways.
fn pieces(world: &World, id: &str, handle_types: &str) -> Result<Worker> {
    let arguments = ["--piece-mib", "16", "--handle-types", handle_types];
    let mut worker = Worker::start_as(world, Worker::pieces(id, "fast", WORKER_MIB, &arguments))?;
    worker.wait_filled()?;
    Ok(worker)
}

/// What was imported is not exported again: who may want to is brought home without a vault.
#[test]
fn memory_that_the_application_maps_by_itself_stays_what_it_was() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut plain = pieces(&world, "worker", "0")?;
    filled_once(&world, &mut plain)?;
    assert_eq!(plain.call("properties")?.ok, Some(true));
    let fills = world.cli().gpu()?.vault_fills;

    let mut shared = pieces(&world, "shared", "1")?;
    for _ in 0..2 {
        world.cli().move_out("shared")?;
        assert_eq!(world.cli().known("shared")?.processes[0].parked_bytes, WORKER_MIB * MIB);
        // A vault that would take it has it by now.
        until("nobody to be on the way to the vault", || {
            Ok((world.cli().gpu()?.vault_pending == 0).then_some(()))
        })?;
        assert_eq!(shared.call("properties")?.ok, Some(true));
        assert!(shared.verify()?);
    }
    assert_eq!(world.cli().gpu()?.vault_fills, fills);
    let exported = shared.call("export")?;
    assert_eq!(exported.result, 0, "{exported:?}");
    assert!(plain.verify()? && shared.verify()?);
    Ok(())
}

/// What the driver does not export again has no handle either; what is allocated later has.
#[test]
fn legacy_ipc_is_refused_for_what_a_vault_has_made() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start_as(&world, ipc::giver("worker", WORKER_MIB))?;
    worker.wait_filled()?;
    filled_once(&world, &mut worker)?;
    assert_eq!(worker.ask("handle 0")?.result, 1);
    until("the command to say what to do", || {
        let row = world.cli().known("worker")?;
        Ok(row.warnings.iter().any(|text| text.contains("IPC")).then_some(()))
    })?;
    // It goes on as before.
    filled_once(&world, &mut worker)
}

#[test]
fn the_vault_gives_its_room_to_who_waits_for_it() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = Worker::start(&world, "worker", WORKER_MIB)?;
    let vault = move_out(&world, "worker")?;
    let total = world.cli().gpu()?.vram_total_bytes / MIB;
    // All of the device but this one's own context.
    let spec = Worker::spec("other", USUAL, total - 24)
        .annotation("affinode.io/engine", "driver")
        .annotation("affinode.io/on-oom", "wait");
    let mut other = Worker::start_as(&world, spec)?;
    other.wait_filled()?;
    assert_ne!(world.cli().gpu()?.vault_pid, vault);
    other.running.kill(&world)?;
    other.running.delete(&world)?;
    assert!(worker.verify()?);
    Ok(())
}
