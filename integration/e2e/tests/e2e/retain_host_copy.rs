//! `retain_host_copy`: the copy in host memory stays after a return, and what has not changed by the
//! next time is not copied again.

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

/// Moves it out and home: MiB that were parked, and MiB that were not copied for that.
fn cycle(world: &Testbed, id: &str, worker: &mut Worker) -> Result<(u64, u64)> {
    world.cli().move_out(id)?;
    let away = process(world, id)?;
    worker.call("streamsync")?;
    world.cli().wait_resident(id)?;
    Ok((away.copied_out_bytes / MIB, away.unchanged_bytes / MIB))
}

#[test]
fn only_what_has_changed_is_copied_again() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let all = WORKER_MIB + MORE_MIB;
    for engine in ENGINES {
        let mut worker = start(&world, engine, engine, "true")?;
        worker.call(&format!("alloc {MORE_MIB}"))?;
        assert_eq!(cycle(&world, engine, &mut worker)?, (all, 0), "nothing is known at first");
        until("the copy to be kept", || {
            Ok((process(&world, engine)?.kept_bytes >= all * MIB).then_some(()))
        })?;
        assert_eq!(cycle(&world, engine, &mut worker)?, (all, all), "{engine}");
        for round in 0..2 {
            worker.call("touch")?;
            let (_, unchanged) = cycle(&world, engine, &mut worker)?;
            assert_eq!(unchanged, MORE_MIB, "{engine}, round {round}");
            assert!(worker.verify()?, "{engine}: what has changed was copied, round {round}");
        }
        assert_eq!(cycle(&world, engine, &mut worker)?, (all, all), "{engine}: changed by nobody");
        worker.call("free")?;
        // Whatever the addresses: the older keeps its place in the pool.
        assert_eq!(cycle(&world, engine, &mut worker)?, (WORKER_MIB, WORKER_MIB), "{engine}");
        assert!(worker.verify()?, "{engine}: after a part was freed");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

/// By default everything is copied each time, and after a larger pool had to be made.
#[test]
fn without_a_copy_that_is_kept_everything_is_copied_each_time() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = start(&world, "none", "full", "false")?;
    for _ in 0..2 {
        assert_eq!(cycle(&world, "none", &mut worker)?, (WORKER_MIB, 0));
    }
    let mut grows = start(&world, "grows", "full", "true")?;
    cycle(&world, "grows", &mut grows)?;
    grows.call(&format!("alloc {MORE_MIB}"))?;
    let all = WORKER_MIB + MORE_MIB;
    assert_eq!(cycle(&world, "grows", &mut grows)?, (all, 0), "a new pool holds nothing");
    assert_eq!(cycle(&world, "grows", &mut grows)?, (all, all));
    assert!(worker.verify()? && grows.verify()?);
    Ok(())
}

/// Some seconds after a return, whoever sees that its memory limit is far has kept all; who sees
/// no limit, and none that is not there, has kept the least.
#[test]
fn what_is_kept_stays_where_the_limit_is_seen_to_be_far() -> Result<()> {
    const LARGE_MIB: u64 = 1152;
    const MIN_MIB: u64 = 1024;
    let world = TestbedConfig::default().config(MANUAL).world()?;
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
    // The other one has looked before.
    until("what is kept to be given back", || {
        let kept = process(&world, "blind")?.kept_bytes;
        Ok((0 < kept && kept <= MIN_MIB * MIB).then_some(()))
    })?;
    assert_eq!(cycle(&world, "sees", &mut sees)?, (LARGE_MIB, LARGE_MIB));
    assert_eq!(cycle(&world, "blind", &mut blind)?, (LARGE_MIB, MIN_MIB));
    assert!(sees.verify()? && blind.verify()?);
    Ok(())
}
