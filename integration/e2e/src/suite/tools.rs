//! Tests of CUDA tools on a real GPU, with each engine and with the stock runtime: torch.profiler
//! in several orders, NVTX, compute-sanitizer, ncu, and a session of NVDEC. An order is a sequence
//! of profiling and offloading.
//!
//! | order | sequence |
//! | --- | --- |
//! | ended | a profile is taken and ended, then the container is offloaded |
//! | offloaded | the container is offloaded, then the profiler starts |
//! | begins | an offload is requested while the profiler starts |
//! | through | the profiler runs during the offload and restore |
//! | again | like `ended`, twice |
//!
//! Each process is one repetition. A container has several processes. They are forked before they
//! use CUDA, and execute the same commands at the same time. An order in which a process was once
//! seen to hang or to be lost is repeated `AFFINODE_TOOL_ROUNDS` times (default 20). The other
//! orders are repeated four times.

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{
    BY_ORDER,
    engines::moved_by,
    python::Python,
    report::{NotHere, Rows},
};
use crate::{
    container::{CLIENTS, Spec},
    containerd::STOCK,
    testbed::Testbed,
    wait::until_within,
    worker::Worker,
};

const PROGRAM: &str = "tool_program.py";
const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];
/// Pseudo engine name of the container that uses the stock runtime.
const STILL: &str = "stock";
/// Number of repetitions of a sequence in which no process was ever seen to hang or to be lost.
const FEW: usize = 4;
/// Time after which the program reports that a command does not return.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit until the program prints its first line. A machine that has just started reads large
/// libraries slowly.
const IMPORTS: Duration = Duration::from_secs(180);

/// A reply of the program `tool_program.py`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Said {
    command: String,
    why: String,
    digest: String,
    /// Number of processes of the container that executed the command successfully.
    count: usize,
    /// Number of GPU events in the profile with the fewest events.
    events: u64,
}

/// Results of one container after a sequence of profiling and offloading.
#[derive(Default)]
struct Seen {
    /// Number of commands that all processes executed.
    answered: usize,
    asked: usize,
    digest: String,
    /// Whether at least one profile contains no GPU event.
    blind: bool,
    /// Result of the offload as text: the phase of the process, or the reason why the container was
    /// not offloaded.
    left: String,
}

/// A container that runs the program `tool_program.py`, and its results.
struct Subject<'w> {
    world: &'w Testbed,
    engine: &'static str,
    worker: Worker,
    processes: usize,
    seen: Seen,
}

/// Number of repetitions of sequences in which a process was once seen to hang or to be lost.
fn rounds() -> usize {
    let asked = std::env::var("AFFINODE_TOOL_ROUNDS").ok();
    asked.and_then(|rounds| rounds.parse().ok()).unwrap_or(20)
}

/// Runs torch.profiler in every order that the table of the module lists. In each order, all
/// processes must reply, and the results must equal those with the stock runtime.
pub fn profiler(python: &Python, rows: &mut Rows) -> Result<()> {
    let orders: [(&str, usize, Order); 5] = [
        ("begun while offloaded", rounds(), offloaded),
        ("moved while it begins", rounds(), begins),
        ("ended before", FEW, ended),
        ("running through it", FEW, through),
        ("ended and begun again", FEW, again),
    ];
    // After an order that hangs, the remaining orders still run.
    let mut outcome = Ok(());
    for (name, processes, order) in orders {
        outcome = outcome.and(beside_stock(python, name, processes, &[], order, rows));
    }
    outcome.and(idle_again(python, rows))
}

/// Offloads a program that uses NVTX ranges. Affinode must not treat NVTX as a profiler. If it did,
/// an offload would not checkpoint the context.
pub fn ranges(python: &Python, rows: &mut Rows) -> Result<()> {
    beside_stock(
        python,
        "NVTX ranges",
        FEW,
        &["nvtx"],
        |subject| {
            subject.leave()?;
            let hazards = subject.hazards()?;
            ensure!(hazards.is_empty(), "NVTX counts as a tool: {hazards:?}");
            subject.ask("step")
        },
        rows,
    )
}

/// Decodes video with NVDEC, offloads the container, and decodes video again. All processes must
/// reply, and the results must equal those with the stock runtime.
pub fn video(python: &Python, rows: &mut Rows) -> Result<()> {
    beside_stock(
        python,
        "NVDEC session",
        1,
        &[],
        |subject| {
            subject.ask("video")?;
            subject.leave()?;
            subject.ask("video")?;
            subject.ask("step")
        },
        rows,
    )
}

type Order = fn(&mut Subject) -> Result<()>;

fn ended(subject: &mut Subject) -> Result<()> {
    subject.profile()?;
    subject.leave()?;
    subject.ask("step")
}

fn offloaded(subject: &mut Subject) -> Result<()> {
    subject.leave()?;
    subject.profile()?;
    subject.ask("step")
}

