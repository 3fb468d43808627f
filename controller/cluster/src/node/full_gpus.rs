//! Determines which GPUs are full of VRAM that no offload can free. Such a GPU has no room for
//! further pods, although their claims may fit into its capacity.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use affinode_proto::api::control::Gpu;

/// Share of the VRAM, in percent, that must be unmovable before a GPU becomes full.
const FULL_PERCENT: u64 = 90;
/// Share of the VRAM, in percent, below which a full GPU is no longer full. It is below
/// [`FULL_PERCENT`], so that small changes do not switch the state back and forth.
const FREE_PERCENT: u64 = 80;
/// Time for which a GPU must be above or below the limit before its state changes. A container that
/// has just started holds VRAM before its processes have registered.
const SETTLE_TIME: Duration = Duration::from_secs(30);

/// The state of one GPU.
#[derive(Clone, Copy, Debug, Default)]
struct GpuState {
    is_full: bool,
    /// Since when the readings contradict `is_full`. `None`: the last reading agrees with it.
    contradicted_since: Option<Duration>,
    /// Since when no reading contains the GPU. `None`: the last reading contains it.
    absent_since: Option<Duration>,
}

impl GpuState {
    /// Returns whether the state of a GPU that the reading does not contain is still known. NVML
    /// can fail to read one GPU, and `has_error` says that it did.
    fn lasts(&mut self, now: Duration, has_error: bool) -> bool {
        let since = *self.absent_since.get_or_insert(now);
        // What was read before says nothing about the time without a reading.
        self.contradicted_since = None;
        has_error || now.saturating_sub(since) < SETTLE_TIME
    }
}

/// The states of a node's GPUs, from the readings of the node's controller.
#[derive(Debug, Default)]
pub struct FullGpus {
    gpus: BTreeMap<String, GpuState>,
    /// Whether there was a reading without an error. Until then, the first reading of a GPU sets its
    /// state at once, because the agent may have started while the GPU was full.
    has_complete: bool,
}

