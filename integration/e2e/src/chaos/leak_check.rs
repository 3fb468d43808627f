//! Counts processes, files and mounts while all containers are offloaded. If a count after a round
//! differs from the count in the new environment, something has leaked.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{container::ChaosContainer, fault::COPIER};
use crate::{processes, supervisor::cgroup_folders, testbed::Testbed};

/// Number of descriptors that the controller may have open in addition to those that it had open in
/// the new environment. Clients that are connected to the controller during the count use such
/// descriptors.
const PASSING_DESCRIPTORS: usize = 6;
/// Program name of Affinode's shim.
const OWN_SHIM: &str = "containerd-shim-affinode-v1";

/// Number of descriptors that a shim of Affinode may have open in addition to the highest number of
/// any shim in the new environment.
const PASSING_SHIM_DESCRIPTORS: usize = 6;
/// Maximum number of a copier's open descriptors for each CUDA process of the environment. The
/// copier itself counts as one more process. The limit is absolute, because no copier may have been
/// running when the environment was new.
const COPIER_DESCRIPTORS_EACH: usize = 16;
const COPIER_MEMORY_FILES_EACH: usize = 6;
/// Program name of the host pool's process.
const HOST_POOL: &str = "affinode-host-pool";

/// Counts of processes, files and mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeakCheck {
    counts: BTreeMap<&'static str, usize>,
    controller_descriptors: usize,
    /// Highest number of open descriptors of any of Affinode's shims.
    shim_descriptors: usize,
    /// Findings about copiers with more open descriptors than the maximum.
    copier_excess: Vec<String>,
    strangers: Vec<String>,
}

impl LeakCheck {
    /// Counts processes, files and mounts. `scenery` contains the pids of the test's own processes.
    /// They run as long as the environment exists, so they are no leak.
    ///
    /// # Errors
    /// When there is no controller, or it does not reply.
    pub fn take(world: &Testbed, cast: &[ChaosContainer], scenery: &[i32]) -> Result<Self> {
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
        // Root folder of the supervisor's mount namespace. Only this namespace contains the
        // following folders.
        let inside = PathBuf::from(format!("/proc/{}/root", world.keeper().pid()));
        counts.insert("shim sockets", entries(&inside.join("run/containerd/s")).len());
        let states = inside.join("run/containerd/runc/default");
        counts.insert("runc states", entries(&states).len());
        counts.insert("mounts", mounts(world)?);

        let controller = world.controller()?.context("no controller is running")?;
        let own = descriptors(controller.pid.as_raw());
        let of = |part: &str| own.iter().filter(|target| target.contains(part)).count();
        counts.insert("pages in the controller", of("/memfd:"));
        // The controller has at most one copier for each GPU, and one host pool. They start on
        // demand. Each of them costs the controller a pidfd and three more descriptors.
        let copiers = world.processes(COPIER)?.len();
        let host_pools = world.processes(HOST_POOL)?.len();
        let gpus: BTreeSet<_> = cast.iter().map(|actor| actor.way.gpu).collect();
        counts.insert("copiers too many", copiers.saturating_sub(gpus.len().max(1)));
        counts.insert("host pools too many", host_pools.saturating_sub(1));
        let children = copiers + host_pools;
        counts.insert("pidfds in the controller", of("pidfd").saturating_sub(children));
        let controller_descriptors = own.len().saturating_sub(4 * children);
        let known = world.cli().ps()?;
        counts.insert("containers in `affinode ps`", known.containers.len());
        let managed = known.containers.iter().map(|row| row.processes.len()).sum();
        counts.insert("processes in `affinode ps`", managed);
        let shims = world.shims()?.into_iter().filter(|shim| shim.command.contains(OWN_SHIM));
        let shims: Vec<_> = shims.map(|shim| descriptors(shim.pid.as_raw())).collect();
        let shim_descriptors = shims.iter().map(Vec::len).max().unwrap_or(0);
        let files = shims.iter().flatten().filter(|target| target.contains("/memfd:"));
        counts.insert("memory files in shims", files.count());
        let each = cast.iter().map(|actor| actor.processes.len()).sum();
        let mut copier_excess = Vec::new();
        for copier in world.processes(COPIER)? {
            copier_excess.extend(excess(&descriptors(copier.pid.as_raw()), each));
        }
        Ok(Self { counts, controller_descriptors, shim_descriptors, copier_excess, strangers })
    }

