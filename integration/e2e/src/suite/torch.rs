//! Torch and JAX, as the machine has them installed.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{
    BY_ORDER,
    cycle::{EMPTY_BYTES, mib},
    engines::{ENGINE, ENGINES},
    host_root, median,
    report::Rows,
    vram_used,
};
use crate::{
    cli::ContainerRow,
    container::{CLIENTS, Spec},
    containerd::STOCK,
    gpu::Gpu,
    worker::Worker,
    world::{MIB, World},
};

/// Environment that a Python and its GPU libraries may need.
const ENVIRONMENT: [&str; 5] =
    ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "NCCL_NVLS_ENABLE"];
/// Steps before and after the cycle.
const STEPS: u32 = 5;
/// The programs.
const TORCH: &str = "torch_worker.py";
const JAX: &str = "jax_worker.py";
/// Cycles with each engine.
const ROUNDS: usize = 5;
/// What the worker holds beside its model then.
const HELD_GIB: u64 = 23;

/// How its memory is made.
struct Flavour<'a> {
    name: &'a str,
    /// The program, in [`CLIENTS`].
    program: &'a str,
    settings: &'a [(&'a str, &'a str)],
    /// It calls by itself all the time: it may be on its way home before anybody looks.
    is_restless: bool,
}

/// A Python with torch, and a root filesystem that has it.
pub struct Torch<'w> {
    world: &'w World,
    python: PathBuf,
    root: PathBuf,
}

#[derive(Deserialize)]
struct Step {
    #[serde(default)]
    digest: String,
    #[serde(default)]
    step_ms: f64,
    #[serde(default)]
    best_ms: f64,
    #[serde(default)]
    sync_ms: f64,
}

impl<'w> Torch<'w> {
    /// Finds it.
    ///
    /// # Errors
    /// When the machine has none, or the GPU is not a real one.
    pub fn find(world: &'w World) -> Result<Self> {
        if !matches!(world.gpu(), Gpu::Real) {
            bail!("the simulated GPU runs no torch");
        }
        let probe = "import sys, torch; assert torch.cuda.is_available(); print(sys.executable)";
        let output = Command::new("python3").args(["-c", probe]).output().context("no python3")?;
        if !output.status.success() {
            bail!("python3 has no torch that sees the GPU");
        }
        let python = String::from_utf8(output.stdout)?.trim().into();
        Ok(Self { world, python, root: host_root::mount(world)? })
    }

    fn spec(&self, id: &str, who: &str, program: &str) -> Result<Spec> {
        let script = format!("{CLIENTS}/{program}");
        let mut spec = Spec::gpu(id, &[&self.python.to_string_lossy(), "-u", &script]);
        spec.rootfs = Some(self.root.clone());
        spec.mounts = host_root::other_mounts(self.world)?;
        for name in ENVIRONMENT {
            if let Ok(value) = std::env::var(name) {
                spec = spec.env(name, &value);
            }
        }
        // Caches of the machine's users are not for this one.
        spec = spec.env("HOME", "/tmp").env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor");
        Ok(if who == "root" { spec } else { spec.flags(&["--user", "1000:1000"]) })
    }

    /// Trains, goes idle, is away, trains on; and the same without being away.
    pub fn cycle(&self, who: &str, rows: &mut Rows) -> Result<()> {
        let world = self.world;
        let mut digests = Vec::new();
        for away in [false, true] {
            let id = format!("torch-{who}-{away}");
            let spec = self.spec(&id, who, TORCH)?;
            let spec = if away { spec } else { spec.annotation("affinode.io/offload", "off") };
            let mut worker = Worker::start_as(world, spec)?;
            worker.expect("ready")?;
            step(&mut worker, STEPS)?;
            if away {
                let full = vram_used(world, |used| used >= 256 * MIB)?;
                rows.tell("device in use, trained", mib(full), "MiB");
                let row = world.cli().wait_for_state(&id, "Offloaded")?;
                rows.tell("moved out in", row.last_offload_ms as f64, "ms");
                let empty = vram_used(world, |used| used < full / 2)?;
                rows.want(
                    "device in use, away",
                    mib(empty),
                    "MiB",
                    "a few MiB",
                    empty <= EMPTY_BYTES,
                );
            }
            digests.push(step(&mut worker, STEPS)?.digest);
            if away {
                let row = world.cli().known(&id)?;
                rows.tell("came back in", row.last_wake_ms as f64, "ms");
                world.cli().wait_for_state(&id, "Offloaded")?;
                rows.count("ends by itself while away", usize::from(worker.ends(world)?), 1);
            } else {
                worker.running.kill(world)?;
            }
            worker.running.delete(world)?;
        }
        rows.count(
            "weights after training as without the cycle",
            usize::from(digests[0] == digests[1]),
            1,
        );
        Ok(())
    }

