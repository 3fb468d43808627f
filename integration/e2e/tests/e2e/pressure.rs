//! Tests in which containers need more VRAM than the GPU has.

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::Result;

use crate::offload::EAGER;

const VRAM_MIB: u64 = 512;
/// VRAM of a container, in MiB. Two such containers do not fit on the GPU.
const EACH_MIB: u64 = 320;

fn small_world(config: &str) -> Result<Testbed> {
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB })
        .config(config)
        .world()
}

#[test]
fn two_that_do_not_fit_take_turns() -> Result<()> {
    let world = small_world(EAGER)?;
    let mut alpha = Worker::start(&world, "alpha", EACH_MIB)?;
    world.cli().wait_for_state("alpha", "Offloaded")?;
    let mut beta = Worker::start(&world, "beta", EACH_MIB)?;
    for _ in 0..3 {
        alpha.call("touch")?;
        assert!(alpha.verify()?);
        beta.call("touch")?;
        assert!(beta.verify()?);
    }
    Ok(())
}

/// Wakes a container while another container uses the VRAM. The woken container must show that it
/// waits for VRAM, and must be restored with unchanged contents after the other container has
/// ended.
#[test]
fn a_return_waits_for_room() -> Result<()> {
    let world = small_world(EAGER)?;
    let mut alpha = Worker::start(&world, "alpha", EACH_MIB)?;
    world.cli().wait_for_state("alpha", "Offloaded")?;
    let spec = Worker::spec("busy", "dlopen_dlsym", EACH_MIB).busy();
    let mut busy = Worker::start_as(&world, spec)?;
    busy.wait_filled()?;
    alpha.send("verify")?;
    // While the controller checks with NVML that the VRAM is free, the shown reason is still the
    // call.
    until("alpha to wait for VRAM", || {
        let row = world.cli().container("alpha")?;
        Ok(row.filter(|row| row.state == "Queued" && row.reason == "waiting-for-vram"))
    })?;
    assert!(!alpha.has_answer()?);
    // The resident container can read that another container waits for its VRAM.
    let read = ["/bin/cat", "/.affinode/run/pressure"];
    until("the notice of pressure in the container", || {
        Ok(busy.running.exec(&world, &read)?.contains("GPU-").then_some(()))
    })?;
    busy.running.kill(&world)?;
    let answer = alpha.expect("verify")?;
    assert_eq!(answer.ok, Some(true));
    until("the notice of pressure to be removed", || {
        Ok((!alpha.running.exec(&world, &read)?.contains("GPU-")).then_some(()))
    })?;
    let told = world.cli().events()?.into_iter().filter(|event| event.kind == "pressure").count();
    assert!(told >= 2, "events report the pressure: {told}");
    Ok(())
}

/// Checks mode `pressure`. An idle container must stay resident while no other container needs
/// VRAM. It must be offloaded when another container needs VRAM.
#[test]
fn an_idle_neighbour_makes_room() -> Result<()> {
    let world = small_world(&EAGER.replace("eager", "pressure"))?;
    let mut alpha = Worker::start(&world, "alpha", EACH_MIB)?;
    until("alpha to be idle", || {
        let row = world.cli().container("alpha")?;
        Ok(row.filter(|row| row.state == "Idle" && row.reason == "no-pressure"))
    })?;
    world.cli().move_out("alpha")?;
    let mut beta = Worker::start(&world, "beta", EACH_MIB)?;
    // As soon as beta is idle, alpha must be restored into beta's VRAM.
    assert!(alpha.verify()?);
    world.cli().wait_for_state("beta", "Offloaded")?;
    assert!(beta.verify()?);
    assert!(alpha.verify()?);
    Ok(())
}
