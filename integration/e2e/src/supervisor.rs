//! The supervisor: a process that owns everything that a testbed starts. When the test, the demo or
//! the benchmark ends or is killed, the supervisor ends all processes and removes all mounts.
//!
//! ```text
//!  test ──stdin/stdout, JSON lines──> affinode-keeper          own session, own mount namespace,
//!    │                                  ├─ containerd           subreaper of all its descendants
//!    │ nsenter (ctr)                    ├─ affinode-sim-gpud
//!    v                                  ├─ shims, controller, containers (and orphans)
//!  same mount namespace                 └─ …
//!
//! stdin ends (test over, panicked, killed) ──> SIGKILL to all descendants until none is left,
//!                                               unmount, remove cgroups and folder, exit
//! ```
//!
//! The supervisor needs no list of process names. It kills its own descendants, and unmounts the
//! mounts of its own namespace.

mod cleanup;
mod client;
mod mounts;
mod server;
mod tunables;

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use client::Keeper;
pub use server::serve;

/// Folder of containerd's images and snapshots in the testbed's folder. It is a separate tmpfs. The
/// reason is that a machine's root may be an overlayfs, on which no second overlayfs can be
/// stacked.
pub(crate) const STORE: &str = "store";

/// Determines which parts of the machine are private to a testbed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Only the mounts that the testbed creates are private.
    #[default]
    Mounts,
    /// The network, and the fixed folders of a kubelet, are private as well. Such a testbed is a
    /// node of a cluster.
    Node,
}

impl Scope {
    /// Value of the supervisor's second argument that selects [`Scope::Node`].
    const NODE: &str = "node";

    /// Parses the supervisor's second argument.
    #[must_use]
    pub fn of(argument: Option<&std::ffi::OsStr>) -> Self {
        if argument.is_some_and(|word| word == Self::NODE) { Scope::Node } else { Scope::Mounts }
    }
}

/// A program that the supervisor is requested to start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// Program and its arguments.
    pub argv: Vec<String>,
    /// Environment variables of the program, in addition to those of the supervisor.
    pub env: BTreeMap<String, String>,
    /// File to which stdout and stderr are appended.
    pub log: PathBuf,
}

/// A reply of the supervisor. It sends one reply after its own start, and one reply to each
/// [`Job`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reply {
    /// The start has succeeded. The value is the process id of the supervisor, or of the program
    /// that a [`Job`] has started.
    Pid(u32),
    /// The supervisor could not start the program of a [`Job`]. The value is the reason.
    Error(String),
}

/// Returns the path of the cgroup of a testbed's containers, relative to each cgroup hierarchy.
#[must_use]
pub fn cgroup_parent(world: &std::path::Path) -> String {
    let name = world.file_name().map_or_else(|| "world".into(), |name| name.to_string_lossy());
    format!("affinode-e2e-{name}")
}

/// Returns the folders of the testbed's cgroup in all hierarchies that contain it.
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
