//! Tests of memory that contains only zeros. It is not stored while its process is offloaded, and
//! contains zeros again after the restore.

use std::fs;

use affinode_e2e::{
    cli::ProcessRow,
    container::SEES_ITS_CGROUP,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result, bail};

use crate::{copier::fills, offload::MANUAL};

const FILLED_MIB: u64 = 32;
const ZERO_MIB: u64 = 384;
const MORE_MIB: u64 = 64;

fn start(world: &Testbed, engine: &str, keep: &str) -> Result<Worker> {
    let id = format!("{engine}-{keep}");
    let spec = Worker::spec(&id, USUAL, FILLED_MIB)
        .annotation("affinode.io/engine", engine)
        .annotation("affinode.io/retain-host-copy", keep)
        .flags(&SEES_ITS_CGROUP);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Offloads and restores the worker, and checks its contents. Returns two values from the time at
/// which the worker was offloaded: the row of its process, and the host memory in MiB that the
/// process occupied.
fn cycle(world: &Testbed, worker: &mut Worker) -> Result<(ProcessRow, u64)> {
    let id = worker.running.id.clone();
    world.cli().move_out(&id)?;
    let node = world.cli().ps()?;
    let row = node
        .containers
        .into_iter()
        .find(|row| row.id == id)
        .context("the controller does not list the container")?;
    let offloaded = row.process()?.clone();
    assert_eq!(node.host_used_bytes, row.offloaded_bytes - offloaded.zero_bytes, "{offloaded:?}");
    let resident = resident_mib(offloaded.pid)?;
    // A copier restores every process that it can restore.
    until("the copier", || {
        Ok(world.cli().ps()?.gpus.iter().all(|gpu| gpu.copier_registering == 0).then_some(()))
    })?;
    assert!(worker.verify()?, "{id}: contents as before");
    world.cli().wait_resident(&id)?;
    Ok((offloaded, resident))
}

fn resident_mib(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = kib.context("cannot find the size of the process")?.trim().trim_end_matches(" kB");
    Ok(kib.parse::<u64>()? / 1024)
}

#[test]
fn zero_memory_takes_no_host_memory() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for (engine, keep) in [("copy", "false"), ("full", "true")] {
        let mut worker = start(&world, engine, keep)?;
        worker.call(&format!("alloc {MORE_MIB}"))?;
        worker.call(&format!("alloc {ZERO_MIB} 0"))?;
        for round in 0..2 {
            let (offloaded, resident) = cycle(&world, &mut worker)?;
            let said = (offloaded.copied_out_bytes / MIB, offloaded.zero_bytes / MIB);
            let all = FILLED_MIB + MORE_MIB + ZERO_MIB;
            assert_eq!(said, (all, ZERO_MIB), "{engine}, {keep}, round {round}");
            assert!(resident < all * 2 / 3, "{engine}, {keep}: {resident} MiB, round {round}");
            worker.call("touch")?;
        }
        // The test writes zeros where other contents were, including in the pool, and other
        // contents where zeros were.
        for (set, zeros) in [
            ("set 0 0", MORE_MIB + ZERO_MIB),
            ("set 0 5", ZERO_MIB),
            ("set 1 6", 0),
            ("set 1 0", ZERO_MIB),
        ] {
            worker.call(set)?;
            assert_eq!(cycle(&world, &mut worker)?.0.zero_bytes / MIB, zeros, "{engine}, {set}");
        }
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

/// Checks that a small amount of zeros is stored like other contents, so that a copier can restore
/// the process. This saves more time than skipping a few zeros. A copier cannot restore a process
/// that skips pages, because earlier contents of these pages would appear again.
#[test]
fn copier_restores_process_that_skips_nothing() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = start(&world, "full", "false")?;
    // One chunk of the pool contains data since the program's start, so the pool is never empty.
    for mib in [32, 32, 32] {
        worker.call(&format!("alloc {mib}"))?;
    }
    worker.call("set 2 0")?;
    // The first offload starts the copier, which may be too late for this cycle.
    cycle(&world, &mut worker)?;
    filled_with_zeros_stored(&world, &mut worker)?;
    worker.call("set 1 0")?;
    let before = fills(&world)?;
    let (offloaded, _) = cycle(&world, &mut worker)?;
    assert_eq!(
        (offloaded.zero_bytes / MIB, fills(&world)? - before),
        (64, 0),
        "expected that half of the memory is zero and that no copier restores it"
    );
    // When the process again has enough contents to store, a copier must restore it after one or
    // two cycles.
    worker.call("set 1 7")?;
    cycle(&world, &mut worker)?;
    filled_with_zeros_stored(&world, &mut worker)
}

/// Offloads and restores the worker until a copier has restored it. On a busy machine the copier
/// may be too late several times.
fn filled_with_zeros_stored(world: &Testbed, worker: &mut Worker) -> Result<()> {
    let before = fills(world)?;
    for _ in 0..12 {
        let (offloaded, _) = cycle(world, worker)?;
        assert_eq!(
            offloaded.zero_bytes, 0,
            "zeros were left out although a copier can restore the process"
        );
        if fills(world)? > before {
            return Ok(());
        }
    }
    bail!("in 12 rounds the copier restored no process whose zeros are stored")
}
