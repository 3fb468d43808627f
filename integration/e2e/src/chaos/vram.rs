//! Checks which processes hold VRAM while every container is offloaded. The figures come from the
//! driver.

use std::collections::{BTreeMap, BTreeSet};

use crate::gpu::Holders;

/// Amounts of VRAM that may be in use while every container is offloaded.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Maximum VRAM in bytes by process id: for copiers, and for processes whose context stays in
    /// VRAM.
    pub by_pid: BTreeMap<i32, u64>,
    /// Process ids of unmanaged programs that may hold any amount of VRAM. These programs only
    /// occupy VRAM.
    pub ballast: BTreeSet<i32>,
    /// Maximum VRAM in use that the driver attributes to no process, in bytes. It is the driver's
    /// own reserve.
    pub unnamed_bytes: u64,
}

/// Describes each use of VRAM that `allowed` does not permit. Empty if there is none.
#[must_use]
pub fn leaks(holders: &Holders, allowed: &Allowed) -> Vec<String> {
    let mut found = Vec::new();
    for (pid, &bytes) in holders.by_pid.iter().filter(|(pid, _)| !allowed.ballast.contains(pid)) {
        let most = allowed.by_pid.get(pid).copied();
        if bytes > most.unwrap_or(0) {
            let may = most.map_or("nothing".into(), |most| format!("at most {most}"));
            found.push(format!("process {pid} holds {bytes} bytes of VRAM, may hold {may}"));
        }
    }
    let named: u64 = holders.by_pid.values().sum();
    let unnamed = holders.used_bytes.saturating_sub(named);
    if unnamed > allowed.unnamed_bytes {
        found.push(format!("{unnamed} bytes of VRAM are in use, and no process holds them"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPIER: i32 = 7;
    const COPIED_OUT: i32 = 8;

    fn found(used_bytes: u64, by_pid: &[(i32, u64)]) -> usize {
        let holders = Holders { used_bytes, by_pid: by_pid.iter().copied().collect() };
        let allowed = Allowed {
            by_pid: BTreeMap::from([(COPIER, 16), (COPIED_OUT, 16)]),
            ballast: BTreeSet::from([9]),
            unnamed_bytes: 4,
        };
        leaks(&holders, &allowed).len()
    }

    #[test]
    fn contexts_and_driver_reserve_may_be_held() {
        assert_eq!(found(0, &[]), 0);
        assert_eq!(found(1036, &[(COPIER, 16), (COPIED_OUT, 16), (9, 1000)]), 0);
    }

    #[test]
    fn memory_beyond_a_context_is_a_leak() {
        assert_eq!(found(17, &[(COPIER, 17)]), 1, "of the copier");
        assert_eq!(found(17, &[(COPIED_OUT, 17)]), 1, "of a copied_out process");
        assert_eq!(found(1, &[(10, 1)]), 1, "of a process that is offloaded");
        assert_eq!(found(21, &[(COPIER, 16)]), 1, "without a process");
    }
}
