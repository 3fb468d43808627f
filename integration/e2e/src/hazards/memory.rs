//! Hazards that depend on the kind of memory that a CUDA process uses. If a checkpoint cannot
//! restore this kind of memory, the controller must refuse the offload before any driver call.
//! Otherwise the container must be offloaded. A context that has ended is a hazard for the library's
//! own copy, which must make no call in it. An open capture becomes invalid by calls that the library's
//! copy makes in the wrong capture mode.

use anyhow::Result;

use super::{
    Case, Found,
    manual_ops::{Held, intact, kind, refused},
};
use crate::{testbed::Testbed, worker::Worker};

/// The driver's error code `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i32 = 801;

/// Kinds of memory that the hazards use. Each entry has a name, the argument of `hazards.c` that
/// selects the kind, the engine for which it is a hazard, and the reason for which the offload must
/// be refused. The reason is `None` if the container must be offloaded.
const KINDS: [(&str, &str, &str, Option<&str>); 9] = [
    ("managed memory", "managed", "checkpoint", Some("managed-memory")),
    ("peer access between GPUs", "peer", "checkpoint", Some("peer-access")),
    ("legacy IPC, imported", "ipc-import", "checkpoint", Some("shared-memory")),
    ("legacy IPC, exported only", "ipc-export", "checkpoint", Some("shared-memory")),
    ("pinned host memory", "pinned", "checkpoint", None),
    ("cuMemAllocAsync", "async", "checkpoint", None),
    ("context ended by cuCtxDetach", "detach", "copy", None),
    ("green context that has ended", "green", "copy", None),
    ("open capture in the mode GLOBAL", "capture", "copy", None),
];

pub fn cases() -> Vec<Case> {
    KINDS
        .iter()
        .map(|(name, what, engine, reason)| {
            Case::new(name, move |world| play(world, what, engine, *reason))
        })
        .collect()
}

fn play(world: &Testbed, what: &str, engine: &str, reason: Option<&str>) -> Result<Found> {
    let mut bare = Held::bare(world, kind("bare", what))?;
    let ready = bare.worker.receive()?;
    if what == "peer" && ready.result != 0 {
        bare.end()?;
        return Ok(Found::Skipped("needs two GPUs that reach each other".into()));
    }
    if what == "green" && ready.result == NOT_SUPPORTED {
        bare.end()?;
        return Ok(Found::Skipped("the driver has no green contexts".into()));
    }
    anyhow::ensure!(ready.result == 0, "{what}: the program cannot start: {ready:?}");
    let without = bare.cycle(world)?;
    bare.kill(world)?;

    let spec = kind(what, what).annotation("affinode.io/engine", engine);
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
