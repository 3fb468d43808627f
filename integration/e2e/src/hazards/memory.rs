//! Hazards that depend on the kind of memory that a CUDA process uses. If a checkpoint cannot
//! restore this kind of memory, the controller must refuse the offload before any driver call.
//! Otherwise the container must be offloaded.

use anyhow::Result;

use super::{
    Case, Found,
    manual_ops::{Held, intact, kind, refused},
};
use crate::{testbed::Testbed, worker::Worker};

/// Kinds of memory that the hazards use. Each entry has a name, the argument of `hazards.c` that
/// selects the kind, and the reason for which the offload must be refused. The reason is `None` if
/// the container must be offloaded.
const KINDS: [(&str, &str, Option<&str>); 6] = [
    ("managed memory", "managed", Some("managed-memory")),
    ("peer access between GPUs", "peer", Some("peer-access")),
    ("legacy IPC, imported", "ipc-import", Some("shared-memory")),
    ("legacy IPC, exported only", "ipc-export", Some("shared-memory")),
    ("pinned host memory", "pinned", None),
    ("cuMemAllocAsync", "async", None),
];

pub fn cases() -> Vec<Case> {
    KINDS
        .iter()
        .map(|(name, what, reason)| Case::new(name, move |world| play(world, what, *reason)))
        .collect()
}

fn play(world: &Testbed, what: &str, reason: Option<&str>) -> Result<Found> {
    let mut bare = Held::bare(world, kind("bare", what))?;
    let ready = bare.worker.receive()?;
    if what == "peer" && ready.result != 0 {
        bare.end()?;
        return Ok(Found::Skipped("needs two GPUs that reach each other".into()));
    }
    anyhow::ensure!(ready.result == 0, "{what}: the program cannot start: {ready:?}");
    let without = bare.cycle(world)?;
    bare.kill(world)?;

    // The engine is set because these hazards affect only the driver's checkpoint.
    let spec = kind(what, what).annotation("affinode.io/engine", "checkpoint");
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    let with = match reason {
        Some(reason) => refused(world, what, reason)?,
        None => {
            world.cli().move_out(what)?;
            "moved out and back; contents intact".into()
        }
    };
    intact(&mut worker)?;
    Ok(Found::Row { without, with })
}
