//! `cargo xtask load`: measures the cost of the controller on a full node on which nothing changes,
//! and the delay until watchers see a change.
//!
//! ```text
//!  1,000 processes with the preload library, on the simulated GPU ──> 200 sockets ──> controller
//!  this program: announces the 200 containers, watches over HTTP, reads /proc
//! ```
//!
//! The processes run outside of containers, so only the controller is measured. The figures depend
//! on other load of the machine, so this is not a test.

mod processes;
mod watchers;

use std::time::Duration;

use affinode_e2e::{
    gpu::Gpu,
    testbed::{MIB, TestbedConfig},
    worker::Worker,
};
use anyhow::{Context, Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, output};
use processes::LoadProcesses;

/// Configuration of the controller: the default, but without automatic offloads.
const CONFIG: &str = "[policy]\nmode = \"manual\"\n";
/// Number of changes whose delay is measured.
const CHANGES: usize = 20;

/// Size of the load.
#[derive(Args)]
pub struct Options {
    /// Number of containers to announce.
    #[arg(long, default_value_t = 200)]
    containers: usize,
    /// Number of CUDA processes per container.
    #[arg(long, default_value_t = 5)]
    processes: usize,
    /// Number of watchers of the dashboard.
    #[arg(long, default_value_t = 20)]
    watchers: usize,
    /// Build without optimisation, which is quicker; the figures are worse than those of a release.
    #[arg(long)]
    dev: bool,
    /// Exit with an error if a goal is missed.
    #[arg(long)]
    strict: bool,
    /// How long processor time is measured, in seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// Builds the programs, fills a node, and prints the figures.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the load starts containerd and a container: run as root");
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::from_release(!options.dev))?;
    let total = (options.containers * options.processes) as u64;
    let world = TestbedConfig::default()
        .artifacts(artifacts)
        .release(&release)
        .gpu(Gpu::Simulated { vram_bytes: (total + 64) * 32 * MIB })
        .config(CONFIG)
        .world()?;
    // The container's shim starts the controller.
    let _seed = Worker::start(&world, "seed", 16)?;
    output::step(&format!("{} containers with {total} processes", options.containers));
    let load = LoadProcesses::gather(&world, options.containers, options.processes)?;
    let controller = world.controller()?.context("no controller is running")?.pid.as_raw();
    let span = Duration::from_secs(options.seconds);

    let (mut lines, mut missed) = (Vec::new(), Vec::new());
    let mut tell = |what: &str, value: f64, unit: &str, most: Option<f64>| {
        let goal = most.map_or(String::new(), |most| {
            format!("at most {most} {unit}: {}", if value <= most { "met" } else { "MISSED" })
        });
        if most.is_some_and(|most| value > most) {
            missed.push(what.to_owned());
        }
        lines.push(format!("{what:<58} {value:>8.1} {unit:<4} {goal}"));
    };
    output::step("No changes, no watchers");
    tell("processor without watchers, of one core", percent(controller, span)?, "%", Some(3.0));
    let resident = || affinode_e2e::processes::resident_bytes(controller);
    tell("memory", resident()? as f64 / MIB as f64, "MiB", Some(100.0));

    output::step(&format!("{} watchers of the dashboard", options.watchers));
    let socket = world.cli().run_dir().join("http.sock");
    let watchers = watchers::open(&socket, "/api/v1/events?watch=node", options.watchers)?;
    let what = format!("processor with {} watchers, of one core", options.watchers);
    tell(&what, percent(controller, span)?, "%", None);
    let mut times = watchers::time_changes(&socket, &watchers, load.keys(), CHANGES)?;
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    tell("a change reaches a watcher, median", at(0.5), "ms", Some(100.0));
    tell("a change reaches a watcher, slowest", at(1.0), "ms", Some(100.0));
    tell("memory", resident()? as f64 / MIB as f64, "MiB", Some(100.0));
    drop(watchers);

    output::step("Call tracing of all containers");
    let calls = watchers::open(&socket, "/api/v1/calls", 1)?;
    let what = "processor with call tracing of all containers, of one core";
    tell(what, percent(controller, span)?, "%", None);
    drop(calls);
    lines.iter().for_each(|line| output::out(line));
    if options.strict && !missed.is_empty() {
        bail!("these goals were missed: {}", missed.join(", "));
    }
    Ok(())
}

/// Returns the processor time that a process uses during a time span, in percent of one core.
fn percent(pid: i32, span: Duration) -> Result<f64> {
    let before = processor_ticks(pid)?;
    std::thread::sleep(span);
    let ticks = processor_ticks(pid)? - before;
    let per_second =
        nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("cannot read CLK_TCK")?;
    Ok(100.0 * ticks as f64 / per_second as f64 / span.as_secs_f64())
}

fn processor_ticks(pid: i32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command name is in brackets and can contain any character. utime and stime are fields 14
    // and 15.
    let (_, rest) = stat.rsplit_once(") ").context("/proc/PID/stat has too few fields")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let field = |n: usize| -> Result<u64> {
        Ok(fields.get(n - 3).context("/proc/PID/stat has too few fields")?.parse()?)
    };
    Ok(field(14)? + field(15)?)
}
