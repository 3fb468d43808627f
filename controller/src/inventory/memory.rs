//! Determines the pools of host memory that an offload uses. The driver moves VRAM into anonymous
//! memory of the process, which is charged to the container's memory cgroup. If that cgroup has no
//! free memory, the kernel kills the process in the middle of the checkpoint. The pools are the
//! cgroup, each of its ancestors, and the node. [`affinode_core::host_memory`] decides whether a
//! pool has enough free memory besides the memory that is promised to other moves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use affinode_core::host_memory::{
    HostNeed, HostPoolAllowance, MemoryPlace, MemoryPool, SurveyedMemory, node_reserve_bytes,
};
use affinode_proto::reason::Reason;

use super::process;

/// Amounts of host memory that an offload needs in addition to VRAM, and that it must leave free.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRules {
    /// Host memory that each process needs in addition to its VRAM, in bytes.
    pub overhead_bytes: u64,
    /// Memory that must stay free on the node after an offload, in bytes. `None` means the value of
    /// [`node_reserve_bytes`] for this node.
    pub node_reserve_bytes: Option<u64>,
    /// Size of the host pool in bytes. 0: the node has no host pool.
    pub host_pool_bytes: u64,
}

/// Returns the memory that must stay free below a cgroup's limit, in bytes: a sixty-fourth of the
/// limit, but at most 64 MiB.
fn group_reserve_bytes(limit_bytes: u64) -> u64 {
    (limit_bytes / 64).min(64 << 20)
}

/// Returns the pools from which an offload of these processes takes host memory. The pools are the
/// node, the host pool, and each memory cgroup that is charged for the offload and has a limit.
/// Each pool has its free memory and the memory that the offload needs. `host_pool_used_bytes` is
/// the memory of the host pool that is in use. It is `None` if the offload cannot use the host
/// pool.
///
/// # Errors
/// A process cannot be moved now, or a file of /proc or the cgroup cannot be read.
pub fn pools(
    rules: MemoryRules,
    processes: &[HostNeed],
    host_pool_used_bytes: Option<u64>,
) -> Result<SurveyedMemory, (Reason, String)> {
    let mut groups_of: Vec<(Vec<PathBuf>, &HostNeed)> = Vec::new();
    for need in processes {
        let pid = need.pid;
        let groups = CgroupTree::of(pid).map_err(|e| {
            (Reason::CgroupMemory, format!("cannot read the cgroup of process {pid}: {e}"))
        })?;
        if groups.is_frozen() || process::is_stopped(pid) {
            return Err((Reason::Frozen, format!("process {pid}")));
        }
        groups_of.push((groups.memory_ancestors(), need));
    }
    let free_bytes = free_node_bytes(rules.node_reserve_bytes)
        .map_err(|e| (Reason::HostMemory, format!("/proc/meminfo: {e}")))?;
    let node = |need_bytes| MemoryPool { place: MemoryPlace::Node, free_bytes, need_bytes };
    let pools = |need_of: &dyn Fn(&HostNeed) -> u64| {
        let mut by_group: BTreeMap<&Path, u64> = BTreeMap::new();
        for (groups, need) in &groups_of {
            for group in groups {
                let sum = by_group.entry(group).or_default();
                *sum = sum.saturating_add(need_of(need));
            }
        }
        by_group.into_iter().filter_map(pool_of_group).collect::<Vec<_>>()
    };
    let total = |need_of: &dyn Fn(&HostNeed) -> u64| {
        processes.iter().fold(0_u64, |sum, need| sum.saturating_add(need_of(need)))
    };
    let own = |need: &HostNeed| need.own_bytes(rules.overhead_bytes);
    let mut container = pools(&own);
    container.push(node(total(&own)));
    let mut host_pool = Vec::new();
    if let Some(used_bytes) = host_pool_used_bytes {
        let beside = |need: &HostNeed| need.own_bytes_beside_host_pool(rules.overhead_bytes);
        host_pool = pools(&beside);
        // What the processes have of the host pool already counts as free for them. The whole
        // content is promised nevertheless: they may free these pages and allocate them again.
        let kept_bytes = total(&HostNeed::pooled_already_bytes);
        host_pool.push(MemoryPool {
            free_bytes: free_bytes.saturating_add(kept_bytes),
            ..node(total(&beside).saturating_add(total(&HostNeed::pooled_bytes)))
        });
        host_pool.push(MemoryPool {
            place: MemoryPlace::HostPool,
            free_bytes: rules.host_pool_bytes.saturating_sub(used_bytes.saturating_sub(kept_bytes)),
            need_bytes: total(&HostNeed::pooled_bytes),
        });
    }
    let allowance = |need: &HostNeed| HostPoolAllowance {
        pid: need.pid,
        bytes: need.pooled_bytes(),
        kept_bytes: need.pooled_already_bytes(),
    };
    let allowances = processes.iter().map(allowance).collect();
    Ok(SurveyedMemory { container, host_pool, allowances })
}

