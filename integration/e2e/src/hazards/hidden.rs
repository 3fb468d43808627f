//! Hazard in which a thread calls the driver through a function that Affinode does not hook, while
//! the process is offloaded.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{
    Case, Found,
    manual_ops::{Held, intact, offload_once},
};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Time within which a process without Affinode should reply to the test. A process that has not
/// replied by then is reported as hanging. This result does not make the hazard fail.
const HANGS: Duration = Duration::from_secs(5);

pub fn cases() -> Vec<Case> {
    let name = "unknown-way into the driver while offloaded";
    vec![Case::new(name, play).simulated("the GPU suite has this part")]
}

fn spec(id: &str) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/hidden"), "call"])
}

fn play(world: &Testbed) -> Result<Found> {
    let mut bare = Held::bare(world, spec("bare"))?;
    bare.worker.expect("ready")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    bare.worker.send("hidden")?;
    std::thread::sleep(HANGS);
    let without =
        if bare.worker.has_answer()? { "returns" } else { "hangs until it is restored by hand" };
    ensure!(
        bare.tool(world, &["restore", "unlock"])? == [0, 0],
        "the tool cannot restore and unlock the process"
    );
    bare.worker.expect("hidden")?;
    bare.kill(world)?;

    for engine in ["checkpoint", "full"] {
        let id = format!("hidden-{engine}");
        let spec = spec(&id).annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(world, spec)?;
        worker.expect("ready")?;
        world.cli().move_out(&id)?;
        worker.call("hidden")?;
        told(world, &id)?;
        intact(&mut worker)?;
        // After a hidden call, an offload by the driver's checkpoint is refused.
        if engine == "checkpoint" {
            let said = offload_once(world, &id)?;
            ensure!(
                !said.done && said.reason == "hidden-way",
                "expected a refusal for hidden-way, got {said:?}"
            );
        } else {
            world.cli().move_out(&id)?;
            let row = world.cli().known(&id)?;
            ensure!(
                row.processes.iter().all(|process| process.phase == "CopiedOut"),
                "expected all processes copied out: {row:?}"
            );
            // After a copy out the context is still resident, so a hidden call does not block.
            worker.call("hidden")?;
            let row = world.cli().known(&id)?;
            ensure!(row.state == "Offloaded", "the container was restored without a call: {row:?}");
        }
        intact(&mut worker)?;
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    let with = "is restored, is not checkpointed again; contents intact".into();
    Ok(Found::Row { without: without.into(), with })
}

/// Requires that exactly one event reports the hidden call, and that the container's row lists it
/// as a hazard.
fn told(world: &Testbed, id: &str) -> Result<()> {
    let name = format!("default/{id}");
    until("an event about the hidden call", || {
        let events = world.cli().events()?;
        let mut told = events.iter().filter(|e| e.kind == "hidden-way" && e.container == name);
        Ok(told.next().map(|_| ()))
    })?;
    let row = world.cli().known(id)?;
    let has = |process: &crate::cli::ProcessRow| process.hazards.iter().any(|h| h == "hidden-way");
    ensure!(row.processes.iter().all(has), "expected the hazard at every process: {row:?}");
    let events = world.cli().events()?;
    let count = events.iter().filter(|e| e.kind == "hidden-way" && e.container == name).count();
    ensure!(count == 1, "expected one event, got {count}");
    Ok(())
}
