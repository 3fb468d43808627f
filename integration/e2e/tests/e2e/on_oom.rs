//! Tests of allocations for which free VRAM does not suffice.

use affinode_e2e::{
    container::Spec,
    gpu::Gpu,
    suite,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use crate::offload::EAGER;

const VRAM_MIB: u64 = 512;
const OUT_OF_MEMORY: i32 = 2;

/// Creates a testbed in which a container is offloaded only if another container needs VRAM.
fn world() -> Result<Testbed> {
    let config = EAGER.replace("eager", "pressure");
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB })
        .config(&config)
        .world()
}

fn waiting(id: &str, mib: u64) -> Spec {
    Worker::spec(id, USUAL, mib).annotation("affinode.io/on-oom", "wait")
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn reasons(world: &Testbed, of: &str) -> Result<Vec<String>> {
    let events = world.cli().events()?;
    let own = events.into_iter().filter(|e| e.kind == "allocation" && e.container.contains(of));
    Ok(own.map(|event| event.reason).collect())
}

/// Waits until the container has had events with these reasons, in this order. A wait is necessary
/// because the controller publishes an event slightly after its cause.
fn wait_for_reasons(world: &Testbed, of: &str, wanted: &[&str]) -> Result<()> {
    let mut last = Vec::new();
    until("the events of allocations", || {
        last = reasons(world, of)?;
        Ok((last == wanted).then_some(()))
    })
    .with_context(|| format!("expected the events {wanted:?}, got {last:?}"))
}

#[test]
fn idle_neighbour_is_evicted_for_allocation() -> Result<()> {
    let world = world()?;
    let mut idle = start(&world, Worker::spec("idle", USUAL, 320))?;
    // First the creation of the container's context waits for VRAM, then the container's first
    // allocation.
    let mut newcomer = start(&world, waiting("newcomer", 300))?;
    world.cli().wait_for_state("idle", "Offloaded")?;
    assert!(newcomer.verify()?);
    wait_for_reasons(&world, "newcomer", &["allocation-waits", "room-found"])?;
    assert!(idle.verify()?);
    assert!(newcomer.verify()?);
    Ok(())
}

#[test]
fn without_annotation_allocation_fails() -> Result<()> {
    let world = world()?;
    let mut idle = start(&world, Worker::spec("idle", USUAL, 320))?;
    let mut other = start(&world, Worker::spec("other", USUAL, 64))?;
    assert_eq!(other.ask("alloc 300")?.result, OUT_OF_MEMORY);
    assert!(idle.verify()?);
    assert_eq!(world.cli().container("idle")?.map(|row| row.offloads), Some(0));
    Ok(())
}

#[test]
fn oversized_allocation_fails_waiting_times_out() -> Result<()> {
    let world = world()?;
    let mut busy = start(&world, waiting("busy", 300).busy())?;
    let spec = waiting("short", 64).annotation("affinode.io/on-oom-timeout", "1s");
    let mut short = start(&world, spec)?;
    assert_eq!(short.ask("alloc 600")?.result, OUT_OF_MEMORY);
    wait_for_reasons(&world, "short", &["no-room"])?;
    assert_eq!(short.ask("alloc 300")?.result, OUT_OF_MEMORY);
    wait_for_reasons(&world, "short", &["no-room", "allocation-waits", "no-room-in-time"])?;
    // The process continues, and the container in use was not offloaded.
    assert!(short.verify()?);
    assert_eq!(world.cli().container("busy")?.map(|row| row.offloads), Some(0));
    busy.expect("period").map(|_| ())
}

#[test]
fn waiting_allocation_is_shown_and_can_end() -> Result<()> {
    let world = world()?;
    let busy = start(&world, Worker::spec("busy", USUAL, 300).busy())?;
    let mut waiter = start(&world, waiting("waiter", 64))?;
    waiter.send("alloc 300")?;
    until("the reason of the waiting container", || {
        let row = world.cli().container("waiter")?;
        Ok(row.filter(|row| row.state == "Active" && row.reason == "allocation-waits"))
    })?;
    assert!(!waiter.has_answer()?);
    waiter.running.kill(&world)?;
    waiter.running.delete(&world)?;
    // The controller must forget the ended process, so that the next process is served.
    let mut next = start(&world, waiting("next", 64))?;
    next.send("alloc 300")?;
    busy.running.kill(&world)?;
    assert_eq!(next.expect("alloc")?.result, 0);
    Ok(())
}

#[test]
fn two_that_each_need_the_others_room_take_turns() -> Result<()> {
    let world = world()?;
    let mut alpha = start(&world, waiting("alpha", 180))?;
    let mut beta = start(&world, waiting("beta", 180))?;
    alpha.send("alloc 180")?;
    beta.send("alloc 180")?;
    alpha.expect("alloc")?;
    beta.expect("alloc")?;
    assert!(alpha.verify()? && beta.verify()?);
    Ok(())
}

#[test]
fn controller_restart_keeps_allocation_waiting() -> Result<()> {
    let world = world()?;
    let busy = start(&world, Worker::spec("busy", USUAL, 300).busy())?;
    let mut waiter = start(&world, waiting("waiter", 64))?;
    waiter.send("alloc 300")?;
    let waits = |world: &Testbed| -> Result<_> {
        let row = world.cli().container("waiter")?;
        Ok(row.filter(|row| row.reason == "allocation-waits"))
    };
    until("the wait to be shown", || waits(&world))?;
    let old = world.controller()?.context("no controller is running")?.pid;
    kill(old, Signal::SIGKILL)?;
    until("the next controller to show the wait", || {
        let new = world.controller()?.map(|process| process.pid);
        Ok(if new == Some(old) { None } else { waits(&world).unwrap_or_default() })
    })?;
    busy.running.kill(&world)?;
    assert_eq!(waiter.expect("alloc")?.result, 0);
    Ok(())
}

/// Runs the oversubscription scenario of the suite for GPU machines. All bursts and allocations
/// must succeed.
#[test]
fn newcomer_and_three_tenants_all_proceed() -> Result<()> {
    let config = EAGER.replace("200ms", "500ms");
    let world = TestbedConfig::default().config(&config).world()?;
    let mut rows = suite::Rows::default();
    suite::oversubscribed(&world, &mut rows)?;
    assert_eq!(rows.missed(), Vec::<String>::new());
    Ok(())
}
