//! Reads properties of a process from /proc and the cgroup file systems.

use std::fs;
use std::path::{Path, PathBuf};

/// Translates a pid of the pid namespace of the process `caller` to a pid of the host. Returns
/// `None` if no process has this pid.
///
/// A real kernel driver can look the pid up in the caller's pid namespace. A daemon cannot, so this
/// function searches for the pid in the field `NSpid` of `/proc/PID/status`.
pub fn resolve_pid(caller: u32, pid: i32) -> Option<u32> {
    let wanted = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let namespace = pid_namespace(caller)?;
    if pid_namespace_of_self() == Some(namespace.clone()) {
        return Path::new("/proc").join(wanted.to_string()).exists().then_some(wanted);
    }
    let matches = |host: &u32| {
        inner_pid(*host) == Some(wanted) && pid_namespace(*host).as_ref() == Some(&namespace)
    };
    if matches(&caller) {
        return Some(caller);
    }
    let processes = fs::read_dir("/proc").ok()?;
    processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).find(matches)
}

fn pid_namespace(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

fn pid_namespace_of_self() -> Option<PathBuf> {
    fs::read_link("/proc/self/ns/pid").ok()
}

/// Returns the pid of a process in its own pid namespace.
fn inner_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}

/// Returns the folder of a process's cgroup in the hierarchy of cgroup v2. Returns `None` if that
/// hierarchy is not mounted, or the process has ended.
pub fn cgroup(pid: u32) -> Option<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // With cgroup v1, version 2 may be mounted below it.
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
    Some(root.join(path))
}

/// Returns whether a folder is a cgroup of version 2 without cgroups below it.
pub fn is_leaf_cgroup(folder: &Path) -> bool {
    let below = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_leaf = !below.into_iter().any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    is_leaf && folder.join("cgroup.procs").exists()
}

/// Returns the lowest memory limit of the process's cgroup and the cgroups above it, in bytes.
/// Returns `None` if none of them has a limit.
pub fn memory_limit_bytes(pid: u32) -> Option<u64> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let limits = cgroups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            lowest(Path::new("/sys/fs/cgroup"), path, "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            lowest(Path::new("/sys/fs/cgroup/memory"), path, "memory.limit_in_bytes")
        } else {
            None
        }
    });
    limits.min()
}

fn lowest(root: &Path, path: &str, file: &str) -> Option<u64> {
    let group = root.join(path);
    let limits =
        group.ancestors().take_while(|group| group.starts_with(root)).filter_map(|group| {
            // A file may contain "max", which means no limit and is not a number. It is missing if
            // a cgroup is not visible.
            fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok()
        });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_our_namespace_keeps_its_number() {
        let me = std::process::id();
        assert_eq!(resolve_pid(me, me as i32), Some(me));
        assert_eq!(resolve_pid(me, 0), None);
        assert_eq!(resolve_pid(me, -1), None);
    }

    #[test]
    fn the_lowest_limit_of_the_ancestors_counts() {
        let root = std::env::temp_dir().join(format!("affinode-sim-node-{}", std::process::id()));
        fs::create_dir_all(root.join("pod/container")).unwrap();
        fs::write(root.join("pod/memory.max"), "1000\n").unwrap();
        fs::write(root.join("pod/container/memory.max"), "max\n").unwrap();
        assert_eq!(lowest(&root, "pod/container", "memory.max"), Some(1000));
        assert_eq!(lowest(&root, "elsewhere", "memory.max"), None);
        fs::remove_dir_all(root).unwrap();
    }
}
