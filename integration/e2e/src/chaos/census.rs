//! What there is when everything is quiet: the same after every round, or something leaks.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{actor::Actor, fault::VAULT};
use crate::{keeper::cgroup_folders, processes, world::World};

/// Descriptors that a controller may have beyond those it had first: a reader that comes
/// and goes, no more.
const PASSING_DESCRIPTORS: usize = 6;

/// How many there are of each kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    counts: BTreeMap<&'static str, usize>,
    controller_descriptors: usize,
    strangers: Vec<String>,
}

impl Census {
    /// Counts. `scenery`: processes that are there all the time.
    ///
    /// # Errors
    /// When there is no controller, or it does not answer.
    pub fn take(world: &World, cast: &[Actor], scenery: &[i32]) -> Result<Self> {
        let mut counts = BTreeMap::new();
        let strangers = count_processes(world, cast, scenery, &mut counts)?;
        let run_dir = world.cli().run_dir();
        counts.insert("container folders", entries(&run_dir.join("containers")).len());
        let records = entries(&run_dir.join("journal"));
        counts.insert("journal records", records.len());
        counts.insert("bundles", entries(&world.containerd().bundles("default")).len());
        let groups = cgroup_folders(world.dir());
        let cgroups = groups.iter().flat_map(|group| entries(group)).filter(|path| path.is_dir());
        counts.insert("cgroups", cgroups.count());
        // Seen from the keeper's mount namespace.
        let inside = PathBuf::from(format!("/proc/{}/root", world.keeper().pid()));
        counts.insert("shim sockets", entries(&inside.join("run/containerd/s")).len());
        let states = inside.join("run/containerd/runc/default");
        counts.insert("runc states", entries(&states).len());
        counts.insert("mounts", mounts(world)?);

        let controller = world.controller()?.context("no controller runs")?;
        let descriptors = descriptors(controller.pid.as_raw());
        let of = |part: &str| descriptors.iter().filter(|target| target.contains(part)).count();
        counts.insert("pages in the controller", of("/memfd:"));
        // A vault comes and goes as it is needed: at most one, with a pidfd and three more.
        let vaults = world.processes(VAULT)?.len();
        counts.insert("vaults too many", vaults.saturating_sub(1));
        counts.insert("pidfds in the controller", of("pidfd").saturating_sub(vaults));
        let controller_descriptors = descriptors.len().saturating_sub(4 * vaults);
        let known = world.cli().ps()?;
        counts.insert("containers in `affinode ps`", known.containers.len());
        let managed = known.containers.iter().map(|row| row.processes.len()).sum();
        counts.insert("processes in `affinode ps`", managed);
        Ok(Self { counts, controller_descriptors, strangers })
    }

    /// What is otherwise than it was; empty when nothing is.
    #[must_use]
    pub fn differences(&self, first: &Census) -> Vec<String> {
        let kinds: BTreeSet<&&str> = self.counts.keys().chain(first.counts.keys()).collect();
        let count = |census: &Census, kind: &str| census.counts.get(kind).copied().unwrap_or(0);
        let mut found: Vec<String> = kinds
            .into_iter()
            .filter(|kind| count(self, kind) != count(first, kind))
            .map(|kind| format!("{kind}: {}, were {}", count(self, kind), count(first, kind)))
            .collect();
        found.extend(self.strangers.iter().map(|command| format!("left running: {command}")));
        if self.controller_descriptors > first.controller_descriptors + PASSING_DESCRIPTORS {
            found.push(format!(
                "descriptors of the controller: {}, were {}",
                self.controller_descriptors, first.controller_descriptors
            ));
        }
        found
    }
}

/// The world's processes by what they are; those that are nothing known are returned.
fn count_processes(
    world: &World,
    cast: &[Actor],
    scenery: &[i32],
    counts: &mut BTreeMap<&'static str, usize>,
) -> Result<Vec<String>> {
    let contained: BTreeSet<i32> = cast.iter().flat_map(|actor| actor.pids(world)).collect();
    let mut strangers = Vec::new();
    for process in processes::named("", world.keeper().pid())? {
        let command = process.command.trim_end();
        let program = command.split(' ').next().unwrap_or_default();
        let program = program.rsplit('/').next().unwrap_or_default();
        let kind = match program {
            "containerd" => "containerds",
            "affinode-sim-gpud" => "simulated GPUs",
            "containerd-shim-runc-v2" => "stock shims",
            "containerd-shim-affinode-v1" if command.ends_with(" controller") => "controllers",
            VAULT => continue,
            "containerd-shim-affinode-v1" => "shims",
            _ if contained.contains(&process.pid.as_raw()) => "processes of containers",
            _ if scenery.contains(&process.pid.as_raw()) => "scenery",
            // A corpse has no command line, and is collected in a moment.
            "" => continue,
            _ => {
                strangers.push(format!("{} ({command})", process.pid));
                continue;
            }
        };
        *counts.entry(kind).or_default() += 1;
    }
    Ok(strangers)
}

/// Mounts of the world's own. Others come and go with the machine's other business.
fn mounts(world: &World) -> Result<usize> {
    let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", world.keeper().pid()))?;
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let own = |point: &&str| Path::new(point).starts_with(world.dir()) || point.starts_with("/run");
    Ok(points.filter(own).count())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = std::fs::read_dir(folder).into_iter().flatten().flatten();
    read.map(|entry| entry.path()).collect()
}

fn descriptors(pid: i32) -> Vec<String> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let target = |path: &PathBuf| std::fs::read_link(path).ok();
    entries(&folder)
        .iter()
        .filter_map(target)
        .map(|path| path.to_string_lossy().into_owned())
        .collect()
}
