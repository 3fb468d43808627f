//! Hazards in which a container ends, or is paused, while it is offloaded or waits for VRAM.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};

use super::{Case, Found, manual_ops::ballast, moments::all_intact};
use crate::{
    chaos::container::{ChaosContainer, Way, has_ended},
    containerd, memory_cgroup,
    supervisor::cgroup_folders,
    testbed::{MIB, Testbed},
    wait::until,
};

#[derive(Clone, Copy)]
enum End {
    Deleted,
    Terminated,
    OutOfMemory,
    Paused,
}

const ENDS: [(&str, End); 4] = [
    ("container deleted", End::Deleted),
    ("SIGTERM", End::Terminated),
    ("OOM kill", End::OutOfMemory),
    ("container paused", End::Paused),
];
const ID: &str = "ends";
/// Shell script that uses memory until the kernel kills a process.
const SPEND: &str = "x=0123456789abcdef; while :; do x=$x$x; done";

pub fn cases() -> Vec<Case> {
    let moment = |queued: bool| if queued { "queued" } else { "offloaded" };
    let all =
        [false, true].into_iter().flat_map(|queued| ENDS.map(|(name, end)| (queued, name, end)));
    all.map(|(queued, name, end)| {
        let name = format!("{name} while {}", moment(queued));
        Case::new(&name, move |world| play(world, end, queued))
    })
    .collect()
}

fn play(world: &Testbed, end: End, queued: bool) -> Result<Found> {
    let mut actor = ChaosContainer::start(world, ID, 1, 64, Way::DRIVER)?;
    world.cli().move_out(ID)?;
    let mut taker = None;
    if queued {
        taker = Some(ballast(world, 16 * MIB)?);
        actor.processes[0].ask("verify")?;
        world.cli().wait_for_state(ID, "Queued")?;
    }
    let pid = actor.processes[0].pid;
    match end {
        End::Deleted => {
            world.ctr().args(["tasks", "delete", "--force", ID]).output()?;
        }
        End::Terminated => kill(pid, Signal::SIGTERM)?,
        End::OutOfMemory => spend(world, &actor)?,
        End::Paused => {
            containerd::run(world.ctr().args(["tasks", "pause", ID]))?;
            actor.processes[0].ask("verify")?;
        }
    }
    if let End::Paused = end {
        if let Some(taker) = &taker {
            taker.running.kill(world)?;
        }
        // Other requests for this container and its GPU wait until it is resumed.
        containerd::run(world.ctr().args(["tasks", "resume", ID]))?;
        all_intact(&mut actor)?;
        let with = "goes on when it is resumed; contents intact".into();
        return Ok(Found::Row { without: "-".into(), with });
    }
    until("the process to end", || Ok(has_ended(pid).then_some(())))?;
    until("the controller to notice", || {
        let row = world.cli().container(ID)?;
        Ok(row.is_none_or(|row| row.processes.is_empty()).then_some(()))
    })?;
    let journal = std::fs::read_dir(world.cli().run_dir().join("journal"))?;
    let records = journal.flatten().filter(|f| !f.file_name().to_string_lossy().starts_with('.'));
    ensure!(records.count() == 0, "a record is left in the journal");
    Ok(Found::Row { without: "-".into(), with: "ends as it would; nothing is left".into() })
}

/// Uses up the container's memory limit, so that the kernel kills a process. The offloaded process
/// is killed first, because the function gives it the highest `oom_score_adj`.
fn spend(world: &Testbed, actor: &ChaosContainer) -> Result<()> {
    let pid = actor.processes[0].pid;
    std::fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")?;
    let folders = cgroup_folders(world.dir());
    let limits = |folder: &std::path::PathBuf| {
        folder.join("memory.limit_in_bytes").exists() || folder.join("memory.max").exists()
    };
    let folder = folders.iter().map(|folder| folder.join(ID)).find(limits);
    memory_cgroup::set_limit(
        &folder.context("no cgroup hierarchy has the memory controller")?,
        Some(2 << 30),
    )?;
    let mut command = world.ctr();
    command.args(["tasks", "exec", "--exec-id", "spend", ID, "/bin/sh", "-c", SPEND]);
    command.output().map(|_| ()).context("cannot run ctr")
}
