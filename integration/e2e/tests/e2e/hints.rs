//! Tests of the hints `idle` and `busy`, by which a program or an operator reports whether a
//! container is in use.

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::Result;

use crate::offload::EAGER;

/// Configuration in which a container without a hint is idle only after an hour.
const PATIENT: &str = r#"
[policy]
mode = "eager"
idle_timeout = "1h"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
"#;

fn says(world: &Testbed, worker: &Worker, word: &str) -> Result<()> {
    let script = format!("echo {word} > /.affinode/run/hint");
    worker.running.exec(world, &["/bin/sh", "-c", &script]).map(drop)
}

/// Writes the hint `idle` from a program in the container. The container must then be offloaded,
/// and the program's next call must restore it.
#[test]
fn idle_hint_offloads_until_the_next_call() -> Result<()> {
    let world = TestbedConfig::default().config(PATIENT).world()?;
    let mut worker = Worker::start(&world, "modest", 32)?;
    says(&world, &worker, "idle")?;
    world.cli().wait_for_state("modest", "Offloaded")?;
    world.cli().wait_for_event("the hint", |event| event.reason == "hinted-idle")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Gives the hint `busy` for a container that makes no calls. The container must stay resident
/// until an operator gives the hint `idle`.
#[test]
fn busy_hint_prevents_offload_until_idle() -> Result<()> {
    let world = TestbedConfig::default().config(PATIENT).world()?;
    let mut worker = Worker::start(&world, "thinker", 32)?;
    says(&world, &worker, "nonsense busy")?;
    world.cli().wait_for_event("the hint", |event| event.reason == "hinted-busy")?;
    // The process starts with the engine `checkpoint`, so none of its memory can be copied.
    let eager = EAGER.replace("[policy]", "[policy]\nengine = \"checkpoint\"");
    std::fs::write(world.dir().join("affinode/config.toml"), eager)?;
    world.cli().run(&["reload"])?;
    until("the container to show the hint busy as its reason", || {
        let row = world.cli().container("thinker")?;
        Ok(row.filter(|row| row.reason == "hinted-busy" && row.offloads == 0))
    })?;
    world.cli().run(&["hint", "thinker", "idle"])?;
    world.cli().wait_for_state("thinker", "Offloaded")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Gives the hint `idle` while a kernel runs and no call is in progress. The container must stay
/// resident, because NVML reports the running work. Without that report, the controller would order
/// an offload. The driver would then refuse to lock the process, and an event would show this
/// refusal.
#[test]
fn running_work_overrides_idle_hint() -> Result<()> {
    let world =
        TestbedConfig::default().config(&format!("{PATIENT}lock_timeout = \"100ms\"\n")).world()?;
    let mut worker = Worker::start(&world, "runner", 32)?;
    world.cli().wait_for_state("runner", "Active")?;
    // 12 s is far longer than the two checks that follow.
    worker.call("spin 12000")?;
    until("NVML to show the work", || {
        let row = world.cli().container("runner")?;
        Ok(row.filter(|row| row.state == "Active" && row.reason == "gpu-busy"))
    })?;
    until("its utilization to be reported", || {
        let row = world.cli().container("runner")?.unwrap_or_default();
        let share = row.processes.first().and_then(|process| process.utilization_percent);
        Ok((share > Some(0)).then_some(()))
    })?;
    says(&world, &worker, "idle")?;
    world.cli().wait_for_state("runner", "Offloaded")?;
    let events = world.cli().events()?;
    assert!(events.iter().all(|event| event.kind != "refused"), "{events:?}");
    assert!(worker.verify()?);
    Ok(())
}
