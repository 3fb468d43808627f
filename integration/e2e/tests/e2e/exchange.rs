//! Two containers exchange their VRAM: one is restored while the other still copies out.

use std::fs;

use affinode_e2e::{
    cli::{ContainerRow, EventRow},
    gpu::Gpu,
    memory_cgroup,
    testbed::{MIB, Testbed, TestbedConfig},
    worker::Worker,
};
use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::recovery::shoot_controller;

/// Containers are offloaded only if another container waits for their VRAM.
const PRESSURE: &str = r#"
[policy]
mode = "pressure"
idle_timeout = "100ms"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
"#;
const RETURNS: &str = "returns";
const LEAVES: &str = "leaves";
const VRAM_MIB: u64 = 320;
/// The file for which a copy out waits after it has copied about half of the memory.
const GO_ON: &str = "/go-on";

/// Two containers on VRAM for one. The first is offloaded and was called. The other copies out for
/// it, and waits in the middle of the copy.
struct Exchange {
    world: Testbed,
    returns: Worker,
    leaves: Worker,
}

impl Exchange {
    fn begin() -> Result<Exchange> {
        let gpu = Gpu::Simulated { vram_bytes: 512 * MIB };
        let world = TestbedConfig::default().gpu(gpu).config(PRESSURE).world()?;
        let mut returns = Worker::start_as(&world, Worker::segments(RETURNS, "auto", VRAM_MIB))?;
        returns.wait_filled()?;
        world.cli().wait_for_state(RETURNS, "Idle")?;
        world.cli().move_out(RETURNS)?;
        // The memory has 80 pieces, with one copy each.
        let spec = Worker::segments(LEAVES, "auto", VRAM_MIB)
            .env("AFFINODE_SIM_HOLD_COPY", &format!("40:{GO_ON}"));
        let mut leaves = Worker::start_as(&world, spec)?;
        leaves.wait_filled()?;
        world.cli().wait_for_state(LEAVES, "Idle")?;
        returns.send("verify")?;
        // If the VRAM were granted only after the whole copy, this would never happen.
        let restores =
            |event: &EventRow| event.container.ends_with(RETURNS) && event.to == "Restoring";
        world.cli().wait_for_event("the restore beside the copy out", restores)?;
        assert_eq!(world.cli().known(LEAVES)?.state, "Offloading");
        Ok(Exchange { world, returns, leaves })
    }

    fn go_on(&self) -> Result<()> {
        let pid = self.leaves.running.pid(&self.world)?;
        fs::write(format!("/proc/{pid}/root{GO_ON}"), "").context("write the file to wait for")
    }
}

#[test]
fn restore_begins_while_the_other_copies_out() -> Result<()> {
    let mut exchange = Exchange::begin()?;
    exchange.go_on()?;
    assert_eq!(exchange.returns.expect("verify")?.ok, Some(true));
    exchange.world.cli().wait_for_state(LEAVES, "Offloaded")?;
    assert!(exchange.leaves.verify()?);
    assert!(exchange.returns.verify()?);
    Ok(())
}

#[test]
fn restore_survives_death_of_the_other() -> Result<()> {
    let mut exchange = Exchange::begin()?;
    exchange.leaves.running.kill(&exchange.world)?;
    assert_eq!(exchange.returns.expect("verify")?.ok, Some(true));
    Ok(())
}

#[test]
fn exchange_survives_death_of_the_controller() -> Result<()> {
    let mut exchange = Exchange::begin()?;
    shoot_controller(&exchange.world)?;
    exchange.go_on()?;
    assert_eq!(exchange.returns.expect("verify")?.ok, Some(true));
    assert!(exchange.leaves.verify()?);
    assert!(exchange.returns.verify()?);
    Ok(())
}

/// The container that waits for VRAM is killed in the middle. The other one loses nothing.
#[test]
fn copy_out_survives_death_of_the_waiter() -> Result<()> {
    let mut exchange = Exchange::begin()?;
    let pid = exchange.returns.running.pid(&exchange.world)?;
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    exchange.go_on()?;
    exchange.world.cli().wait_for_state(LEAVES, "Offloaded")?;
    assert!(exchange.leaves.verify()?);
    Ok(())
}

/// Host memory that a container's process keeps for its next offload, in MiB.
fn kept_mib(row: &ContainerRow) -> u64 {
    row.processes.iter().map(|process| process.kept_bytes).sum::<u64>() / MIB
}

/// While two containers do not both fit on the GPU, the resident one prepares memory of the host pool
/// for its offload. It frees the memory when the other one has ended.
#[test]
fn contended_container_prefaults_host_pool() -> Result<()> {
    let name = "affinode-test-pool-prefault";
    let config = format!("{PRESSURE}[memory]\nhost_pool_cgroup = \"{name}\"\n");
    let gpu = Gpu::Simulated { vram_bytes: 512 * MIB };
    let world = TestbedConfig::default().gpu(gpu).config(&config).world()?;
    let mut returns = Worker::start_as(&world, Worker::segments(RETURNS, "auto", VRAM_MIB))?;
    returns.wait_filled()?;
    world.cli().wait_for_state(RETURNS, "Idle")?;
    world.cli().move_out(RETURNS)?;
    let mut leaves = Worker::start_as(&world, Worker::segments(LEAVES, "auto", VRAM_MIB))?;
    leaves.wait_filled()?;
    let is_ready = |row: &ContainerRow| kept_mib(row) >= VRAM_MIB;
    world.cli().wait_for(LEAVES, "to have memory for its offload", is_ready)?;
    let pool = memory_cgroup::at_root(name);
    assert!(memory_cgroup::used_bytes(&pool)? >= 2 * VRAM_MIB * MIB, "of the host pool");
    assert!(returns.verify()?);
    world.cli().wait_for_state(LEAVES, "Offloaded")?;
    assert!(leaves.verify()?, "the content is as before");
    world.cli().wait_for(LEAVES, "to have memory again", is_ready)?;
    returns.running.kill(&world)?;
    world.cli().wait_for(LEAVES, "to have freed it", |row| kept_mib(row) == 0)?;
    assert!(leaves.verify()?);
    Ok(())
}
