//! Tests of NVML queries in an offloaded process. The queries must return without a restore, with
//! the same results as under the stock runtime.

use anyhow::{Result, bail, ensure};

use super::{
    BY_ORDER,
    python::{Python, ask},
    report::Rows,
};
use crate::{
    container::{CLIENTS, Spec},
    containerd::STOCK,
    testbed::Testbed,
    worker::Worker,
};

/// Command line of the program that uses pynvml.
const PROGRAM: &[&str] = &["nvml_program.py"];
const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];
/// Number of times that the process is offloaded with each engine.
const ROUNDS: usize = 20;

fn managed(spec: Spec, engine: &str) -> Spec {
    spec.annotation("affinode.io/engine", engine).annotation(BY_ORDER.0, BY_ORDER.1)
}

/// Sends NVML commands to an offloaded process. Requires that all commands return while the process
/// stays offloaded, and that its memory is unchanged.
fn answers(world: &Testbed, id: &str, worker: &mut Worker, commands: &[&str]) -> Result<()> {
    for command in commands {
        worker.call(command)?;
    }
    let row = world.cli().known(id)?;
    ensure!(row.state == "Offloaded", "{id} was woken: {row:?}");
    ensure!(worker.verify()?, "{id}: the memory has changed");
    Ok(())
}

/// Offloads a C program that has not initialised NVML yet, and then makes NVML queries in this
/// program. The queries must return without a restore, with each engine.
pub fn plain(world: &Testbed, rows: &mut Rows) -> Result<()> {
    const COMMANDS: [&str; 5] = ["ask", "shutdown", "init", "ask", "ask"];
    for engine in ENGINES {
        let id = format!("nvml-{engine}");
        let spec = Spec::gpu(&id, &[&format!("{CLIENTS}/nvml")]);
        let mut worker = Worker::start_as(world, managed(spec, engine))?;
        worker.expect("ready")?;
        world.cli().move_out(&id)?;
        worker.call("init")?;
        worker.call("ask")?;
        // With the engine `copy`, this verification is the first step that restores the memory.
        ensure!(worker.verify()?, "{id}: the memory has changed");
        let mut good = 0;
        for _ in 0..ROUNDS {
            world.cli().move_out(&id)?;
            answers(world, &id, &mut worker, &COMMANDS)?;
            good += 1;
        }
        rows.count(&format!("{engine}: absences in which it answers"), good, ROUNDS);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

/// Tests NVML queries from pynvml, and compares the results with the stock runtime.
pub fn python(python: &Python, rows: &mut Rows) -> Result<()> {
    const COMMANDS: [&str; 3] = ["figures", "shutdown", "init"];
    let world = python.world;
    let start = |spec: Spec| -> Result<Worker> {
        let mut worker = Worker::start_as(world, spec)?;
        if let Some(why) = python.greet(&mut worker, PROGRAM)? {
            bail!("pynvml cannot run here: {why}");
        }
        Ok(worker)
    };
    let mut stock = start(python.spec("nvml-stock", "root", PROGRAM)?.runtime(STOCK))?;
    ask(&mut stock, "init")?;
    let facts = ask(&mut stock, "facts")?.digest()?;
    ask(&mut stock, "figures")?;
    stock.running.kill(world)?;
    stock.running.delete(world)?;
    for engine in ENGINES {
        let id = format!("pynvml-{engine}");
        let mut worker = start(managed(python.spec(&id, "root", PROGRAM)?, engine))?;
        ask(&mut worker, "init")?;
        let mut same = usize::from(ask(&mut worker, "facts")?.digest()? == facts);
        for _ in 0..ROUNDS {
            world.cli().move_out(&id)?;
            same += usize::from(ask(&mut worker, "facts")?.digest()? == facts);
            answers(world, &id, &mut worker, &COMMANDS)?;
        }
        let what = format!("{engine}: facts as with the stock runtime");
        rows.count(&what, same, ROUNDS + 1);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}
