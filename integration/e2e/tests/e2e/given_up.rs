//! A CUDA call during a copy out cancels the offload.

use affinode_e2e::{
    cli::EventRow,
    cpu_cgroup,
    testbed::TestbedConfig,
    worker::{USUAL, Worker},
};
use anyhow::{Result, anyhow};

use crate::offload::MANUAL;

const NAME: &str = "called";
const VRAM_MIB: u64 = 512;
/// Share of a processor that the container gets. With it the copy takes seconds, so the call comes
/// during the copy.
const PERCENT: u32 = 5;

fn cancelled(engine: &str) -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let spec = Worker::spec(NAME, USUAL, VRAM_MIB).annotation("affinode.io/engine", engine);
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    let cli = world.cli();
    cli.wait_for(NAME, "to have registered", |row| !row.processes.is_empty())?;
    // Work on the GPU would delay the offload.
    worker.call("streamsync")?;
    let pid = worker.running.pid(&world)?;
    cpu_cgroup::set_percent(pid, Some(PERCENT))?;
    let said = std::thread::scope(|scope| {
        let asks = scope.spawn(|| cli.output(&["offload", NAME]));
        cli.wait_for_state(NAME, "Offloading")?;
        worker.call("streamsync")?;
        asks.join().map_err(|_| anyhow!("the thread that asks has panicked"))?
    })?;
    assert!(!said.status.success(), "{engine}: {said:?}");
    let row = cli.wait_resident(NAME)?;
    assert_eq!((row.offloads, row.restores), (0, 0), "{engine}");
    let returns = |event: &EventRow| event.from == "Offloading" && event.to == "Active";
    let events = cli.wait_for_event("the return of the container", returns)?;
    let left = events.iter().find(|event| event.to == "Queued" || event.kind == "refused");
    assert!(left.is_none(), "{engine}: the memory has left the GPU, or it is a failure: {left:?}");
    cpu_cgroup::set_percent(pid, None)?;
    assert!(worker.verify()?, "{engine}");
    // The next offload is not delayed.
    assert!(cli.offload(NAME)?.done, "{engine}");
    assert!(worker.verify()?, "{engine}");
    Ok(())
}

#[test]
fn call_cancels_a_copy_with_auto() -> Result<()> {
    cancelled("auto")
}

#[test]
fn call_cancels_a_copy_with_full() -> Result<()> {
    cancelled("full")
}
