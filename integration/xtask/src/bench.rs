//! `cargo xtask bench`: measures the overhead of Affinode. Each figure is measured with and without
//! Affinode in the same run.
//!
//! Runs with and without Affinode alternate. Each figure has two values, which are medians of
//! several runs: with Affinode and without it. To estimate the noise of a figure, the runs without
//! Affinode are divided into two halves. The noise is the difference between the medians of the
//! halves.
//!
//! | figure | method |
//! | --- | --- |
//! | hooked call | a program times calls of a driver function that does nothing, with and without the preload library |
//! | start to exit | median time of `ctr run --rm` of `/bin/true`, with the stock shim and Affinode's in turn |
//! | memory | resident set of all shims of one running container, with the stock shim and with Affinode's |
//! | wake | time of a waiting call minus the time of the driver's own restore and unlock |
//! | engines | the same programs are offloaded with each engine, and the results compared with the goals (with `--engines`, or on a machine with a GPU) |

mod calls;
mod containers;
mod engines;
mod stats;
mod wake;

use affinode_e2e::{
    gpu::Gpu,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;
use serde::Serialize;

use crate::{build, deps, output};

#[derive(Args)]
pub struct Options {
    /// Print one JSON object and nothing else on standard output.
    #[arg(long)]
    json: bool,
    /// Number of runs of each container.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Also compare the engines with each other and with their goals, which takes minutes. Without
    /// this option, the comparison runs only on a machine with a GPU.
    #[arg(long)]
    engines: bool,
    /// Exit with an error if a goal is missed or a part fails.
    #[arg(long)]
    strict: bool,
}

/// One measured figure, with and without Affinode.
#[derive(Serialize)]
pub struct Figure {
    name: &'static str,
    unit: &'static str,
    without: f64,
    with: f64,
    /// Noise in the unit of the figure: the difference between the medians of two halves of the
    /// runs without Affinode. If `with` and `without` differ by less, their difference is not
    /// significant.
    noise: f64,
    /// The goal that the project has set for the figure.
    goal: &'static str,
    met: bool,
    method: String,
}

/// Measures all figures and prints them.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the bench starts containerd and containers: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Release)?;
    let recipe = || {
        TestbedConfig::default()
            .artifacts(artifacts.clone())
            .release(&release)
            .gpu(Gpu::Simulated { vram_bytes: PLENTY_BYTES })
            .config("[policy]\nmode = \"manual\"\n")
    };
    let mut figures = Vec::new();
    output::step("Calls");
    figures.extend(calls::measure(&artifacts)?);
    output::step("Containers");
    figures.extend(containers::measure(&recipe().world()?, options.rounds)?);
    output::step("Wake");
    figures.extend(wake::measure(&recipe().world()?)?);
    print(&figures, options.json)?;
    let mut missed: Vec<&str> =
        figures.iter().filter(|figure| !figure.met).map(|figure| figure.name).collect();
    if !options.json && (options.engines || Gpu::real_is_there()) {
        output::step("Engines");
        if !engines::measure(&artifacts, &release)? {
            missed.push("comparison of the engines");
        }
    }
    if options.strict && !missed.is_empty() {
        bail!("these goals were missed: {}", missed.join(", "));
    }
    Ok(())
}

fn print(figures: &[Figure], json: bool) -> Result<()> {
    if json {
        output::out(&serde_json::to_string_pretty(figures)?);
        return Ok(());
    }
    output::out(&format!(
        "{:<34} {:>6} {:>11} {:>11} {:>11} {:>8}  {:<24} ",
        "FIGURE", "UNIT", "WITHOUT", "WITH", "DIFFERENCE", "NOISE", "GOAL"
    ));
    for figure in figures {
        let met = if figure.met { "met" } else { "MISSED" };
        output::out(&format!(
            "{:<34} {:>6} {:>11.2} {:>11.2} {:>+11.2} {:>8.2}  {:<24} {met}",
            figure.name,
            figure.unit,
            figure.without,
            figure.with,
            figure.with - figure.without,
            figure.noise,
            figure.goal,
        ));
    }
    output::out("");
    for figure in figures {
        output::out(&format!("{}: {}", figure.name, figure.method));
    }
    Ok(())
}
