//! Offloads and restores of a container that failed, and when they are tried again.

use affinode_proto::reason::Reason;

use super::super::Millis;

/// Number of failed forced offloads in a row after which the container counts as immovable. Only
/// offloads that failed because CUDA calls did not end are counted.
const PUSHES: u32 = 3;

/// Failed offloads of one container, and the earliest time of its next offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadFailures {
    /// Number of failed offloads in a row, without those that lacked host memory. A completed
    /// offload sets it to 0.
    pub in_a_row: u32,
    /// Number of offloads in a row that lacked host memory. A completed offload or a use of the
    /// container sets it to 0.
    pub short_in_a_row: u32,
    /// Earliest time of the next offload after one that failed for another reason than host memory.
    failed_not_before: Millis,
    /// Earliest time of the next offload after one that lacked host memory.
    short_not_before: Millis,
    /// When the last offload lacked host memory.
    pub short_at: Millis,
    /// Number of restores of other containers that were ordered to free host memory for this
    /// container, since its last completed offload.
    reliefs: u32,
    /// Earliest time of the next such restore.
    relief_not_before: Millis,
    /// Time until which the container's own memory is preferred to the host pool.
    pub host_pool_not_before: Millis,
    /// Earliest time of the next disk step of the container after one that ended or failed.
    pub disk_not_before: Millis,
    /// The same for a disk step that a waiter needs. It is earlier after a step that ended.
    pub disk_for_waiter_not_before: Millis,
    /// Number of forced offloads in a row that were given up because calls did not end.
    forced_in_a_row: u32,
    /// When the container last proved to be immovable: an offload failed for a reason such as a
    /// hazard, or several forced offloads in a row failed because CUDA calls did not end.
    pub immovable_at: Option<Millis>,
}

impl OffloadFailures {
    /// Counts an offload that failed for this reason, and delays the next attempt. The first delay
    /// is twice the idle timeout, which is taken as 1 s to 5 min. Each further failure doubles the
    /// delay, up to an hour. If host memory was short, the delays are 1 s to 30 s: any restore of
    /// another container can free host memory.
    pub fn count(&mut self, now: Millis, idle_timeout_ms: Millis, why: Reason) {
        let (in_a_row, not_before, base_ms, most_ms) = if why.is_host_shortage() {
            self.short_at = now;
            (&mut self.short_in_a_row, &mut self.short_not_before, 500, 30_000)
        } else {
            let base_ms = idle_timeout_ms.clamp(1_000, 300_000);
            (&mut self.in_a_row, &mut self.failed_not_before, base_ms, 3_600_000)
        };
        *in_a_row = in_a_row.saturating_add(1);
        *not_before = now + (base_ms << (*in_a_row).min(6)).min(most_ms);
    }

    /// Earliest time of the next offload.
    #[must_use]
    pub fn not_before(&self) -> Millis {
        self.failed_not_before.max(self.short_not_before)
    }

    /// Permits an offload that lacked host memory at once, because host memory was freed.
    pub fn host_memory_was_freed(&mut self) {
        self.short_not_before = 0;
    }

    /// Whether another container may be restored to free host memory for this container. A
    /// container that is not offloaded nevertheless must not cause such restores without end.
    #[must_use]
    pub fn may_be_relieved(&self, now: Millis) -> bool {
        const MAX_RELIEFS: u32 = 5;
        self.reliefs < MAX_RELIEFS && now >= self.relief_not_before
    }

    /// Records that another container is restored to free host memory for this container. The next
    /// such restore must wait: 20 s at first, and twice as long after each.
    pub fn record_relief(&mut self, now: Millis) {
        const FIRST_MS: Millis = 20_000;
        self.relief_not_before = now + (FIRST_MS << self.reliefs.min(6));
        self.reliefs += 1;
    }

    /// Records why an offload failed, and decides whether the container counts as immovable. If
    /// CUDA calls did not end, the container counts as immovable only after several forced offloads
    /// in a row. If host memory was short, it counts as immovable only after several such offloads
    /// in a row, because host memory can become free. If its VRAM was unknown, it does not count as
    /// immovable.
    pub fn has_stayed(&mut self, now: Millis, why: Reason, forced: bool) {
        let immovable = match why {
            Reason::Busy | Reason::Called => {
                self.forced_in_a_row += u32::from(forced);
                self.forced_in_a_row >= PUSHES
            }
            Reason::VramUnknown => false,
            why if why.is_host_shortage() => self.short_in_a_row >= PUSHES,
            _ => true,
        };
        if immovable {
            self.forced_in_a_row = 0;
            self.immovable_at = Some(now);
        }
    }

