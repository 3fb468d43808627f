//! Tests of the annotation `affinode.io/vram-limit`, which limits the VRAM of a container.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    gpu::{CONTAINER_TOOL, Gpu},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use crate::offload::MANUAL;

const VRAM_MIB: u64 = 1024;
const LIMIT_MIB: u64 = 256;
const OUT_OF_MEMORY: i32 = 2;
const ENGINES: [&str; 3] = ["checkpoint", "copy", "full"];

fn world() -> Result<Testbed> {
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB })
        .config(MANUAL)
        .world()
}

fn limited(id: &str) -> Spec {
    let limit = format!("{LIMIT_MIB}Mi");
    Worker::spec(id, USUAL, 64).annotation("affinode.io/vram-limit", &limit)
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Free VRAM and size of the VRAM in bytes, from `cuMemGetInfo`.
fn memory(worker: &mut Worker) -> Result<(u64, u64)> {
    let answer = worker.call("meminfo")?;
    answer.free_bytes.zip(answer.total_bytes).context("the reply to `meminfo` has no sizes")
}

#[test]
fn limit_holds_with_each_engine() -> Result<()> {
    let world = world()?;
    for engine in ENGINES {
        let mut worker = start(&world, limited(engine).annotation("affinode.io/engine", engine))?;
        let (free, total) = memory(&mut worker)?;
        assert_eq!(total, LIMIT_MIB * MIB, "{engine}");
        // The context is included, as NVML counts it.
        assert!(free > 128 * MIB && free <= 192 * MIB, "{engine}: {free} bytes are free");
        worker.call("alloc 100")?;
        assert_eq!(worker.ask("alloc 100")?.result, OUT_OF_MEMORY, "{engine}");
        assert!(worker.verify()?, "{engine}: the refused allocation changed nothing");
        world.cli().move_out(engine)?;
        worker.call("sync")?;
        assert_eq!(worker.ask("alloc 100")?.result, OUT_OF_MEMORY, "{engine}: after a restore");
        worker.call("free")?;
        worker.call("alloc 100")?;
        assert!(memory(&mut worker)?.0 <= free - 100 * MIB, "{engine}");
        assert!(worker.verify()?, "{engine}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

#[test]
fn limit_counts_what_the_driver_rounds_up() -> Result<()> {
    let world = world()?;
    let mut worker = start(&world, limited("small"))?;
    let mut allocations = 0;
    while worker.ask("alloc 3 -")?.result == 0 {
        allocations += 1;
        assert!(allocations < LIMIT_MIB, "the limit does not hold");
    }
    let row = world.cli().wait_for("small", "to show its VRAM", |row| {
        // The allocation of 3 MiB takes 4 MiB.
        row.vram_bytes + 4 * MIB > LIMIT_MIB * MIB
    })?;
    assert!(row.vram_bytes <= LIMIT_MIB * MIB, "{} bytes are in use", row.vram_bytes);
    Ok(())
}

#[test]
fn neighbour_without_a_limit_is_not_limited() -> Result<()> {
    let world = world()?;
    let mut worker = start(&world, limited("limited"))?;
    let mut other = start(&world, Worker::spec("other", USUAL, 64))?;
    let (_, total) = memory(&mut other)?;
    assert_eq!(total, VRAM_MIB * MIB);
    other.call("alloc 500")?;
    assert!(memory(&mut worker)?.0 > 128 * MIB, "the neighbour's VRAM is not the container's");
    worker.call("alloc 100")?;
    assert!(worker.verify()? && other.verify()?);
    Ok(())
}

#[test]
fn limit_holds_after_a_controller_crash() -> Result<()> {
    let world = world()?;
    let mut worker = start(&world, limited("worker"))?;
    worker.call("alloc 100")?;
    let controller = world.controller()?.context("there is no controller")?;
    kill(controller.pid, Signal::SIGKILL)?;
    // The allocation waits for the next controller.
    assert_eq!(worker.ask("alloc 100")?.result, OUT_OF_MEMORY);
    worker.call("free")?;
    worker.call("alloc 100")?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn nvidia_smi_shows_the_limit() -> Result<()> {
    let world = world()?;
    let mut worker = start(&world, limited("worker"))?;
    let mut other = start(&world, Worker::spec("other", USUAL, 300))?;
    let tool = |worker: &Worker| {
        let query = "--query-gpu=memory.total,memory.used";
        let output = worker
            .running
            .exec(&world, &[CONTAINER_TOOL, query, "--format=csv,noheader,nounits"])?;
        let (total, used) = output.trim().split_once(", ").context("two numbers")?;
        Ok::<_, anyhow::Error>((total.parse::<u64>()?, used.parse::<u64>()?))
    };
    until("nvidia-smi to show the container's VRAM", || {
        let (total, used) = tool(&worker)?;
        Ok((total == LIMIT_MIB && (64..=128).contains(&used)).then_some(()))
    })?;
    let (total, used) = tool(&other)?;
    assert!(
        total == VRAM_MIB && used > 364,
        "{used} of {total} MiB in a container without a limit"
    );
    assert!(worker.verify()? && other.verify()?);
    Ok(())
}

#[test]
fn nvml_in_the_process_shows_the_limit() -> Result<()> {
    let world = world()?;
    let program = format!("{CLIENTS}/nvml");
    let spec = Spec::gpu("nvml", &[&program, "64"]);
    let mut worker = Worker::start_as(&world, spec.annotation("affinode.io/vram-limit", "256Mi"))?;
    worker.expect("ready")?;
    worker.call("init")?;
    let free = worker.call("ask")?.free_bytes.context("the reply has no field `free_bytes`")?;
    assert!(free > 128 * MIB && free <= 192 * MIB, "{free} bytes are free");
    Ok(())
}
