//! Tests of content that moves on from the host pool to disk while its container is offloaded.

use affinode_e2e::{
    gpu::Gpu,
    memory_cgroup,
    testbed::{MIB, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use crate::{
    host_pool::{NAME, SmallContainer, VRAM_MIB},
    offload::EAGER,
    recovery::shoot_controller,
};

/// Starts a container whose limit is below its VRAM, on a node whose content moves to disk as soon as
/// a container is offloaded. `name` is the name of the host pool's cgroup in this test. Returns the
/// folder on disk too.
fn start(engine: &str, name: &str, max_mib: u64) -> Result<(SmallContainer, TempDir)> {
    let disk = tempfile::tempdir_in("/var/tmp")?;
    let settings = format!(
        "disk_folder = \"{}\"\ndisk_max_mib = {max_mib}\n[[policy.namespace]]\nname = \
         \"default\"\ndisk_after = \"1ms\"",
        disk.path().display()
    );
    Ok((SmallContainer::start(engine, name, &settings)?, disk))
}

fn disk_bytes(small: &SmallContainer) -> Result<u64> {
    Ok(small.world.cli().known(NAME)?.disk_bytes)
}

/// Waits until the controller shows that all content is on disk.
fn wait_shown(small: &SmallContainer) -> Result<()> {
    until("the content to be on disk", || Ok((disk_bytes(small)? >= VRAM_MIB * MIB).then_some(())))
}

fn content_returns_from_disk(engine: &str) -> Result<()> {
    let (mut small, _disk) = start(engine, &format!("affinode-test-disk-{engine}"), 4096)?;
    small.offload()?;
    wait_shown(&small)?;
    small.wait_pool_empty()?;
    assert!(small.worker.verify()?, "{engine}");
    until("no content to be on disk", || Ok((disk_bytes(&small)? == 0).then_some(())))?;
    small.offload()?;
    assert!(small.worker.verify()?, "{engine}, again");
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
    let (mut small, _disk) = start("auto", "affinode-test-disk-ends", 4096)?;
    small.offload()?;
    wait_shown(&small)?;
    small.wait_pool_empty()?;
    kill(small.host_pool_pid()?, Signal::SIGKILL)?;
    shoot_controller(&small.world)?;
    small.world.cli().wait_for_state(NAME, "Offloaded")?;
    // A new controller shows it too.
    wait_shown(&small)?;
    assert!(small.worker.verify()?, "with another controller");
    Ok(())
}

/// The rest of the content stays in host memory, and the container returns as before.
#[test]
fn full_disk_keeps_content_in_memory() -> Result<()> {
    let (mut small, _disk) = start("auto", "affinode-test-disk-full", 200)?;
    small.offload()?;
    until("the failure", || {
        let events = small.world.cli().events()?;
        Ok(events.iter().any(|event| event.kind == "disk-failed").then_some(()))
    })?;
    assert!(disk_bytes(&small)? < VRAM_MIB * MIB);
    assert!(small.pool_bytes()? > 200 * MIB);
    assert!(small.worker.verify()?);
    Ok(())
}

/// The host pool has room for the content of one container, and the containers' memory limit for
/// none. The other container is idle on the GPU and cannot be offloaded, so the waiting one gets no
/// turn until its own content has moved to disk. They take turns in this way.
#[test]
fn content_of_a_waiter_moves_if_memory_is_full() -> Result<()> {
    const ROOM_MIB: u64 = 400;
    let percent_mib = memory_cgroup::node_mib()? / 100;
    let percent = 1_280_u64.div_ceil(percent_mib);
    let vram_mib = percent * percent_mib * 4 / 5;
    let disk = tempfile::tempdir_in("/var/tmp")?;
    let config = format!(
        "{EAGER}\n[memory]\ndriver_overhead_mib = 64\nhost_pool_cgroup = \
         \"affinode-test-disk-waits\"\nhost_pool_percent = {percent}\ndisk_folder = \"{}\"\n",
        disk.path().display()
    );
    let gpu = Gpu::Simulated { vram_bytes: vram_mib * MIB * 8 / 5 };
    let world = TestbedConfig::default().gpu(gpu).config(&config).world()?;
    let spec = |id| Worker::spec(id, USUAL, vram_mib).annotation("affinode.io/engine", "auto");
    let mut alpha = Worker::start_as(&world, spec("alpha"))?;
    alpha.wait_filled()?;
    world.cli().wait_for_state("alpha", "Offloaded")?;
    let folder = memory_cgroup::folder(&world)?;
    let limit_bytes = memory_cgroup::used_bytes(&folder)? + ROOM_MIB * MIB;
    memory_cgroup::set_limit(&folder, Some(limit_bytes))?;
    let mut beta = Worker::start_as(&world, spec("beta"))?;
    beta.wait_filled()?;
    assert!(alpha.verify()? && beta.verify()?);
    assert!(alpha.verify()?, "its content moves to disk again");
    let events = world.cli().events()?;
    let stored: Vec<&str> = events
        .iter()
        .filter(|event| event.kind == "stored-on-disk")
        .map(|event| event.container.as_str())
        .collect();
    let is_stored = |name: &str| stored.iter().any(|container| container.ends_with(name));
    assert!(is_stored("alpha") && is_stored("beta"), "{stored:?}");
    Ok(())
}
