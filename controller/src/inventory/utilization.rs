//! Computes the mean utilization of GPUs over the last minute. NVML's own value covers between a
//! sixth of a second and a second, and fluctuates.

use std::collections::{HashMap, VecDeque};

use affinode_core::{Millis, input::GpuSample};

/// Time over which the mean utilization is computed, in milliseconds.
const WINDOW_MS: Millis = 60_000;
/// Maximum time for which one utilization reading counts in the mean, in milliseconds. A reading
/// counts for the time since the previous reading, but never for longer than this.
const STALE_AFTER_MS: Millis = 10_000;

/// Utilization readings of the last minute for each GPU, by UUID.
#[derive(Debug, Default)]
pub struct GpuUtilization {
    devices: HashMap<String, VecDeque<(Millis, u32)>>,
}

impl GpuUtilization {
    /// Records a reading of the utilization of all GPUs. A GPU that could not be read has none.
    pub fn note(&mut self, now: Millis, gpus: &[GpuSample]) {
        self.devices.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
        for gpu in gpus.iter().filter(|gpu| gpu.error.is_none()) {
            let readings = self.devices.entry(gpu.uuid.clone()).or_default();
            readings.push_back((now, gpu.utilization_percent));
            // One reading from before the window is kept, because the next reading counts for the
            // time since that reading.
            while readings.get(1).is_some_and(|(at, _)| now.saturating_sub(*at) >= WINDOW_MS) {
                readings.pop_front();
            }
        }
    }

    /// Returns the mean utilization of a GPU over the last minute, in percent. Each reading counts
    /// for the time since the previous reading.
    #[must_use]
    pub fn percent(&self, uuid: &str) -> u32 {
        let Some(readings) = self.devices.get(uuid) else { return 0 };
        let pairs = readings.iter().zip(readings.iter().skip(1));
        let (mut weighted, mut time) = (0, 0);
        for ((before, _), (at, percent)) in pairs {
            let passed = at.saturating_sub(*before).min(STALE_AFTER_MS);
            weighted += passed * u64::from(*percent);
            time += passed;
        }
        let last = readings.back().map_or(0, |(_, percent)| *percent);
        let mean = (weighted + time / 2).checked_div(time);
        mean.map_or(last, |mean| u32::try_from(mean).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(percent: u32) -> [GpuSample; 1] {
        [GpuSample { uuid: "a".into(), utilization_percent: percent, ..GpuSample::default() }]
    }

    #[test]
    fn readings_count_for_the_time_before_them() {
        let mut busy = GpuUtilization::default();
        assert_eq!(busy.percent("a"), 0);
        busy.note(0, &gpu(100));
        assert_eq!(busy.percent("a"), 100, "nothing else is known");
        busy.note(1_000, &gpu(0));
        busy.note(2_000, &gpu(60));
        assert_eq!(busy.percent("a"), 30);
        // Three readings within a short time must not outweigh one reading that counts for a
        // second.
        for at in [2_100, 2_200, 2_300] {
            busy.note(at, &gpu(100));
        }
        assert_eq!(busy.percent("a"), 39);
    }

    #[test]
    fn old_readings_and_removed_gpus_are_dropped() {
        let mut busy = GpuUtilization::default();
        (0..60).for_each(|n| busy.note(n * 1_000, &gpu(100)));
        (60..122).for_each(|n| busy.note(n * 1_000, &gpu(0)));
        assert_eq!(busy.percent("a"), 0);
        assert!(busy.devices["a"].len() < 63);
        busy.note(200_000, &[]);
        assert!(busy.devices.is_empty());
    }
}
