//! A crash campaign, which injects random faults while containers are offloaded and restored.
//! Together the containers need more VRAM than the GPU has.
//!
//! ```text
//!  round: make the plan from (seed, number)
//!           ──> for each scene: make CUDA calls, cause the fault when its step is observed
//!           ──> undo the faults that do not end by themselves
//!           ──> every container must reply, with its memory unchanged
//!           ──> replace the containers that have ended
//!           ──> offload all containers: no VRAM may be in use
//!           ──> compare processes, files and mounts with those at the start
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | [`plan`] | the steps of a round, without side effects |
//! | [`container`] | one container and its CUDA processes |
//! | [`mod@env`] | the environment, its containers, and the invariants after a round |
//! | [`fault`] | causing and undoing each fault |
//! | [`vram`] | the processes that may hold VRAM while all containers are offloaded, from the driver's figures |
//! | [`watch`] | the events by which steps are observed |
//! | [`leak_check`] | finds processes, files and mounts that a round has left behind |
//! | [`report`] | the findings |
//! | [`setup`] | the conditions of an environment |
//!
//! One environment (a testbed with its containers) serves a block of rounds. Each round begins with
//! all containers offloaded. After a finding (a violated invariant), the next round gets a new
//! environment. Several environments run the blocks of a campaign in parallel. Of every ten blocks,
//! one runs with offloads and restores that take seconds, and a different one with little host
//! memory. The same seed and round number always produce the same plan, but the timing depends on
//! the machine.

pub mod container;
pub mod env;
pub mod fault;
pub mod leak_check;
pub mod plan;
pub mod report;
pub mod setup;
pub mod vram;
pub mod watch;

use std::{
    process::{Child, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

pub use report::{Finding, Report};

use self::report::NO_COPIER;
use crate::{gpu::Gpu, testbed::TestbedConfig, wait::until};
use env::ChaosEnv;
use plan::{Fault, Plan, Scene, Stimulus};
use setup::Setup;

/// Number of rounds in a block. The rounds of a block use the same environment.
const BLOCK: u64 = 10;
/// Time for which a round waits until content of a container is on disk.
const STORED_WITHIN: Duration = Duration::from_secs(15);
/// Number of findings (violated invariants) after which a campaign ends.
const ENOUGH: usize = 5;

/// Parameters of a crash campaign.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed that reproduces the campaign.
    pub seed: u64,
    /// Number of the first round.
    pub first: u64,
    /// Number of rounds to run.
    pub rounds: u64,
    /// The GPU on which the campaign runs: a simulated GPU of any size, or the machine's own GPU.
    pub gpu: Gpu,
    /// Number of environments that run rounds in parallel. It is 1 on a real GPU.
    pub worlds: usize,
    /// Number of GPUs over which the containers are distributed, 1 or 2. A real machine must have
    /// at least this many GPUs.
    pub gpus: usize,
}

/// Runs a crash campaign. `recipe` returns the configuration of each testbed. `tell` receives lines
/// about the campaign's progress.
///
/// # Errors
/// When no testbed can be created.
pub fn run(
    recipe: &(dyn Fn() -> TestbedConfig + Sync),
    options: &Options,
    tell: &mut (dyn FnMut(&str) + Send),
) -> Result<Report> {
    let gpu = options.gpu.as_str().into();
    let report = Report { gpu, seed: options.seed, ..Report::default() };
    let campaign = Campaign {
        recipe,
        options,
        next: AtomicU64::new(options.first),
        began: Instant::now(),
        told: Mutex::new((report, tell)),
    };
    std::thread::scope(|scope| {
        let worlds: Vec<_> =
            (0..options.worlds.max(1)).map(|_| scope.spawn(|| campaign.play_rounds())).collect();
        worlds.into_iter().try_for_each(|world| {
            world.join().unwrap_or_else(|_| bail!("a thread of the campaign panicked"))
        })
    })?;
    let seconds = campaign.began.elapsed().as_secs_f64();
    let (report, _) = campaign.told.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Report { seconds, ..report })
}

/// Data that the threads of a campaign share. Each thread runs rounds in its own testbed.
struct Campaign<'a> {
    recipe: &'a (dyn Fn() -> TestbedConfig + Sync),
    options: &'a Options,
    next: AtomicU64,
    began: Instant,
    told: Mutex<Told<'a>>,
}

/// The report with the findings so far, and the callback that prints lines about the progress.
type Told<'a> = (Report, &'a mut (dyn FnMut(&str) + Send));

