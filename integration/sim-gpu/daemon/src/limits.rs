//! VRAM limits of cgroups, as driver 615 enforces them. The limits have no side effects: their
//! input and output are paths and numbers.
//!
//! VRAM is charged to the cgroup that the client was in when it attached. A limit counts the VRAM
//! of its cgroup and of all cgroups below it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use affinode_sim_protocol::MemoryLimit;

use crate::ledger::{ClientId, Ledger};

#[derive(Debug, Default)]
pub struct Limits {
    /// For each GPU and cgroup with a limit: the guaranteed and the maximum VRAM in bytes.
    set: BTreeMap<(usize, PathBuf), (u64, u64)>,
    /// Cgroup of each attached client.
    cgroups: BTreeMap<ClientId, PathBuf>,
}

impl Limits {
    /// Records the cgroup of a client that attaches.
    pub fn attach(&mut self, client: ClientId, cgroup: PathBuf) {
        self.cgroups.insert(client, cgroup);
    }

    pub fn detach(&mut self, client: ClientId) {
        self.cgroups.remove(&client);
    }

    pub fn set(&mut self, limit: MemoryLimit) {
        let place = (limit.gpu, limit.cgroup);
        if limit.soft_bytes == 0 && limit.hard_bytes == u64::MAX {
            self.set.remove(&place);
        } else {
            self.set.insert(place, (limit.soft_bytes, limit.hard_bytes));
        }
    }

    pub fn list(&self) -> Vec<MemoryLimit> {
        let set = self.set.iter();
        set.map(|((gpu, cgroup), (soft_bytes, hard_bytes))| MemoryLimit {
            gpu: *gpu,
            cgroup: cgroup.clone(),
            soft_bytes: *soft_bytes,
            hard_bytes: *hard_bytes,
        })
        .collect()
    }

    /// Removes the limits of a cgroup that has ended.
    pub fn forget(&mut self, ended: &Path) {
        self.set.retain(|(_, cgroup), _| cgroup != ended);
    }

    /// Returns the smallest limit that applies to a cgroup on a GPU, and the bytes that are in use
    /// under this limit. `None`: no limit applies.
    pub fn of_cgroup(&self, ledger: &Ledger, gpu: usize, cgroup: &Path) -> Option<(u64, u64)> {
        let limit = |folder: &Path| {
            let (_, hard_bytes) = self.set.get(&(gpu, folder.to_owned()))?;
            let inside = self.cgroups.iter().filter(|(_, of)| of.starts_with(folder));
            let used_bytes = inside.map(|(client, _)| ledger.taken_bytes(*client, gpu)).sum();
            Some((*hard_bytes, used_bytes))
        };
        cgroup.ancestors().filter_map(limit).min_by_key(|(hard, used)| hard.saturating_sub(*used))
    }

    /// Like [`Limits::of_cgroup`], for the cgroup of a client.
    pub fn of_client(&self, ledger: &Ledger, gpu: usize, client: ClientId) -> Option<(u64, u64)> {
        self.of_cgroup(ledger, gpu, self.cgroups.get(&client)?)
    }

    /// Returns whether a client may take this many further bytes of a GPU.
    pub fn permit(&self, ledger: &Ledger, gpu: usize, client: ClientId, bytes: u64) -> bool {
        bytes == 0
            || self
                .of_client(ledger, gpu, client)
                .is_none_or(|(hard_bytes, used_bytes)| used_bytes + bytes <= hard_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);

    fn limit(cgroup: &str, hard_bytes: u64) -> MemoryLimit {
        MemoryLimit { gpu: 0, cgroup: cgroup.into(), soft_bytes: 0, hard_bytes }
    }

    #[test]
    fn limit_counts_all_clients_below_it() {
        let mut ledger = Ledger::new(vec![1_000, 1_000], 10, 0);
        let mut limits = Limits::default();
        limits.attach(A, "/c/pod/a".into());
        limits.attach(B, "/c/pod/b".into());
        limits.set(limit("/c/pod", 100));
        ledger.create_context(A, 0).unwrap();
        ledger.allocate(B, 0, 50).unwrap();
        assert_eq!(limits.of_client(&ledger, 0, A), Some((100, 60)));
        assert!(limits.permit(&ledger, 0, A, 40) && !limits.permit(&ledger, 0, A, 41));
        assert!(limits.permit(&ledger, 1, A, 900), "the other GPU has no limit");
        limits.set(limit("/c/pod/b", 55));
        assert!(!limits.permit(&ledger, 0, B, 6) && limits.permit(&ledger, 0, A, 6));
        limits.set(limit("/c/pod/b", u64::MAX));
        limits.set(limit("/c/pod", u64::MAX));
        assert_eq!(limits.of_client(&ledger, 0, B), None);
    }

    #[test]
    fn imported_memory_counts_for_its_creator() {
        let mut ledger = Ledger::new(vec![1_000], 0, 0);
        let mut limits = Limits::default();
        limits.attach(A, "/c/a".into());
        limits.attach(B, "/c/b".into());
        limits.set(limit("/c/b", 100));
        let object = ledger.allocate(A, 0, 500).unwrap();
        ledger.hold(B, object).unwrap();
        assert_eq!(limits.of_client(&ledger, 0, B), Some((100, 0)));
    }
}
