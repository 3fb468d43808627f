//! Ends all processes that a testbed started, and removes its cgroups.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::cgroup_folders;
use crate::{processes::descendants, wait::until};

/// Kills every descendant of this process until none is left. One pass is not enough, because a
/// process may fork while it is killed. The new process then becomes a child of this process.
pub(super) fn kill_descendants() -> Result<()> {
    until("the processes of the testbed to end", || {
        let pids = descendants(std::process::id() as i32)?;
        for pid in &pids {
            // The signal fails if the process has ended by itself, which is the desired result.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        Ok(pids.is_empty().then_some(()))
    })
}

/// Removes the testbed's cgroups from every hierarchy.
pub(super) fn remove_cgroups(world: &Path) {
    for folder in cgroup_folders(world) {
        // The kernel releases the cgroup of a killed process a moment after the process has ended.
        for _ in 0..100 {
            remove_tree(&folder);
            if !folder.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Removes a cgroup and all cgroups below it. The innermost cgroups are removed first, because
/// cgroupfs removes only folders without subfolders.
fn remove_tree(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    let below: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    for folder in below {
        remove_tree(&folder);
    }
    let _ = std::fs::remove_dir(folder);
}
