//! Measures containers whose memory limit is far below their VRAM. Their offloads and restores use
//! the host pool. For comparison, the same program runs in a container without a limit, on a node
//! without a host pool. The difference is the cost of the host pool.

use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};

use super::{
    BY_ORDER,
    engines::{ENGINE, SCRUBBED_AFTER},
    median,
    python::{Python, ask, step},
    report::{NotHere, Rows},
};
use crate::{
    container::Spec,
    gpu::Gpu,
    memory_cgroup,
    supervisor::cgroup_folders,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

/// Settings of a node without a host pool.
pub const OFF: &str = "[memory]\nhost_pool_percent = 0\n";
const ENGINES: [&str; 2] = ["auto", "full"];
const TORCH: &[&str] = &["torch_worker.py"];
const ROUNDS: usize = 5;
/// Time after a restore until the library has freed its host memory.
const TIDIED_AFTER: Duration = Duration::from_secs(6);

struct Load {
    piece_mib: u64,
    pieces: u64,
    limit_mib: u64,
}

impl Load {
    fn of(world: &Testbed) -> Load {
        match world.gpu() {
            Gpu::Real => Load { piece_mib: 4096, pieces: 6, limit_mib: 4096 },
            Gpu::Simulated { .. } => Load { piece_mib: 64, pieces: 6, limit_mib: 160 },
        }
    }

    fn bytes(&self) -> u64 {
        self.piece_mib * self.pieces * MIB
    }
}

/// Measures a C program in a container with a memory limit.
pub fn limited(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = Load::of(world);
    let limit = (load.limit_mib * MIB).to_string();
    ENGINES.iter().try_for_each(|engine| {
        let spec = spec(engine, &load).flags(&["--memory-limit", &limit]);
        cycles(world, rows, &format!("{engine}, limited to {} MiB", load.limit_mib), spec, &load)
    })
}

/// Measures the same program in a container without a limit, on a node without a host pool.
pub fn in_own_memory(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = Load::of(world);
    ENGINES.iter().try_for_each(|engine| {
        cycles(world, rows, &format!("{engine}, own memory"), spec(engine, &load), &load)
    })
}

fn spec(engine: &str, load: &Load) -> Spec {
    Worker::spec(&format!("pooled-{engine}"), USUAL, load.piece_mib)
        .annotation(BY_ORDER.0, BY_ORDER.1)
        .annotation(ENGINE, engine)
}

fn cycles(world: &Testbed, rows: &mut Rows, name: &str, spec: Spec, load: &Load) -> Result<()> {
    let id = spec.id.clone();
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    for _ in 1..load.pieces {
        worker.call(&format!("alloc {}", load.piece_mib))?;
    }
    let (mut out, mut back, mut good) = (Vec::new(), Vec::new(), 0);
    let mut more_bytes = 0;
    for _ in 0..ROUNDS {
        let before_bytes = charged(world, &id)?;
        world.cli().move_out(&id)?;
        out.push(world.cli().known(&id)?.last_offload_ms as f64);
        more_bytes = charged(world, &id)?.saturating_sub(before_bytes);
        if matches!(world.gpu(), Gpu::Real) {
            thread::sleep(SCRUBBED_AFTER);
        }
        back.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
        good += usize::from(worker.check(load.bytes())?);
        until("the library to have freed its host memory", || {
            Ok((charged(world, &id)? < before_bytes + load.bytes() / 8).then_some(()))
        })?;
        if matches!(world.gpu(), Gpu::Real) {
            thread::sleep(TIDIED_AFTER);
        }
    }
    rows.tell(&format!("{name}: first offload"), out[0], "ms");
    rows.tell(&format!("{name}: offload"), median(&out), "ms");
    rows.tell(&format!("{name}: wake"), median(&back), "ms");
    let what = format!("{name}: charged to the offloaded container");
    rows.tell(&what, (more_bytes / MIB) as f64, "MiB");
    rows.count(&format!("{name}: contents as before"), good, ROUNDS);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Returns the memory that is charged to a container, in bytes.
fn charged(world: &Testbed, id: &str) -> Result<u64> {
    let folders = cgroup_folders(world.dir()).into_iter().map(|folder| folder.join(id));
    let mut used = folders.filter_map(|folder| memory_cgroup::used_bytes(&folder).ok());
    used.next().with_context(|| format!("container {id} has no memory cgroup"))
}

/// Measures a torch program in a container with a memory limit. The program also allocates 23 GiB
/// that it does not use.
pub fn torch(python: &Python, rows: &mut Rows) -> Result<()> {
    let (world, id) = (python.world, "pooled-torch");
    let limit = (4096 * MIB).to_string();
    let spec = python.spec(id, "root", TORCH)?.annotation(ENGINE, "auto");
    let spec = spec.flags(&["--memory-limit", &limit]);
    let mut worker = Worker::start_as(world, spec.annotation(BY_ORDER.0, BY_ORDER.1))?;
    if let Some(why) = python.greet(&mut worker, TORCH)? {
        return Err(NotHere(why).into());
    }
    step(&mut worker, 5)?;
    ask(&mut worker, "hold 23")?;
    let before = ask(&mut worker, "check")?.digest()?;
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        world.cli().move_out(id)?;
        out.push(world.cli().known(id)?.last_offload_ms as f64);
        thread::sleep(SCRUBBED_AFTER);
        back.push(ask(&mut worker, "sync")?.sync_ms);
        thread::sleep(TIDIED_AFTER);
    }
    ensure!(ask(&mut worker, "check")?.digest()? == before, "the memory of torch has changed");
    rows.tell("torch, limited to 4096 MiB: first offload", out[0], "ms");
    let goal = "at most 500 ms";
    let (out, back) = (median(&out), median(&back));
    rows.want("torch, limited to 4096 MiB: offload", out, "ms", goal, out <= 500.0);
    rows.want("torch, limited to 4096 MiB: wake", back, "ms", goal, back <= 500.0);
    worker.running.kill(world)?;
    worker.running.delete(world)
}
