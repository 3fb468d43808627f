//! The hazard suite: one small program per hazard, without Affinode and with it, in real
//! containers, on the simulated GPU or on the machine's own.
//!
//! | module | plays |
//! | --- | --- |
//! | [`calls`] | the five calls that kill a process while its state is offloaded |
//! | [`nvml`] | NVML asked in a process that is offloaded |
//! | [`memory`] | kinds of memory that a checkpoint cannot carry, or can |
//! | [`host`] | host memory that has no room for the VRAM |
//! | [`setup`] | processes that cannot be managed, or not now |
//! | [`moments`] | something happens in the middle of a move |
//! | [`ends`] | a container ends, or is paused, while it is offloaded or waits |
//! | [`tools`] | profilers and video, which reach the driver past its public functions |
//! | [`exits`] | a program ends by itself while it is offloaded |
//! | [`hidden`] | a driver call that no hook sees |
//! | [`wake_race`] | two that do not fit together are woken at once |
//! | [`manual_ops`] | helpers of all hazards |
//! | [`report`] | the table |
//!
//! *Without* is reported, not judged: it is the reason for the row. *With* is judged: the process
//! must live on with its memory intact, offloaded or refused with the expected reason.

mod calls;
mod ends;
mod exits;
mod hidden;
mod host;
mod manual_ops;
mod memory;
mod moments;
mod nvml;
pub mod report;
mod setup;
mod tools;
mod wake_race;

use anyhow::{Context, Result};

pub(crate) use manual_ops::ballast;
pub use report::{Report, Row};

use crate::{
    containerd,
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
};

/// No container is offloaded without a request, and an offload waits only briefly for a running
/// kernel.
const CONFIG: &str = r#"
[policy]
mode = "manual"
idle_timeout = "100ms"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
lock_timeout = "1s"
[history]
dir = "off"
"#;
/// Simulated GPUs, large and mostly never touched, the last one cut by MIG; moves take long enough to be met in the middle.
const SIMULATED: [&str; 8] =
    ["--gpus", "3", "--mig-gpu", "2", "--checkpoint-fixed-ms", "150", "--restore-fixed-ms", "50"];
/// More than a driver keeps for itself; less than any process holds.
const QUIET_BYTES: u64 = 1_024 * MIB;
/// VRAM of a simulated GPU.
const SIMULATED_BYTES: u64 = 8_192 * MIB;

/// A hazard to play.
struct Case {
    name: String,
    /// Why it has nothing to show on a real GPU.
    simulated_only: Option<&'static str>,
    play: Play,
}

type Play = Box<dyn Fn(&Testbed) -> Result<Found>>;

/// What a row shows.
enum Found {
    /// The outcome of a played hazard.
    Row {
        /// Outcome of the play without Affinode.
        without: String,
        /// Outcome of the play with Affinode.
        with: String,
    },
    /// This machine cannot have it, and why.
    Skipped(String),
}

impl Case {
    fn new(name: &str, play: impl Fn(&Testbed) -> Result<Found> + 'static) -> Self {
        Self { name: name.into(), simulated_only: None, play: Box::new(play) }
    }

    fn simulated(mut self, why: &'static str) -> Self {
        self.simulated_only = Some(why);
        self
    }
}

fn cases() -> Vec<Case> {
    let groups = [calls::cases(), memory::cases(), host::cases(), setup::cases()];
    let mut cases: Vec<Case> = groups.into_iter().flatten().collect();
    cases.extend(nvml::cases());
    cases.extend(moments::cases());
    cases.extend(ends::cases());
    cases.extend(tools::cases());
    cases.extend(exits::cases());
    cases.extend(hidden::cases());
    cases
}

/// Which hazards to play.
#[derive(Clone, Debug)]
pub struct Options {
    /// Simulated, of whatever size, or the machine's own.
    pub gpu: Gpu,
    /// Only hazards whose name holds this.
    pub filter: String,
    /// How often two are woken at once.
    pub turns: usize,
}

/// Plays the hazards in testbeds of this recipe. A row that fails does not keep the others from
/// being played.
///
/// # Errors
/// When no testbed can be made.
pub fn run(
    recipe: &dyn Fn() -> TestbedConfig,
    options: &Options,
    tell: &mut dyn FnMut(&str),
) -> Result<Report> {
    let Options { gpu, filter, turns } = options;
    let mut report = Report::new(gpu.as_str());
    let chosen: Vec<Case> =
        cases().into_iter().filter(|case| case.name.contains(filter.as_str())).collect();
    if !chosen.is_empty() {
        let gpu = match gpu {
            Gpu::Simulated { .. } => Gpu::Simulated { vram_bytes: SIMULATED_BYTES },
            Gpu::Real => Gpu::Real,
        };
        let world = recipe().gpu(gpu).config(CONFIG).sim_options(&SIMULATED).world()?;
        for case in chosen {
            tell(&case.name);
            play(&world, case, &mut report);
        }
        if report.failed() {
            world.show_logs();
        }
    }
    if wake_race::NAME.contains(filter.as_str()) {
        tell(wake_race::NAME);
        let found = wake_race::play(recipe(), gpu, *turns);
        report.add(wake_race::NAME, found);
    }
    Ok(report)
}

fn play(world: &Testbed, case: Case, report: &mut Report) {
    if let (Gpu::Real, Some(why)) = (world.gpu(), case.simulated_only) {
        report.add(&case.name, Ok(Found::Skipped(why.into())));
        return;
    }
    let found = (case.play)(world);
    // Whatever is left would be in the way of the next row.
    let cleared = clear(world).context("between two rows");
    report.add(&case.name, found.and_then(|found| cleared.map(|()| found)));
}

/// Removes every container, and waits until the controller has forgotten them.
fn clear(world: &Testbed) -> Result<()> {
    until("the containers to be removed", || {
        let listed = containerd::run(world.ctr().args(["containers", "list", "--quiet"]))?;
        for id in listed.lines() {
            // A container that ends by itself meanwhile is the wanted result.
            let _ = world.ctr().args(["tasks", "delete", "--force", id]).output()?;
            let _ = world.ctr().args(["containers", "delete", id]).output()?;
        }
        Ok(listed.trim().is_empty().then_some(()))
    })?;
    until("the controller to forget them", || {
        let node = world.cli().ps_now().ok();
        let none = |node: crate::cli::Node| {
            node.containers.is_empty()
                && node.gpus.iter().all(|gpu| gpu.vram_used_bytes < QUIET_BYTES)
        };
        Ok(node.is_none_or(none).then_some(()))
    })
}
