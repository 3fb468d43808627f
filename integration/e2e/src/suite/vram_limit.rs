//! Tests of the annotation `affinode.io/vram-limit` on a real driver. The libraries and tools in a
//! container must report the limit as the size of the VRAM (JAX: its share of the limit).
//! Allocations must fail at the limit. The module also measures the cost of the limit, and runs
//! containers whose limits together are 2.4 times the free VRAM.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::{
    BY_ORDER,
    host_memory::{self, Load},
    median,
    python::{Answer, Python, ask},
    report::{NotHere, Report, Rows},
};
use crate::{
    container::{CLIENTS, Spec},
    containerd::STOCK,
    gpu::Gpu,
    hazards,
    testbed::{MIB, Testbed},
    worker::{USUAL, Worker},
};

const ANNOTATION: &str = "affinode.io/vram-limit";
const PROGRAM: &str = "limit_program.py";
const LIBRARIES: [&str; 3] = ["torch", "CuPy", "JAX"];
const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];
const GIB: u64 = 1024 * MIB;
const LIMIT_GIB: u64 = 20;
/// Maximum VRAM of a process in addition to its allocated blocks of 1 GiB each: the context, and
/// parts of a GiB.
const MAX_BESIDE_BYTES: u64 = 3 * GIB;
/// Fraction of its VRAM that JAX allocates at its start.
const SHARE_OF_JAX: f64 = 0.75;
/// Number of measured pairs of an allocation and a free. The sizes of the allocations together
/// exceed the limit. Therefore the library requests a new allowance (an amount of VRAM that the
/// process may still allocate) from the controller several times.
const PAIRS: &str = "20000";
const STARTS: usize = 5;
const OUT_OF_MEMORY: i32 = 2;

/// Runs the parts that need no Python.
pub fn plain(world: &Testbed, report: &mut Report) {
    report.part(world, "VRAM limit, plain", of_a_plain_program);
    report.part(world, "VRAM limit, cost of an allocation", cost);
}

/// Runs the parts that need the machine's Python.
pub fn with_python(python: &Python, report: &mut Report) {
    for library in LIBRARIES {
        let part = format!("VRAM limit, {library}");
        report.part(python.world, &part, |_, rows| of_a_library(python, library, rows));
    }
    let part = "VRAM limit, three containers on one GPU";
    report.part(python.world, part, |_, rows| beyond_the_gpu(python, rows));
}

fn limited(spec: Spec, limit_bytes: u64) -> Spec {
    spec.annotation(ANNOTATION, &format!("{}Mi", limit_bytes / MIB))
        .annotation(BY_ORDER.0, BY_ORDER.1)
}

fn limit_bytes(world: &Testbed) -> u64 {
    match world.gpu() {
        Gpu::Real => LIMIT_GIB * GIB,
        Gpu::Simulated { .. } => 256 * MIB,
    }
}

