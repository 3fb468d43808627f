//! The memory cgroup that contains all containers of a testbed. It is like the memory cgroup of a
//! pod in a cluster.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{container::Spec, supervisor::cgroup_folders, testbed::Testbed};

/// Returns the testbed's cgroup folder in the hierarchy of the memory controller. If the cgroup
/// does not exist yet, a first container is run to create it.
///
/// # Errors
/// When no cgroup hierarchy has the memory controller, or that container fails.
pub fn folder(world: &Testbed) -> Result<PathBuf> {
    if cgroup_folders(world.dir()).is_empty() {
        // The cgroup is created with the first container.
        Spec::gpu("first", &["/bin/true"]).run(world)?;
    }
    cgroup_folders(world.dir())
        .into_iter()
        .find(|folder| limit_file(folder).exists())
        .context("no cgroup hierarchy has the memory controller")
}

/// Returns the folder of a memory cgroup below the root cgroup.
#[must_use]
pub fn at_root(name: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let unified = root.join("cgroup.controllers").exists();
    if unified { root.join(name) } else { root.join("memory").join(name) }
}

/// Returns a value of `/proc/meminfo`, in bytes. `name` ends with a colon.
#[must_use]
pub fn meminfo_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the memory of this node in MiB.
///
/// # Errors
/// When `/proc/meminfo` does not contain it.
pub fn node_mib() -> Result<u64> {
    Ok(meminfo_bytes("MemTotal:").context("/proc/meminfo has no MemTotal")? >> 20)
}

/// Returns the memory that is charged to the cgroup, in bytes.
///
/// # Errors
/// When the cgroup's file cannot be read.
pub fn used_bytes(folder: &Path) -> Result<u64> {
    let v1 = folder.join("memory.usage_in_bytes");
    let file = if v1.exists() { v1 } else { folder.join("memory.current") };
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("cannot read {}", file.display()))?;
    text.trim()
        .parse()
        .with_context(|| format!("expected a number in {}, got {text}", file.display()))
}

/// Sets the memory limit of the cgroup, in bytes. `None` removes the limit.
///
/// # Errors
/// When the kernel refuses the limit.
pub fn set_limit(folder: &Path, bytes: Option<u64>) -> Result<()> {
    let file = limit_file(folder);
    let none = if file.ends_with("memory.max") { "max" } else { "-1" };
    let text = bytes.map_or(none.into(), |bytes| bytes.to_string());
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

fn limit_file(folder: &Path) -> PathBuf {
    let v1 = folder.join("memory.limit_in_bytes");
    if v1.exists() { v1 } else { folder.join("memory.max") }
}
