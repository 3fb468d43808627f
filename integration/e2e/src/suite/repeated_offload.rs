//! Runs a program in turns, and offloads it after each turn, with each engine. The results must be
//! the same as without an offload.

use std::{any::Any, thread, time::Instant};

use anyhow::{Result, anyhow};

use super::{
    BY_ORDER,
    cycle::mib,
    engines::{KEPT, PREPARED, copies, moved_by},
    median,
    python::{Python, ask, step},
    report::{NotHere, Rows},
    vram_used, wait_held, wait_prepared,
};
use crate::{container::Spec, worker::Worker};

/// Number of steps in a turn.
pub(super) const STEPS: u32 = 5;
/// Pseudo engine name of the container that is never offloaded.
const STILL: &str = "off";
/// Phases that a process can have while its container is offloaded.
const OFFLOADED: [&str; 2] = ["Checkpointed", "CopiedOut"];

/// A program, and how it is offloaded in the test.
pub struct Flavour {
    /// Prefix of the names of the program's containers.
    pub name: &'static str,
    /// File name of the program in the folder of client programs, and its arguments.
    pub program: &'static [&'static str],
    /// Environment variables of the program, for example to select its allocator.
    pub settings: &'static [(&'static str, &'static str)],
    /// Engines with which the program is run and offloaded.
    pub engines: &'static [&'static str],
    /// Number of offloads with each engine.
    pub rounds: usize,
    /// Memory that the program allocates but does not use, in GiB.
    pub held_gib: u64,
    /// Number of processes of the program that allocate memory on the device.
    pub processes: usize,
    /// Whether the containers run one at a time, so that measured times and remaining VRAM belong
    /// to a single container. Otherwise all containers run at the same time, which is faster.
    pub is_alone: bool,
}

