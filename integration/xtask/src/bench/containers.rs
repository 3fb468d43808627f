//! Measures a container's time from start to exit and the memory of its shims, compared with the
//! stock shim.

use std::time::Instant;

use affinode_e2e::{
    container::Spec,
    containerd::{AFFINODE, STOCK, run},
    testbed::Testbed,
    wait::until,
};
use anyhow::{Context, Result};

use super::{
    Figure,
    stats::{median, noise},
};

/// Number of pods that are started with each of the two shims. The memory of their shim processes
/// is measured.
const PODS: usize = 4;

/// Measures the time from start to exit of `/bin/true`, and the memory of the shims of
/// `/bin/sleep`.
pub fn measure(world: &Testbed, rounds: usize) -> Result<Vec<Figure>> {
    let plain = |runtime: &str| Spec::plain("plain", &["/bin/true"]).runtime(runtime);
    let gpu = |runtime: &str| Spec::gpu("gpu", &["/bin/true"]).runtime(runtime);
    // This container starts the controller, so that a controller already runs when the measurement
    // begins, as on a node in use.
    start_to_exit_ms(world, &gpu(AFFINODE))?;
    let mut figures = Vec::new();
    for (name, make) in [
        ("container start to exit", &plain as &dyn Fn(&str) -> Spec),
        ("GPU container start to exit", &gpu),
    ] {
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            without.push(start_to_exit_ms(world, &make(STOCK))?);
            with.push(start_to_exit_ms(world, &make(AFFINODE))?);
        }
        let noise = noise(&without);
        let (without, with) = (median(&without), median(&with));
        figures.push(Figure {
            name,
            unit: "ms",
            without,
            with,
            noise,
            goal: "at most 1.15x",
            met: with <= without * 1.15,
            method: format!("`ctr run --rm /bin/true`, {rounds} runs of each shim in turn, median"),
        });
    }
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..PODS {
        without.push(shims_kib(world, STOCK)? / 1024.0);
        with.push(shims_kib(world, AFFINODE)? / 1024.0);
    }
    let noise = noise(&without);
    let (without, with) = (median(&without), median(&with));
    figures.push(Figure {
        name: "resident memory of a pod's shims",
        unit: "MiB",
        without,
        with,
        noise,
        goal: "at most 6 MiB more",
        met: with - without <= 6.0,
        method: format!(
            "sum of Rss in smaps_rollup of every shim process of one running GPU container; median of {PODS} of each in turn"
        ),
    });
    Ok(figures)
}

fn start_to_exit_ms(world: &Testbed, spec: &Spec) -> Result<f64> {
    let mut command = spec.command(world, &["--rm", "--null-io"])?;
    let began = Instant::now();
    run(&mut command)?;
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}

fn shims_kib(world: &Testbed, runtime: &str) -> Result<f64> {
    until("earlier shims to end", || Ok(world.shims()?.is_empty().then_some(())))?;
    let running = Spec::gpu("memory", &["/bin/sleep", "infinity"]).runtime(runtime).start(world)?;
    // containerd started the shim through a launcher, which has ended or is about to end.
    let expected = if runtime == STOCK { 1 } else { 2 };
    let shims =
        until("the shims", || Ok(Some(world.shims()?).filter(|shims| shims.len() == expected)))?;
    let mut sum = 0.0;
    for shim in shims {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", shim.pid))?;
        let rss = text
            .lines()
            .find_map(|line| line.strip_prefix("Rss:"))
            .context("smaps_rollup has no Rss")?;
        sum += rss.trim().trim_end_matches(" kB").parse::<f64>()?;
    }
    running.kill(world)?;
    running.delete(world)?;
    Ok(sum)
}
