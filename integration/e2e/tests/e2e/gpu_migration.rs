//! Tests of restores on another GPU of the same model, which take place if the container's own GPU
//! is full.

use std::path::Path;

use affinode_e2e::{
    cli::GpuRow,
    gpu::Gpu,
    suite::{Rows, measure_links, woken_together},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;
use nix::sys::signal::{Signal, kill};

use crate::offload::MANUAL;

const VRAM_MIB: u64 = 512;
const WORKER_MIB: u64 = 192;
/// VRAM in MiB of a filler program. It fills a GPU so that the worker does not fit.
const FILLER_MIB: u64 = 352;

fn two_gpus(options: &[&str]) -> Result<Testbed> {
    let options: Vec<&str> = ["--gpus", "2"].iter().chain(options).copied().collect();
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB })
        .sim_options(&options)
        .config(MANUAL)
        .world()
}

/// Starts a worker with this engine. It can open only the device files of the GPUs with the indexes
/// in `files`.
fn start(world: &Testbed, id: &str, engine: &str, files: &[usize]) -> Result<Worker> {
    let mut spec = Worker::spec(id, USUAL, WORKER_MIB)
        .annotation("affinode.io/engine", engine)
        .annotation("affinode.io/allow-gpu-migration", "true");
    // Any device file that can be opened is enough, because the simulated driver has no device
    // files.
    let files = files.iter().map(|n| ("/dev/null".into(), format!("/dev/nvidia{n}").into()));
    spec.mounts.extend(files);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn fill_first(world: &Testbed) -> Result<Worker> {
    Worker::start(world, "filler", FILLER_MIB)
}

/// Waits until `is_so` returns true for the VRAM in use on both GPUs, in MiB. The copiers' VRAM is
/// not included.
fn wait_until_used(world: &Testbed, is_so: impl Fn([u64; 2]) -> bool) -> Result<()> {
    until("the expected VRAM use of both GPUs", || {
        let used = |gpu: &GpuRow| gpu.vram_used_bytes.saturating_sub(gpu.copier_vram_bytes) / MIB;
        match world.cli().ps()?.gpus.as_slice() {
            [first, second] => Ok(is_so([used(first), used(second)]).then_some(())),
            // A controller that has just started has not read the GPUs yet.
            _ => Ok(None),
        }
    })
}

fn says(world: &Testbed, part: &str) -> Result<bool> {
    Ok(world.cli().events()?.iter().any(|event| event.text.contains(part)))
}

#[test]
fn full_gpu_restores_on_the_other_gpu() -> Result<()> {
    for engine in ["checkpoint", "full"] {
        let world = two_gpus(&[])?;
        let mut worker = start(&world, "moves", engine, &[0, 1])?;
        worker.call("alloc 16")?;
        world.cli().move_out("moves")?;
        let filler = fill_first(&world)?;
        wait_until_used(&world, |[first, second]| first > FILLER_MIB && second == 0)?;

        assert!(worker.verify()?, "{engine}: the memory has changed on the second GPU");
        world.cli().wait_resident("moves")?;
        wait_until_used(&world, |[_, second]| second > WORKER_MIB)?;
        until("an event about the restore on another GPU", || {
            Ok(says(&world, "is restored on GPU-")?.then_some(()))
        })?;
        // Everything that worked on the first GPU must work on the second GPU.
        worker.call("touch")?;
        worker.call("alloc 16")?;
        world.cli().move_out("moves")?;
        wait_until_used(&world, |[_, second]| second == 0)?;
        filler.running.kill(&world)?;
        assert!(worker.verify()?, "{engine}: the memory has changed after the second restore");
        wait_until_used(&world, |[_, second]| second > WORKER_MIB)?;
        assert!(worker.ends(&world)?, "{engine}");
        drop(filler);
    }
    Ok(())
}

/// Checks that a container waits for its own GPU if its process cannot open the other GPU's device
/// file.
#[test]
fn container_of_one_gpu_waits_for_it() -> Result<()> {
    for files in [&[0][..], &[]] {
        let world = two_gpus(&[])?;
        let mut worker = start(&world, "stays", "full", files)?;
        world.cli().move_out("stays")?;
        let filler = fill_first(&world)?;
        worker.send("verify")?;
        world.cli().wait_for_state("stays", "Queued")?;
        until("an event with the reason", || {
            Ok(says(&world, "the process cannot access every GPU of the node")?.then_some(()))
        })?;
        assert!(!worker.has_answer()?);
        filler.running.kill(&world)?;
        assert_eq!(worker.expect("verify")?.ok, Some(true));
        wait_until_used(&world, |[first, second]| first > WORKER_MIB && second == 0)?;
    }
    Ok(())
}

#[test]
fn controller_death_in_migration_is_recovered() -> Result<()> {
    let world = two_gpus(&["--restore-fixed-ms", "4000"])?;
    let mut worker = start(&world, "moves", "full", &[0, 1])?;
    world.cli().move_out("moves")?;
    let _filler = fill_first(&world)?;
    worker.send("verify")?;
    let row = world.cli().wait_for_state("moves", "Restoring")?;
    let controller = world.controller()?.expect("a controller");
    kill(controller.pid, Signal::SIGKILL)?;
    assert!(Path::new("/proc").join(row.process()?.pid.to_string()).exists());
    assert_eq!(worker.expect("verify")?.ok, Some(true));
    world.cli().wait_resident("moves")?;
    wait_until_used(&world, |[_, second]| second > WORKER_MIB)?;
    world.cli().move_out("moves")?;
    assert!(worker.verify()?, "and again");
    Ok(())
}

#[test]
fn containers_of_two_gpus_are_woken_together() -> Result<()> {
    let world = two_gpus(&[])?;
    let mut rows = Rows::default();
    woken_together(&world, &mut rows)?;
    assert_eq!(rows.missed(), Vec::<String>::new());
    Ok(())
}

/// Runs the program that measures the links of two GPUs on simulated GPUs. It must succeed, except
/// for functions that simulated GPUs lack.
#[test]
fn links_of_two_gpus_are_measured() -> Result<()> {
    let world = two_gpus(&[])?;
    let mut rows = Rows::default();
    measure_links(&world, &mut rows)?;
    assert_eq!(rows.missed(), Vec::<String>::new());
    Ok(())
}
