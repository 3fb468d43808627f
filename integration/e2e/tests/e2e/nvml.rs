//! Tests of NVML calls in a container's own processes: queries of a monitor, the first
//! initialisation, and a call that is in progress during an offload.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};

use crate::offload::{EAGER, MANUAL, wait_gpu_empty};

const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];
const WORKER_MIB: u64 = 64;
/// Number of NVML queries that the monitoring program makes after the offload.
const QUESTIONS: u32 = 30;

fn start(
    world: &Testbed,
    program: &str,
    engine: &str,
    more: impl Fn(Spec) -> Spec,
) -> Result<Worker> {
    let program = format!("{CLIENTS}/{program}");
    let spec = Spec::gpu(engine, &[&program, &WORKER_MIB.to_string()]);
    let spec = more(spec.annotation("affinode.io/engine", engine));
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    Ok(worker)
}

fn asked(worker: &mut Worker) -> Result<u32> {
    worker.call("asked")?.polls.context("the reply to `asked` has no count")
}

/// Runs a program that queries NVML ten times a second, before and after the offload of its
/// container. The queries must not keep the container in use, and must not restore it.
#[test]
fn monitor_keeps_no_container_on_its_gpu() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    for (engine, program) in ENGINES.into_iter().zip(["nvml", "nvml_linked", "nvml"]) {
        let mut worker = start(&world, program, engine, |spec| spec)?;
        worker.call("init")?;
        worker.call("monitor 100")?;
        world.cli().wait_for_state(engine, "Offloaded")?;
        let (offloaded, before) = (world.cli().known(engine)?, asked(&mut worker)?);
        until("further queries of the monitor", || {
            Ok((asked(&mut worker)? >= before + QUESTIONS).then_some(()))
        })?;
        let row = world.cli().known(engine)?;
        assert_eq!(row.state, "Offloaded", "{engine}: {row:?}");
        assert_eq!(
            (row.offloads, row.restores),
            (offloaded.offloads, offloaded.restores),
            "{engine}"
        );
        // With the engine `copy`, only the container's context still uses VRAM.
        let gpu = world.cli().ps()?.gpus.remove(0);
        let answer = worker.call("ask")?;
        let free = gpu.vram_total_bytes - gpu.vram_used_bytes;
        assert_eq!(answer.free_bytes, Some(free), "{engine}");
        assert!(gpu.vram_used_bytes < WORKER_MIB * MIB, "{engine}: {gpu:?}");
        assert!(worker.verify()?, "{engine}");
        world.cli().wait_for(engine, "to be restored", |row| row.restores > offloaded.restores)?;
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
        wait_gpu_empty(&world)?;
    }
    Ok(())
}

#[test]
fn figures_while_offloaded_are_current() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = start(&world, "nvml", "full", |spec| spec)?;
    worker.call("init")?;
    let before = worker.call("ask")?.free_bytes.context("the reply has no field `free_bytes`")?;
    world.cli().move_out("full")?;
    wait_gpu_empty(&world)?;
    let offloaded =
        worker.call("ask")?.free_bytes.context("the reply has no field `free_bytes`")?;
    assert!(offloaded >= before + WORKER_MIB * MIB, "{before} {offloaded}");
    // A neighbour that starts during the offload appears in the result of the query.
    let mut neighbour = Worker::start(&world, "neighbour", 128)?;
    let mut last = offloaded;
    until("NVML to show the neighbour's memory", || {
        last = worker.call("ask")?.free_bytes.context("the reply has no field `free_bytes`")?;
        Ok((last + 128 * MIB <= offloaded).then_some(()))
    })
    .with_context(|| {
        format!("NVML reported {offloaded} bytes free before the start of the neighbour, and {last} bytes afterwards")
    })?;
    assert_eq!(world.cli().known("full")?.state, "Offloaded");
    assert!(worker.verify()? && neighbour.verify()?);
    Ok(())
}

#[test]
fn first_init_while_offloaded_restores() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["checkpoint", "full"] {
        let mut worker = start(&world, "nvml", engine, |spec| spec)?;
        world.cli().move_out(engine)?;
        worker.call("init")?;
        // NVML calls return after the driver's unlock, a moment before the controller shows the
        // container as active.
        world
            .cli()
            .wait_for(engine, "to be restored", |row| row.restores == 1 && row.state == "Active")?;
        worker.call("ask")?;
        // The library has recorded no reply to this query, so the query causes a restore.
        world.cli().move_out(engine)?;
        worker.call("utilization")?;
        world.cli().wait_for(engine, "to have two restores", |row| row.restores == 2)?;
        assert!(worker.verify()?);
    }
    Ok(())
}

#[test]
fn python_queries_by_ctypes_while_offloaded() -> Result<()> {
    if !std::path::Path::new("/usr/bin/python3").exists() {
        affinode_test_notes::skip("python3", "no /usr/bin/python3 on this machine");
        return Ok(());
    }
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let program = format!("{CLIENTS}/ctypes_worker.py");
    let spec = Spec::gpu("python", &["/usr/bin/python3", &program, "--mib", "64"]);
    let mut worker = Worker::start_as(&world, spec.annotation("affinode.io/engine", "full"))?;
    worker.expect("open")?;
    worker.call("nvml-init")?;
    let before = worker.call("nvml")?.free_bytes.context("the reply has no field `free_bytes`")?;
    world.cli().move_out("python")?;
    wait_gpu_empty(&world)?;
    let offloaded =
        worker.call("nvml")?.free_bytes.context("the reply has no field `free_bytes`")?;
    assert!(offloaded >= before + WORKER_MIB * MIB, "{before} {offloaded}");
    assert_eq!(world.cli().known("python")?.state, "Offloaded");
    assert!(worker.verify()?);
    Ok(())
}

/// Offloads a process during one of its NVML calls. The driver's lock of the process must wait
/// until the call has ended, because the simulated NVML kills a process that is locked during a
/// call.
#[test]
fn lock_waits_for_a_call_inside_nvml() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ENGINES {
        let slow = |spec: Spec| spec.env("AFFINODE_SIM_NVML_SLOW_MS", "150");
        let mut worker = start(&world, "nvml", engine, slow)?;
        worker.call("init")?;
        worker.call("monitor 10")?;
        for _ in 0..5 {
            world.cli().move_out(engine)?;
            assert!(worker.verify()?, "{engine}");
        }
        let asked = worker.call("asked")?;
        assert!(asked.polls.is_some_and(|polls| polls > 0), "{engine}: {asked:?}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}
