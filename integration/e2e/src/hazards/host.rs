//! Hazards in which host memory is too small for an offload. The controller must refuse the
//! offload. Otherwise the kernel would kill the process during its checkpoint.

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use super::{
    Case, Found,
    manual_ops::{Held, intact, refused, usual},
};
use crate::{
    container::Spec, gpu::Gpu, memory_cgroup, oom::OomWatch, supervisor::cgroup_folders,
    testbed::Testbed, wait::until, worker::Worker,
};

const LIMIT_BYTES: u64 = 1 << 30;
const VRAM_MIB: u64 = 4096;

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("memory limit of 1 GiB, 4 GiB of VRAM", |world| {
            let limit = LIMIT_BYTES.to_string();
            limited(world, &|id| usual(id, 16).flags(&["--memory-limit", &limit]))
        }),
        Case::new("the same limit on an ancestor", |world| {
            let folder = memory_cgroup::folder(world)?;
            memory_cgroup::set_limit(&folder, Some(LIMIT_BYTES))?;
            let found = limited(world, &|id| usual(id, 16));
            memory_cgroup::set_limit(&folder, None)?;
            found
        }),
        Case::new("the node's host memory is spent", budget_spent),
    ]
}

fn limited(world: &Testbed, spec: &dyn Fn(&str) -> Spec) -> Result<Found> {
    // The first container creates the testbed's cgroup, for which the limit is set.
    let mut bare = Held::bare(world, spec("bare"))?;
    bare.worker.wait_filled()?;
    let grow = format!("alloc {VRAM_MIB}");
    bare.worker.call(&grow)?;
    let own = cgroup_folders(world.dir()).into_iter().map(|folder| folder.join("bare"));
    let watch = OomWatch::start(own.collect());
    let returned = bare.tool(world, &["lock", "checkpoint"])?;
    let without = if returned == [0, 0] {
        bare.kill(world)?;
        "moves".into()
    } else {
        let (_, end) = bare.end()?;
        let by = match (watch.kills(), world.gpu()) {
            (1.., _) => " (OOM)",
            (0, Gpu::Simulated { .. }) => " by the simulated driver",
            (0, Gpu::Real) => "",
        };
        format!("checkpoint returns {}, {end}{by}", returned.last().unwrap_or(&-1))
    };

    let mut worker = Worker::start_as(world, spec("limited"))?;
    worker.wait_filled()?;
    worker.call(&grow)?;
    let with = refused(world, "limited", "cgroup-memory")?;
    intact(&mut worker)?;
    Ok(Found::Row { without, with })
}

/// Requires that an offload is refused when the node's budget of host memory is used up. Restarts
/// the controller, because it reads the budget only at its start.
fn budget_spent(world: &Testbed) -> Result<Found> {
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

/// Kills the controller, and waits until the next controller replies.
pub fn next_controller(world: &Testbed) -> Result<()> {
    let old = world.controller()?.context("no controller is running")?.pid;
    kill(old, Signal::SIGKILL)?;
    let old = old.as_raw();
    until("the next controller", || {
        Ok(world.cli().ps_now().ok().filter(|node| node.controller_pid != old).map(|_| ()))
    })
}