fn begins(subject: &mut Subject) -> Result<()> {
    subject.worker.send("begin")?;
    subject.leave()?;
    subject.hear("begin")?;
    subject.ask("step")?;
    subject.ask("end")
}

fn through(subject: &mut Subject) -> Result<()> {
    subject.ask("begin")?;
    subject.ask("step")?;
    subject.leave()?;
    subject.ask("step")?;
    subject.ask("end")
}

fn again(subject: &mut Subject) -> Result<()> {
    for _ in 0..2 {
        subject.profile()?;
        subject.leave()?;
    }
    subject.ask("step")
}

impl<'w> Subject<'w> {
    fn start(
        python: &Python<'w>,
        engine: &'static str,
        processes: usize,
        more: &[&str],
        spec: impl FnOnce(Spec) -> Spec,
    ) -> Result<Self> {
        let count = processes.to_string();
        let program = [&[PROGRAM, &*count], more].concat();
        let made = python.spec(&format!("tools-{engine}"), "root", &program)?;
        let made = spec(if engine == STILL { made.runtime(STOCK) } else { moved_by(made, engine) });
        let worker = Worker::start_as(python.world, made)?;
        let seen = Seen::default();
        let mut subject = Subject { world: python.world, engine, worker, processes, seen };
        let first: Said = serde_json::from_str(&subject.worker.receive_first_line(IMPORTS)?)?;
        ensure!(
            first.command == "ready" && first.count == processes,
            "not all processes are ready: {}",
            first.why
        );
        subject.ask("step")?;
        Ok(subject)
    }

    /// Sends a command to all processes of the container, and waits for their replies.
    fn ask(&mut self, command: &str) -> Result<()> {
        self.worker.send(command)?;
        self.hear(command)
    }

    fn hear(&mut self, command: &str) -> Result<()> {
        let said: Said = serde_json::from_str(&self.worker.receive_first_line(COMMAND_TIMEOUT)?)?;
        ensure!(
            said.command == command,
            "expected a reply to {command}, got one to {}",
            said.command
        );
        if said.why.contains("libnvcuvid.so.1: cannot open") {
            return Err(NotHere("no libnvcuvid.so.1".into()).into());
        }
        self.seen.asked += self.processes;
        self.seen.answered += said.count;
        let engine = self.engine;
        ensure!(
            said.count == self.processes,
            "{engine}: {command}: {} of {} processes replied: {}",
            said.count,
            self.processes,
            said.why
        );
        if command == "step" {
            self.seen.digest = said.digest;
        }
        self.seen.blind |= command == "end" && said.events == 0;
        Ok(())
    }

    /// Profiles one step of the program with torch.profiler.
    fn profile(&mut self) -> Result<()> {
        ["begin", "step", "end"].into_iter().try_for_each(|command| self.ask(command))
    }

    /// Requests an offload of the container. Stores the result: the phase of the process, or the
    /// reason for the refusal.
    fn leave(&mut self) -> Result<()> {
        if self.engine == STILL {
            return Ok(());
        }
        let id = self.worker.running.id.clone();
        let said = self.world.cli().offload(&id)?;
        let row = self.world.cli().known(&id)?;
        self.seen.left = match said.done {
            true => row.process()?.phase.clone(),
            false => said.reason,
        };
        Ok(())
    }

    fn hazards(&self) -> Result<Vec<String>> {
        if self.engine == STILL {
            return Ok(Vec::new());
        }
        let row = self.world.cli().known(&self.worker.running.id)?;
        Ok(row.process()?.hazards.clone())
    }

    fn end(&self) -> Result<()> {
        self.worker.running.kill(self.world)?;
        self.worker.running.delete(self.world)
    }
}

/// Runs a sequence of profiling and offloading in several containers at the same time: one for each
/// engine, and one with the stock runtime. Adds rows that compare the results of each engine with
/// those of the stock runtime.
fn beside_stock(
    python: &Python,
    name: &str,
    processes: usize,
    more: &[&str],
    order: Order,
    rows: &mut Rows,
) -> Result<()> {
    let lane = |engine| -> Result<Seen> {
        let by_order = |spec: Spec| spec.annotation(BY_ORDER.0, BY_ORDER.1);
        let mut subject = Subject::start(python, engine, processes, more, by_order)?;
        let outcome = order(&mut subject);
        // A container that hangs is removed, too, because the next order uses the same name.
        let ended = subject.end();
        outcome.and(ended).with_context(|| format!("{name}, {engine}: the order failed"))?;
        Ok(subject.seen)
    };
    let lanes: Vec<(&str, Result<Seen>)> = thread::scope(|scope| {
        let begin = |engine| (engine, scope.spawn(move || lane(engine)));
        let lanes: Vec<_> = [STILL].into_iter().chain(ENGINES).map(begin).collect();
        let join = |lane: thread::ScopedJoinHandle<'_, Result<Seen>>| {
            lane.join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread of a container panicked")))
        };
        lanes.into_iter().map(|(engine, lane)| (engine, join(lane))).collect()
    });
    let (mut still, mut outcome) = (String::new(), Ok(()));
    for (engine, seen) in lanes {
        let seen = match seen {
            Ok(seen) => seen,
            Err(error) => {
                outcome = outcome.and(Err(error));
                continue;
            }
        };
        let what = |what: &str| format!("{name}, {engine}: {what}");
        rows.count(&what("processes that answered"), seen.answered, seen.asked);
        rows.count(&what("profiles with GPU events"), usize::from(!seen.blind), 1);
        if engine == STILL {
            still = seen.digest;
            continue;
        }
        rows.count(
            &what("results as with the stock runtime"),
            usize::from(seen.digest == still),
            1,
        );
        rows.tell(&what(&format!("left as {}", seen.left)), 1.0, "");
    }
    outcome
}

