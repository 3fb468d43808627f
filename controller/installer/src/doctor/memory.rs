//! Checks of host memory for offloaded VRAM: whether memory limits of containers can be read, and
//! whether enough RAM is available.

use std::path::Path;

use affinode_controller::{
    config::MemorySection,
    host_pool::size_and_use,
    inventory::memory::{available_bytes, reserve_in_force},
};

use super::{CheckGroup, DoctorCheck};

/// Version of the cgroup hierarchy from which the memory limits of containers are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// Version 2: one hierarchy, which has the memory controller.
    V2,
    /// Version 1: the memory controller has a separate hierarchy.
    V1,
    /// A cgroup hierarchy is mounted, but it has no memory controller.
    NoMemory,
    /// No hierarchy is mounted at /sys/fs/cgroup.
    Nothing,
}

/// What the checks of host memory examine: the cgroup version, available and reserved RAM, and VRAM
/// in use.
#[derive(Clone, Debug)]
pub struct MemoryFacts {
    /// Version of the cgroup hierarchy from which memory limits are read.
    pub cgroups: CgroupVersion,
    /// Available RAM in bytes, or the reason why it is unknown.
    pub available_bytes: Result<u64, String>,
    /// RAM in bytes that offloads must not use: the node's reserve and the driver's overhead for a
    /// process.
    pub kept_bytes: u64,
    /// VRAM in use on all GPUs, in bytes.
    pub vram_used_bytes: u64,
    /// Maximum size of the host pool and its memory in use, in bytes. Size 0: there is no host pool.
    pub host_pool_bytes: (u64, u64),
}

impl MemoryFacts {
    /// Reads the values for the checks of host memory from /proc and /sys.
    #[must_use]
    pub fn gather(rules: &MemorySection, vram_used_bytes: u64) -> MemoryFacts {
        MemoryFacts {
            cgroups: cgroups(Path::new("/sys/fs/cgroup")),
            available_bytes: available_bytes().map_err(|error| error.to_string()),
            // If the node's memory cannot be read, the check of the available RAM reports it.
            kept_bytes: reserve_in_force(rules.node_reserve_bytes()).unwrap_or(0)
                + (rules.driver_overhead_mib << 20),
            vram_used_bytes,
            host_pool_bytes: size_and_use(rules),
        }
    }
}

fn cgroups(root: &Path) -> CgroupVersion {
    if root.join("memory/memory.limit_in_bytes").exists() {
        return CgroupVersion::V1;
    }
    let controllers = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    match controllers("cgroup.controllers") {
        // In a container, the root is the container's own cgroup. `cgroup.controllers` lists its
        // controllers, too.
        Some(names) if names.split_whitespace().any(|name| name == "memory") => CgroupVersion::V2,
        Some(_) => CgroupVersion::NoMemory,
        None if root.join("unified").exists() || root.join("cpu").exists() => {
            CgroupVersion::NoMemory
        }
        None => CgroupVersion::Nothing,
    }
}

/// Returns the checks of cgroups and RAM.
#[must_use]
pub fn judge(facts: &MemoryFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("memory");
    let hint = "the memory limits of containers cannot be read: mount cgroup2 at /sys/fs/cgroup; if the memory controller is missing there, boot with the kernel argument cgroup_enable=memory";
    match facts.cgroups {
        CgroupVersion::V2 => group.good("cgroups", "cgroup version 2: memory limits can be read"),
        CgroupVersion::V1 => group.good("cgroups", "cgroup version 1: memory limits can be read"),
        CgroupVersion::NoMemory => {
            group.bad("cgroups", "the cgroup hierarchy has no memory controller", hint)
        }
        CgroupVersion::Nothing => {
            group.bad("cgroups", "no cgroup hierarchy is mounted at /sys/fs/cgroup", hint)
        }
    }
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let has_cgroups = matches!(facts.cgroups, CgroupVersion::V1 | CgroupVersion::V2);
    match facts.host_pool_bytes {
        (1.., _) if !has_cgroups => group.warning(
            "host pool",
            "the host pool cannot be used, because it needs a memory cgroup",
            "offloaded memory is charged to the containers until the memory controller is \
             available (see the check cgroups)",
        ),
        (0, _) => group.good(
            "host pool",
            "none (see memory.host_pool_percent): offloaded memory is charged to the containers",
        ),
        (size, used) => {
            group.good("host pool", format!("{} of at most {} in use", mib(used), mib(size)));
        }
    }
    match &facts.available_bytes {
        Err(why) => group.bad(
            "host RAM",
            format!("cannot read the available memory: {why}"),
            "check that /proc is mounted",
        ),
        Ok(available) => {
            let room = available.saturating_sub(facts.kept_bytes);
            let found = format!(
                "{} available, which is enough to offload {} of VRAM. {} of VRAM is in use now",
                mib(*available),
                mib(room),
                mib(facts.vram_used_bytes)
            );
            if room == 0 {
                let hint = "no container can be offloaded: add RAM, or lower memory.node_reserve_mib in the configuration";
                group.bad("host RAM", found, hint);
            } else if room < facts.vram_used_bytes {
                group.warning("host RAM", found, "the VRAM in use cannot all be offloaded at the same time: some containers will stay on the GPU");
            } else {
                group.good("host RAM", found);
            }
        }
    }
    group.checks
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::CheckVerdict, *};

    const GIB: u64 = 1 << 30;

    fn verdicts(cgroups: CgroupVersion, available_bytes: u64) -> Vec<CheckVerdict> {
        let (kept_bytes, vram_used_bytes) = (2 * GIB, 8 * GIB);
        let available_bytes = Ok(available_bytes);
        let host_pool_bytes = (2 << 30, 1 << 30);
        let facts =
            MemoryFacts { cgroups, available_bytes, kept_bytes, vram_used_bytes, host_pool_bytes };
        judge(&facts).iter().map(|check| check.verdict).collect()
    }

    #[test]
    fn ram_is_judged_by_what_fits() {
        use CheckVerdict::{Bad, Good, Warning};
        assert_eq!(verdicts(CgroupVersion::V2, 10 * GIB), [Good, Good, Good]);
        assert_eq!(verdicts(CgroupVersion::V1, 9 * GIB), [Good, Good, Warning]);
        assert_eq!(verdicts(CgroupVersion::NoMemory, 2 * GIB), [Bad, Warning, Bad]);
        assert_eq!(verdicts(CgroupVersion::Nothing, 10 * GIB), [Bad, Warning, Good]);
    }

    #[test]
    fn hierarchies_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(cgroups(root.path()), CgroupVersion::Nothing);
        fs::write(root.path().join("cgroup.controllers"), "cpu io\n").unwrap();
        assert_eq!(cgroups(root.path()), CgroupVersion::NoMemory);
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        assert_eq!(cgroups(root.path()), CgroupVersion::V2);
        fs::create_dir(root.path().join("memory")).unwrap();
        fs::write(root.path().join("memory/memory.limit_in_bytes"), "1").unwrap();
        assert_eq!(cgroups(root.path()), CgroupVersion::V1);
    }
}
