//! Tests of content that moves on from the host pool to disk while its container is offloaded.

use std::path::PathBuf;

use affinode_e2e::{
    memory_cgroup, processes,
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

const VRAM_MIB: u64 = 512;
/// Host memory in MiB that the container may still use. It does not suffice for its content.
const ROOM_MIB: u64 = 256;
const NAME: &str = "rests";

/// A container on a node whose content moves to disk as soon as it is offloaded.
struct RestingContainer {
    world: Testbed,
    worker: Worker,
    /// Folder of the host pool's memory cgroup.
    pool: PathBuf,
    _disk: tempfile::TempDir,
}

impl RestingContainer {
    /// Starts the container. `name` is the name of the host pool's cgroup in this test.
    fn start(engine: &str, name: &str, max_mib: u64) -> Result<RestingContainer> {
        let disk = tempfile::tempdir_in("/var/tmp")?;
        let config = format!(
            "[policy]\nmode = \"manual\"\n[timing]\nsample_interval = \"50ms\"\n[memory]\n\
             driver_overhead_mib = 64\nhost_pool_cgroup = \"{name}\"\ndisk_folder = \"{}\"\n\
             disk_max_mib = {max_mib}\n[[policy.namespace]]\nname = \"default\"\n\
             disk_after = \"1ms\"\n",
            disk.path().display()
        );
        let world = TestbedConfig::default().config(&config).world()?;
        let limited = memory_cgroup::folder(&world)?;
        let spec = Worker::spec(NAME, USUAL, VRAM_MIB).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        world.cli().wait_for(NAME, "to have registered", |row| !row.processes.is_empty())?;
        // With `full`, only a container whose limit is too low uses the host pool.
        let limit_bytes = memory_cgroup::used_bytes(&limited)? + ROOM_MIB * MIB;
        memory_cgroup::set_limit(&limited, Some(limit_bytes))?;
        Ok(RestingContainer { world, worker, pool: memory_cgroup::at_root(name), _disk: disk })
    }

    fn offload(&self) -> Result<()> {
        let said = self.world.cli().offload(NAME)?;
        assert!(said.done, "{said:?}");
        Ok(())
    }

    fn disk_bytes(&self) -> Result<u64> {
        Ok(self.world.cli().known(NAME)?.disk_bytes)
    }

    fn pool_bytes(&self) -> Result<u64> {
        memory_cgroup::used_bytes(&self.pool)
    }

    /// Waits until all content is on disk, and its memory is free.
    fn wait_stored(&self) -> Result<()> {
        until("the content to be on disk", || {
            Ok((self.disk_bytes()? >= VRAM_MIB * MIB).then_some(()))
        })?;
        until("the host pool to be empty", || Ok((self.pool_bytes()? < 64 * MIB).then_some(())))
    }

    fn host_pool_pid(&self) -> Result<Pid> {
        let controller = self.world.controller()?.context("no controller is running")?;
        let children = processes::named("host-pool", controller.pid.as_raw())?;
        Ok(children.first().context("the controller has no host pool")?.pid)
    }
}

fn content_returns_from_disk(engine: &str) -> Result<()> {
    let name = format!("affinode-test-disk-{engine}");
    let mut resting = RestingContainer::start(engine, &name, 4096)?;
    resting.offload()?;
    resting.wait_stored()?;
    assert!(resting.worker.verify()?, "{engine}");
    until("no content to be on disk", || Ok((resting.disk_bytes()? == 0).then_some(())))?;
    resting.offload()?;
    assert!(resting.worker.verify()?, "{engine}, again");
    Ok(())
}

#[test]
fn content_returns_from_disk_with_auto() -> Result<()> {
    content_returns_from_disk("auto")
}

#[test]
fn content_returns_from_disk_with_full() -> Result<()> {
    content_returns_from_disk("full")
}

/// The process has the file and the key, so it needs neither the host pool nor the controller.
#[test]
fn content_on_disk_outlives_pool_and_controller() -> Result<()> {
    let mut resting = RestingContainer::start("auto", "affinode-test-disk-ends", 4096)?;
    resting.offload()?;
    resting.wait_stored()?;
    kill(resting.host_pool_pid()?, Signal::SIGKILL)?;
    shoot_controller(&resting.world)?;
    resting.world.cli().wait_for_state(NAME, "Offloaded")?;
    until("a new controller to show what is on disk", || {
        Ok((resting.disk_bytes()? >= VRAM_MIB * MIB).then_some(()))
    })?;
    assert!(resting.worker.verify()?, "with another controller");
    Ok(())
}

/// The rest of the content stays in host memory, and the container returns as before.
#[test]
fn full_disk_keeps_content_in_memory() -> Result<()> {
    let mut resting = RestingContainer::start("auto", "affinode-test-disk-full", 200)?;
    resting.offload()?;
    until("the failure", || {
        let events = resting.world.cli().events()?;
        Ok(events.iter().any(|event| event.kind == "disk-failed").then_some(()))
    })?;
    assert!(resting.disk_bytes()? < VRAM_MIB * MIB);
    assert!(resting.pool_bytes()? > 200 * MIB);
    assert!(resting.worker.verify()?);
    Ok(())
}
