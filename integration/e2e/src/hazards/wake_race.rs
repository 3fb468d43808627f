//! Hazard in which two offloaded containers are woken at the same time, although VRAM suffices for
//! only one of them. The test repeats this many times. No process may be lost. The container that
//! enters the queue first must be restored first.

use anyhow::{Context, Result, ensure};

use super::{
    Found,
    manual_ops::{Held, ballast, usual},
};
use crate::{
    chaos::watch::Watch,
    gpu::Gpu,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};

/// Name of the hazard in the table.
pub const NAME: &str = "two woken at once, VRAM for one";

const CONFIG: &str = r#"
[policy]
mode = "eager"
idle_timeout = "50ms"
minimum_residency = "1ms"
[timing]
sample_interval = "20ms"
[history]
dir = "off"
"#;
const NAMES: [&str; 2] = ["alpha", "beta"];
/// Upper limit of the VRAM that the controller leaves free on a device for the driver.
const MARGIN_BYTES: u64 = 512 * MIB;

pub fn play(recipe: TestbedConfig, gpu: &Gpu, rounds: usize) -> Result<Found> {
    let gpu = match gpu {
        Gpu::Simulated { .. } => Gpu::Simulated { vram_bytes: 128 * MIB },
        Gpu::Real => Gpu::Real,
    };
    // On a real GPU each container takes more VRAM than the controller keeps free for the driver,
    // so two containers never fit.
    let each_mib = if matches!(gpu, Gpu::Real) { 1024 } else { 64 };
    let world = recipe.config(CONFIG).gpu(gpu).world()?;
    let watch = Watch::start(world.cli());
    let mut workers = Vec::new();
    let mut each_bytes = 0;
    for name in NAMES {
        workers.push(Worker::start(&world, name, each_mib)?);
        each_bytes = world.cli().wait_for_state(name, "Offloaded")?.offloaded_bytes;
    }
    let _taker = match world.gpu() {
        Gpu::Real => Some(ballast(&world, MARGIN_BYTES + each_bytes * 3 / 2)?),
        Gpu::Simulated { .. } => None,
    };
    for round in 0..rounds {
        for name in NAMES {
            world.cli().wait_for_state(name, "Offloaded")?;
        }
        watch.clear();
        // In each round, the other container makes its call first.
        let first = round % 2;
        workers[first].send("verify")?;
        workers[1 - first].send("verify")?;
        for worker in &mut workers {
            let answer =
                worker.expect("verify").with_context(|| format!("round {round}: cannot verify"))?;
            ensure!(answer.ok == Some(true), "round {round}: the memory has changed: {answer:?}");
        }
        // A container whose verification is slow may be offloaded and restored a second time. Only
        // its first restore counts.
        let order = |state: &str| -> Vec<String> {
            let mut names: Vec<String> = Vec::new();
            let entered = watch.log().into_iter().filter(|e| e.kind == "state" && e.to == state);
            for event in entered.filter(|event| event.from != "Unregistered") {
                if !names.contains(&event.container) {
                    names.push(event.container);
                }
            }
            names
        };
        let (came, served) = until("events about both restores", || {
            let (came, served) = (order("Queued"), order("Restoring"));
            Ok((came.len() == 2 && served.len() == 2).then_some((came, served)))
        })?;
        ensure!(
            came == served,
            "round {round}: requests came in the order {came:?}, but were served in the order {served:?}"
        );
    }
    let without = by_hand(&world, each_mib)?;
    let with = format!("{rounds} of {rounds} times both return, in order; contents intact");
    Ok(Found::Row { without, with })
}

/// Runs two programs without Affinode. Checkpoints both with the driver's calls, then restores one
/// after the other. Returns how many restores failed.
fn by_hand(world: &Testbed, each_mib: u64) -> Result<String> {
    let mut bare = Vec::new();
    for name in NAMES {
        world.cli().wait_for_state(name, "Offloaded")?;
    }
    for name in NAMES {
        let mut held = Held::bare(world, usual(&format!("bare-{name}"), each_mib))?;
        held.worker.wait_filled()?;
        ensure!(
            held.tool(world, &["lock", "checkpoint"])? == [0, 0],
            "the tool cannot lock and checkpoint the process"
        );
        bare.push(held);
    }
    let mut returned = Vec::new();
    for held in &bare {
        returned.extend(held.tool(world, &["restore"])?);
    }
    for held in bare {
        held.kill(world)?;
    }
    let lost = returned.iter().filter(|result| **result != 0).count();
    Ok(format!("restores return {returned:?}: {lost} lost"))
}
