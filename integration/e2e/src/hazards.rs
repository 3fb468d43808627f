//! The hazard suite, which runs one small program for each hazard (a situation that can end or
//! damage a process while its GPU memory is moved). Each program runs without Affinode and with it,
//! in a real container, on the simulated GPU or on the machine's own.
//!
//! | module | content |
//! | --- | --- |
//! | [`calls`] | the five calls that kill a process while its state is offloaded |
//! | [`nvml`] | NVML queries in a process that is offloaded |
//! | [`memory`] | kinds of memory that a checkpoint can, or cannot, restore |
//! | [`host`] | too little host memory for the VRAM |
//! | [`setup`] | processes that cannot be managed, at all or at present |
//! | [`moments`] | events during an offload or restore |
//! | [`ends`] | a container ends or is paused while it is offloaded or waits for VRAM |
//! | [`tools`] | profilers and video, which enter the driver without its public functions |
//! | [`exits`] | a program ends by itself while it is offloaded |
//! | [`hidden`] | a driver call that no hook sees |
//! | [`wake_race`] | two containers are woken at the same time, but VRAM suffices for one |
//! | [`manual_ops`] | helper functions for all hazards |
//! | [`report`] | the table of results |
//!
//! Only the result with Affinode decides whether the hazard passes: the process must continue with
//! its memory intact, and its offload must succeed or be refused with the expected reason. The
//! result without Affinode is only reported.

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

pub(crate) use manual_ops::{ballast, ballast_on};
pub use report::{Report, Row};

use crate::{
    containerd,
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
};

/// Affinode's configuration for the hazard suite. Containers are offloaded only on request, and an
/// offload waits only briefly for a running kernel.
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
/// Options of the simulated GPUs. The last of the three GPUs is in MIG mode. Offloads and restores
/// are slow enough that a test can cause an event during them.
const SIMULATED: [&str; 8] =
    ["--gpus", "3", "--mig-gpu", "2", "--checkpoint-fixed-ms", "150", "--restore-fixed-ms", "50"];
/// VRAM use in bytes below which a GPU counts as unused. The value is more than a driver reserves
/// for itself and less than any process of the suite uses.
const QUIET_BYTES: u64 = 1_024 * MIB;
/// VRAM of a simulated GPU.
const SIMULATED_BYTES: u64 = 8_192 * MIB;

/// A hazard that the suite runs.
struct Case {
    name: String,
    /// Reason why the hazard cannot be run on a real GPU. `None` if it can be run there.
    simulated_only: Option<&'static str>,
    play: Play,
}

type Play = Box<dyn Fn(&Testbed) -> Result<Found>>;

/// Result of a hazard: the outcomes without and with Affinode, or the reason why the hazard was
/// skipped.
enum Found {
    /// The outcomes of a hazard that was run.
    Row {
        /// Outcome of the run without Affinode.
        without: String,
        /// Outcome of the run with Affinode.
        with: String,
    },
    /// The reason why the hazard cannot be run on this machine.
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

/// Parameters of the hazard suite.
#[derive(Clone, Debug)]
pub struct Options {
    /// The GPU: simulated, of any size, or the machine's own.
    pub gpu: Gpu,
    /// Runs only hazards whose names contain one of these texts. If the list is empty, all hazards
    /// run.
    pub filters: Vec<String>,
    /// Number of times that the wake race wakes two containers at the same time.
    pub turns: usize,
}

/// Runs the hazards in testbeds that `recipe` configures. The remaining hazards still run if a
/// hazard fails. `tell` receives lines about the progress.
///
/// # Errors
/// When no testbed can be created.
pub fn run(
    recipe: &dyn Fn() -> TestbedConfig,
    options: &Options,
    tell: &mut dyn FnMut(&str),
) -> Result<Report> {
    let Options { gpu, filters, turns } = options;
    let is_wanted =
        |name: &str| filters.is_empty() || filters.iter().any(|text| name.contains(text.as_str()));
    let mut report = Report::new(gpu.as_str());
    let chosen: Vec<Case> = cases().into_iter().filter(|case| is_wanted(&case.name)).collect();
    if !chosen.is_empty() {
        let gpu = match gpu {
            Gpu::Simulated { .. } => Gpu::Simulated { vram_bytes: SIMULATED_BYTES },
            Gpu::Real => Gpu::Real,
        };
        let world = recipe().gpu(gpu).config(CONFIG).sim_options(&SIMULATED).world()?;
        for case in chosen {
            tell(&case.name);
            let before = report.rows.len();
            play(&world, case, &mut report);
            // A hazard that cannot be run on this machine adds no row.
            for row in report.rows.iter().skip(before) {
                tell(&format!("  without: {}; with: {}", row.without, row.with));
            }
        }
        if report.failed() {
            world.show_logs();
        }
    }
    if is_wanted(wake_race::NAME) {
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
    // Remaining containers would disturb the next hazard.
    let cleared = clear(world).context("cannot remove the containers of the previous hazard");
    report.add(&case.name, found.and_then(|found| cleared.map(|()| found)));
}

/// Removes every container of the testbed, and waits until the controller lists none.
fn clear(world: &Testbed) -> Result<()> {
    until("the containers to be removed", || {
        let listed = containerd::run(world.ctr().args(["containers", "list", "--quiet"]))?;
        for id in listed.lines() {
            // The command fails if the container ends by itself meanwhile, which is the desired
            // result.
            let _ = world.ctr().args(["tasks", "delete", "--force", id]).output()?;
            let _ = world.ctr().args(["containers", "delete", id]).output()?;
        }
        Ok(listed.trim().is_empty().then_some(()))
    })?;
    until("the controller to remove them from its list", || {
        let node = world.cli().ps_now().ok();
        let none = |node: crate::cli::Node| {
            node.containers.is_empty()
                && node.gpus.iter().all(|gpu| gpu.vram_used_bytes < QUIET_BYTES)
        };
        Ok(node.is_none_or(none).then_some(()))
    })
}
