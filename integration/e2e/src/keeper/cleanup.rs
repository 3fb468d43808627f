//! Ending what a world started.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::cgroup_parent;
use crate::until::until;

/// Kills every descendant of this process, again and again until none is left:
/// one that forks while it is being killed leaves a child that comes to us.
pub(super) fn kill_descendants() -> Result<()> {
    until("the processes of the world to end", || {
        let pids = descendants(std::process::id() as i32)?;
        for pid in &pids {
            // One that ended by itself in between is what was wanted.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        Ok(pids.is_empty().then_some(()))
    })
}

fn descendants(of: i32) -> Result<Vec<i32>> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").context("cannot read /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // A process that ended meanwhile has no parent to speak of.
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut look = vec![of];
    while let Some(pid) = look.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        found.extend(&below);
        look.extend(below);
    }
    Ok(found)
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may hold anything, blanks and parentheses too.
    let after = stat.rsplit_once(") ")?.1;
    after.split(' ').nth(1)?.parse().ok()
}

/// Removes the world's cgroups from every hierarchy.
pub(super) fn remove_cgroups(world: &Path) {
    let parent = cgroup_parent(world);
    let root = Path::new("/sys/fs/cgroup");
    let mut hierarchies = vec![root.to_path_buf()];
    if let Ok(entries) = std::fs::read_dir(root) {
        hierarchies.extend(entries.flatten().map(|entry| entry.path()));
    }
    for folder in hierarchies.iter().map(|h| h.join(&parent)) {
        // The kernel lets go of a killed process's cgroup a moment after its end.
        for _ in 0..100 {
            remove_tree(&folder);
            if !folder.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// cgroupfs has only folders that can be removed, and only from the bottom up.
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
