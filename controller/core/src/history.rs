//! Learns from a container's earlier uses how long it stays resident without use (keep-alive), when
//! its next use is expected, and when to restore it in advance (prewake).
//!
//! A pause is a second or more without use. The lengths of pauses are counted in bins, four for
//! each doubling of the length (octave). The pace of a container is the mean length of its last
//! pauses, in classes of 1, 2, 4, ... seconds. Pauses are counted separately for each pace, because
//! a pause of a minute after calls every second predicts something else than a pause of a minute
//! after calls every minute. The counts of all containers of the node are added, with the weight of
//! a hundred pauses.
//!
//! ```text
//! keep-alive:  the T with the least  E[VRAM held idle] + wake cost x waiting calls x P(pause > T)
//! next use:    E[pause - idle | pause > idle], by the same counts
//! prewake:     if the last pauses after offloads differ by at most a quarter:
//!              shortly before the shortest of these pauses would end
//! ```

use std::sync::LazyLock;

use super::Millis;

/// Number of bins per octave. An octave is a doubling of the pause's length.
const PER_OCTAVE: f32 = 4.0;
/// Number of bins for the lengths of pauses, from 1 s to 2^18 s (three days).
pub const BINS: usize = 72;
/// Number of paces. A pace is a class of the mean length of a container's last pauses: 1, 2, 4, ...
/// 128 s and more.
const PACES: usize = 8;
/// Weight of the counts of all containers of the node. It equals the weight of this many pauses of
/// the container itself.
const NODE_WEIGHT: f32 = 100.0;
/// Weight of the uniform prior over all bins. It equals the weight of this many pauses of the
/// container itself.
const PRIOR_WEIGHT: f32 = 0.5;
/// Sum of the counts of one pace (a class of the mean length of pauses). Above this sum, the counts
/// of that pace are halved, so that old pauses lose weight.
const FADE_AT: f32 = 4096.0;
/// Estimated time for which CUDA calls wait when they wake a container, in seconds. It includes the
/// end of an offload in progress, and the restore.
const RETURN_S: f32 = 2.0;
/// Estimated number of calls per second of use.
const CALLS_PER_USE_S: f32 = 3.0;
/// Minimum number of the container's own pauses before its keep-alive is learned.
const ENOUGH: u32 = 8;
/// Minimum number of pauses of all containers of the node before a keep-alive is learned for a
/// container with fewer than `ENOUGH` pauses of its own.
const ENOUGH_OF_NODE: u32 = 64;
/// Weight of the newest value in the running means of pauses and uses.
const PACE_STEP: f32 = 0.2;
/// Minimum time without use that counts as a pause.
pub const PAUSE_MS: Millis = 1_000;
/// Number of the last long pauses that are stored individually.
const RECENT: usize = 8;

type Bins = [f32; BINS];

/// Counts of pauses at one pace (a class of the mean length of the preceding pauses). `bins`:
/// number of pauses of each length. `sum`: number of pauses in all bins.
#[derive(Clone, Debug)]
struct Counts {
    bins: Bins,
    sum: f32,
}

/// Counts of pauses by length. `counts`: one entry for each pace, which is a class of the mean
/// length of the preceding pauses. `seen`: number of all counted pauses.
#[derive(Clone, Debug, Default)]
pub struct Pauses {
    counts: [Option<Box<Counts>>; PACES],
    seen: u32,
}

impl Pauses {
    fn add(&mut self, pace: usize, bin: usize) {
        self.seen = self.seen.saturating_add(1);
        let none = || Box::new(Counts { bins: [0.0; BINS], sum: 0.0 });
        let counts = self.counts[pace].get_or_insert_with(none);
        counts.bins[bin] += 1.0;
        counts.sum += 1.0;
        if counts.sum > FADE_AT {
            counts.bins.iter_mut().for_each(|count| *count *= 0.5);
            counts.sum *= 0.5;
        }
    }
}

/// What the controller has learned about the uses and pauses of one container.
#[derive(Clone, Debug, Default)]
pub struct History {
    own: Pauses,
    /// Running mean of the binary logarithms of the last pauses' lengths in seconds. `None`: there
    /// was no pause.
    pace: Option<f32>,
    /// Lengths of the last pauses during which the container was offloaded, in milliseconds.
    long: Vec<Millis>,
    /// Running means in seconds: the length of a use (`mean_use_s`), and the length of a use
    /// together with the pause after it (`mean_cycle_s`).
    mean_use_s: f32,
    mean_cycle_s: f32,
    keep_alive: Option<Millis>,
    prewakes: u32,
    hits: u32,
}

