//! Tests of the host pool: containers whose memory limit is below their VRAM.

use std::path::PathBuf;

use affinode_e2e::{
    memory_cgroup, oom, processes,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::recovery::shoot_controller;

pub const VRAM_MIB: u64 = 512;
/// Host memory in MiB that the container may still use. It suffices for the page tables of its
/// memory file and for the driver's own need, but not for the content of its VRAM.
const ROOM_MIB: u64 = 256;
pub const NAME: &str = "small";

/// A container whose memory limit is below its VRAM, and the node's host pool.
pub struct SmallContainer {
    pub world: Testbed,
    pub worker: Worker,
    /// Folder of the memory cgroup that limits the container.
    limited: PathBuf,
    /// Folder of the host pool's memory cgroup.
    pool: PathBuf,
}

impl SmallContainer {
    /// Starts the container. `name` is the name of the host pool's cgroup in this test.
    pub fn start(engine: &str, name: &str, settings: &str) -> Result<SmallContainer> {
        SmallContainer::start_with(VRAM_MIB, engine, name, settings)
    }

    /// Starts the container with this amount of VRAM, in MiB.
    fn start_with(
        vram_mib: u64,
        engine: &str,
        name: &str,
        settings: &str,
    ) -> Result<SmallContainer> {
        let config = format!(
            "[policy]\nmode = \"manual\"\n[timing]\nsample_interval = \"50ms\"\n[memory]\n\
             driver_overhead_mib = 64\nhost_pool_cgroup = \"{name}\"\n{settings}\n"
        );
        let world = TestbedConfig::default().config(&config).world()?;
        let limited = memory_cgroup::folder(&world)?;
        let spec = Worker::spec(NAME, USUAL, vram_mib).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        world.cli().wait_for(NAME, "to have registered", |row| !row.processes.is_empty())?;
        let limit_bytes = memory_cgroup::used_bytes(&limited)? + ROOM_MIB * MIB;
        memory_cgroup::set_limit(&limited, Some(limit_bytes))?;
        Ok(SmallContainer { world, worker, limited, pool: memory_cgroup::at_root(name) })
    }

    pub fn pool_bytes(&self) -> Result<u64> {
        memory_cgroup::used_bytes(&self.pool)
    }

    /// Host memory that the container's process keeps for its next offload, in bytes.
    fn kept_bytes(&self) -> Result<u64> {
        let row = self.world.cli().known(NAME)?;
        Ok(row.processes.first().map_or(0, |process| process.kept_bytes))
    }

    pub fn offload(&self) -> Result<()> {
        let said = self.world.cli().offload(NAME)?;
        assert!(said.done, "{said:?}");
        Ok(())
    }

    /// Waits until the host pool has no content.
    pub fn wait_pool_empty(&self) -> Result<()> {
        until("the host pool to be empty", || Ok((self.pool_bytes()? < 64 * MIB).then_some(())))
    }

    pub fn host_pool_pid(&self) -> Result<Pid> {
        let controller = self.world.controller()?.context("no controller is running")?;
        let children = processes::named("host-pool", controller.pid.as_raw())?;
        Ok(children.first().context("the controller has no host pool")?.pid)
    }
}

fn leaves_and_returns(engine: &str) -> Result<()> {
    let mut small = SmallContainer::start(engine, &format!("affinode-test-pool-{engine}"), "")?;
    for round in 0..3 {
        let before_bytes = memory_cgroup::used_bytes(&small.limited)?;
        small.offload()?;
        assert!(small.pool_bytes()? >= VRAM_MIB * MIB, "{engine} {round}: content is in the pool");
        let more_bytes = memory_cgroup::used_bytes(&small.limited)?.saturating_sub(before_bytes);
        assert!(more_bytes < ROOM_MIB * MIB / 2, "{engine} {round}: {more_bytes} bytes more");
        assert!(small.worker.verify()?, "{engine} {round}");
        small.wait_pool_empty()?;
    }
    assert_eq!(oom::kills(&small.limited), Some(0));
    Ok(())
}

#[test]
fn limit_below_vram_permits_auto() -> Result<()> {
    leaves_and_returns("auto")
}

#[test]
fn limit_below_vram_permits_full() -> Result<()> {
    leaves_and_returns("full")
}

/// The content must outlive the host pool and the controller, which may end at any moment.
#[test]
fn content_outlives_pool_and_controller() -> Result<()> {
    let mut small = SmallContainer::start("auto", "affinode-test-pool-ends", "")?;
    small.offload()?;
    kill(small.host_pool_pid()?, Signal::SIGKILL)?;
    assert!(small.worker.verify()?, "without the host pool");
    small.wait_pool_empty()?;
    // The host pool is started again, though not at once.
    until("the next offload", || Ok(small.world.cli().offload(NAME)?.done.then_some(())))?;
    shoot_controller(&small.world)?;
    small.world.cli().wait_for_state(NAME, "Offloaded")?;
    assert!(small.pool_bytes()? >= VRAM_MIB * MIB, "a new controller counts what is in the pool");
    assert!(small.worker.verify()?, "with another controller");
    small.wait_pool_empty()?;
    small.offload()?;
    assert!(small.worker.verify()?);
    Ok(())
}

/// A copy that is retained after a restore stays in the host pool. It must not keep the container
/// from its next offload, for which the container's own limit has no room.
#[test]
fn retained_copy_permits_the_next_offload() -> Result<()> {
    let settings = "[[policy.namespace]]\nname = \"default\"\nretain_host_copy = true";
    let mut small = SmallContainer::start("auto", "affinode-test-pool-kept", settings)?;
    small.offload()?;
    assert!(small.worker.verify()?);
    small.offload()?;
    assert!(small.pool_bytes()? >= VRAM_MIB * MIB, "the second copy is in the pool, too");
    assert!(small.worker.verify()?);
    Ok(())
}

#[test]
fn memory_of_an_ended_container_is_free() -> Result<()> {
    let small = SmallContainer::start("auto", "affinode-test-pool-dies", "")?;
    small.offload()?;
    assert!(small.pool_bytes()? >= VRAM_MIB * MIB);
    small.worker.running.kill(&small.world)?;
    small.wait_pool_empty()
}

#[test]
fn container_without_room_in_the_pool_stays() -> Result<()> {
    let mut small =
        SmallContainer::start("auto", "affinode-test-pool-none", "host_pool_percent = 0")?;
    let said = small.world.cli().offload(NAME)?;
    assert_eq!((said.done, said.reason.as_str()), (false, "cgroup-memory"), "{said:?}");
    assert!(small.worker.verify()?);
    Ok(())
}

/// Starts a container that will retain its copy in a host pool with room for one copy. Returns its
/// VRAM in MiB too.
fn retaining(name: &str) -> Result<(SmallContainer, u64)> {
    let percent_mib = memory_cgroup::node_mib()? / 100;
    let percent = (VRAM_MIB * 5 / 4).div_ceil(percent_mib);
    let vram_mib = percent * percent_mib * 4 / 5;
    let settings = format!(
        "host_pool_percent = {percent}\n[[policy.namespace]]\nname = \"default\"\n\
         retain_host_copy = true"
    );
    Ok((SmallContainer::start_with(vram_mib, "auto", name, &settings)?, vram_mib))
}

/// A resident container retains its copy, which fills the host pool, and its own limit has no room.
/// Its next offload must use the memory of this copy.
#[test]
fn retained_copy_in_a_full_pool_is_used_again() -> Result<()> {
    let (mut small, vram_mib) = retaining("affinode-test-pool-again")?;
    for _ in 0..3 {
        small.offload()?;
        assert!(small.worker.verify()?);
        until("the copy to be retained", || {
            Ok((small.kept_bytes()? >= vram_mib * MIB).then_some(()))
        })?;
    }
    Ok(())
}

/// A resident container retains its copy in a host pool that has room for one copy. When another
/// container is to be offloaded, the copy must be freed for it.
#[test]
fn retained_copy_gives_way_to_another() -> Result<()> {
    let (mut small, vram_mib) = retaining("affinode-test-pool-way")?;
    memory_cgroup::set_limit(&small.limited, None)?;
    let spec = Worker::spec("other", USUAL, vram_mib).annotation("affinode.io/engine", "auto");
    let mut other = Worker::start_as(&small.world, spec)?;
    other.wait_filled()?;
    small.world.cli().wait_for("other", "to have registered", |row| !row.processes.is_empty())?;
    let limit_bytes = memory_cgroup::used_bytes(&small.limited)? + ROOM_MIB * MIB;
    memory_cgroup::set_limit(&small.limited, Some(limit_bytes))?;
    small.offload()?;
    assert!(small.worker.verify()?);
    until("the copy to be retained", || Ok((small.kept_bytes()? >= vram_mib * MIB).then_some(())))?;
    let said = small.world.cli().offload("other")?;
    assert!(said.done, "{said:?}");
    assert_eq!(small.kept_bytes()?, 0, "the retained copy is gone");
    assert!(other.verify()? && small.worker.verify()?);
    Ok(())
}
