//! How much memory the node and the host pool have.

use std::{fs, path::Path};

use crate::cgroup;

/// A reading of the memory of the node and of the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Memory of the node that can be allocated without swapping, in bytes.
    pub available_bytes: u64,
    /// Memory that is charged to the host pool's cgroup, in bytes.
    pub used_bytes: u64,
}

/// Reads the memory of the node, and that of the host pool's cgroup. `None`: one of them cannot be
/// read.
pub fn read(cgroup: &Path) -> Option<Room> {
    let available_bytes = available_bytes(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(Room { available_bytes, used_bytes: cgroup::used_bytes(cgroup).ok()? })
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read() {
        let text = "MemTotal:  100 kB\nMemAvailable:    12 kB\nBuffers: 3 kB\n";
        assert_eq!(available_bytes(text), Some(12 << 10));
        assert_eq!(available_bytes("MemTotal: 100 kB\n"), None);
        let cgroup = tempfile::tempdir().unwrap();
        assert_eq!(read(cgroup.path()), None, "the pool's cgroup cannot be read");
        fs::write(cgroup.path().join("memory.current"), "4096\n").unwrap();
        let room = read(cgroup.path()).unwrap();
        assert!(room.available_bytes > 0 && room.used_bytes == 4096);
    }
}