/// The objective for learning a keep-alive: the cost of a wake, and the maximum keep-alive.
#[derive(Clone, Copy, Debug)]
pub struct KeepAliveTarget {
    /// Cost of one wake, expressed as a time in milliseconds. One wake costs as much as holding the
    /// idle container's VRAM for this time.
    pub wake_cost_ms: Millis,
    /// Upper limit of the keep-alive, in milliseconds.
    pub at_most_ms: Millis,
}

impl History {
    /// Counts a pause that has ended, for the container and for the node, and learns the keep-alive
    /// again. `use_ms`: length of the use before the pause. `wish`: the objective, `None` if the
    /// keep-alive is fixed.
    pub fn observe(
        &mut self,
        use_ms: Millis,
        pause_ms: Millis,
        node: &mut Pauses,
        wish: Option<KeepAliveTarget>,
    ) {
        if pause_ms < PAUSE_MS {
            return;
        }
        let (pace, bin) = (self.pace(), bin_of(pause_ms));
        self.own.add(pace, bin);
        node.add(pace, bin);
        let (use_s, pause_s) = (use_ms as f32 / 1000.0, pause_ms.min(600_000) as f32 / 1000.0);
        self.mean_use_s += PACE_STEP * (use_s - self.mean_use_s);
        self.mean_cycle_s += PACE_STEP * (use_s + pause_s - self.mean_cycle_s);
        let log = pause_s.log2();
        self.pace = Some(self.pace.map_or(log, |mean| mean + PACE_STEP * (log - mean)));
        let enough = self.own.seen >= ENOUGH || node.seen >= ENOUGH_OF_NODE;
        self.keep_alive = wish.filter(|_| enough).map(|wish| self.learn(node, wish));
    }

    /// The learned time without use after which the container is idle, in milliseconds. `None`:
    /// there were too few pauses, or the time is fixed.
    #[must_use]
    pub fn keep_alive_ms(&self) -> Option<Millis> {
        self.keep_alive
    }

    fn pace(&self) -> usize {
        self.pace.map_or(PACES - 1, |log| (log.max(0.0) as usize).min(PACES - 1))
    }

    fn weights(&self, node: &Pauses) -> Bins {
        let pace = self.pace();
        let mut weights = [PRIOR_WEIGHT / BINS as f32; BINS];
        if let Some(counts) = &node.counts[pace] {
            let scale = NODE_WEIGHT / counts.sum.max(1.0);
            weights.iter_mut().zip(&counts.bins).for_each(|(w, count)| *w += scale * count);
        }
        if let Some(counts) = &self.own.counts[pace] {
            weights.iter_mut().zip(&counts.bins).for_each(|(w, count)| *w += count);
        }
        weights
    }

    fn learn(&self, node: &Pauses, wish: KeepAliveTarget) -> Millis {
        let weights = self.weights(node);
        // If a container calls often, several of its calls wait for one restore.
        let calls_per_s = (1.0 + CALLS_PER_USE_S * self.mean_use_s) / self.mean_cycle_s.max(1.0);
        let wake_s = wish.wake_cost_ms as f32 / 1000.0 * (1.0 + RETURN_S * calls_per_s);
        let mut longer: f32 = weights.iter().sum();
        let (mut held, mut best) = (0.0, (f32::INFINITY, PAUSE_MS));
        let Ends { s, ms } = &*ENDS;
        for ((weight, end), at) in weights.iter().zip(s).zip(ms) {
            held += weight * end * 0.92;
            longer -= weight;
            let cost = held + longer * (end + wake_s);
            let at = *at;
            if at > wish.at_most_ms {
                break;
            }
            if cost < best.0 {
                best = (cost, at);
            }
        }
        best.1.min(wish.at_most_ms)
    }

    /// Expected time until the next use, after `idle_ms` without use.
    #[must_use]
    pub fn expected_return_ms(&self, idle_ms: Millis, node: &Pauses) -> Millis {
        let idle = idle_ms as f32 / 1000.0;
        let (mut sum, mut weight) = (0.0, 0.0);
        for (count, end) in self.weights(node).iter().zip(&ENDS.s) {
            if *end > idle {
                weight += count;
                sum += count * (end - idle);
            }
        }
        if weight > 0.0 { (sum / weight * 1000.0) as Millis } else { idle_ms }
    }

    /// Records the length of the pause before a restore.
    pub fn returned(&mut self, pause_ms: Millis) {
        if self.long.len() == RECENT {
            self.long.remove(0);
        }
        self.long.push(pause_ms);
    }

