//! Hazards of NVML calls that a process makes while its own context is checkpointed. Without
//! Affinode, every NVML function then blocks.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{
    Case, Found,
    manual_ops::{Held, intact},
};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    worker::Worker,
};

/// Time after which an NVML call without Affinode counts as blocked.
const BLOCKED: Duration = Duration::from_secs(3);
const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];

pub fn cases() -> Vec<Case> {
    [
        ("nvml: called while offloaded", "nvml"),
        ("nvml: linked, called while offloaded", "nvml_linked"),
    ]
    .map(|(name, program)| Case::new(name, move |world| play(world, program)))
    .into()
}

fn spec(id: &str, program: &str) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/{program}")])
}

fn play(world: &Testbed, program: &str) -> Result<Found> {
    let mut bare = Held::bare(world, spec("bare", program))?;
    bare.worker.expect("ready")?;
    bare.worker.call("init")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    bare.worker.send("ask")?;
    let end = Instant::now() + BLOCKED;
    while Instant::now() < end && !bare.worker.has_answer()? {
        std::thread::sleep(Duration::from_millis(20));
    }
    let blocks = !bare.worker.has_answer()?;
    ensure!(
        bare.tool(world, &["restore", "unlock"])? == [0, 0],
        "the tool cannot restore and unlock the process"
    );
    bare.worker.expect("ask")?;
    bare.kill(world)?;
    let without = if blocks { "blocks until it is restored" } else { "answers" }.into();

    for engine in ENGINES {
        let id = format!("{program}-{engine}");
        let spec = spec(&id, program).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(world, spec)?;
        worker.expect("ready")?;
        world.cli().move_out(&id)?;
        // NVML is initialised for the first time in this process. If the process is offloaded, the
        // initialisation causes a restore.
        worker.call("init")?;
        worker.call("ask")?;
        // With the engine `copy` the context stays on the GPU, so the NVML calls may not have
        // caused a restore. In this case the verification causes the restore.
        intact(&mut worker)?;
        world.cli().move_out(&id)?;
        for command in ["ask", "init", "ask", "shutdown"] {
            worker.call(command)?;
        }
        let shown = world.cli().known(&id)?;
        ensure!(shown.state == "Offloaded", "{engine}: it was woken: {shown:?}");
        worker.call("utilization")?;
        intact(&mut worker)?;
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    let with = "answers without a wake, or comes back; contents intact".into();
    Ok(Found::Row { without, with })
}