    /// Trains with ballast, is away after each turn, trains on, with each engine; and the same
    /// without being away.
    pub fn engines(&self, rows: &mut Rows) -> Result<()> {
        self.side_by_side(
            &Flavour { name: "torch", program: TORCH, settings: &[], is_restless: false },
            rows,
        )
    }

    /// The same with the allocator that maps its memory by itself.
    pub fn engines_with_segments(&self, rows: &mut Rows) -> Result<()> {
        let settings = &[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
        self.side_by_side(
            &Flavour { name: "segments", program: TORCH, settings, is_restless: false },
            rows,
        )
    }

    /// The same with JAX, which maps its memory by itself too.
    pub fn engines_with_jax(&self, rows: &mut Rows) -> Result<()> {
        // What it takes at its start, of the whole device.
        let settings = &[("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")];
        self.side_by_side(&Flavour { name: "jax", program: JAX, settings, is_restless: true }, rows)
    }

    /// Whether the same Python has JAX.
    pub fn has_jax(&self) -> bool {
        let probe = ["-c", "import jax; assert jax.default_backend() == 'gpu'"];
        let mut command = Command::new(&self.python);
        command.args(probe).env("XLA_PYTHON_CLIENT_PREALLOCATE", "false");
        command.output().is_ok_and(|out| out.status.success())
    }

    fn side_by_side(&self, flavour: &Flavour, rows: &mut Rows) -> Result<()> {
        let still = self.turns(flavour, "off", rows, |_, _, _| Ok(()))?;
        let mut wakes = Vec::new();
        for engine in ENGINES {
            let (mut out, mut back, mut left) = (Vec::new(), Vec::new(), 0);
            let digest = self.turns(flavour, engine, rows, |worker, row, used| {
                out.push(row.last_offload_ms as f64);
                left = used;
                worker.send("sync")?;
                let sync_ms = answer(worker)?.sync_ms;
                let row = self.world.cli().known(&row.id)?;
                back.push(if flavour.is_restless { row.last_wake_ms as f64 } else { sync_ms });
                Ok(())
            })?;
            rows.tell(&format!("{engine}: offload"), median(&out), "ms");
            rows.tell(&format!("{engine}: wake, as the caller feels it"), median(&back), "ms");
            if !flavour.is_restless {
                rows.tell(&format!("{engine}: device in use, away"), mib(left), "MiB");
            }
            let same = usize::from(digest == still);
            rows.count(&format!("{engine}: weights as without being away"), same, 1);
            wakes.push((median(&out), median(&back)));
        }
        if let [driver, _, fast] = wakes[..] {
            rows.tell("fast against driver: offload", driver.0 / fast.0.max(0.001), "times");
            rows.tell("fast against driver: wake", driver.1 / fast.1.max(0.001), "times");
        }
        Ok(())
    }

    /// A worker that trains in turns; `away` is called after each with what is known of it
    /// while it is away. The digest of its weights in the end.
    fn turns(
        &self,
        flavour: &Flavour,
        engine: &str,
        rows: &mut Rows,
        mut away: impl FnMut(&mut Worker, &ContainerRow, u64) -> Result<()>,
    ) -> Result<String> {
        let world = self.world;
        let moves = engine != "off";
        let id = &format!("{}-{engine}", flavour.name);
        let spec = flavour
            .settings
            .iter()
            .fold(self.spec(id, "root", flavour.program)?, |spec, (name, value)| {
                spec.env(name, value)
            });
        let spec = spec.annotation(BY_ORDER.0, BY_ORDER.1);
        let spec = if moves { spec.annotation(ENGINE, engine) } else { spec };
        let mut worker = Worker::start_as(world, spec)?;
        worker.expect("ready")?;
        step(&mut worker, STEPS)?;
        let mut before = String::new();
        if moves {
            worker.send(&format!("hold {HELD_GIB}"))?;
            answer(&mut worker)?;
            worker.send("check")?;
            before = answer(&mut worker)?.digest;
        }
        for _ in 0..ROUNDS {
            if moves {
                world.cli().move_out(id)?;
                let row = world.cli().known(id)?;
                let used = match flavour.is_restless {
                    true => 0,
                    false => vram_used(world, |used| used < HELD_GIB << 29)?,
                };
                away(&mut worker, &row, used)?;
            }
            step(&mut worker, STEPS)?;
        }
        if moves {
            worker.send("check")?;
            let same = usize::from(answer(&mut worker)?.digest == before);
            rows.count(&format!("{engine}: ballast as it was"), same, 1);
            let row = world.cli().known(id)?;
            let share = row.parkable_share.unwrap_or(0.0) * 100.0;
            rows.tell(&format!("{engine}: copied, of its VRAM with the context"), share, "%");
            if engine != "driver" {
                // The context, and what is too small to be worth it.
                let what = format!("{engine}: at wire speed");
                rows.want(&what, share, "%", "at least 95%", share >= 95.0);
            }
        }
        let digest = step(&mut worker, STEPS)?.digest;
        worker.running.kill(world)?;
        worker.running.delete(world)?;
        Ok(digest)
    }

    /// The time of a step with our runtime and with the stock one, in turn.
    pub fn step_cost(&self, rows: &mut Rows) -> Result<()> {
        let world = self.world;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            for (id, samples) in [("step-stock", &mut without), ("step-ours", &mut with)] {
                let (name, value) = BY_ORDER;
                let mut spec = self.spec(id, "root", TORCH)?.annotation(name, value);
                if id == "step-stock" {
                    spec = spec.runtime(STOCK);
                }
                let mut worker = Worker::start_as(world, spec)?;
                worker.expect("ready")?;
                worker.send("bench")?;
                samples.push(answer(&mut worker)?);
                worker.running.kill(world)?;
                worker.running.delete(world)?;
            }
        }
        // From one start to the next the median differs by 15 %, whoever runs it; the fastest
        // step of many starts by less than 1 %.
        let median_of =
            |steps: &[Step]| median(&steps.iter().map(|s| s.step_ms).collect::<Vec<_>>());
        rows.tell("median with the stock runtime", median_of(&without), "ms");
        rows.tell("median with the library", median_of(&with), "ms");
        let best = |steps: &[Step]| steps.iter().map(|s| s.best_ms).fold(f64::INFINITY, f64::min);
        let (without, with) = (best(&without), best(&with));
        rows.tell("the fastest step with the stock runtime", without, "ms");
        rows.tell("the fastest step with the library", with, "ms");
        let more = (with / without - 1.0) * 100.0;
        rows.want("more by", more, "%", "within 1%", more <= 1.0);
        // The container was not only preloaded: it can be moved.
        let mut worker = Worker::start_as(
            world,
            self.spec("step-moved", "root", TORCH)?.annotation(BY_ORDER.0, BY_ORDER.1),
        )?;
        worker.expect("ready")?;
        world.cli().move_out("step-moved")?;
        step(&mut worker, 1)?;
        worker.running.kill(world)?;
        worker.running.delete(world)
    }
}

fn step(worker: &mut Worker, count: u32) -> Result<Step> {
    worker.send(&format!("step {count}"))?;
    answer(worker)
}

fn answer(worker: &mut Worker) -> Result<Step> {
    let line = worker.receive_line()?;
    let step: Step = serde_json::from_str(&line).with_context(|| format!("torch said: {line}"))?;
    Ok(step)
}