    /// Sets the counts of failures in a row to 0 after a completed offload.
    pub fn clear(&mut self) {
        self.in_a_row = 0;
        self.short_in_a_row = 0;
        (self.reliefs, self.relief_not_before) = (0, 0);
        self.forced_in_a_row = 0;
    }
}

/// Failed restores of one container, and the earliest time at which it enters the queue for VRAM
/// again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreFailures {
    /// Number of wasted VRAM grants in a row. A grant is wasted if the container was not restored
    /// and did not make its allocation, although other processes paused their allocations for it.
    pub in_a_row: u32,
    /// Earliest time at which the container enters the queue for VRAM again.
    pub not_before: Millis,
    /// When the controller last searched for containers to evict for this container.
    pub eviction_searched_at: Option<Millis>,
    /// When the controller last searched for a container whose restore frees host memory for this
    /// container.
    pub relief_searched_at: Option<Millis>,
}

impl RestoreFailures {
    /// Records a wasted grant: it led to neither a restore nor an allocation, although other
    /// processes paused their allocations for it. From the second in a row on, the container enters
    /// the queue again only after a pause. The pause doubles with each wasted grant, up to a
    /// minute.
    pub fn has_wasted_a_turn(&mut self, now: Millis) {
        const FIRST_PAUSE_MS: Millis = 250;
        if self.in_a_row > 0 {
            self.not_before = now + (FIRST_PAUSE_MS << self.in_a_row.min(8));
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failed_forces_show_it_immovable() {
        let mut failures = OffloadFailures::default();
        for at in 1..10 {
            failures.has_stayed(at, Reason::Busy, false);
        }
        assert_eq!(failures.immovable_at, None);
        for (at, expected) in [(10, None), (11, None), (12, Some(12))] {
            failures.has_stayed(at, Reason::Called, true);
            assert_eq!(failures.immovable_at, expected);
        }
    }

    #[test]
    fn lasting_shortage_shows_it_immovable() {
        let mut failures = OffloadFailures::default();
        for at in 0..5 {
            failures.has_stayed(at, Reason::HostMemory, false);
            failures.count(at, 1_000, Reason::HostMemory);
            assert_eq!(failures.immovable_at.is_some(), at >= 3, "{at}");
        }
    }

    #[test]
    fn reliefs_become_rarer_and_end() {
        let mut failures = OffloadFailures::default();
        let (mut now, mut waits) = (7, Vec::new());
        for _ in 0..5 {
            let began = now;
            while !failures.may_be_relieved(now) {
                now += 1_000;
            }
            waits.push(now - began);
            failures.record_relief(now);
        }
        assert_eq!(waits, [0, 20_000, 40_000, 80_000, 160_000]);
        assert!(!failures.may_be_relieved(Millis::MAX));
        failures.clear();
        assert!(failures.may_be_relieved(now));
    }

    #[test]
    fn short_host_memory_delays_only_briefly() {
        for (why, delays_ms) in [
            (Reason::HostMemory, [1_000, 2_000]),
            (Reason::CgroupMemory, [1_000, 2_000]),
            (Reason::DriverError, [600_000, 1_200_000]),
        ] {
            let mut failures = OffloadFailures::default();
            for delay_ms in delays_ms {
                failures.count(7, 300_000, why);
                assert_eq!(failures.not_before(), 7 + delay_ms, "{why:?}");
            }
            (0..20).for_each(|_| failures.count(7, 300_000, why));
            let longest_ms = if why.is_host_shortage() { 30_000 } else { 3_600_000 };
            assert_eq!(failures.not_before(), 7 + longest_ms, "{why:?}");
        }
    }

    #[test]
    fn freed_host_memory_ends_only_its_delay() {
        let mut failures = OffloadFailures::default();
        (0..6).for_each(|_| failures.count(7, 300_000, Reason::HostMemory));
        failures.host_memory_was_freed();
        assert_eq!(failures.not_before(), 0);
        failures.count(7, 300_000, Reason::Busy);
        failures.count(7, 300_000, Reason::HostMemory);
        failures.host_memory_was_freed();
        assert_eq!(failures.not_before(), 7 + 600_000, "the two kinds are counted separately");
    }

    #[test]
    fn first_wasted_turn_costs_no_pause() {
        let mut failures = RestoreFailures::default();
        failures.has_wasted_a_turn(7);
        assert_eq!(failures.not_before, 0);
        failures.has_wasted_a_turn(7);
        assert_eq!(failures.not_before, 7 + 500);
        (0..20).for_each(|_| failures.has_wasted_a_turn(7));
        assert_eq!(failures.not_before, 7 + 64_000);
    }
}
