//! Reads how much host memory is available for content that is charged to no container.

use std::{fs, path::Path};

/// Total and free memory of the node, reduced to the limits of this process's control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBudget {
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Memory that this process could still allocate, in bytes.
    pub free_bytes: u64,
}

impl HostBudget {
    /// Reads the budget at the time of the call.
    pub fn now() -> HostBudget {
        let node = HostBudget {
            total_bytes: of_meminfo("MemTotal"),
            free_bytes: of_meminfo("MemAvailable"),
        };
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        let root = Path::new("/sys/fs/cgroup");
        node.within(root, &root.join(path.trim_start_matches('/')))
    }

    /// Returns the budget, reduced to the limits of a control group and of all groups above it. The
    /// kernel kills processes when a group exceeds its limit.
    fn within(self, root: &Path, group: &Path) -> HostBudget {
        let read = |group: &Path, file: &str| {
            fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok()
        };
        group.ancestors().take_while(|above| *above != root).fold(self, |least, above| {
            // Without a limit, the file contains "max".
            let Some(limit) = read(above, "memory.max") else { return least };
            // The kernel drops inactive cached files before it kills a process.
            let unused = fs::read_to_string(above.join("memory.stat")).unwrap_or_default();
            let used = read(above, "memory.current").unwrap_or(limit);
            let used = used.saturating_sub(inactive_file_bytes(&unused));
            HostBudget {
                total_bytes: least.total_bytes.min(limit),
                free_bytes: least.free_bytes.min(limit.saturating_sub(used)),
            }
        })
    }
}

/// Reads a value of `/proc/meminfo`, in bytes. Returns 0 if the value is unknown.
fn of_meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    value(&text, name).unwrap_or(0)
}

fn value(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn inactive_file_bytes(stat: &str) -> u64 {
    let bytes = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    bytes.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let text = "MemTotal:       24 kB\nMemAvailableX: 9 kB\nMemAvailable:    7 kB\nHuge: 3\n";
        assert_eq!(value(text, "MemAvailable"), Some(7 << 10));
        assert_eq!([value(text, "Huge"), value(text, "Swap")], [None, None]);
        let now = HostBudget::now();
        assert!(now.total_bytes >= now.free_bytes && now.total_bytes > 0, "{now:?}");
    }

    #[test]
    fn the_least_limit_counts_wherever_it_is() {
        let root = std::env::temp_dir().join(format!("affinode-limits-{}", std::process::id()));
        let group = root.join("a/b");
        fs::create_dir_all(&group).unwrap();
        let set = |path: &str, value: &str| fs::write(root.join(path), value).unwrap();
        let node = HostBudget { total_bytes: 100, free_bytes: 80 };
        let within = |total_bytes, free_bytes| {
            assert_eq!(node.within(&root, &group), HostBudget { total_bytes, free_bytes });
        };
        within(100, 80);
        set("a/b/memory.max", "max\n");
        within(100, 80);
        set("a/memory.max", "90\n");
        within(90, 0);
        set("a/memory.current", "20\n");
        within(90, 70);
        set("a/memory.stat", "anon 3\ninactive_file 5\nactive_file 9\n");
        within(90, 75);
        set("a/b/memory.max", "50\n");
        set("a/b/memory.current", "60\n");
        within(50, 0);
        fs::remove_dir_all(&root).unwrap();
    }
}
