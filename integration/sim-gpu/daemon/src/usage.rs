//! Computes the utilisation of GPUs and processes during the last second, from the statistics pages
//! that the processes write. A process may write false values to its page. They change the figures
//! of this process and of its GPU, but not the figures of other processes.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use affinode_sim_protocol::STATS_BYTES;
use nix::time::{ClockId, clock_gettime};

use crate::ledger::ClientId;

/// Interval at which [`Usage::sample`] should be called.
pub const PERIOD: Duration = Duration::from_millis(250);
const KEPT: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Sample {
    at_ns: u64,
    busy_ns: u64,
}

/// The samples of the last second, for each process.
#[derive(Debug, Default)]
pub struct Usage {
    samples: HashMap<(ClientId, usize), Vec<Sample>>,
}

impl Usage {
    /// Reads the statistics pages of all processes in the list, and forgets processes that are no
    /// longer in the list.
    pub fn sample<'a>(
        &mut self,
        now_ns: u64,
        gpus: usize,
        pages: impl Iterator<Item = (ClientId, &'a File)>,
    ) {
        let mut kept = HashMap::new();
        for (client, page) in pages {
            for gpu in 0..gpus {
                let mut samples = self.samples.remove(&(client, gpu)).unwrap_or_default();
                samples.push(Sample { at_ns: now_ns, busy_ns: busy_ns(page, gpu, now_ns) });
                if samples.len() > KEPT {
                    samples.remove(0);
                }
                kept.insert((client, gpu), samples);
            }
        }
        self.samples = kept;
    }

    /// Percentage of the sampled time in which a kernel of this process ran.
    pub fn busy_percent(&self, client: ClientId, gpu: usize) -> u32 {
        let Some([first, .., last]) = self.samples.get(&(client, gpu)).map(Vec::as_slice) else {
            return 0;
        };
        let elapsed = last.at_ns.saturating_sub(first.at_ns).max(1);
        let busy = last.busy_ns.saturating_sub(first.busy_ns);
        (u128::from(busy) * 100 / u128::from(elapsed)).min(100) as u32
    }
}

fn busy_ns(page: &File, gpu: usize, now_ns: u64) -> u64 {
    let mut bytes = [0u8; STATS_BYTES];
    if page.read_exact_at(&mut bytes, 0).is_err() {
        return 0;
    }
    let word = |index: usize| {
        let place = bytes.get(index * 8..index * 8 + 8).and_then(|word| word.try_into().ok());
        place.map_or(0, u64::from_ne_bytes)
    };
    let (busy, since) = (word(gpu * 2), word(gpu * 2 + 1));
    let running = if since == 0 { 0 } else { now_ns.saturating_sub(since) };
    busy.saturating_add(running)
}

/// Returns the time of CLOCK_MONOTONIC in nanoseconds. The times in the statistics pages come from
/// the same clock.
pub fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
        (now.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec() as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn a_kernel_that_still_runs_counts() {
        let page = File::from(memory::create("stats", STATS_BYTES as u64).unwrap());
        let mut usage = Usage::default();
        let client = ClientId(1);
        usage.sample(1_000, 1, std::iter::once((client, &page)));
        assert_eq!(usage.busy_percent(client, 0), 0);
        page.write_all_at(&1_500u64.to_ne_bytes(), 8).unwrap();
        usage.sample(2_000, 1, std::iter::once((client, &page)));
        assert_eq!(usage.busy_percent(client, 0), 50);
        page.write_all_at(&[0xff; 16], 0).unwrap();
        usage.sample(3_000, 1, std::iter::once((client, &page)));
        assert_eq!(usage.busy_percent(client, 0), 100);
    }
}
