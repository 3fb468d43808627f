//! Tests that need two GPUs of one model. Some tests restore a container on the second GPU when its
//! own GPU is full. Others run programs that share memory between processes or GPUs: shared memory
//! must stay on its GPU, and the results must be the same as without Affinode. [`together`] wakes
//! containers on both GPUs at the same time. [`links`] measures copies and shared memory of two
//! GPUs with the stock runtime.

pub mod links;
pub mod together;

use anyhow::{Context, Result, ensure};

use super::{
    BY_ORDER, Report, Testbed,
    engines::ENGINE,
    median,
    python::{Python, ask, step},
    report::{NotHere, Rows},
    wait_held,
};
use crate::{
    container::Spec,
    containerd::STOCK,
    testbed::MIB,
    wait::until,
    worker::{USUAL, Worker},
};

/// Engines with which the programs that share memory are run. The first engine is the default.
const ENGINES: [&str; 3] = ["auto", "checkpoint", "full"];
/// Number of times that each program is migrated (restored on the other GPU).
const HOPS: usize = 4;
/// VRAM in MiB that remains free on a GPU that a test has filled. Every program of these tests
/// needs more.
const LEFT_MIB: u64 = 2048;
const PLAIN_MIB: u64 = 4096;
/// Memory that torch allocates but does not use, in GiB.
const HELD_GIB: u64 = 23;
const STEPS: u32 = 3;

/// A test program that shares memory between processes or GPUs.
struct Sharing {
    part: &'static str,
    kind: &'static str,
    settings: &'static [(&'static str, &'static str)],
    /// Reasons for which the controller may refuse to offload the container. `None` if the
    /// container must be offloaded.
    stays: Option<&'static [&'static str]>,
}

/// VRAM in bytes that each program allocates in total and does not share: 2 GiB in each of two
/// processes, or on each of two GPUs.
const UNSHARED_BYTES: u64 = 4096 * MIB;

const SHARED_ALONE: &[&str] = &["shared-memory"];
const SHARED: Option<&[&str]> = Some(SHARED_ALONE);
/// Environment variables that restrict NCCL to the loopback interface. Both ranks need them if
/// there is no other network.
const LOCAL: [(&str, &str); 1] = [("NCCL_SOCKET_IFNAME", "lo")];
/// Flags of `ctr` that give a container more shared memory than the default of 64 MiB.
const SHARED_MEMORY: [&str; 2] =
    ["--mount", "type=tmpfs,src=shm,dst=/dev/shm,options=mode=1777:size=1g"];

const SHARING: [Sharing; 5] = [
    Sharing { part: "gpus, torch.multiprocessing", kind: "sharing", settings: &[], stays: SHARED },
    Sharing {
        part: "gpus, NCCL",
        kind: "ranks",
        settings: &[],
        stays: Some(&["shared-memory", "peer-access"]),
    },
    Sharing {
        part: "gpus, NCCL, legacy IPC",
        kind: "ranks",
        settings: &[("NCCL_CUMEM_ENABLE", "0"), ("NCCL_CUMEM_HOST_ENABLE", "0")],
        stays: SHARED,
    },
    Sharing {
        part: "gpus, NCCL through host memory",
        kind: "ranks",
        settings: &[
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_CUMEM_ENABLE", "0"),
            ("NCCL_CUMEM_HOST_ENABLE", "0"),
        ],
        stays: None,
    },
    Sharing {
        part: "gpus, copies between peers",
        kind: "peers",
        settings: &[],
        stays: Some(&["peer-access"]),
    },
];

const PLAIN: &str = "gpus, another one, plain process";
const TORCH: &str = "gpus, another one, torch";

/// Runs all tests of this module if the machine has two GPUs.
pub fn all(world: &Testbed, python: Option<&Python>, report: &mut Report) {
    let parts = SHARING.iter().map(|sharing| sharing.part);
    let parts = parts.chain([PLAIN, TORCH, together::PART, links::PART]);
    if !parts.into_iter().any(|part| report.wants(part)) {
        return;
    }
    match world.gpu().count() {
        2 => {}
        // With more than two GPUs, the target of a migration would not be known.
        many => return report.skip("gpus", &format!("takes two GPUs, not {many}")),
    }
    report.part(world, links::PART, links::without_affinode);
    report.part(world, together::PART, together::wakes);
    report.part(world, PLAIN, plain_hops);
    let Some(python) = python else { return };
    report.part(world, TORCH, |_, rows| torch_hops(python, rows));
    for sharing in &SHARING {
        report.part(world, sharing.part, |_, rows| sharing.beside_stock(python, rows));
    }
}