impl<'a> Campaign<'a> {
    /// Runs rounds until all rounds have run or the campaign has enough findings. Each block of
    /// rounds gets a new testbed. After a finding, the next round gets a new testbed as well.
    fn play_rounds(&self) -> Result<()> {
        let Options { seed, first, rounds, gpu, gpus, .. } = self.options;
        let mut env: Option<ChaosEnv> = None;
        let mut block = 0..0;
        loop {
            if block.is_empty() {
                let begin = self.next.fetch_add(BLOCK, Ordering::SeqCst);
                block = begin..(begin + BLOCK).min(first + rounds);
            }
            let next = block.next();
            let Some(round) = next.filter(|_| self.lock().0.findings.len() < ENOUGH) else {
                return Ok(());
            };
            let setup = Setup::of(round, gpu);
            let on = match env.take().filter(|env| env.setup == setup) {
                Some(env) => env,
                None => ChaosEnv::build((self.recipe)(), gpu, *gpus, setup)?,
            };
            let on = env.insert(on);
            let plan = Plan::draw(*seed, round);
            let mut seen = Report::default();
            seen.findings = play(on, &plan, round, &mut seen);
            let failed = seen.failed();
            if failed {
                self.show(on, &plan, round, &seen.findings);
            }
            self.add(seen);
            if failed {
                env = None;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told<'a>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of rounds between two progress lines. It is lower on a real GPU, because rounds take
    /// longer there and the campaign may be interrupted.
    fn tell_each(&self) -> u64 {
        match self.options.gpu {
            Gpu::Simulated { .. } => 25,
            Gpu::Real => 5,
        }
    }

    fn add(&self, seen: Report) {
        let mut told = self.lock();
        let (report, tell) = &mut *told;
        report.add(seen);
        if report.rounds.is_multiple_of(self.tell_each()) {
            tell(&format!(
                "{} rounds in {:.0} s, {} findings",
                report.rounds,
                self.began.elapsed().as_secs_f64(),
                report.findings.len()
            ));
        }
    }

    /// Prints a round's plan, its findings, its events and the state of the controller.
    fn show(&self, on: &ChaosEnv, plan: &Plan, round: u64, findings: &[Finding]) {
        let mut told = self.lock();
        let tell = &mut told.1;
        tell(&format!("round {round} of seed {}\n{plan}", self.options.seed));
        for finding in findings {
            tell(&format!("  {}: {}", finding.kind, finding.text));
        }
        for event in on.watch.log().iter().filter(|event| event.kind == "state") {
            tell(&format!(
                "    {} {} {} -> {} ({})",
                event.unix_ms, event.container, event.from, event.to, event.reason
            ));
        }
        if let Ok(answer) = on.world.cli().output(&["ps", "-o", "json"]) {
            tell(&String::from_utf8_lossy(&answer.stdout));
        }
        on.world.show_logs();
    }
}

/// Runs one round, and then checks for leaks. Returns the findings.
fn play(env: &mut ChaosEnv, plan: &Plan, round: u64, report: &mut Report) -> Vec<Finding> {
    env.watch.clear();
    let squeezed = env.setup == Setup::Squeezed;
    let together = plan.together && !squeezed && !env.setup.uses_host_pool();
    let mut outcome = if together { env.bring_together() } else { Ok(()) };
    report.together += u64::from(env.is_together());
    let error =
        |error: &anyhow::Error| Finding { round, kind: "error", text: format!("{error:#}") };
    let mut undo = Vec::new();
    let mut asked = Vec::new();
    for scene in &plan.scenes {
        outcome = outcome.and_then(|()| play_scene(env, scene, &mut undo, &mut asked, report));
    }
    if squeezed {
        // After `call_twins`, both twins become idle at the same time. Host memory suffices to
        // offload only one of them.
        outcome = outcome.and_then(|()| call_twins(env));
    }
    let mut found: Vec<Finding> = outcome.err().iter().map(error).collect();
    if let Err(why) = fault::undo(&env.world, undo).and_then(|()| controller_is_back(env)) {
        found.push(error(&why));
    }
    match env.longest_return_ms() {
        Ok(longest_ms) => report.longest_return_ms = report.longest_return_ms.max(longest_ms),
        Err(why) => found.push(Finding { round, kind: "stuck", text: format!("{why:#}") }),
    }
    found.extend(env.verify(round, &mut report.verified));
    let killed = env.oom_kills();
    if killed > 0 {
        let text = format!("the kernel killed {killed} processes because host memory was short");
        found.push(Finding { round, kind: "lost", text });
    }
    for child in asked {
        if let Err(why) = end(child) {
            found.push(Finding { round, kind: "stuck", text: format!("{why:#}") });
        }
    }
    if !found.is_empty() {
        return found;
    }
    if let Err(why) = env.replace().and_then(|()| env.rest()) {
        return vec![Finding { round, kind: "stuck", text: format!("{why:#}") }];
    }
    let stayed = env.take_stayed();
    if !stayed.is_empty() {
        let finding = |text| Finding { round, kind: "stuck", text };
        return stayed.into_iter().map(finding).collect();
    }
    let woken = |event: &&crate::cli::EventRow| event.from == "Restoring" && event.to == "Active";
    if env.setup == Setup::Pooled && round.is_multiple_of(2) {
        // In the other rounds, the next calls arrive while content moves to disk. If no content moves,
        // for example because all of it is in the containers' own memory, the round ends too.
        let _ = env.watch.wait_kind("stored-on-disk", STORED_WITHIN);
    }
    let stored = |event: &&crate::cli::EventRow| event.kind == "stored-on-disk";
    report.stored += env.watch.log().iter().filter(stored).count() as u64;
    report.wakes += env.watch.log().iter().filter(woken).count() as u64;
    let leaks = env.leaks();
    match leaks {
        Ok(leaks) => {
            leaks.into_iter().map(|text| Finding { round, kind: "leaked", text }).collect()
        }
        Err(why) => vec![error(&why)],
    }
}

fn call_twins(env: &mut ChaosEnv) -> Result<()> {
    for role in plan::TWINS {
        let twin = &mut env.cast[role];
        if let Some(process) = twin.processes.first_mut().filter(|process| !process.doomed)
            && !twin.doomed
        {
            process.ask("touch")?;
        }
    }
    Ok(())
}

fn play_scene(
    env: &mut ChaosEnv,
    scene: &Scene,
    undo: &mut Vec<fault::Undo>,
    asked: &mut Vec<Child>,
    report: &mut Report,
) -> Result<()> {
    let from = env.watch.count();
    for stimulus in &scene.stimuli {
        match stimulus {
            Stimulus::Call(target, what) => {
                let container = &mut env.cast[target.container];
                if let Some(process) = container.processes.get_mut(target.process)
                    && !container.doomed
                    && !process.doomed
                {
                    process.ask(what)?;
                }
            }
            Stimulus::Offload(container) => asked.push(ask(env, "offload", *container)?),
            Stimulus::Restore(container) => asked.push(ask(env, "restore", *container)?),
            Stimulus::Exec(container) => {
                let container = &mut env.cast[*container];
                if container.is_whole() {
                    container.exec(&env.world)?;
                }
            }
        }
    }
    let strike = &scene.strike;
    let (watched, step) = strike.at;
    // The watched container may never enter the state, because timing differs between machines. In
    // this case the fault is caused when the time limit has passed.
    let patience = env.setup.step_patience();
    let _ = env.watch.wait(&env.cast[watched].name(), step, from, patience);
    std::thread::sleep(Duration::from_micros(strike.after_us));
    let state = env.watch.state(&env.cast[strike.on.container].name());
    let state = if fault::has_victim(&env.world, strike.fault)? { &state } else { NO_COPIER };
    report.count(strike.fault.as_str(), state);
    if strike.fault == Fault::KillController {
        env.time_return()?;
    }
    let before = undo.len();
    fault::strike(&env.world, strike, &mut env.cast[strike.on.container], undo)
        .with_context(|| strike.fault.as_str())?;
    if undo.len() > before {
        std::thread::sleep(Duration::from_millis(strike.lasts_ms));
        // Lasting faults are undone here, except for an ended containerd. containerd is started
        // again only after the round, so that the remaining scenes run without it.
        let last = undo.split_off(before);
        let (later, now): (Vec<_>, Vec<_>) =
            last.into_iter().partition(|undo| matches!(undo, fault::Undo::StartContainerd));
        undo.extend(later);
        fault::undo(&env.world, now)?;
    }
    Ok(())
}

/// Starts the command `affinode offload` or `affinode restore` for a container in the background.
/// Its exit status is not checked. At the end of the round, the test checks that the command has
/// ended.
fn ask(env: &ChaosEnv, what: &str, container: usize) -> Result<Child> {
    let mut command = env.world.cli().command(&[what, &env.cast[container].running.id]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().with_context(|| format!("cannot run affinode {what}"))
}

fn end(mut child: Child) -> Result<()> {
    let ended = until("affinode offload or restore to answer", || {
        Ok(child.try_wait()?.is_some().then_some(()))
    });
    if ended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    ended
}

/// Waits until a controller replies. Returns at once if all containers were meant to end, because
/// then no controller is needed.
fn controller_is_back(env: &ChaosEnv) -> Result<()> {
    if env.cast.iter().all(|container| container.doomed) {
        return Ok(());
    }
    until("a controller to reply", || Ok(env.world.cli().ps_now().ok())).map(|_| ())
}