fn pool_of_group((group, need_bytes): (&Path, u64)) -> Option<MemoryPool> {
    let (room, limit) = headroom(group)?;
    Some(MemoryPool {
        free_bytes: room.saturating_sub(group_reserve_bytes(limit)),
        place: MemoryPlace::Cgroup(group.display().to_string()),
        need_bytes,
    })
}

/// Returns every pool that is charged for the move of a process with `vram_bytes` of VRAM, and the
/// memory that the move needs from it. The free memory of the pools and the state of the process
/// are not read.
#[must_use]
pub fn pools_of(rules: MemoryRules, pid: u32, vram_bytes: u64) -> Vec<MemoryPool> {
    let need_bytes = vram_bytes.saturating_add(rules.overhead_bytes);
    let groups = CgroupTree::of(pid).map(|tree| tree.memory_ancestors()).unwrap_or_default();
    let cgroup = |group: PathBuf| MemoryPlace::Cgroup(group.display().to_string());
    let places = groups.into_iter().map(cgroup).chain([MemoryPlace::Node]);
    places.map(|place| MemoryPool { place, free_bytes: 0, need_bytes }).collect()
}

/// Returns how much host memory these processes may still use, for each pool. The pools are the
/// node, and each memory cgroup that is charged for the processes and has a limit. Half of each
/// pool's reserve stays free, to keep a distance from the kernel's out-of-memory killer. A cgroup
/// that cannot be read is omitted.
#[must_use]
pub fn levels(rules: MemoryRules, pids: &[u32]) -> Vec<MemoryPool> {
    let groups = pids.iter().filter_map(|pid| CgroupTree::of(*pid).ok());
    let groups: BTreeSet<PathBuf> = groups.flat_map(|groups| groups.memory_ancestors()).collect();
    let level = |group: &PathBuf| {
        let (room, limit) = headroom(group)?;
        Some(MemoryPool {
            free_bytes: room.saturating_sub(group_reserve_bytes(limit) / 2),
            place: MemoryPlace::Cgroup(group.display().to_string()),
            need_bytes: 0,
        })
    };
    let node = || {
        let reserve_bytes = reserve_in_force(rules.node_reserve_bytes).ok()?;
        let free_bytes = available_bytes().ok()?.saturating_sub(reserve_bytes / 2);
        Some(MemoryPool { place: MemoryPlace::Node, free_bytes, need_bytes: 0 })
    };
    groups.iter().filter_map(level).chain(node()).collect()
}

/// Returns the path of a process's memory cgroup, as in the names of the pools. `None`: it cannot be
/// read.
#[must_use]
pub fn cgroup_of(pid: u32) -> Option<String> {
    Some(CgroupTree::of(pid).ok()?.memory?.display().to_string())
}

/// Paths of a process's cgroups. They show the limits of the process's memory, and whether the
/// process is frozen.
struct CgroupTree {
    memory: Option<PathBuf>,
    memory_root: PathBuf,
    freezer_v1: Option<PathBuf>,
    /// Path of the process's cgroup in the hierarchy of version 2. Processes can be frozen in this
    /// hierarchy even on a machine whose memory limits are in version 1.
    unified: Option<PathBuf>,
    unified_root: PathBuf,
}

impl CgroupTree {
    fn of(pid: u32) -> io::Result<CgroupTree> {
        Ok(CgroupTree::parse(&process::cgroups(pid)?, Path::new("/sys/fs/cgroup")))
    }