impl Flavour {
    /// Describes a program whose memory is so large that copying it takes most of the time of a
    /// move. A run of the program takes minutes.
    pub const fn large(name: &'static str, program: &'static [&'static str]) -> Self {
        Self {
            name,
            program,
            settings: &[],
            engines: &["checkpoint", "auto", "full", KEPT, PREPARED],
            rounds: 5,
            held_gib: 23,
            processes: 1,
            is_alone: true,
        }
    }

    /// Describes a program with less memory than [`Self::large`], but enough memory for the library
    /// to copy it. A run of the program takes seconds.
    pub const fn small(name: &'static str, program: &'static [&'static str]) -> Self {
        Self { rounds: 2, held_gib: 3, is_alone: false, ..Self::large(name, program) }
    }

    /// Describes a container that runs this program with an engine. If `engine` is [`STILL`], the
    /// container is never offloaded.
    fn spec(&self, python: &Python, engine: &str) -> Result<Spec> {
        let id = format!("{}-{engine}", self.name);
        let spec = python.spec(&id, "root", self.program)?.annotation(BY_ORDER.0, BY_ORDER.1);
        let set = |spec: Spec, (name, value): &(&str, &str)| spec.env(name, value);
        let spec = self.settings.iter().fold(spec, set);
        Ok(if engine == STILL { spec } else { moved_by(spec, engine) })
    }

    /// Runs the program with each engine, and without an offload.
    ///
    /// # Errors
    /// When a container or a move fails. [`NotHere`] if the machine lacks something that the
    /// program needs.
    pub fn side_by_side(&self, python: &Python, rows: &mut Rows) -> Result<()> {
        let began = Instant::now();
        let engines = [STILL].into_iter().chain(self.engines.iter().copied());
        let lane = |engine| self.lane(python, engine);
        let mut lanes: Vec<Finished> = Vec::new();
        if self.is_alone {
            for engine in engines {
                lanes.push(lane(engine));
                if lanes.last().is_some_and(|lane| lane.1.is_err()) {
                    break;
                }
            }
        } else {
            lanes = thread::scope(|scope| {
                let lanes: Vec<_> = engines.map(|e| scope.spawn(move || lane(e))).collect();
                lanes.into_iter().map(|lane| lane.join().unwrap_or_else(panicked)).collect()
            });
        }
        let felt = if self.is_alone { "as the caller feels it" } else { "beside the others" };
        let (mut still, mut wakes) = (String::new(), Vec::new());
        for (found, lane) in lanes {
            rows.append(found);
            let Lane { engine, digest, out, back, left } = lane?;
            if engine == STILL {
                still = digest;
                continue;
            }
            let (first, again) = out.split_at(usize::from(engine == KEPT));
            for first in first {
                rows.tell(&format!("{engine}: first offload"), *first, "ms");
            }
            let (out, back) = (median(again), median(&back));
            rows.tell(&format!("{engine}: offload"), out, "ms");
            rows.tell(&format!("{engine}: wake, {felt}"), back, "ms");
            if let Some(left) = left {
                rows.tell(&format!("{engine}: device in use, offloaded"), mib(left), "MiB");
            }
            let same = usize::from(digest == still);
            rows.count(&format!("{engine}: results as without an offload"), same, 1);
            wakes.push((out, back));
        }
        if let ([driver, _, fast, kept, prepared], true) = (&wakes[..], self.is_alone) {
            let times = driver.0 / prepared.0.max(0.001);
            rows.tell("prefaulted against checkpoint: offload", times, "times");
            let times = driver.1 / prepared.1.max(0.001);
            rows.tell("prefaulted against checkpoint: wake", times, "times");
            rows.tell("kept against full: offload", kept.0 / fast.0.max(0.001) * 100.0, "%");
            rows.tell("full against checkpoint: offload", driver.0 / fast.0.max(0.001), "times");
            rows.tell("full against checkpoint: wake", driver.1 / fast.1.max(0.001), "times");
        }
        rows.tell("took", began.elapsed().as_secs_f64(), "s");
        Ok(())
    }

    /// Runs the container of one engine from its start to its end.
    fn lane(&self, python: &Python, engine: &'static str) -> Finished {
        let mut rows = Rows::default();
        let outcome = (|| {
            let mut worker = Worker::start_as(python.world, self.spec(python, engine)?)?;
            if let Some(why) = python.greet(&mut worker, self.program)? {
                return Err(NotHere(why).into());
            }
            let lane = self.turns(python, engine, &mut worker, &mut rows)?;
            worker.running.kill(python.world)?;
            worker.running.delete(python.world)?;
            Ok(lane)
        })();
        (rows, outcome)
    }

    /// Runs the turns of one container. Each turn ends with an offload, except with [`STILL`].
    fn turns(
        &self,
        python: &Python,
        engine: &'static str,
        worker: &mut Worker,
        rows: &mut Rows,
    ) -> Result<Lane> {
        let cli = python.world.cli();
        let id = &worker.running.id.clone();
        let mut lane = Lane { engine, ..Lane::default() };
        step(worker, STEPS)?;
        if engine == STILL {
            for _ in 0..self.rounds {
                step(worker, STEPS)?;
            }
            lane.digest = step(worker, STEPS)?.digest()?;
            return Ok(lane);
        }
        ask(worker, &format!("hold {}", self.held_gib))?;
        let before = ask(worker, "check")?;
        let digest = before.digest()?;
        let (mut together, mut copied_out, mut unchanged) = (0, Vec::new(), 0);
        let copied = copies(python.world)?;
        // Memory that can be exported is not prefaulted. For a program with such memory this wait
        // fails, and the failure is ignored.
        let mut prepares = engine == PREPARED;
        for _ in 0..self.rounds {
            wait_held(python.world)?;
            prepares = prepares && wait_prepared(python.world, self.processes).is_ok();
            cli.move_out(id)?;
            let row = cli.known(id)?;
            lane.out.push(row.last_offload_ms as f64);
            copied_out.push(row.processes.iter().map(|p| p.copied_out_bytes).sum::<u64>());
            unchanged = row.processes.iter().map(|p| p.unchanged_bytes).sum::<u64>();
            let offloaded = row.processes.iter().filter(|p| OFFLOADED.contains(&&*p.phase)).count();
            together +=
                usize::from(offloaded == self.processes && row.processes.len() == offloaded);
            if self.is_alone {
                lane.left = Some(vram_used(python.world, |used| used < self.held_gib << 29)?);
            }
            wait_held(python.world)?;
            lane.back.push(ask(worker, "sync")?.sync_ms);
            step(worker, STEPS)?;
        }
        if self.processes > 1 {
            rows.count(
                &format!("{engine}: all processes offloaded together"),
                together,
                self.rounds,
            );
        }
        let same = usize::from(ask(worker, "check")?.digest()? == digest);
        rows.count(&format!("{engine}: ballast as it was"), same, 1);
        let whole = cli.known(id)?.copyable_share.unwrap_or(0.0) * 100.0;
        rows.tell(&format!("{engine}: copied, of its VRAM with the context"), whole, "%");
        if engine != "checkpoint" {
            // The context is a large part of a small program's VRAM. The bytes copied at the first
            // offload are therefore compared with the memory of the program's allocators, if that
            // amount is known.
            let own = before.held_bytes.zip(copied_out.first());
            let share =
                own.map(|(held, &copied_out)| copied_out as f64 / held.max(1) as f64 * 100.0);
            let share = share.map_or(whole, |share| share.min(100.0));
            // The remaining VRAM is the context, and allocations that are too small for a copy.
            let what = format!("{engine}: at wire speed");
            rows.want(&what, share, "%", "at least 95%", share >= 95.0);
        }
        if engine == PREPARED {
            let copies = copies(python.world)?.saturating_sub(copied) as usize;
            let what = format!("{engine}: copied out by the copier");
            match prepares {
                true => rows.count(&what, copies, self.rounds * self.processes),
                false => rows.tell(&what, copies as f64, "times"),
            }
        }
        if engine == KEPT {
            let share = unchanged as f64 / copied_out.last().map_or(1, |all| *all.max(&1)) as f64;
            let what = format!("{engine}: not copied again, the last time");
            rows.tell(&what, share * 100.0, "%");
        }
        lane.digest = step(worker, STEPS)?.digest()?;
        Ok(lane)
    }
}

/// Outcome of the run of one container: its report rows, and either its results or an error.
type Finished = (Rows, Result<Lane>);

fn panicked(_: Box<dyn Any + Send>) -> Finished {
    (Rows::default(), Err(anyhow!("the thread of a container panicked")))
}

/// Results of the container that ran with one engine.
#[derive(Default)]
struct Lane {
    engine: &'static str,
    /// Digest of the container's results at the end.
    digest: String,
    /// Durations of the container's offloads, in milliseconds.
    out: Vec<f64>,
    back: Vec<f64>,
    /// VRAM in use on the device while the container was offloaded, in bytes. `None` if other
    /// containers ran at the same time.
    left: Option<u64>,
}
