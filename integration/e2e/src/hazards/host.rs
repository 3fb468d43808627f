//! Host memory that has no room for the VRAM: a checkpoint would be killed in the middle.

use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use super::{
    Case, Found,
    hands::{Held, intact, refused, usual},
};
use crate::{container::Spec, keeper::cgroup_folders, until::until, worker::Worker, world::World};

const LIMIT_BYTES: u64 = 1 << 30;
const VRAM_MIB: u64 = 4096;

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("memory limit of 1 GiB, 4 GiB of VRAM", |world| {
            let limit = LIMIT_BYTES.to_string();
            limited(world, &|id| usual(id, 16).flags(&["--memory-limit", &limit]))
        }),
        Case::new("the same limit on an ancestor", |world| {
            let folder = memory_cgroup(world)?;
            set_limit(&folder, Some(LIMIT_BYTES))?;
            let found = limited(world, &|id| usual(id, 16));
            set_limit(&folder, None)?;
            found
        }),
        Case::new("the node's host memory is spent", budget_spent),
    ]
}

fn limited(world: &World, spec: &dyn Fn(&str) -> Spec) -> Result<Found> {
    // The world's cgroup, which may carry the limit, is there once a container was.
    let mut bare = Held::bare(world, spec("bare"))?;
    bare.worker.wait_filled()?;
    let grow = format!("alloc {VRAM_MIB}");
    bare.worker.call(&grow)?;
    let returned = bare.tool(world, &["lock", "checkpoint"])?;
    let without = if returned == [0, 0] {
        bare.kill(world)?;
        "moves".into()
    } else {
        let (_, end) = bare.end()?;
        format!("checkpoint returns {}, {end} (OOM)", returned.last().unwrap_or(&-1))
    };

    let mut worker = Worker::start_as(world, spec("limited"))?;
    worker.wait_filled()?;
    worker.call(&grow)?;
    let with = refused(world, "limited", "cgroup-memory")?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with })
}

/// The world's folder in the hierarchy that limits memory.
fn memory_cgroup(world: &World) -> Result<PathBuf> {
    if cgroup_folders(world.dir()).is_empty() {
        // Made with the first container.
        Spec::gpu("first", &["/bin/true"]).run(world)?;
    }
    cgroup_folders(world.dir())
        .into_iter()
        .find(|folder| limit_file(folder).exists())
        .context("no cgroup hierarchy limits memory")
}

fn limit_file(folder: &std::path::Path) -> PathBuf {
    let v1 = folder.join("memory.limit_in_bytes");
    if v1.exists() { v1 } else { folder.join("memory.max") }
}

/// Sets a memory limit; none takes it away.
pub fn set_limit(folder: &std::path::Path, bytes: Option<u64>) -> Result<()> {
    let file = limit_file(folder);
    let none = if file.ends_with("memory.max") { "max" } else { "-1" };
    let text = bytes.map_or(none.into(), |bytes| bytes.to_string());
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The budget is read when a controller starts.
fn budget_spent(world: &World) -> Result<Found> {
    let mut worker = Worker::start(world, "budget", 16)?;
    let file = world.dir().join("affinode/config.toml");
    let usual = std::fs::read_to_string(&file)?;
    std::fs::write(&file, format!("{usual}[memory]\nnode_reserve_mib = 1073741824\n"))?;
    next_controller(world)?;
    let found = refused(world, "budget", "host-memory");
    std::fs::write(&file, usual)?;
    next_controller(world)?;
    let with = found?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}

/// Kills the controller and waits for the next.
pub fn next_controller(world: &World) -> Result<()> {
    let old = world.controller()?.context("a controller runs")?.pid;
    kill(old, Signal::SIGKILL)?;
    let old = old.as_raw();
    until("the next controller", || {
        Ok(world.cli().ps_now().ok().filter(|node| node.controller_pid != old).map(|_| ()))
    })
}
