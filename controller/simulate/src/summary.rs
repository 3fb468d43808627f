//! The results of simulating one policy.

use affinode_core::Millis;
use serde::Serialize;

use super::memory::OffloadLevel;

/// The results of simulating one policy on a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SimulationSummary {
    /// Name of the policy.
    pub policy: String,
    /// Number of requests in the trace.
    pub requests: u64,
    /// VRAM-time (amount of VRAM times duration) that offloads freed, as a fraction of the
    /// VRAM-time of all processes between their first and last calls.
    pub freed_of_all: f64,
    /// VRAM-time (amount of VRAM times duration) that offloads freed, as a fraction of the
    /// VRAM-time during which the processes had no call in progress.
    pub freed_of_idle: f64,
    /// VRAM-time (amount of VRAM times duration) that offloads freed, as a fraction of the
    /// VRAM-time of all processes over the whole trace.
    pub freed_of_trace: f64,
    /// Mean of the VRAM that processes hold, in bytes.
    pub resident_mean_bytes: u64,
    /// 95th percentile, over time, of the VRAM that processes hold, in bytes.
    pub resident_p95_bytes: u64,
    /// Maximum of the VRAM that processes hold, in bytes.
    pub resident_peak_bytes: u64,
    /// Mean of the host memory in use for offloaded VRAM, in bytes.
    pub host_mean_bytes: u64,
    /// Maximum host memory in use for offloaded VRAM, in bytes.
    pub host_peak_bytes: u64,
    /// Maximum disk space in use for offloaded VRAM, in bytes.
    pub disk_peak_bytes: u64,
    /// Number of processes whose content was moved from host memory to disk, counted once for each
    /// move.
    pub stored_on_disk: u64,
    /// Number of restores that read content from disk.
    pub restores_from_disk: u64,
    /// Fraction of requests that found their process offloaded and caused its restore. Requests
    /// during a move are not counted.
    pub wake_share: f64,
    /// Fraction of requests that had to wait, for example for a restore.
    pub delayed_share: f64,
    /// Median of the added latency over all requests, in milliseconds.
    pub latency_p50_ms: u64,
    /// 99th percentile of the added latency over all requests, in milliseconds.
    pub latency_p99_ms: u64,
    /// Median of the added latency of those requests that waited, in milliseconds.
    pub delay_p50_ms: u64,
    /// 99th percentile of the added latency of those requests that waited, in milliseconds.
    pub delay_p99_ms: u64,
    /// Fraction of requests that waited longer than the objective `slo_ms`.
    pub slow_share: f64,
    /// The part of `slow_share` that waited for a copy only, because the CUDA context was still on
    /// the GPU.
    pub slow_copied_share: f64,
    /// The part of `slow_share` that waited for a restore of a checkpointed CUDA context.
    pub slow_context_gone_share: f64,
    /// Number of restores in the whole run.
    pub restores: u64,
    /// Number of restores that only copied memory, because the CUDA context was still on the GPU.
    pub restores_copied: u64,
    /// Number of restores, divided by the number of processes and by the length of the trace in
    /// hours.
    pub restores_per_process_hour: f64,
    /// Number of restores that began less than a minute after the offload of the same process.
    pub thrash: u64,
    /// Maximum number of containers that waited for VRAM at the same time.
    pub queue_peak: u64,
    /// Mean number of containers that waited for VRAM.
    pub queue_mean: f64,
    /// Number of offloads that the node refused. For the baseline without offloads: number of
    /// requests of processes that did not fit on their GPU.
    pub refused: u64,
    /// Number of prewakes, which are restores before an expected call.
    pub prewakes: u64,
    /// Number of prewakes that a call followed.
    pub prewake_hits: u64,
    /// Jain's fairness index over the fraction of each process's requests that did not wait. 1: the
    /// fraction is the same for all processes.
    pub fairness_jain: f64,
    /// Mean fraction of requests that waited, in the 10 % of processes with the highest such
    /// fraction.
    pub worst_decile_delayed: f64,
    /// VRAM that processes hold, in bytes, for the plot. Each value is the mean of one of the equal
    /// intervals into which the trace is divided.
    pub resident_over_time: Vec<u64>,
}

/// Number of points in the plot.
const POINTS: usize = 480;
/// Number of classes into which the amounts of resident VRAM are divided. For each class, the meter
/// adds up the time during which the amount was in this class.
const LEVELS: usize = 1024;

/// Integrates resident VRAM and queue length over the time of a run.
#[derive(Debug)]
pub struct SummaryMeter {
    end: Millis,
    capacity: u64,
    at: Millis,
    resident: u64,
    queue: usize,
    levels: Vec<Millis>,
    points: Vec<u128>,
    area: u128,
    queue_area: u128,
    queue_peak: usize,
    peak: u64,
}

impl SummaryMeter {
    /// Creates a meter for a trace that ends at `end`, on GPUs with `capacity` bytes of VRAM in
    /// total.
    #[must_use]
    pub fn new(end: Millis, capacity: u64) -> SummaryMeter {
        SummaryMeter {
            end: end.max(1),
            capacity: capacity.max(1),
            at: 0,
            resident: 0,
            queue: 0,
            levels: vec![0; LEVELS + 1],
            points: vec![0; POINTS],
            area: 0,
            queue_area: 0,
            queue_peak: 0,
            peak: 0,
        }
    }

