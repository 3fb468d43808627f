//! Measures the overhead of the library in a working program. It compares the time of the program's
//! steps with an engine and with the stock runtime.
//!
//! The speed of a program differs from start to start, and the load of a host changes. Therefore
//! several containers of each kind (with Affinode and with the stock runtime) run at the same time
//! and are measured in turn, several times. The value of a container is its fastest step. To find
//! the noise, the containers with the stock runtime are divided into two halves, in every possible
//! way. The noise is the largest difference between two halves. A difference between the two kinds
//! that is smaller than the noise is not significant.

use std::time::Instant;

use anyhow::Result;

use super::{
    BY_ORDER, Report, Testbed,
    engines::ENGINE,
    median,
    python::{Python, ask},
    report::{NotHere, Rows},
};
use crate::{containerd::STOCK, worker::Worker};

/// Names of the programs in the report, and their arguments.
const PROGRAMS: [(&str, &[&str]); 3] = [
    ("steps, training", &["programs.py", "training"]),
    ("steps, decoding", &["programs.py", "llm"]),
    ("steps, graph replay", &["programs.py", "graph"]),
];
/// Engine of the containers with Affinode. With the engine `full`, the library also serves the
/// program's allocations in place of the driver.
const ENGINE_ON: &str = "full";
/// Number of containers of each kind. The two kinds are containers with Affinode, and containers
/// with the stock runtime.
const STARTS: usize = 4;
/// Number of times that each container is measured.
const ROUNDS: usize = 3;
/// Maximum overhead in percent that meets the goal. If the noise is greater, the noise is the
/// maximum.
const GOAL_PERCENT: f64 = 1.0;

/// A running container, and its fastest times so far.
struct Start {
    worker: Worker,
    best_ms: f64,
    median_ms: f64,
}

/// Runs all programs, each as a part of the report.
pub fn all(world: &Testbed, report: &mut Report) {
    match Python::find(world) {
        Ok(python) => {
            for (part, program) in PROGRAMS {
                report.part(world, part, |_, rows| compare(&python, program, rows));
            }
        }
        Err(why) => report.skip("steps", &format!("{why:#}")),
    }
}

fn compare(python: &Python, program: &[&str], rows: &mut Rows) -> Result<()> {
    let began = Instant::now();
    let (mut stock, mut ours) = (Vec::new(), Vec::new());
    for n in 0..STARTS {
        stock.push(start(python, program, &format!("steps-stock-{n}"), true)?);
        ours.push(start(python, program, &format!("steps-ours-{n}"), false)?);
    }
    for start in stock.iter_mut().chain(&mut ours) {
        if let Some(why) = python.greet(&mut start.worker, program)? {
            return Err(NotHere(why).into());
        }
    }
    for round in 0..ROUNDS {
        for n in 0..STARTS {
            let mut pair = [&mut stock[n], &mut ours[n]];
            // The two containers of a pair, one of each side, are measured in alternating order, so
            // that neither side is always second.
            pair.rotate_left((round + n) % 2);
            pair.into_iter().try_for_each(measure)?;
        }
    }
    let best = |side: &[Start]| side.iter().map(|start| start.best_ms).collect::<Vec<_>>();
    let (without, with) = (best(&stock), best(&ours));
    compared(rows, "fastest step", fastest, &without, &with, true);
    compared(rows, "middle fastest step", median, &without, &with, false);
    let medians = |side: &[Start]| side.iter().map(|start| start.median_ms).collect::<Vec<_>>();
    let (without, with) = (medians(&stock), medians(&ours));
    compared(rows, "middle median step", median, &without, &with, false);

    // The measured program is then offloaded, and must be as fast after its restore as before.
    if let Some(moved) = ours.first_mut() {
        python.world.cli().move_out(&moved.worker.running.id)?;
        let step = ask(&mut moved.worker, "bench")?;
        rows.tell("one start: fastest step before it was offloaded", moved.best_ms, "ms");
        rows.tell("one start: fastest step after its return", step.best_ms, "ms");
    }
    for start in stock.iter().chain(&ours) {
        start.worker.running.kill(python.world)?;
        start.worker.running.delete(python.world)?;
    }
    rows.tell("took", began.elapsed().as_secs_f64(), "s");
    Ok(())
}

fn start(python: &Python, program: &[&str], id: &str, stock: bool) -> Result<Start> {
    let spec = python.spec(id, "root", program)?.annotation(BY_ORDER.0, BY_ORDER.1);
    let spec = if stock { spec.runtime(STOCK) } else { spec.annotation(ENGINE, ENGINE_ON) };
    let worker = Worker::start_as(python.world, spec)?;
    Ok(Start { worker, best_ms: f64::INFINITY, median_ms: f64::INFINITY })
}

fn measure(start: &mut Start) -> Result<()> {
    let step = ask(&mut start.worker, "bench")?;
    start.best_ms = start.best_ms.min(step.best_ms);
    start.median_ms = start.median_ms.min(step.step_ms);
    Ok(())
}

/// Compares the containers with Affinode and with the stock runtime by one measure, such as the
/// fastest step. Determines the noise from the containers with the stock runtime.
fn compared(
    rows: &mut Rows,
    what: &str,
    measure: impl Fn(&[f64]) -> f64,
    without: &[f64],
    with: &[f64],
    decides: bool,
) {
    let (stock, ours) = (measure(without), measure(with));
    let more = (ours / stock - 1.0) * 100.0;
    let noise = noise(without, &measure);
    rows.tell(&format!("{what}, stock runtime"), stock, "ms");
    rows.tell(&format!("{what}, with the library"), ours, "ms");
    rows.tell(&format!("{what}, stock against stock"), noise, "%");
    let title = format!("{what}: more by");
    if decides {
        let goal = format!("within {GOAL_PERCENT} % or the noise");
        rows.want(&title, more, "%", &goal, more <= GOAL_PERCENT.max(noise));
    } else {
        rows.tell(&title, more, "%");
    }
}

/// Returns the noise in percent. It is the largest difference between the measures of two halves of
/// `starts`, over all ways to divide them. `starts` has one value for each container.
fn noise(starts: &[f64], measure: impl Fn(&[f64]) -> f64) -> f64 {
    let mut most: f64 = 0.0;
    for halves in 0..1_u32 << starts.len() {
        if halves.count_ones() as usize * 2 != starts.len() {
            continue;
        }
        let half = |wanted: u32| {
            let of = starts.iter().enumerate().filter(|(n, _)| halves >> n & 1 == wanted);
            measure(&of.map(|(_, &ms)| ms).collect::<Vec<_>>())
        };
        most = most.max((half(0) / half(1) - 1.0) * 100.0);
    }
    most
}

fn fastest(starts: &[f64]) -> f64 {
    starts.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_knows_all_kinds() {
        let source = include_str!("../../programs/programs.py");
        for (part, program) in PROGRAMS {
            assert_eq!((program.len(), program[0]), (2, "programs.py"), "{part}");
            assert!(source.contains(&format!("    {:?}: (", program[1])), "{part}");
        }
    }

    #[test]
    fn noise_is_the_largest_half_difference() {
        let noise_of = |starts: &[f64]| noise(starts, fastest).round();
        assert_eq!(noise_of(&[10.0, 10.0, 10.0, 10.0]), 0.0);
        // The halves with the largest difference are 10 and 11, and 12 and 13. Their fastest steps
        // are 10 and 12.
        assert_eq!(noise_of(&[12.0, 10.0, 13.0, 11.0]), 20.0);
        assert_eq!(noise(&[10.0, 12.0, 10.0, 12.0], median).round(), 20.0);
    }
}