    /// Describes each difference from `first`, the counts in the new environment. Empty if there
    /// are none.
    #[must_use]
    pub fn differences(&self, first: &LeakCheck) -> Vec<String> {
        let kinds: BTreeSet<&&str> = self.counts.keys().chain(first.counts.keys()).collect();
        let count = |census: &LeakCheck, kind: &str| census.counts.get(kind).copied().unwrap_or(0);
        let mut found: Vec<String> = kinds
            .into_iter()
            .filter(|kind| count(self, kind) != count(first, kind))
            .map(|kind| format!("{kind}: {}, were {}", count(self, kind), count(first, kind)))
            .collect();
        found.extend(
            self.strangers.iter().map(|command| format!("a process still runs: {command}")),
        );
        if self.controller_descriptors > first.controller_descriptors + PASSING_DESCRIPTORS {
            found.push(format!(
                "descriptors of the controller: {}, were {}",
                self.controller_descriptors, first.controller_descriptors
            ));
        }
        if self.shim_descriptors > first.shim_descriptors + PASSING_SHIM_DESCRIPTORS {
            found.push(format!(
                "descriptors of a shim: {}, were {}",
                self.shim_descriptors, first.shim_descriptors
            ));
        }
        found.extend(self.copier_excess.iter().cloned());
        found
    }
}

/// Checks the numbers of a copier's open descriptors and memory files. Describes each number that
/// exceeds its maximum. The maximum depends on `processes`, the number of CUDA processes of the
/// environment.
fn excess(descriptors: &[String], processes: usize) -> Vec<String> {
    let files = descriptors.iter().filter(|target| target.contains("/memfd:")).count();
    let most = |each: usize| each * (processes + 1);
    let mut found = Vec::new();
    if descriptors.len() > most(COPIER_DESCRIPTORS_EACH) {
        found.push(format!("descriptors of the copier: {}", descriptors.len()));
    }
    if files > most(COPIER_MEMORY_FILES_EACH) {
        found.push(format!("memory files in the copier: {files}"));
    }
    found
}

/// Counts the environment's processes by kind, into `counts`. Returns the command lines of
/// processes of an unknown kind.
fn count_processes(
    world: &Testbed,
    cast: &[ChaosContainer],
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
            COPIER | HOST_POOL => continue,
            "containerd-shim-affinode-v1" => "shims",
            _ if contained.contains(&process.pid.as_raw()) => "processes of containers",
            _ if scenery.contains(&process.pid.as_raw()) => "scenery",
            // Zombies have no command line. A zombie that is about to be collected no longer exists
            // at the next check.
            "" if processes::is_zombie(process.pid.as_raw()) => "zombies",
            // A process that has just been created has no command line either.
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

/// Number of mounts of the testbed. The machine's other mounts are not counted, because they may
/// change at any time.
fn mounts(world: &Testbed) -> Result<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copier_with_a_file_too_many_is_found() {
        let file = |_| "/memfd:affinode-copied-out (deleted)".to_owned();
        let files = |count: usize| (0..count).map(file).collect::<Vec<_>>();
        assert!(excess(&files(2 * COPIER_MEMORY_FILES_EACH), 1).is_empty());
        assert_eq!(excess(&files(2 * COPIER_MEMORY_FILES_EACH + 1), 1).len(), 1);
        let sockets = vec!["socket:[1]".to_owned(); 2 * COPIER_DESCRIPTORS_EACH + 1];
        assert_eq!(excess(&sockets, 1).len(), 1);
    }

    #[test]
    fn differences_name_what_was_not_there_before() {
        let first = LeakCheck {
            counts: BTreeMap::from([("zombies", 0)]),
            controller_descriptors: 20,
            shim_descriptors: 12,
            copier_excess: Vec::new(),
            strangers: Vec::new(),
        };
        assert!(first.differences(&first).is_empty());
        let mut later = first.clone();
        later.counts.insert("zombies", 1);
        later.shim_descriptors = 30;
        later.controller_descriptors = 40;
        later.copier_excess = vec!["memory files in the copier: 90".into()];
        assert_eq!(later.differences(&first).len(), 4);
    }
}