    /// Sets the resident VRAM in bytes and the queue length that apply from `now` on.
    pub fn set(&mut self, now: Millis, resident: u64, queue: usize) {
        if (self.resident, self.queue) != (resident, queue) {
            self.pass(now);
            (self.resident, self.queue) = (resident, queue);
            self.peak = self.peak.max(resident);
            self.queue_peak = self.queue_peak.max(queue);
        }
    }

    fn pass(&mut self, now: Millis) {
        let now = now.min(self.end);
        let step = now.saturating_sub(self.at);
        if step > 0 {
            let level = u128::from(self.resident) * LEVELS as u128 / u128::from(self.capacity);
            self.levels[(level as usize).min(LEVELS)] += step;
            self.area += u128::from(self.resident) * u128::from(step);
            self.queue_area += self.queue as u128 * u128::from(step);
            self.spread(now);
            self.at = now;
        }
    }

    fn spread(&mut self, now: Millis) {
        let width = self.end.div_ceil(POINTS as u64).max(1);
        let mut from = self.at;
        while from < now {
            let point = (from / width) as usize;
            let to = now.min((point as u64 + 1) * width);
            if let Some(area) = self.points.get_mut(point) {
                *area += u128::from(self.resident) * u128::from(to - from);
            }
            from = to;
        }
    }

    /// Computes the results from the integrals and writes them to `figures`.
    pub fn finish(mut self, figures: &mut SimulationSummary) {
        self.pass(self.end);
        let end = u128::from(self.end);
        figures.resident_mean_bytes = (self.area / end) as u64;
        figures.resident_peak_bytes = self.peak;
        figures.queue_mean = self.queue_area as f64 / self.end as f64;
        figures.queue_peak = self.queue_peak as u64;
        let mut below = 0;
        for (level, time) in self.levels.iter().enumerate() {
            below += time;
            if below * 20 >= self.end * 19 {
                let bytes = u128::from(self.capacity) * level as u128 / LEVELS as u128;
                figures.resident_p95_bytes = bytes as u64;
                break;
            }
        }
        let width = u128::from(self.end.div_ceil(POINTS as u64).max(1));
        figures.resident_over_time = self.points.iter().map(|a| (a / width) as u64).collect();
    }
}

/// Number of requests of one process, and number of requests that waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct ContainerTotals {
    /// Number of the process's requests.
    pub requests: u64,
    /// Number of requests that waited.
    pub delayed: u64,
}

/// The waiting time of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallDelay {
    pub(super) ms: u32,
    /// The level of the offload that the process's restore ended. `Resident`: the offload was
    /// cancelled, so no memory had to be restored.
    pub(super) from: OffloadLevel,
}

/// Computes added latency, fairness, and the share of requests that waited longer than `slo_ms`.
/// `delays` has one entry for each request that waited. `lived` has one entry for each process,
/// with the numbers of all its requests and of its waiting requests.
pub(super) fn latency(
    figures: &mut SimulationSummary,
    delays: Vec<CallDelay>,
    lived: &[ContainerTotals],
    slo_ms: Millis,
) {
    let share = |accepts: fn(OffloadLevel) -> bool| {
        let slow = delays.iter().filter(|d| Millis::from(d.ms) > slo_ms && accepts(d.from));
        slow.count() as f64 / figures.requests.max(1) as f64
    };
    let shares = [
        share(|_| true),
        share(|from| from == OffloadLevel::Copied),
        share(|from| !matches!(from, OffloadLevel::Copied | OffloadLevel::Resident)),
    ];
    [figures.slow_share, figures.slow_copied_share, figures.slow_context_gone_share] = shares;
    let mut delays_ms: Vec<u32> = delays.iter().map(|delay| delay.ms).collect();
    delays_ms.sort_unstable();
    let delayed = delays_ms.len() as u64;
    let prompt = figures.requests.saturating_sub(delayed);
    figures.delayed_share = delayed as f64 / figures.requests.max(1) as f64;
    let of_all = |share: f64| {
        let rank = (figures.requests as f64 * share) as u64;
        rank.checked_sub(prompt)
            .and_then(|n| delays_ms.get(n as usize))
            .map_or(0, |ms| u64::from(*ms))
    };
    let of_delayed = |share: f64| {
        delays_ms.get((delays_ms.len() as f64 * share) as usize).map_or(0, |ms| u64::from(*ms))
    };
    (figures.latency_p50_ms, figures.latency_p99_ms) = (of_all(0.5), of_all(0.99));
    (figures.delay_p50_ms, figures.delay_p99_ms) = (of_delayed(0.5), of_delayed(0.99));
    let mut shares: Vec<f64> =
        lived.iter().map(|l| l.delayed as f64 / l.requests.max(1) as f64).collect();
    let (sum, squares) = shares
        .iter()
        .map(|delayed| 1.0 - delayed)
        .fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    if squares > 0.0 {
        figures.fairness_jain = sum * sum / (shares.len() as f64 * squares);
    }
    shares.sort_by(|a, b| b.total_cmp(a));
    let worst = shares.len().div_ceil(10);
    figures.worst_decile_delayed = shares[..worst].iter().sum::<f64>() / worst.max(1) as f64;
}