/// Requires that a container becomes idle again after its process has used a profiler.
fn idle_again(python: &Python, rows: &mut Rows) -> Result<()> {
    const WITHIN: Duration = Duration::from_secs(20);
    let mut subject = Subject::start(python, "copy", 1, &[], |spec| spec)?;
    subject.profile()?;
    let id = subject.worker.running.id.clone();
    let cli = python.world.cli();
    let before = cli.known(&id)?;
    let left = until_within(WITHIN, "it to be idle", || {
        Ok((cli.known(&id)?.state == "Offloaded").then_some(()))
    });
    let after = cli.known(&id)?;
    rows.count("idle again after a profile", usize::from(left.is_ok()), 1);
    if left.is_err() {
        let calls = after.process()?.calls.saturating_sub(before.process()?.calls);
        let name =
            format!("calls since, the last one {}: {}", after.process()?.last_call, after.reason);
        rows.tell(&name, calls as f64, "");
    }
    subject.ask("step")?;
    subject.end()
}

/// Runs the program under compute-sanitizer and under ncu, one after the other, because the tools
/// cannot run at the same time.
pub fn wrappers(python: &Python, rows: &mut Rows) -> Result<()> {
    const TOOLS: [(&str, &[&str]); 2] = [
        ("compute-sanitizer", &["--log-file", "/tmp/sanitizer.log"]),
        ("ncu", &["--log-file", "/tmp/ncu.log", "--launch-count", "1"]),
    ];
    let found = TOOLS.map(|(name, arguments)| (name, arguments, find(name)));
    if found.iter().all(|(.., path)| path.is_none()) {
        return Err(NotHere("neither compute-sanitizer nor ncu".into()).into());
    }
    for (name, arguments, path) in found {
        let Some(path) = path else { continue };
        for engine in [STILL].into_iter().chain(ENGINES) {
            let mut spec = python.spec(&format!("{name}-{engine}"), "root", &[PROGRAM])?;
            let program = format!("{CLIENTS}/hazards");
            spec.argv = [path.to_string_lossy().into_owned()].into();
            spec.argv.extend(arguments.iter().map(|&argument| argument.to_owned()));
            spec.argv.extend([program, "plain".into(), "64".into()]);
            let spec = spec.annotation(BY_ORDER.0, BY_ORDER.1);
            let spec = if engine == STILL { spec.runtime(STOCK) } else { moved_by(spec, engine) };
            let mut worker = Worker::start_as(python.world, spec)?;
            let ready: crate::worker::Answer =
                serde_json::from_str(&worker.receive_first_line(IMPORTS)?)?;
            ensure!(ready.result == 0, "{name}, {engine}: the program cannot start: {ready:?}");
            if engine != STILL {
                let id = worker.running.id.clone();
                let said = python.world.cli().offload(&id)?;
                let row = python.world.cli().known(&id)?;
                let phase = row.process()?.phase.clone();
                ensure!(
                    phase != "Checkpointed",
                    "{name}, {engine}: its context was checkpointed: {row:?}"
                );
                let left = if said.done { phase } else { said.reason };
                rows.tell(&format!("{name}, {engine}: left as {left}"), 1.0, "");
            }
            let intact = usize::from(worker.verify()?);
            rows.count(&format!("{name}, {engine}: contents intact"), intact, 1);
            rows.count(
                &format!("{name}, {engine}: ends"),
                usize::from(worker.ends(python.world)?),
                1,
            );
            worker.running.delete(python.world)?;
        }
    }
    Ok(())
}

/// Finds the path of a CUDA tool in PATH or in the folders of the CUDA packages.
fn find(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    places.push("/usr/local/cuda/bin".into());
    places.push("/usr/local/cuda/compute-sanitizer".into());
    places.into_iter().map(|folder| folder.join(name)).find(|path| path.is_file())
}
