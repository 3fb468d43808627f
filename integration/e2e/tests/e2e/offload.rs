//! Tests of the main function of Affinode, with every containerd release: a container becomes idle,
//! is offloaded, and is restored by a CUDA call.

use affinode_e2e::{
    image,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};

use crate::matrix::on_every_containerd;

/// Configuration in which a container is idle after a short time and offloaded immediately.
pub const EAGER: &str = r#"
[policy]
mode = "eager"
idle_timeout = "200ms"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
"#;

/// Configuration in which containers are offloaded only on request.
pub const MANUAL: &str = r#"
[policy]
mode = "manual"
idle_timeout = "200ms"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
"#;

on_every_containerd!(
    TestbedConfig::default().config(EAGER);
    goes_when_idle_and_comes_back_when_called,
    runs_unprivileged,
    survives_containerd_restart_while_offloaded,
);

const WORKER_MIB: u64 = 256;

/// Waits until `wanted` returns true for the VRAM in use on the node's GPU, and returns this VRAM
/// in bytes. The value comes from NVML, without the copier's VRAM.
pub fn wait_vram_used(world: &Testbed, wanted: impl Fn(u64) -> bool) -> Result<u64> {
    let mut last = None;
    until("the VRAM in use to change", || {
        let gpus = world.cli().ps()?.gpus;
        last = gpus.first().map(|gpu| gpu.vram_used_bytes.saturating_sub(gpu.copier_vram_bytes));
        Ok(last.filter(|used| wanted(*used)))
    })
    .with_context(|| format!("in use were {last:?}"))
}

/// Waits until NVML reports that 0 bytes of VRAM are in use.
pub fn wait_gpu_empty(world: &Testbed) -> Result<()> {
    wait_vram_used(world, |used| used == 0).map(|_| ())
}

fn goes_when_idle_and_comes_back_when_called(world: &Testbed) -> Result<()> {
    let mut worker = Worker::start(world, "worker", WORKER_MIB)?;
    let row = world.cli().wait_for_state("worker", "Offloaded")?;
    assert!(
        row.offloaded_bytes >= WORKER_MIB * MIB,
        "expected {WORKER_MIB} MiB offloaded: {row:?}"
    );
    assert_eq!(row.offloads, 1);
    // No VRAM is in use, not even for the context.
    wait_gpu_empty(world)?;
    world.cli().wait_for("worker", "to hold no VRAM", |row| row.vram_bytes == 0)?;

    assert!(worker.verify()?);
    world.cli().wait_for("worker", "to have one restore", |row| row.restores == 1)?;

    // Changes that the program makes between two cycles must be kept, too.
    worker.call("touch")?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    wait_gpu_empty(world)?;
    assert!(worker.verify()?);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

fn runs_unprivileged(world: &Testbed) -> Result<()> {
    let spec = Worker::spec("user", USUAL, 64).image(image::UNPRIVILEGED);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    world.cli().wait_for_state("user", "Offloaded")?;
    wait_gpu_empty(world)?;
    assert!(worker.verify()?);
    Ok(())
}

fn survives_containerd_restart_while_offloaded(world: &Testbed) -> Result<()> {
    let mut worker = Worker::start(world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Offloaded")?;
    world.containerd().stop(nix::sys::signal::Signal::SIGTERM)?;
    // The container must be restored without containerd, and again after containerd's restart.
    assert!(worker.verify()?);
    world.cli().wait_for_state("worker", "Offloaded")?;
    world.start_containerd()?;
    wait_gpu_empty(world)?;
    assert!(worker.verify()?);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Runs a program with and without an offload, and requires equal results.
#[test]
fn results_are_equal_with_and_without_offload() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut checksums = Vec::new();
    for offloaded in [false, true] {
        let mut worker = Worker::start(&world, "same", 64)?;
        for _ in 0..3 {
            worker.call("touch")?;
            if offloaded {
                world.cli().move_out("same")?;
                wait_gpu_empty(&world)?;
            }
        }
        let answer = worker.call("verify")?;
        assert_eq!(answer.ok, Some(true));
        checksums.push(answer.checksum.context("the reply to `verify` has no checksum")?);
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    assert_eq!(checksums[0], checksums[1]);
    Ok(())
}

/// Runs a thread that polls its stream repeatedly, as frameworks do. The polls must not count as
/// use of the GPU, and must return without a restore.
#[test]
fn polling_thread_neither_blocks_nor_wakes() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    for engine in ["checkpoint", "copy", "full"] {
        let spec = Worker::spec(engine, USUAL, 32).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        worker.call("poll 5")?;
        world.cli().wait_for_state(engine, "Offloaded")?;
        let before = worker.call("polled")?.polls.context("the reply to `polled` has no count")?;
        until("a hundred polls of the offloaded process", || {
            let polls =
                worker.call("polled")?.polls.context("the reply to `polled` has no count")?;
            Ok((polls >= before + 100).then_some(()))
        })?;
        let row = world.cli().known(engine)?;
        assert_eq!((row.state.as_str(), row.restores), ("Offloaded", 0), "{row:?}");
        assert!(worker.verify()?, "{engine}");
        assert_eq!(worker.call("polled")?.ok, Some(true), "{engine}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}
