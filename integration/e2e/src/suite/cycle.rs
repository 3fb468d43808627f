//! Offloads and restores a plain CUDA process, and requires that its memory contents do not change.

use anyhow::{Context, Result};

use super::{BY_ORDER, report::Rows, vram_used};
use crate::{
    image,
    testbed::{MIB, Testbed},
    worker::{USUAL, Worker},
};

/// VRAM that the process fills, in MiB.
const WORKER_MIB: u64 = 1024;
/// VRAM in bytes up to which a device counts as unused. The driver reserves a little VRAM for
/// itself.
pub(super) const EMPTY_BYTES: u64 = 32 * MIB;

/// Runs the cycle of offload and restore, with a process of the user `who`: `root`, or uid 1000.
pub fn plain(world: &Testbed, who: &str, rows: &mut Rows) -> Result<()> {
    let id = format!("plain-{who}");
    let image = if who == "root" { image::PLAIN } else { image::UNPRIVILEGED };
    let mut worker = Worker::start_as(world, Worker::spec(&id, USUAL, WORKER_MIB).image(image))?;
    worker.wait_filled()?;
    let full = vram_used(world, |used| used >= WORKER_MIB * MIB)?;
    rows.tell("device in use, filled", mib(full), "MiB");
    let row = world.cli().wait_for_state(&id, "Offloaded")?;
    rows.tell("moved out in", row.last_offload_ms as f64, "ms");
    let empty = vram_used(world, |used| used < full / 2)?;
    rows.want("device in use, offloaded", mib(empty), "MiB", "a few MiB", empty <= EMPTY_BYTES);
    let info = worker.ask("exec-info")?;
    rows.tell("runs as uid", f64::from(info.uid.context("the reply has no uid")?), "");
    rows.count("cuDeviceGetName while offloaded", usize::from(info.result == 0), 1);
    let good = worker.verify()?;
    let row = world.cli().known(&id)?;
    rows.tell("came back in", row.last_wake_ms as f64, "ms");
    rows.count("contents as before", usize::from(good), 1);
    world.cli().wait_for_state(&id, "Offloaded")?;
    rows.count("ends by itself while offloaded", usize::from(worker.ends(world)?), 1);
    worker.running.delete(world)?;
    rows.count("checksum as without the cycle", usize::from(same_results(world, &id, image)?), 1);
    Ok(())
}

/// Whether three kernels produce the same results with and without an offload and restore after
/// each kernel.
fn same_results(world: &Testbed, id: &str, image: &str) -> Result<bool> {
    let mut checksums = Vec::new();
    for offloaded in [false, true] {
        let (name, value) = BY_ORDER;
        let spec = Worker::spec(id, USUAL, 256).image(image).annotation(name, value);
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        for _ in 0..3 {
            worker.call("touch")?;
            if offloaded {
                world.cli().move_out(id)?;
            }
        }
        let answer = worker.call("verify")?;
        checksums.push(answer.checksum.context("the reply to `verify` has no checksum")?);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(checksums[0] == checksums[1])
}

pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}
