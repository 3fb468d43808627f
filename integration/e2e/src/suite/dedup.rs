//! Measures dedup with two containers that have equal contents: the host memory in use while both
//! are offloaded, the time until the contents are stored once, and the speed of each restore.

use std::time::Instant;

use anyhow::Result;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{BY_ORDER, engines::ENGINE, median, report::Rows, wait_held};
use crate::{
    container::{CLIENTS, Spec},
    gpu::Gpu,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

/// Kubernetes namespace for which the suite's configuration enables dedup.
const NAMESPACE: &str = "together";
const IDS: [&str; 2] = ["one", "other"];

/// Measures the offload of two containers with equal contents.
pub fn held_once(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (mib, rounds) = match world.gpu() {
        Gpu::Real => (4096, 5),
        Gpu::Simulated { .. } => (256, 2),
    };
    let start = |id: &&str| -> Result<Worker> {
        let program = format!("{CLIENTS}/{USUAL}");
        let spec = Spec::gpu(id, &[&program, "--mib", &mib.to_string(), "--seed", "7"])
            .annotation(BY_ORDER.0, BY_ORDER.1)
            .annotation(ENGINE, "full")
            .annotation("io.kubernetes.cri.sandbox-namespace", NAMESPACE);
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        Ok(worker)
    };
    let mut workers = IDS.iter().map(start).collect::<Result<Vec<_>>>()?;
    let (mut after, mut back) = (Vec::new(), Vec::new());
    let mut stored_bytes = 0;
    let filled = world.cli().gpu()?.copier_restores;
    let leave = || -> Result<(u64, f64)> {
        for id in IDS {
            world.cli().move_out(id)?;
        }
        let offloaded = Instant::now();
        let stored_bytes = until("both containers to share the content", || {
            let gpu = world.cli().gpu()?;
            let all = gpu.copier_shared_bytes == IDS.len() as u64 * mib * MIB;
            Ok(all.then_some(gpu.copier_stored_bytes))
        })?;
        Ok((stored_bytes, offloaded.elapsed().as_secs_f64() * 1000.0))
    };
    for _ in 0..rounds {
        let (bytes, ms) = leave()?;
        stored_bytes = bytes;
        after.push(ms);
        for worker in &mut workers {
            wait_held(world)?;
            back.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
        }
    }
    let size = format!("two of {:.1} GiB", mib as f64 / 1024.0);
    let share = stored_bytes as f64 / (mib * MIB) as f64 * 100.0;
    let once = (share - 100.0).abs() < 0.1;
    rows.want(&format!("{size}: host memory, of one's"), share, "%", "once", once);
    rows.tell(&format!("{size}: held once after"), median(&after), "ms");
    rows.tell(&format!("{size}: wake"), median(&back), "ms");
    rows.tell(&format!("{size}: wake"), (mib * MIB) as f64 / median(&back) / 1e6, "GB/s");
    let filled = world.cli().gpu()?.copier_restores - filled;
    rows.tell(&format!("{size}: wakes through the copier"), filled as f64, "");
    // Each process still maps the shared contents itself, so it can restore them without the
    // copier.
    leave()?;
    kill(Pid::from_raw(world.cli().gpu()?.copier_pid), Signal::SIGKILL)?;
    let mut alone = Vec::new();
    for worker in &mut workers {
        alone.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
    }
    rows.tell(&format!("{size}: wake, the copier killed"), median(&alone), "ms");
    let mut good = 0;
    for mut worker in workers {
        good += usize::from(worker.verify()?);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    rows.count(&format!("{size}: contents as before"), good, IDS.len());
    Ok(())
}