fn plain_hops(world: &Testbed, rows: &mut Rows) -> Result<()> {
    for engine in ENGINES {
        let id = format!("hops-{engine}");
        let spec = movable(Worker::spec(&id, USUAL, PLAIN_MIB), engine);
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        let mut back = Vec::new();
        let mut good = 0;
        let mut hops = Hops::new(world, &id);
        for _ in 0..HOPS {
            hops.leave()?;
            back.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
            hops.arrived()?;
            // Kernels, new allocations and old memory must all work on the other GPU.
            worker.call("touch")?;
            worker.call("alloc 64")?;
            worker.call("free")?;
            good += usize::from(worker.verify()?);
        }
        rows.count(&format!("{engine}: contents as before, on the other GPU"), good, HOPS);
        rows.tell(&format!("{engine}, 4 GiB: wake on the other GPU"), median(&back), "ms");
        hops.end()?;
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

/// Runs a training loop that migrates to the other GPU after each turn. Compares its results with a
/// loop that stays on its GPU.
fn torch_hops(python: &Python, rows: &mut Rows) -> Result<()> {
    const PROGRAM: &[&str] = &["torch_worker.py"];
    let world = python.world;
    let mut digests = Vec::new();
    for engine in ["off"].into_iter().chain(ENGINES) {
        let id = format!("torch-hops-{engine}");
        let mut worker =
            Worker::start_as(world, movable(python.spec(&id, "root", PROGRAM)?, engine))?;
        worker.expect("ready")?;
        ask(&mut worker, &format!("hold {HELD_GIB}"))?;
        let before = ask(&mut worker, "check")?.digest()?;
        let mut hops = Hops::new(world, &id);
        let mut back = Vec::new();
        for _ in 0..HOPS {
            if engine != "off" {
                hops.leave()?;
                back.push(ask(&mut worker, "sync")?.sync_ms);
                hops.arrived()?;
            }
            step(&mut worker, STEPS)?;
        }
        let held = usize::from(ask(&mut worker, "check")?.digest()? == before);
        rows.count(&format!("{engine}: ballast as it was"), held, 1);
        digests.push(step(&mut worker, STEPS)?.digest()?);
        if engine != "off" {
            let what = format!("{engine}: wake on the other GPU, as the caller feels it");
            rows.tell(&what, median(&back), "ms");
            let same = usize::from(digests.last() == digests.first());
            rows.count(&format!("{engine}: weights as without an offload"), same, 1);
        }
        hops.end()?;
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

fn movable(spec: Spec, engine: &str) -> Spec {
    let spec = spec
        .annotation(BY_ORDER.0, BY_ORDER.1)
        .annotation("affinode.io/allow-gpu-migration", "true");
    if engine == "off" { spec } else { spec.annotation(ENGINE, engine) }
}

/// A container that a test moves from one GPU to the other, repeatedly.
struct Hops<'w> {
    world: &'w Testbed,
    id: &'w str,
    /// Index of the GPU on which the container runs.
    on: usize,
    /// Program that fills the container's previous GPU while the container is offloaded.
    filler: Option<Worker>,
    fillers: usize,
}

impl<'w> Hops<'w> {
    fn new(world: &'w Testbed, id: &'w str) -> Self {
        Hops { world, id, on: 0, filler: None, fillers: 0 }
    }

    /// Offloads the container, and then fills the GPU on which it ran. The container can now be
    /// restored only on the other GPU.
    fn leave(&mut self) -> Result<()> {
        self.end()?;
        wait_held(self.world)?;
        self.world.cli().move_out(self.id)?;
        let name = format!("filler-{}-{}", self.id, self.fillers);
        self.fillers += 1;
        let (key, value) = BY_ORDER;
        let spec = Worker::spec(&name, USUAL, 64).annotation(key, value);
        let spec = spec.env("CUDA_VISIBLE_DEVICES", &self.on.to_string());
        let mut filler = Worker::start_as(self.world, spec)?;
        filler.wait_filled()?;
        let (total, used) = self.memory(self.on)?;
        filler.call(&format!("alloc {} -", (total - used) / MIB - LEFT_MIB))?;
        until("the GPU to be full", || {
            let (total, used) = self.memory(self.on)?;
            Ok((total - used < 2 * LEFT_MIB * MIB).then_some(()))
        })?;
        self.filler = Some(filler);
        Ok(())
    }

    fn memory(&self, gpu: usize) -> Result<(u64, u64)> {
        let gpus = self.world.cli().ps()?.gpus;
        let gpu = gpus.get(gpu).with_context(|| format!("no GPU {gpu} in {gpus:?}"))?;
        Ok((gpu.vram_total_bytes, gpu.vram_used_bytes))
    }

    /// Waits until the container is resident again. Requires that its memory is on the other GPU,
    /// which then becomes the container's current GPU.
    fn arrived(&mut self) -> Result<()> {
        self.on = 1 - self.on;
        self.world.cli().wait_resident(self.id)?;
        until("it to be seen on the other GPU", || {
            let (_, used) = self.memory(self.on)?;
            Ok((used > LEFT_MIB * MIB).then_some(()))
        })
    }

    fn end(&mut self) -> Result<()> {
        if let Some(filler) = self.filler.take() {
            filler.running.kill(self.world)?;
            filler.running.delete(self.world)?;
        }
        Ok(())
    }
}

impl Sharing {
    /// Waits until the controller reports at least [`UNSHARED_BYTES`] of VRAM for the container.
    /// The program has then allocated all of its own memory. Returns the reported VRAM in bytes.
    fn in_use(world: &Testbed, id: &str) -> Result<u64> {
        let row = world
            .cli()
            .wait_for(id, "its own memory to be read", |row| row.vram_bytes >= UNSHARED_BYTES)?;
        Ok(row.vram_bytes)
    }

    /// Adds rows with the VRAM that the container used before its offload, and the VRAM that the
    /// offload freed.
    fn given_back(
        world: &Testbed,
        rows: &mut Rows,
        engine: &str,
        id: &str,
        before_bytes: u64,
    ) -> Result<()> {
        const GIB: f64 = (1_u64 << 30) as f64;
        let row = world.cli().known(id)?;
        rows.tell(
            &format!("{engine}: in use before the offload"),
            before_bytes as f64 / GIB,
            "GiB",
        );
        let given_bytes = if row.state == "Offloaded" { row.offloaded_bytes } else { 0 };
        rows.tell(&format!("{engine}: given back"), given_bytes as f64 / GIB, "GiB");
        Ok(())
    }

    /// Runs the program with each engine and with the stock runtime. Requires the same results.
    fn beside_stock(&self, python: &Python, rows: &mut Rows) -> Result<()> {
        let world = python.world;
        let mut first = String::new();
        for engine in [STOCK].into_iter().chain(ENGINES) {
            let program = ["programs.py", self.kind];
            let name = if engine == STOCK { "stock" } else { engine };
            let id = format!("{}-{name}", self.part.replace(", ", "-").replace([' ', '.'], "-"));
            let mut spec = python.spec(&id, "root", &program)?.annotation(BY_ORDER.0, BY_ORDER.1);
            spec = spec.flags(&SHARED_MEMORY);
            for (name, value) in LOCAL.iter().chain(self.settings) {
                spec = spec.env(name, value);
            }
            let spec =
                if engine == STOCK { spec.runtime(STOCK) } else { spec.annotation(ENGINE, engine) };
            let mut worker = Worker::start_as(world, spec)?;
            if let Some(why) = python.greet(&mut worker, &program)? {
                return Err(NotHere(why).into());
            }
            step(&mut worker, STEPS)?;
            match self.stays {
                _ if engine == STOCK => {}
                Some(reasons) => {
                    let before = Sharing::in_use(world, &id)?;
                    let said = world.cli().offload(&id)?;
                    let known = !said.done && reasons.contains(&&*said.reason);
                    // With an engine that copies, memory that is not shared is offloaded.
                    let in_part = said.done && engine != "checkpoint" && reasons == SHARED_ALONE;
                    ensure!(known || in_part, "expected a refusal for {reasons:?}, got {said:?}");
                    let how = if in_part { "shared memory stays" } else { "stays, and says why" };
                    rows.count(&format!("{engine}: {how}"), 1, 1);
                    Sharing::given_back(world, rows, engine, &id, before)?;
                }
                None => {
                    for turn in 0..2 {
                        let before = Sharing::in_use(world, &id)?;
                        world.cli().move_out(&id)?;
                        if turn == 0 {
                            Sharing::given_back(world, rows, engine, &id, before)?;
                        }
                        step(&mut worker, 1)?;
                        world.cli().wait_resident(&id)?;
                    }
                    rows.count(&format!("{engine}: moved out and back"), 2, 2);
                }
            }
            let more = if self.stays.is_none() && engine != STOCK { STEPS - 2 } else { STEPS };
            let digest = step(&mut worker, more)?.digest()?;
            if engine == STOCK {
                first = digest;
            } else {
                let what = format!("{engine}: results as with the stock runtime");
                rows.count(&what, usize::from(digest == first), 1);
            }
            worker.running.kill(world)?;
            worker.running.delete(world)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_knows_all_kinds() {
        let source = include_str!("../../programs/programs.py");
        for Sharing { part, kind, .. } in SHARING {
            assert!(source.contains(&format!("    {kind:?}: (")), "{part}");
        }
    }
}
