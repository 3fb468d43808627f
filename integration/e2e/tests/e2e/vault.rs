//! Home through the vault: who it fills, and what becomes of those whose vault is gone.

use affinode_e2e::{
    cli::GpuRow,
    until::until,
    worker::{USUAL, Worker},
    world::{MIB, Recipe, World},
};
use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::offload::{MANUAL, wait_gpu_empty, wait_vram_used};

const WORKER_MIB: u64 = 320;

fn config() -> String {
    format!("{MANUAL}\n[vault]\nenabled = true\n")
}

fn worker(world: &World, id: &str) -> Result<Worker> {
    let spec = Worker::spec(id, USUAL, WORKER_MIB).annotation("affinode.io/engine", "fast");
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn gpu(world: &World) -> Result<GpuRow> {
    world.cli().ps()?.gpus.into_iter().next().context("no GPU")
}

/// Moves it out, and waits until a vault holds its memory.
fn move_out(world: &World, id: &str) -> Result<i32> {
    world.cli().move_out(id)?;
    until("a vault that holds its memory", || {
        let gpu = gpu(world)?;
        Ok((gpu.vault_pid != 0 && gpu.vault_holds > 0).then_some(gpu.vault_pid))
    })
}

/// Out and home until the vault was in time.
fn filled_once(world: &World, worker: &mut Worker) -> Result<()> {
    let before = gpu(world)?.vault_fills;
    for _ in 0..4 {
        move_out(world, "worker")?;
        assert!(worker.verify()?);
        if gpu(world)?.vault_fills > before {
            return Ok(());
        }
    }
    bail!("in four rounds the vault has filled nobody")
}

#[test]
fn a_process_comes_home_through_the_vault_again_and_again() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = worker(&world, "worker")?;
    // A vault that gets no turn for half a second is not waited for.
    for round in 1..=12 {
        move_out(&world, "worker")?;
        // The vault's own context is what is in use.
        wait_gpu_empty(&world)?;
        assert!(gpu(&world)?.vault_vram_bytes > 0);
        worker.call("touch")?;
        assert!(worker.verify()?, "round {round}");
        let row = world.cli().known("worker")?;
        assert!(row.vram_bytes >= WORKER_MIB * MIB, "{row:?}");
        assert_eq!(row.processes[0].carried_bytes, WORKER_MIB * MIB, "it can leave again");
        if gpu(&world)?.vault_fills == 3 {
            return Ok(());
        }
    }
    bail!("in 12 rounds the vault has filled it {} times", gpu(&world)?.vault_fills)
}

#[test]
fn a_process_whose_vault_was_killed_comes_home_by_itself() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = worker(&world, "worker")?;
    for _ in 0..2 {
        let vault = move_out(&world, "worker")?;
        kill(Pid::from_raw(vault), Signal::SIGKILL)?;
        until("the vault to be gone", || Ok((gpu(&world)?.vault_pid != vault).then_some(())))?;
        worker.call("touch")?;
        assert!(worker.verify()?);
        assert_eq!(gpu(&world)?.vault_fills, 0);
    }
    // And the next one serves.
    filled_once(&world, &mut worker)
}

#[test]
fn a_process_whose_vault_is_stopped_comes_home_by_itself() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = worker(&world, "worker")?;
    let vault = Pid::from_raw(move_out(&world, "worker")?);
    kill(vault, Signal::SIGSTOP)?;
    worker.call("touch")?;
    assert!(worker.verify()?);
    kill(vault, Signal::SIGCONT)?;
    // It finds out that nobody is there any more, and gives back what it had.
    wait_vram_used(&world, |used| used < 2 * WORKER_MIB * MIB)?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn memory_of_a_vaults_making_is_copied_out_whatever_the_engine_is_now() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = worker(&world, "worker")?;
    filled_once(&world, &mut worker)?;
    // The next controller does not know who made it; the page says so.
    let controller = world.controller()?.context("no controller")?;
    kill(controller.pid, Signal::SIGKILL)?;
    until("another controller", || {
        Ok(world.controller()?.filter(|next| next.pid != controller.pid))
    })?;
    move_out(&world, "worker")?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn the_vault_gives_its_room_to_who_waits_for_it() -> Result<()> {
    let world = Recipe::default().config(&config()).world()?;
    let mut worker = worker(&world, "worker")?;
    let vault = move_out(&world, "worker")?;
    let total = gpu(&world)?.vram_total_bytes / MIB;
    // All of the device but this one's own context.
    let spec = Worker::spec("other", USUAL, total - 24)
        .annotation("affinode.io/engine", "driver")
        .annotation("affinode.io/on-oom", "wait");
    let mut other = Worker::start_as(&world, spec)?;
    other.wait_filled()?;
    assert_ne!(gpu(&world)?.vault_pid, vault);
    other.running.kill(&world)?;
    other.running.delete(&world)?;
    assert!(worker.verify()?);
    Ok(())
}
