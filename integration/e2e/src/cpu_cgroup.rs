//! Limits the CPU time of a container through its cgroup.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

const PERIOD_US: u32 = 100_000;

/// Limits the cgroup of a process to `percent` of one processor. `None` removes the limit.
///
/// # Errors
/// When no cgroup hierarchy can limit the process.
pub fn set_percent(pid: i32, percent: Option<u32>) -> Result<()> {
    let (folder, is_v2) = folder_of(pid)?;
    let quota_us = percent.map(|percent| PERIOD_US / 100 * percent);
    let (file, text) = if is_v2 {
        let quota = quota_us.map_or("max".into(), |quota| quota.to_string());
        ("cpu.max", format!("{quota} {PERIOD_US}"))
    } else {
        ("cpu.cfs_quota_us", quota_us.map_or("-1".into(), |quota| quota.to_string()))
    };
    let file = folder.join(file);
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Returns the cgroup folder of a process, and whether the hierarchy is of version 2. The lines of
/// `/proc/PID/cgroup` have the form `id:controllers:path`.
fn folder_of(pid: i32) -> Result<(PathBuf, bool)> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let root = Path::new("/sys/fs/cgroup");
    let folders = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some((root.join(path), true)),
            _ if controllers.split(',').any(|name| name == "cpu") => {
                Some((root.join(controllers).join(path), false))
            }
            _ => None,
        }
    });
    let limits = |(folder, is_v2): &(PathBuf, bool)| {
        folder.join(if *is_v2 { "cpu.max" } else { "cpu.cfs_quota_us" }).exists()
    };
    folders.into_iter().find(limits).context("no cgroup hierarchy has the cpu controller")
}
