//! The supervisor: a process that owns everything that a testbed starts, so that nothing of it
//! outlives the test, the demo or the bench, however they end.
//!
//! ```text
//!  test ──stdin/stdout, JSON lines──> affinode-keeper          own session, own mount namespace,
//!    │                                  ├─ containerd           subreaper of all its descendants
//!    │ nsenter (ctr)                    ├─ affinode-sim-gpud
//!    v                                  ├─ shims, controller, containers (orphans come to it)
//!  same mount namespace                 └─ …
//!
//!  stdin ends (test over, panicked, killed) ──> SIGKILL to all descendants until none is left,
//!                                               unmount, remove cgroups and folder, exit
//! ```
//!
//! It works without names or guesses: it kills its own descendants, and unmounts the mounts of its
//! own namespace.

mod cleanup;
mod client;
mod mounts;
mod server;
mod tunables;

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use client::Keeper;
pub use server::serve;

/// In the world's folder: where containerd keeps images and snapshots. On a tmpfs
/// of its own, because overlayfs cannot stand on the overlayfs that a machine's
/// root may be.
pub(crate) const STORE: &str = "store";

/// What of the machine a world has for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Mounts that it creates.
    #[default]
    Mounts,
    /// Its network as well, and the folders that a kubelet always uses: a node of a cluster.
    Node,
}

impl Scope {
    /// The keeper's second argument, for a node.
    const NODE: &str = "node";

    /// From the keeper's second argument.
    #[must_use]
    pub fn of(argument: Option<&std::ffi::OsStr>) -> Self {
        if argument.is_some_and(|word| word == Self::NODE) { Scope::Node } else { Scope::Mounts }
    }
}

/// A program that the supervisor must start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// Program and its arguments.
    pub argv: Vec<String>,
    /// Added to the keeper's own environment.
    pub env: BTreeMap<String, String>,
    /// Where standard output and standard error are appended.
    pub log: PathBuf,
}

/// What the keeper answers: to the start of itself, and to each [`Job`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reply {
    /// Ready, or the job runs: its process id.
    Pid(u32),
    /// Reason of the failure.
    Error(String),
}

/// The folder of cgroups that a world's containers go to, below every hierarchy.
#[must_use]
pub fn cgroup_parent(world: &std::path::Path) -> String {
    let name = world.file_name().map_or_else(|| "world".into(), |name| name.to_string_lossy());
    format!("affinode-e2e-{name}")
}

/// That folder in every hierarchy that has it.
#[must_use]
pub fn cgroup_folders(world: &std::path::Path) -> Vec<PathBuf> {
    let parent = cgroup_parent(world);
    let root = PathBuf::from("/sys/fs/cgroup");
    let below = std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut folders: Vec<PathBuf> =
        below.chain([root.clone()]).map(|hierarchy| hierarchy.join(&parent)).collect();
    folders.retain(|folder| folder.is_dir());
    folders
}
