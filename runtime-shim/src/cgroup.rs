//! Moves processes into cgroups: the shim's daemon into the cgroup that the options name, the
//! controller into its own cgroup.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Mount point of the cgroup hierarchies.
const ROOT: &str = "/sys/fs/cgroup";

/// Puts a process into an existing cgroup, in every hierarchy in which this cgroup exists.
pub fn join(path: &str, pid: u32) -> io::Result<()> {
    join_below(&hierarchies(Path::new(ROOT))?, path, pid)
}

/// Moves a process into a cgroup, which is created if it is missing. Returns whether this succeeded
/// in at least one hierarchy.
#[must_use]
pub fn make_and_join(path: &str, pid: u32) -> bool {
    let Ok(roots) = hierarchies(Path::new(ROOT)) else {
        return false;
    };
    let mut joined = false;
    for root in roots {
        let dir = below(&root, path);
        // A new cpuset cgroup (cgroup v1) accepts no process before its CPUs are set, so cpuset is
        // skipped.
        if root.file_name().is_some_and(|name| name == "cpuset") {
            continue;
        }
        if fs::create_dir_all(&dir).is_ok() {
            joined |= fs::write(dir.join("cgroup.procs"), pid.to_string()).is_ok();
        }
    }
    joined
}

fn join_below(roots: &[PathBuf], path: &str, pid: u32) -> io::Result<()> {
    let mut joined = false;
    for root in roots {
        let procs = below(root, path).join("cgroup.procs");
        if procs.exists() {
            fs::write(&procs, pid.to_string())?;
            joined = true;
        }
    }
    if joined {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("cgroup {path} does not exist in any hierarchy"),
        ))
    }
}

/// Returns the mount point of the unified hierarchy, or the folders of all cgroup v1 controllers.
fn hierarchies(root: &Path) -> io::Result<Vec<PathBuf>> {
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.to_owned()]);
    }
    Ok(fs::read_dir(root)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("cgroup.procs").exists())
        .collect())
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(unified: bool) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        if unified {
            file("cgroup.controllers");
            file("shims/cgroup.procs");
        } else {
            for controller in ["memory", "pids"] {
                file(&format!("{controller}/cgroup.procs"));
            }
            file("memory/shims/cgroup.procs");
        }
        dir
    }

    #[test]
    fn both_versions_take_the_process() {
        for (unified, procs) in [(true, "shims/cgroup.procs"), (false, "memory/shims/cgroup.procs")]
        {
            let dir = tree(unified);
            let roots = hierarchies(dir.path()).unwrap();
            join_below(&roots, "/shims", 42).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join(procs)).unwrap(), "42");
            let error = join_below(&roots, "/other", 42).unwrap_err();
            assert_eq!(error.to_string(), "cgroup /other does not exist in any hierarchy");
        }
    }
}
