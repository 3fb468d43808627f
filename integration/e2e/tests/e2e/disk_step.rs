//! Tests of content that moves on from the host pool to disk while its container is offloaded.

use affinode_e2e::{testbed::MIB, wait::until};
use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use crate::{
    host_pool::{NAME, SmallContainer, VRAM_MIB},
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