impl FullGpus {
    /// Records a reading at the time `now` on a monotonic clock. Returns the UUIDs of the GPUs that
    /// are full now. A GPU that the reading does not contain keeps its state for [`SETTLE_TIME`],
    /// or as long as `has_error` says that a GPU could not be read. The first reading of a GPU counts
    /// at once if no earlier reading was complete. Other readings count after [`SETTLE_TIME`].
    pub fn update(&mut self, now: Duration, reading: &[Gpu], has_error: bool) -> BTreeSet<String> {
        let is_start = !self.has_complete;
        self.has_complete |= !has_error;
        // A GPU without a size was not read.
        let read = || reading.iter().filter(|gpu| gpu.vram_total_bytes > 0);
        self.gpus.retain(|uuid, state| {
            read().any(|gpu| gpu.uuid == *uuid) || state.lasts(now, has_error)
        });
        for gpu in read() {
            let is_first = is_start && !self.gpus.contains_key(&gpu.uuid);
            let state = self.gpus.entry(gpu.uuid.clone()).or_default();
            state.absent_since = None;
            let limit_percent = if state.is_full { FREE_PERCENT } else { FULL_PERCENT };
            let is_above = u128::from(gpu.vram_unmovable_bytes) * 100
                >= u128::from(gpu.vram_total_bytes) * u128::from(limit_percent);
            if is_above == state.is_full {
                state.contradicted_since = None;
                continue;
            }
            let since = *state.contradicted_since.get_or_insert(now);
            if is_first || now.saturating_sub(since) >= SETTLE_TIME {
                *state = GpuState { is_full: is_above, ..GpuState::default() };
            }
        }
        let full = self.gpus.iter().filter(|(_, state)| state.is_full);
        full.map(|(uuid, _)| uuid.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-0";

    fn reading(unmovable_bytes: u64) -> [Gpu; 1] {
        [Gpu {
            uuid: GPU.into(),
            vram_total_bytes: 100,
            vram_unmovable_bytes: unmovable_bytes,
            ..Gpu::default()
        }]
    }

    /// Feeds readings, each with its time in seconds, and returns whether the GPU is full after
    /// each of them.
    fn states(readings: &[(u64, u64)]) -> Vec<bool> {
        let mut full = FullGpus::default();
        assert!(full.update(Duration::ZERO, &[], false).is_empty());
        let after = |(seconds, unmovable): &(u64, u64)| {
            full.update(Duration::from_secs(*seconds), &reading(*unmovable), false).contains(GPU)
        };
        readings.iter().map(after).collect()
    }

    #[test]
    fn gpu_is_full_after_it_stays_above_the_limit() {
        assert_eq!(states(&[(0, 90), (29, 95), (30, 90)]), [false, false, true]);
        assert_eq!(states(&[(0, 89), (60, 89)]), [false, false]);
        assert_eq!(
            states(&[(0, 95), (20, 50), (40, 95), (60, 95)]),
            [false; 4],
            "not all the time"
        );
    }

    #[test]
    fn full_gpu_is_free_only_well_below_the_limit() {
        let fill = [(0, 90), (30, 90)];
        let after = |rest: &[(u64, u64)]| states(&[&fill, rest].concat())[2..].to_vec();
        assert_eq!(after(&[(40, 80), (90, 80)]), [true, true]);
        assert_eq!(after(&[(40, 79), (69, 79), (70, 79)]), [true, true, false]);
    }

    #[test]
    fn first_reading_counts_at_once() {
        let mut full = FullGpus::default();
        assert!(full.update(Duration::ZERO, &reading(90), false).contains(GPU));
        let after = |full: &mut FullGpus, seconds| {
            full.update(Duration::from_secs(seconds), &reading(0), false)
        };
        assert!(after(&mut full, 1).contains(GPU));
        assert!(after(&mut full, 31).is_empty());
    }

    /// NVML could not read a GPU when the agent started. The GPU must not count as free until it has
    /// been full for some time.
    #[test]
    fn first_reading_counts_after_an_error() {
        let mut full = FullGpus::default();
        let [first] = reading(0);
        let second = Gpu { uuid: "GPU-1".into(), ..reading(95)[0].clone() };
        let mut update = |seconds, reading: &[Gpu], has_error| {
            full.update(Duration::from_secs(seconds), reading, has_error).contains("GPU-1")
        };
        assert!(!update(0, std::slice::from_ref(&first), true));
        assert!(update(5, &[first.clone(), second.clone()], false));
        let mut full = FullGpus::default();
        full.update(Duration::ZERO, std::slice::from_ref(&first), false);
        let new = full.update(Duration::from_secs(5), &[first, second], false);
        assert!(new.is_empty(), "the GPU came later");
    }

    #[test]
    fn time_without_a_reading_does_not_count() {
        let mut full = FullGpus::default();
        let mut update = |seconds, reading: &[Gpu], has_error| {
            !full.update(Duration::from_secs(seconds), reading, has_error).is_empty()
        };
        assert!(!update(0, &reading(0), false) && !update(5, &reading(95), false));
        assert!(!update(10, &[], true));
        assert!(!update(60, &reading(95), false), "it was full for a moment before");
        assert!(update(90, &reading(95), false));
    }

    #[test]
    fn gpu_without_a_reading_is_not_full() {
        let mut full = FullGpus::default();
        let mut update = |seconds, reading: &[Gpu], has_error| {
            !full.update(Duration::from_secs(seconds), reading, has_error).is_empty()
        };
        let none = &[];
        assert!(update(0, &reading(100), false));
        // NVML could not read the GPU once.
        assert!(update(10, none, false) && update(15, &reading(100), false));
        assert!(update(20, none, true) && update(90, none, true), "it cannot be read");
        assert!(update(91, &reading(100), false));
        let unread = [Gpu { uuid: GPU.into(), ..Gpu::default() }];
        assert!(update(92, &unread, false) && update(121, none, false));
        assert!(!update(122, none, false), "there is no controller");
        assert!(!update(123, &reading(100), false), "it begins again");
    }
}
