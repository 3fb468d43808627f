//! Tests of VRAM limits that the driver itself enforces for the cgroup of a container, as driver 615
//! does. The simulated driver stands in for it.

use std::{fs, path::Path};

use affinode_e2e::{
    cli::ContainerRow,
    container::Spec,
    gpu::{Gpu, cgroup_limits},
    own_cgroup::{self, Dodger},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::{offload::MANUAL, recovery::shoot_controller};

const VRAM_MIB: u64 = 1024;
const LIMIT_MIB: u64 = 256;
const OUT_OF_MEMORY: i32 = 2;
const ENGINES: [&str; 3] = ["checkpoint", "copy", "full"];

fn config() -> TestbedConfig {
    TestbedConfig::default().gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB }).config(MANUAL)
}

/// A configuration in which each container has the limit.
fn config_with_limit() -> TestbedConfig {
    let policy = format!("[policy]\nvram_limit = \"{LIMIT_MIB}Mi\"\n");
    config().config(&MANUAL.replace("[policy]\n", &policy)).sim_options(&["--memory-limits"])
}

fn world() -> Result<Testbed> {
    config().sim_options(&["--memory-limits"]).world()
}

fn limited(id: &str) -> Spec {
    let limit = format!("{LIMIT_MIB}Mi");
    Worker::spec(id, USUAL, 64).annotation("affinode.io/vram-limit", &limit)
}

/// Waits until the driver has this limit for a cgroup, in MiB, or no limit.
fn wait_limit(world: &Testbed, cgroup: &Path, mib: Option<u64>) -> Result<()> {
    until(&format!("the driver's limit {mib:?}"), || {
        let limits = cgroup_limits(world.dir())?;
        let of = limits.iter().find(|limit| limit.cgroup == cgroup);
        let found = of.map(|limit| (limit.gpu, limit.soft_bytes, limit.hard_bytes));
        Ok((found == mib.map(|mib| (0, 0, mib * MIB))).then_some(()))
    })
}

#[test]
fn driver_refuses_what_dodges_the_library() -> Result<()> {
    let world = world()?;
    let (mut worker, cgroup) = own_cgroup::start(&world, limited("limited"))?;
    worker.wait_filled()?;
    wait_limit(&world, &cgroup, Some(LIMIT_MIB))?;
    let by_both = |row: &ContainerRow| {
        row.vram_limit_enforced_by == "library and driver" && row.warnings.is_empty()
    };
    world.cli().wait_for("limited", "to be limited by the driver", by_both)?;
    let mut dodger = Dodger::start(&world, &cgroup, 64)?;
    assert_eq!(dodger.ask("alloc 100")?.result, OUT_OF_MEMORY);
    assert_eq!(dodger.ask("alloc 50")?.result, 0, "the limit is not reached yet");
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn changed_limit_reaches_the_driver() -> Result<()> {
    let world = world()?;
    let (mut worker, cgroup) = own_cgroup::start(&world, Worker::spec("changes", USUAL, 64))?;
    worker.wait_filled()?;
    for mib in [Some(LIMIT_MIB), Some(2 * LIMIT_MIB), None, Some(LIMIT_MIB)] {
        let change = mib.map(|mib| format!("vram_limit={mib}Mi"));
        match &change {
            Some(change) => world.cli().run(&["policy", "set", change])?,
            None => world.cli().run(&["policy", "unset", "vram_limit"])?,
        };
        wait_limit(&world, &cgroup, mib)?;
    }
    assert!(worker.verify()?);
    worker.running.kill(&world)?;
    worker.running.delete(&world)?;
    wait_limit(&world, &cgroup, None)
}

/// Removes the limit from the configuration while the controller is replaced. The next controller
/// must remove the limit that the first one has set.
#[test]
fn next_controller_removes_the_limit() -> Result<()> {
    let world = config_with_limit().world()?;
    let (mut worker, cgroup) = own_cgroup::start(&world, Worker::spec("worker", USUAL, 64))?;
    worker.wait_filled()?;
    wait_limit(&world, &cgroup, Some(LIMIT_MIB))?;
    fs::write(world.dir().join("affinode/config.toml"), MANUAL)?;
    shoot_controller(&world)?;
    wait_limit(&world, &cgroup, None)?;
    assert!(worker.verify()?);
    Ok(())
}

#[test]
fn old_driver_leaves_it_to_the_library() -> Result<()> {
    let world = config().world()?;
    let (mut worker, cgroup) = own_cgroup::start(&world, limited("limited"))?;
    worker.wait_filled()?;
    assert_eq!(worker.ask("alloc 250")?.result, OUT_OF_MEMORY);
    let row = world.cli().known("limited")?;
    assert_eq!((row.vram_limit_enforced_by.as_str(), row.warnings.len()), ("library", 0));
    let mut dodger = Dodger::start(&world, &cgroup, 64)?;
    assert_eq!(dodger.ask("alloc 250")?.result, 0);
    assert!(worker.verify()? && cgroup_limits(world.dir())?.is_empty());
    Ok(())
}

/// Offloads a container that is at its limit. While it is offloaded, another program takes VRAM in
/// its cgroup. The driver must not refuse the restore, and must enforce the limit after it.
#[test]
fn driver_refuses_no_restore_at_the_limit() -> Result<()> {
    let world = world()?;
    for engine in ENGINES {
        let spec = limited(engine).annotation("affinode.io/engine", engine);
        let (mut worker, cgroup) = own_cgroup::start(&world, spec)?;
        worker.wait_filled()?;
        wait_limit(&world, &cgroup, Some(LIMIT_MIB))?;
        while worker.ask("alloc 16 -")?.result == 0 {}
        world.cli().move_out(engine)?;
        worker.call("sync")?;
        assert!(worker.verify()?, "{engine}: alone in its cgroup");
        world.cli().move_out(engine)?;
        wait_limit(&world, &cgroup, None)?;
        let dodger = Dodger::start(&world, &cgroup, 64)?;
        worker.call("sync")?;
        assert!(worker.verify()?, "{engine}: beside another program");
        wait_limit(&world, &cgroup, Some(LIMIT_MIB))?;
        let more = Dodger::start(&world, &cgroup, LIMIT_MIB);
        assert!(more.is_err(), "{engine}: the limit does not hold after the restore");
        drop(dodger);
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}
