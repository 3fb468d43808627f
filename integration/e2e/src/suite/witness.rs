//! Test of a kernel that still runs while its process makes no call. The container must not be
//! offloaded, because NVML reports that the process uses the GPU.

use std::time::Instant;

use anyhow::{Context, Result};

use super::report::Rows;
use crate::{
    testbed::Testbed,
    wait::until,
    worker::{USUAL, Worker},
};

/// VRAM that the process fills, in MiB.
const WORKER_MIB: u64 = 256;
/// Time for which the process's kernel runs. It is longer than the idle timeout.
const KERNEL_MS: u64 = 6_000;

/// A process launches one kernel and makes no further CUDA call. Checks that its container is
/// offloaded only after the kernel has ended.
pub fn work_without_calls(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let id = "runner";
    let mut worker = Worker::start_as(world, Worker::spec(id, USUAL, WORKER_MIB))?;
    worker.wait_filled()?;
    worker.call(&format!("spin {KERNEL_MS}"))?;
    let launched = Instant::now();
    let percent = until("NVML to show the work", || {
        let row = world.cli().container(id)?.filter(|row| row.reason == "gpu-busy");
        Ok(row.and_then(|row| row.processes.first()?.utilization_percent))
    })?;
    rows.tell("seen busy after the launch, with no call in progress", seconds(launched), "s");
    rows.tell("share of the GPU's time", f64::from(percent), "%");
    let row = world.cli().wait_for_state(id, "Offloaded")?;
    let offloaded = seconds(launched);
    rows.want("moved out after the launch", offloaded, "s", "not before its end", {
        (offloaded * 1e3) as u64 + row.last_offload_ms >= KERNEL_MS
    });
    let refused = world.cli().events()?;
    let refused = refused.iter().filter(|e| e.kind == "refused" && e.container.contains(id));
    let refused = refused.count();
    rows.want("offloads tried in vain", refused as f64, "", "none", refused == 0);
    rows.count("contents as before", usize::from(worker.verify()?), 1);
    worker.running.kill(world)?;
    worker.running.delete(world).context("cannot delete the container")
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}