/// Allocates pieces in a C program until an allocation fails, with each engine. After an offload
/// and a restore, a further allocation must fail as well.
fn of_a_plain_program(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let limit = limit_bytes(world);
    let piece_mib = limit / MIB / 20;
    for engine in ENGINES {
        let id = format!("limit-{engine}");
        let spec = limited(Worker::spec(&id, USUAL, 16), limit);
        let spec = spec.annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        let mut pieces = 0;
        let end = loop {
            let end = worker.ask(&format!("alloc {piece_mib} -"))?.result;
            if end != 0 || pieces == 40 {
                break end;
            }
            pieces += 1;
        };
        let is_right = end == OUT_OF_MEMORY;
        rows.want(&format!("{engine}: the error"), f64::from(end), "", "2", is_right);
        rows.tell(&format!("{engine}: allocated"), (pieces * piece_mib) as f64, "MiB");
        let least = pieces * piece_mib * MIB;
        let used = world
            .cli()
            .wait_for(&id, "to show all its VRAM", |row| row.vram_bytes >= least)?
            .vram_bytes;
        let goal = format!("at most {} MiB", limit / MIB);
        let what = format!("{engine}: VRAM in use, by NVML");
        rows.want(&what, (used / MIB) as f64, "MiB", &goal, used <= limit);
        world.cli().move_out(&id)?;
        worker.call("sync")?;
        let again = worker.ask(&format!("alloc {piece_mib} -"))?.result;
        let what = format!("{engine}: after an offload, the error");
        rows.want(&what, f64::from(again), "", "2", again == OUT_OF_MEMORY);
        ensure!(worker.verify()?, "{id}: the memory has changed");
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

/// Allocates VRAM with a Python library until an allocation fails, and compares the sizes that the
/// container shows with the limit.
fn of_a_library(python: &Python, library: &str, rows: &mut Rows) -> Result<()> {
    let (world, id) = (python.world, format!("limit-{library}").to_lowercase());
    let limit = limit_bytes(world);
    let spec = limited(python.spec(&id, "root", &[PROGRAM, library])?, limit);
    let mut worker = Worker::start_as(world, spec)?;
    if let Some(why) = python.greet(&mut worker, &[PROGRAM, library])? {
        return Err(NotHere(why).into());
    }
    sizes(library, limit, &ask(&mut worker, "sizes")?, rows)?;
    let filled = fill(&mut worker)?;
    let least = match library {
        "JAX" => (limit as f64 * SHARE_OF_JAX) as u64,
        _ => limit,
    } - MAX_BESIDE_BYTES;
    let goal = format!("{} to {} GiB", least / GIB, limit / GIB);
    let is_right = (least..=limit).contains(&filled);
    rows.want("allocated at the failure", gib(filled), "GiB", &goal, is_right);
    let used = world
        .cli()
        .wait_for(&id, "to show all its VRAM", |row| row.vram_bytes >= filled)?
        .vram_bytes;
    rows.want("VRAM in use, by NVML", gib(used), "GiB", "at most the limit", used <= limit);
    let before = ask(&mut worker, "check")?.digest()?;
    world.cli().move_out(&id)?;
    let same = usize::from(ask(&mut worker, "check")?.digest()? == before);
    rows.count("same contents after an offload", same, 1);
    let more = fill(&mut worker)?.saturating_sub(filled);
    rows.want("allocated beyond the limit then", gib(more), "GiB", "none", more == 0);
    ask(&mut worker, "drop 3")?;
    let again = fill(&mut worker)?;
    let goal = "as before";
    rows.want("allocated again after a free", gib(again), "GiB", goal, again == filled);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Compares the sizes of the VRAM that `answer` contains with the limit.
fn sizes(library: &str, limit: u64, answer: &Answer, rows: &mut Rows) -> Result<()> {
    ensure!(answer.sizes_bytes.len() == 3, "views are missing: {:?}", answer.sizes_bytes);
    for (view, bytes) in &answer.sizes_bytes {
        let (goal, is_right) = if view == "JAX" {
            let share = *bytes as f64 / limit as f64;
            let is_right = (SHARE_OF_JAX - 0.1..=SHARE_OF_JAX).contains(&share);
            (format!("at most {SHARE_OF_JAX} of the limit"), is_right)
        } else {
            ("the limit".into(), *bytes == limit)
        };
        rows.want(
            &format!("{library}: VRAM in the view of {view}"),
            gib(*bytes),
            "GiB",
            &goal,
            is_right,
        );
    }
    Ok(())
}

/// Allocates until an allocation fails, and returns the size of all blocks in bytes.
fn fill(worker: &mut Worker) -> Result<u64> {
    let answer = ask(worker, "fill")?;
    let is_refused = ["out of memory", "resource_exhausted"]
        .iter()
        .any(|words| answer.why.to_lowercase().contains(words));
    ensure!(is_refused, "the program was not refused memory, but: {:?}", answer.why);
    answer.held_bytes.context("the reply to `fill` has no field `held_bytes`")
}

/// Measures the duration of an allocation followed by its free. The measurement runs with the stock
/// runtime, with Affinode but no VRAM limit, and with Affinode and a limit.
fn cost(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let limit = limit_bytes(world);
    let pair = |id: &str| Spec::gpu(id, &[&format!("{CLIENTS}/memory_cost"), "many", PAIRS]);
    let by_order = |spec: Spec| spec.annotation(BY_ORDER.0, BY_ORDER.1);
    let sides = ["stock runtime", "no limit", "limit"];
    let mut found: [Vec<PairCost>; 3] = Default::default();
    for _ in 0..STARTS {
        found[0].push(PairCost::parse(&pair("stock").runtime(STOCK).run(world)?)?);
        found[1].push(PairCost::parse(&by_order(pair("unlimited")).run(world)?)?);
        found[2].push(PairCost::parse(&limited(pair("limited"), limit).run(world)?)?);
    }
    let of = |side: usize, part: fn(&PairCost) -> f64| {
        median(&found[side].iter().map(part).collect::<Vec<_>>())
    };
    for (side, name) in sides.iter().enumerate() {
        rows.tell(
            &format!("{name}: an allocation and its free, median"),
            of(side, |c| c.median),
            "us",
        );
        rows.tell(&format!("{name}: an allocation and its free, mean"), of(side, |c| c.mean), "us");
    }
    let more = of(2, |cost| cost.median) - of(1, |cost| cost.median);
    let what = "with a limit, median: more by";
    match world.gpu() {
        Gpu::Real => rows.want(what, more, "us", "at most 1 us", more <= 1.0),
        Gpu::Simulated { .. } => rows.tell(what, more, "us"),
    }
    rows.tell(
        "with a limit, mean: more by",
        of(2, |cost| cost.mean) - of(1, |cost| cost.mean),
        "us",
    );
    Ok(())
}

/// Duration of an allocation followed by its free: median and mean, in microseconds.
struct PairCost {
    median: f64,
    mean: f64,
}

/// One line of the output of `memory_cost many`.
#[derive(Deserialize)]
struct Figure {
    what: String,
    value: f64,
}

impl PairCost {
    fn parse(text: &str) -> Result<Self> {
        let figures: Vec<Figure> = text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .context("cannot parse the output of memory_cost many")?;
        match &figures[..] {
            [median, mean] if median.what == "median" && mean.what == "mean" => {
                Ok(Self { median: median.value, mean: mean.value })
            }
            _ => bail!("unexpected output of memory_cost many: {text}"),
        }
    }
}

/// Runs three torch containers with a VRAM limit. Their limits together are 2.4 times the VRAM that
/// an unmanaged program leaves free. Compares the time that the containers take together with the
/// time that they take one after another.
fn beyond_the_gpu(python: &Python, rows: &mut Rows) -> Result<()> {
    // Two of three containers must fit into 126 GiB of host memory, and for a moment all three.
    const ROOM_GIB: u64 = 40;
    const CONTAINERS: usize = 3;
    const LIMIT: &str = "32Gi";
    // The programs need some VRAM for intermediate results.
    const FILLED_GIB: u64 = 28;
    let annotations =
        &[(ANNOTATION, LIMIT), ("affinode.io/engine", "auto"), ("affinode.io/idle-timeout", "2s")];
    let load = |containers| Load { containers, gib: FILLED_GIB, annotations };
    let mut ballast = hazards::ballast(python.world, ROOM_GIB * GIB)?;
    let began = Instant::now();
    for _ in 0..CONTAINERS {
        let mut alone = Rows::default();
        host_memory::run(python, &load(1), &mut alone)?;
        ensure!(alone.missed().is_empty(), "a container alone: {:?}", alone.missed());
    }
    let in_turn = began.elapsed().as_secs_f64();
    let began = Instant::now();
    host_memory::run(python, &load(CONTAINERS), rows)?;
    let together = began.elapsed().as_secs_f64();
    rows.tell("one after another they take", in_turn, "s");
    let goal = "less than one after another";
    rows.want("together they take", together, "s", goal, together < in_turn);
    ensure!(ballast.verify()?, "the unmanaged program's memory has changed");
    ballast.running.kill(python.world)?;
    ballast.running.delete(python.world)
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_knows_all_libraries() {
        let source = include_str!("../../programs/limit_program.py");
        for library in LIBRARIES {
            assert!(source.contains(&format!("\"{library}\": ")), "{library}");
        }
    }
}
