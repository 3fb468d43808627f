//! Finds the cgroup (version 2) that belongs to one container alone.
//!
//! A process of a container may be in a cgroup that it shares with other programs, for example if
//! the container was started without a cgroup of its own. A privileged process may also move itself
//! into the cgroup of another container. A limit must not apply to such a cgroup.

use std::{fs, io, path::PathBuf};

use super::process;

/// Reason why a container's cgroup cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OwnCgroupError {
    /// The hierarchy of cgroup v2 is not mounted.
    #[error("the node has no cgroup v2")]
    NoVersion2,
    /// The process is in a cgroup that is not the container's.
    #[error("the cgroup {0} of its process is not a leaf that belongs to the container alone")]
    NotOwn(String),
    /// The process has ended, or /proc cannot be read.
    #[error("cannot read the cgroup of its process")]
    Read(#[from] io::Error),
}

/// Returns the folder of a process's cgroup. The cgroup must be the container's own, or be inside
/// it, and contain no other cgroup. `cgroups_path` is the container's `linux.cgroupsPath`.
///
/// # Errors
/// [`OwnCgroupError`]: the cgroup cannot be found, or is not the container's.
pub fn find((pid, start_ticks): (u32, u64), cgroups_path: &str) -> Result<PathBuf, OwnCgroupError> {
    let cgroups = process::cgroups(pid)?;
    // The kernel may have given the pid to another process.
    if !process::lives(pid, start_ticks) {
        return Err(io::Error::from(io::ErrorKind::NotFound).into());
    }
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    let path = path.ok_or(OwnCgroupError::NoVersion2)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let root = version_2_root(&mounts).ok_or(OwnCgroupError::NoVersion2)?;
    let folder = PathBuf::from(root).join(path.trim_start_matches('/'));
    let is_leaf = fs::read_dir(&folder)?
        .flatten()
        .all(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
    if is_own(path, cgroups_path) && is_leaf {
        Ok(folder)
    } else {
        Err(OwnCgroupError::NotOwn(path.to_owned()))
    }
}

/// Returns the folder at which cgroup v2 is mounted. `mounts` is the text of `/proc/PID/mountinfo`.
fn version_2_root(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        file_system.strip_prefix("cgroup2 ")?;
        mount.split(' ').nth(4)
    })
}

/// Whether a cgroup is the cgroup that the container engine named in `cgroups_path`, or is inside
/// it. Both forms of this path are known: `/parent/name`, and `slice:prefix:name` for systemd.
fn is_own(cgroup: &str, cgroups_path: &str) -> bool {
    let name = match cgroups_path.split(':').collect::<Vec<_>>()[..] {
        [_, "", name] => format!("{name}.scope"),
        [_, prefix, name] => format!("{prefix}-{name}.scope"),
        _ => cgroups_path.rsplit('/').next().unwrap_or_default().to_owned(),
    };
    !["", ".", ".."].contains(&&*name) && cgroup.split('/').any(|part| part == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cgroup_has_the_name_of_the_container() {
        let slice = "/kubepods.slice/kubepods-pod1.slice/cri-containerd-abc.scope";
        for (cgroup, cgroups_path, own) in [
            ("/default/abc", "/default/abc", true),
            ("/system/default/abc/inner", "/default/abc", true),
            (slice, "kubepods-pod1.slice:cri-containerd:abc", true),
            ("/machine.slice/libpod-abc.scope/container", "machine.slice:libpod:abc", true),
            ("/default/abcd", "/default/abc", false),
            (slice, "kubepods-pod1.slice:cri-containerd:abd", false),
            ("/", "/default/abc", false),
            ("/user.slice/session-1.scope", "", false),
            ("/default/abc", "/", false),
        ] {
            assert_eq!(is_own(cgroup, cgroups_path), own, "{cgroup} {cgroups_path}");
        }
    }

    #[test]
    fn version_2_is_found_among_the_mounts() {
        let v1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let v2 = "25 30 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(version_2_root(v1), None);
        assert_eq!(version_2_root(&[v1, v2].concat()), Some("/sys/fs/cgroup"));
    }

    #[test]
    fn cgroup_of_another_process_is_refused() {
        let me = process::identity(std::process::id()).unwrap();
        assert!(find((me.pid, me.start_ticks), "/default/no-such-container").is_err());
        assert!(matches!(find((me.pid, me.start_ticks + 1), ""), Err(OwnCgroupError::Read(_))));
    }
}
