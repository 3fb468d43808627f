//! Tests of `retain_host_copy`, which keeps the copy in host memory after a restore. The next
//! offload does not copy unchanged contents again.

use affinode_e2e::{
    cli::ProcessRow,
    container::SEES_ITS_CGROUP,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::offload::MANUAL;

const ENGINES: [&str; 2] = ["copy", "full"];
const WORKER_MIB: u64 = 96;
const MORE_MIB: u64 = 64;

fn start(world: &Testbed, id: &str, engine: &str, keep: &str) -> Result<Worker> {
    let spec = Worker::spec(id, USUAL, WORKER_MIB)
        .annotation("affinode.io/engine", engine)
        .annotation("affinode.io/retain-host-copy", keep);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn process(world: &Testbed, id: &str) -> Result<ProcessRow> {
    Ok(world.cli().registered(id)?.process()?.clone())
}

/// Offloads and restores the worker. Returns the size of all contents of the offload, and the size
/// of the unchanged contents that were not copied again, both in MiB.
fn cycle(world: &Testbed, id: &str, worker: &mut Worker) -> Result<(u64, u64)> {
    world.cli().move_out(id)?;
    let offloaded = process(world, id)?;
    worker.call("streamsync")?;
    world.cli().wait_resident(id)?;
    Ok((offloaded.copied_out_bytes / MIB, offloaded.unchanged_bytes / MIB))
}

#[test]
fn only_what_has_changed_is_copied_again() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let all = WORKER_MIB + MORE_MIB;
    for engine in ENGINES {
        let mut worker = start(&world, engine, engine, "true")?;
        worker.call(&format!("alloc {MORE_MIB}"))?;
        assert_eq!(
            cycle(&world, engine, &mut worker)?,
            (all, 0),
            "{engine}: the first offload did not copy all contents"
        );
        until("the copy to be retained", || {
            Ok((process(&world, engine)?.kept_bytes >= all * MIB).then_some(()))
        })?;
        assert_eq!(cycle(&world, engine, &mut worker)?, (all, all), "{engine}");
        for round in 0..2 {
            worker.call("touch")?;
            let (_, unchanged) = cycle(&world, engine, &mut worker)?;
            assert_eq!(unchanged, MORE_MIB, "{engine}, round {round}");
            assert!(worker.verify()?, "{engine}: changed contents were lost, round {round}");
        }
        assert_eq!(
            cycle(&world, engine, &mut worker)?,
            (all, all),
            "{engine}: unchanged contents were copied again"
        );
        worker.call("free")?;
        // The older allocation keeps its position in the staging buffer, whatever the addresses
        // are.
        assert_eq!(cycle(&world, engine, &mut worker)?, (WORKER_MIB, WORKER_MIB), "{engine}");
        assert!(worker.verify()?, "{engine}: the memory has changed after a part was freed");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

/// Checks the default, without `retain_host_copy`. Each offload must copy all contents, also after
/// the staging buffer (the host memory for the copy) has grown.
#[test]
fn without_retained_copy_all_is_copied() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = start(&world, "none", "full", "false")?;
    for _ in 0..2 {
        assert_eq!(cycle(&world, "none", &mut worker)?, (WORKER_MIB, 0));
    }
    let mut grows = start(&world, "grows", "full", "true")?;
    cycle(&world, "grows", &mut grows)?;
    grows.call(&format!("alloc {MORE_MIB}"))?;
    let all = WORKER_MIB + MORE_MIB;
    assert_eq!(
        cycle(&world, "grows", &mut grows)?,
        (all, 0),
        "the offload after the allocation did not copy all contents"
    );
    assert_eq!(cycle(&world, "grows", &mut grows)?, (all, all));
    assert!(worker.verify()? && grows.verify()?);
    Ok(())
}

/// Checks how much of a host copy is retained some seconds after a restore. A process whose memory
/// use is far below its limit must retain the whole copy. A process that cannot see a limit must
/// retain only the minimum. The node has no host pool, so the copies are charged to the containers.
#[test]
fn retained_copy_stays_far_from_the_limit() -> Result<()> {
    const LARGE_MIB: u64 = 1152;
    const MIN_MIB: u64 = 1024;
    let config = format!("{MANUAL}[memory]\nhost_pool_percent = 0\n");
    let world = TestbedConfig::default().config(&config).world()?;
    let spec = |id| {
        Worker::spec(id, USUAL, LARGE_MIB)
            .annotation("affinode.io/engine", "copy")
            .annotation("affinode.io/retain-host-copy", "true")
    };
    let mut sees = Worker::start_as(&world, spec("sees").flags(&SEES_ITS_CGROUP))?;
    sees.wait_filled()?;
    cycle(&world, "sees", &mut sees)?;
    let mut blind = Worker::start_as(&world, spec("blind"))?;
    blind.wait_filled()?;
    cycle(&world, "blind", &mut blind)?;
    // `sees` was restored first, so at this time it has already decided how much of the copy to
    // retain.
    until("the retained copy to be freed", || {
        let kept = process(&world, "blind")?.kept_bytes;
        Ok((0 < kept && kept <= MIN_MIB * MIB).then_some(()))
    })?;
    assert_eq!(cycle(&world, "sees", &mut sees)?, (LARGE_MIB, LARGE_MIB));
    assert_eq!(cycle(&world, "blind", &mut blind)?, (LARGE_MIB, MIN_MIB));
    assert!(sees.verify()? && blind.verify()?);
    Ok(())
}