    /// Parses the cgroups of a process from lines of the form `id:controllers:path`. The line of
    /// version 2 has id 0 and no controllers.
    fn parse(text: &str, root: &Path) -> CgroupTree {
        // If both versions are mounted, version 2 is in a subfolder.
        let hybrid = !root.join("cgroup.controllers").exists();
        let unified_root = if hybrid { root.join("unified") } else { root.to_owned() };
        let mut groups = CgroupTree {
            memory: None,
            memory_root: root.to_owned(),
            freezer_v1: None,
            unified: None,
            unified_root,
        };
        let join = |base: &Path, path: &str| base.join(path.trim_start_matches('/'));
        for line in text.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            if controllers.split(',').any(|c| c == "memory") {
                groups.memory_root = root.join("memory");
                groups.memory = Some(join(&groups.memory_root, path));
            } else if controllers.is_empty() {
                groups.unified = Some(join(&groups.unified_root, path));
                if groups.memory.is_none() && !hybrid {
                    groups.memory = Some(join(root, path));
                }
            }
            if controllers.split(',').any(|c| c == "freezer") {
                groups.freezer_v1 = Some(join(&root.join("freezer"), path));
            }
        }
        groups
    }

    fn memory_ancestors(&self) -> Vec<PathBuf> {
        let inside = |path: &&Path| path.starts_with(&self.memory_root);
        self.memory
            .iter()
            .flat_map(|group| group.ancestors().take_while(inside))
            .map(Path::to_owned)
            .collect()
    }

    fn is_frozen(&self) -> bool {
        let v1 =
            self.freezer_v1.as_ref().and_then(|p| fs::read_to_string(p.join("freezer.state")).ok());
        // A frozen ancestor freezes all groups below it.
        let v2 = self.unified.iter().flat_map(|group| group.ancestors()).any(|group| {
            group.starts_with(&self.unified_root)
                && fs::read_to_string(group.join("cgroup.freeze"))
                    .is_ok_and(|frozen| frozen.trim() == "1")
        });
        v1.is_some_and(|state| state.trim() != "THAWED") || v2
    }
}

/// Returns the free memory of a cgroup and its limit, in bytes, or `None` if it has no limit. Page
/// cache that the kernel can drop counts as free.
fn headroom(group: &Path) -> Option<(u64, u64)> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, usage) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?),
    };
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok())
    };
    let reclaimable = field("total_inactive_file").or_else(|| field("inactive_file")).unwrap_or(0);
    Some((limit.saturating_sub(usage.saturating_sub(reclaimable)), limit))
}

/// Returns the free host memory of this node for offloads, in bytes. It is rounded to steps of 256
/// MiB, so that small allocations do not change it. Returns 0 if it cannot be read.
#[must_use]
pub fn room_bytes(reserve_bytes: Option<u64>) -> u64 {
    const STEP: u64 = 256 << 20;
    free_node_bytes(reserve_bytes).unwrap_or(0) / STEP * STEP
}

/// Returns the available memory of the node minus the reserve, in bytes.
fn free_node_bytes(reserve_bytes: Option<u64>) -> io::Result<u64> {
    Ok(available_bytes()?.saturating_sub(reserve_in_force(reserve_bytes)?))
}

/// Returns the reserve of this node in bytes: the configured value if there is one, otherwise a
/// value computed from the node's memory.
///
/// # Errors
/// /proc/meminfo cannot be read.
pub fn reserve_in_force(configured_bytes: Option<u64>) -> io::Result<u64> {
    match configured_bytes {
        Some(bytes) => Ok(bytes),
        None => {
            let text = fs::read_to_string("/proc/meminfo")?;
            Ok(node_reserve_bytes(meminfo_bytes(&text, "MemTotal:")?))
        }
    }
}

/// Returns the host memory that can be allocated without swapping, in bytes.
///
/// # Errors
/// /proc/meminfo cannot be read.
pub fn available_bytes() -> io::Result<u64> {
    meminfo_bytes(&fs::read_to_string("/proc/meminfo")?, "MemAvailable:")
}

/// Returns the total memory of the node, in bytes.
///
/// # Errors
/// /proc/meminfo cannot be read.
pub fn total_bytes() -> io::Result<u64> {
    meminfo_bytes(&fs::read_to_string("/proc/meminfo")?, "MemTotal:")
}