    /// Time of the prewake (a restore before the expected CUDA call), and time until which the
    /// container then stays resident for the call. Both are milliseconds after the last use.
    /// `None`: the last long pauses differ too much, or too many prewakes were not followed by a
    /// call.
    #[must_use]
    pub fn prewake(&self, lead_ms: Millis) -> Option<(Millis, Millis)> {
        let shortest = *self.long.iter().min()?;
        let longest = *self.long.iter().max()?;
        let agree = self.long.len() >= 4 && longest - shortest <= shortest / 4;
        let pays = self.prewakes < 4 || self.hits * 4 >= self.prewakes * 3;
        let begin = shortest.saturating_sub(shortest / 20 + lead_ms);
        (agree && pays && begin > lead_ms).then_some((begin, longest + longest / 10))
    }

    /// Counts a prewake of this container.
    pub fn prewoken(&mut self) {
        self.prewakes = self.prewakes.saturating_add(1);
        if self.prewakes > 64 {
            (self.prewakes, self.hits) = (self.prewakes / 2, self.hits / 2);
        }
    }

    /// Counts a prewake that was followed by a call.
    pub fn prewake_hit(&mut self) {
        self.hits = self.hits.saturating_add(1).min(self.prewakes);
    }
}

fn bin_of(pause_ms: Millis) -> usize {
    let bin = ((pause_ms as f32 / 1000.0).log2() * PER_OCTAVE).ceil();
    (bin.max(0.0) as usize).min(BINS - 1)
}

/// Upper end of each bin: the longest pause that the bin counts, in seconds (`s`) and in
/// milliseconds (`ms`).
struct Ends {
    s: Bins,
    ms: [Millis; BINS],
}

static ENDS: LazyLock<Ends> = LazyLock::new(|| {
    let s: Bins = std::array::from_fn(|bin| (bin as f32 / PER_OCTAVE).exp2());
    Ends { s, ms: s.map(|end| (end * 1000.0) as Millis) }
});

#[cfg(test)]
mod tests {
    use super::*;

    const WISH: KeepAliveTarget = KeepAliveTarget { wake_cost_ms: 50_000, at_most_ms: 300_000 };

    fn after(pauses: &[Millis]) -> (History, Pauses) {
        let (mut history, mut node) = (History::default(), Pauses::default());
        pauses.iter().for_each(|pause| history.observe(1_000, *pause, &mut node, Some(WISH)));
        (history, node)
    }

    #[test]
    fn few_pauses_teach_nothing() {
        assert_eq!(after(&[4_000; 7]).0.keep_alive_ms(), None);
    }

    #[test]
    fn keep_alive_separates_short_and_long_pauses() {
        let pauses: Vec<Millis> =
            (0..100).map(|n| if n % 10 == 9 { 3_600_000 } else { 4_000 }).collect();
        let learned = after(&pauses).0.keep_alive_ms().unwrap();
        assert!((4_000..30_000).contains(&learned), "{learned}");
    }

    #[test]
    fn keep_alive_covers_pauses_cheaper_than_a_wake() {
        let pauses: Vec<Millis> = (0..100).map(|n| 15_000 + n % 7 * 4_000).collect();
        let learned = after(&pauses).0.keep_alive_ms().unwrap();
        assert!(learned >= 39_000, "{learned}");
    }

    #[test]
    fn keep_alive_never_exceeds_limit() {
        let (history, _) = after(&[290_000; 100]);
        assert!(history.keep_alive_ms().unwrap() <= WISH.at_most_ms);
    }

    #[test]
    fn longer_pauses_give_later_expected_return() {
        let (often, node) = after(&[2_000; 50]);
        let (seldom, other) = after(&[200_000; 50]);
        assert!(often.expected_return_ms(1_000, &node) < seldom.expected_return_ms(1_000, &other));
    }

    #[test]
    fn regular_pauses_are_prewoken_irregular_not() {
        let mut clockwork = History::default();
        (0..4).for_each(|n| clockwork.returned(600_000 + n * 1_000));
        let (begin, end) = clockwork.prewake(5_000).unwrap();
        assert!(begin < 595_000 && end > 603_000, "{begin} {end}");
        let mut other = History::default();
        [60_000, 600_000, 90_000, 4_000_000].into_iter().for_each(|p| other.returned(p));
        assert_eq!(other.prewake(5_000), None);
    }

    #[test]
    fn missed_prewakes_stop_prewaking() {
        let mut history = History::default();
        (0..8).for_each(|_| history.returned(600_000));
        (0..4).for_each(|_| history.prewoken());
        assert_eq!(history.prewake(5_000), None);
        (0..3).for_each(|_| history.prewake_hit());
        assert!(history.prewake(5_000).is_some());
    }
}
