//! `cargo xtask demo`: runs two containers on one GPU, whose VRAM suffices for only one of them.
//!
//! ```text
//!  alpha:  fills its VRAM ── idle ── OFFLOADED ─────────────── called: waits, wakes ── contents as before
//!  beta:                             fills the freed VRAM ──── idle ── OFFLOADED ───── called: wakes ── as before
//! ```
//!
//! With `--dashboard` the demo runs until Ctrl-C, and serves the dashboard.
//!
//! Containers, images and containerd are private to the demo. All of them are removed at the end,
//! even after Ctrl-C.

pub mod dashboard;
mod options;
mod report;
mod scenario;
mod watch;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
};
use anyhow::{Context, Result, bail};
use nix::unistd::Uid;

use crate::{build, deps, output};

pub use options::{GpuChoice, Options};

/// Whether the user has pressed Ctrl-C. An error after that is a consequence of the clean-up.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// VRAM of the simulated GPU.
const SIMULATED_VRAM_BYTES: u64 = 1024 * MIB;

/// Installs missing packages, builds, runs the demo, checks its result, and cleans up.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the demo starts containerd and containers: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let gpu = match options.gpu {
        GpuChoice::Real => Gpu::Real,
        GpuChoice::Auto if Gpu::real_is_there() => Gpu::Real,
        GpuChoice::Auto | GpuChoice::Simulated => {
            Gpu::Simulated { vram_bytes: SIMULATED_VRAM_BYTES }
        }
    };
    let address = if options.dashboard { Some(dashboard::free_address()?) } else { None };
    let config = dashboard::config(scenario::CONFIG, address);
    let began = Instant::now();
    output::step(&format!(
        "Starting a private containerd {} with a {} GPU",
        release.version,
        gpu.as_str()
    ));
    let world = TestbedConfig::default()
        .default_engine()
        .artifacts(artifacts)
        .release(&release)
        .gpu(gpu)
        .config(&config)
        .world()?;
    let world = Arc::new(world);
    clean_up_on_signal(&world)?;
    if let Some(address) = address {
        output::step(&format!(
            "The dashboard is at http://{address} while this runs; Ctrl-C ends it"
        ));
        return dashboard::live(&world).inspect_err(|_| explain(&world));
    }
    let outcome = scenario::play(&world, options.json).inspect_err(|_| explain(&world));
    output::step("Cleaning up");
    world.end();
    let report = outcome.and_then(|seen| report::Report::new(&world, &seen, began.elapsed()))?;
    report.print(options.json)?;
    if !report.contents_verified {
        bail!("the contents of VRAM differ after the restore");
    }
    Ok(())
}

/// Prints the logs of the demo's programs after an error. After Ctrl-C this function only waits,
/// because the signal handler ends the process.
fn explain(world: &Testbed) {
    while INTERRUPTED.load(Ordering::Acquire) {
        std::thread::park();
    }
    world.show_logs();
}

/// Installs a handler of Ctrl-C that removes the testbed and then ends the demo.
fn clean_up_on_signal(world: &Arc<Testbed>) -> Result<()> {
    let world = Arc::downgrade(world);
    ctrlc::set_handler(move || {
        INTERRUPTED.store(true, Ordering::Release);
        output::step("Interrupted: cleaning up");
        if let Some(world) = world.upgrade() {
            world.end();
        }
        std::process::exit(130);
    })
    .context("cannot catch Ctrl-C")
}