fn meminfo_bytes(text: &str, name: &str) -> io::Result<u64> {
    let kib = text
        .lines()
        .find_map(|l| l.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no {name}")))
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::copier::CHUNK_BYTES;

    use super::*;

    const RULES: MemoryRules =
        MemoryRules { overhead_bytes: 0, node_reserve_bytes: Some(0), host_pool_bytes: 0 };

    fn need(pid: u32, bytes: u64) -> HostNeed {
        HostNeed {
            pid,
            vram_bytes: bytes,
            bytes,
            copied_bytes: 0,
            kept_bytes: 0,
            driver_moves: true,
        }
    }

    fn own_pools(rules: MemoryRules, needs: &[HostNeed]) -> Vec<MemoryPool> {
        pools(rules, needs, None).unwrap().container
    }

    #[test]
    fn version_1_and_2_lines_are_understood() {
        let v1 = "4:memory:/kubepods/pod1/abc\n8:freezer:/kubepods/pod1/abc\n0::/x\n";
        let groups = CgroupTree::parse(v1, Path::new("/nowhere"));
        let ancestors = groups.memory_ancestors();
        assert_eq!(ancestors[0], Path::new("/nowhere/memory/kubepods/pod1/abc"));
        assert_eq!(ancestors.last().unwrap(), Path::new("/nowhere/memory"));
        assert_eq!(groups.freezer_v1.unwrap(), Path::new("/nowhere/freezer/kubepods/pod1/abc"));

        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        let groups = CgroupTree::parse("0::/kubepods/abc\n", root.path());
        assert_eq!(groups.memory_ancestors().len(), 3);
    }

    #[test]
    fn a_frozen_ancestor_freezes_its_groups() {
        for (unified, text) in [("", "0::/pod/abc\n"), ("unified", "4:memory:/x\n0::/pod/abc\n")] {
            let root = tempfile::tempdir().unwrap();
            if unified.is_empty() {
                fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
            }
            let pod = root.path().join(unified).join("pod");
            fs::create_dir_all(pod.join("abc")).unwrap();
            fs::write(pod.join("abc/cgroup.freeze"), "0\n").unwrap();
            fs::write(pod.join("cgroup.freeze"), "0\n").unwrap();
            assert!(!CgroupTree::parse(text, root.path()).is_frozen(), "{text}");
            fs::write(pod.join("cgroup.freeze"), "1\n").unwrap();
            assert!(CgroupTree::parse(text, root.path()).is_frozen(), "{text}");
        }
    }

    #[test]
    fn headroom_includes_droppable_page_cache() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "70\n");
        assert_eq!(headroom(group.path()), None);
        write("memory.max", "100\n");
        write("memory.stat", "anon 5\ninactive_file 20\n");
        assert_eq!(headroom(group.path()), Some((50, 100)));
    }

    #[test]
    fn the_node_is_a_pool_of_every_process() {
        const NEED: u64 = 5 << 30;
        let rules = MemoryRules { overhead_bytes: 7, ..RULES };
        let own = std::process::id();
        let pools = own_pools(rules, &[need(own, NEED), need(own, 1)]);
        let node = pools.iter().find(|pool| pool.place == MemoryPlace::Node).unwrap();
        assert_eq!(node.need_bytes, NEED + 1 + 2 * 7);
        assert!(node.free_bytes > 0);
        assert!(pools.iter().all(|pool| pool.need_bytes == node.need_bytes), "{pools:?}");
    }

    /// Checks that `levels` reports more free memory than `pools`. The difference must be about
    /// half of the reserve. Otherwise a copy that stays within its promised memory could be
    /// cancelled.
    #[test]
    fn levels_leave_more_than_promises() {
        let own = std::process::id();
        let rules = MemoryRules { node_reserve_bytes: Some(2 << 30), ..RULES };
        let free = |pools: Vec<MemoryPool>| {
            pools.into_iter().find(|pool| pool.place == MemoryPlace::Node).unwrap().free_bytes
        };
        let (promised, level) =
            (free(own_pools(rules, &[need(own, 0)])), free(levels(rules, &[own])));
        assert!(promised + (1 << 29) < level && level < promised + (3 << 29), "{promised} {level}");
    }

    /// Checks that `pools_of` returns every pool that `pools` returns for an offload of the same
    /// process.
    #[test]
    fn pools_of_a_process_are_those_of_its_survey() {
        let own = std::process::id();
        let rules = MemoryRules { overhead_bytes: 7, ..RULES };
        let of_process = pools_of(rules, own, 5);
        assert!(of_process.iter().all(|pool| pool.need_bytes == 12), "{of_process:?}");
        for pool in own_pools(rules, &[need(own, 5)]) {
            assert!(of_process.iter().any(|known| known.place == pool.place), "{pool:?}");
        }
    }

    #[test]
    fn reserve_grows_with_the_node() {
        const GIB: u64 = 1 << 30;
        assert_eq!(node_reserve_bytes(8 * GIB), GIB);
        assert_eq!(node_reserve_bytes(128 * GIB), 8 * GIB);
        let rules = MemoryRules { node_reserve_bytes: None, ..RULES };
        let free = |rules| own_pools(rules, &[]).pop().unwrap().free_bytes;
        assert!(free(rules) + GIB / 2 < free(RULES), "by default something is kept free");
    }

    #[test]
    fn free_memory_excludes_the_reserve() {
        let room = room_bytes(Some(0));
        assert!(room > 0 && room <= available_bytes().unwrap() + (1 << 30), "{room}");
        assert_eq!(room_bytes(Some(u64::MAX)), 0);
    }

    #[test]
    fn a_stopped_process_is_not_moved() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
        nix::sys::wait::waitpid(pid, Some(nix::sys::wait::WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(pools(RULES, &[need(child.id(), 0)], None).unwrap_err().0, Reason::Frozen);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// An offload to the host pool needs the content from the pool and the node, and from the
    /// container only what the driver moves and what the kernel needs for the mapping.
    #[test]
    fn host_pool_takes_the_copied_content() {
        const COPIED: u64 = 8 << 30;
        const REST: u64 = 1 << 30;
        let rules = MemoryRules { overhead_bytes: 7, host_pool_bytes: 20 << 30, ..RULES };
        let own = std::process::id();
        let need_of = |pools: &[MemoryPool], place: &MemoryPlace| {
            pools.iter().find(|pool| pool.place == *place).unwrap().need_bytes
        };
        let copied = |driver_moves| HostNeed {
            pid: own,
            vram_bytes: COPIED + REST,
            bytes: COPIED + REST,
            copied_bytes: COPIED,
            kept_bytes: 0,
            driver_moves,
        };
        let tables = COPIED / 128 + (32 << 20);
        for (driver_moves, beside) in [(false, tables), (true, tables + REST + 7)] {
            let memory = pools(rules, &[copied(driver_moves)], Some(3 << 30)).unwrap();
            let pooled = COPIED + CHUNK_BYTES;
            assert_eq!(need_of(&memory.host_pool, &MemoryPlace::HostPool), pooled);
            assert_eq!(need_of(&memory.host_pool, &MemoryPlace::Node), pooled + beside);
            assert_eq!(need_of(&memory.container, &MemoryPlace::Node), COPIED + REST + 7);
            assert_eq!(copied(driver_moves).own_bytes_beside_host_pool(7), beside);
            let pool = memory.host_pool.iter().find(|p| p.place == MemoryPlace::HostPool);
            assert_eq!(pool.unwrap().free_bytes, 17 << 30);
        }
        assert_eq!(pools(rules, &[copied(true)], None).unwrap().host_pool, []);
        // What the process has of the pool already counts as free for it, there and on the node.
        let kept = HostNeed { kept_bytes: COPIED, ..copied(false) };
        let memory = pools(rules, &[kept], Some(15 << 30)).unwrap();
        let free_of = |place: &MemoryPlace| {
            memory.host_pool.iter().find(|pool| pool.place == *place).unwrap().free_bytes
        };
        assert_eq!(free_of(&MemoryPlace::HostPool), (5 << 30) + COPIED);
        let own = memory.container.iter().find(|pool| pool.place == MemoryPlace::Node).unwrap();
        assert_eq!(free_of(&MemoryPlace::Node), own.free_bytes + COPIED);
        let pooled = COPIED + CHUNK_BYTES;
        assert_eq!(need_of(&memory.host_pool, &MemoryPlace::HostPool), pooled);
        let (bytes, kept_bytes) = (COPIED + CHUNK_BYTES, COPIED);
        assert_eq!(
            memory.allowances,
            [HostPoolAllowance { pid: std::process::id(), bytes, kept_bytes }]
        );
    }
}
