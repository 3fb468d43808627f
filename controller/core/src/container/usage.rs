//! When a container was used, and when its next use is expected.

use super::super::{
    Millis,
    hints::Hint,
    history::{History, KeepAliveTarget, PAUSE_MS, Pauses},
    no_progress::ProgressStop,
    policy::{KeepAlive, Policy},
};

/// Time after an offload within which a wake counts as early. An early wake shows that the offload
/// came too soon.
const EARLY_MS: Millis = 30_000;
/// Number of early wakes in a row that leave the learned keep-alive (the time without use after
/// which a container is idle) unchanged, because they may be chance.
const THRASH: u32 = 2;
/// Maximum number of times that early wakes double a learned keep-alive (the time without use after
/// which a container is idle).
const MAX_EARLY: u32 = 5;
/// Time after which a busy hint expires if it is not repeated.
const BUSY_MS: Millis = 3_600_000;
/// Age of an idle hint from which on CUDA calls cancel the hint. While the hint is younger, the
/// counters may still show calls that were made before it.
const SETTLE_MS: Millis = 1_000;

/// When a container was used, and when its next use is expected.
#[derive(Clone, Debug)]
pub struct Usage {
    /// When the container was last in use: by a CUDA call, work on the GPU, a hint or a waiting
    /// allocation.
    pub last_use: Millis,
    /// When the container last made a CUDA call.
    pub last_called: Millis,
    /// When a CUDA call of the container last began. A call that is still in progress counts once.
    pub last_progress: Millis,
    /// Why the container makes no progress. `None`: it makes progress, is idle or waits.
    pub no_progress: Option<ProgressStop>,
    /// When the current period of use began. If the container is idle: when its last period of use
    /// began.
    began: Millis,
    /// The last hint, and when it was given.
    pub hint: Option<(Hint, Millis)>,
    /// Lengths of the container's earlier uses and pauses, from which its next use is predicted.
    pub history: History,
    /// Number of early wakes in a row. A wake is early if a CUDA call waits within 30 s after the
    /// container was offloaded because it was idle for its idle timeout.
    pub early_wakes: u32,
    /// Whether the last prewake (a restore before an expected CUDA call) missed: no call followed
    /// it.
    pub prewake_missed: bool,
    /// Time of the next use. Only simulations know and set it.
    pub next_use: Option<Millis>,
}

impl Usage {
    /// Creates the record of a container that was announced at `now`.
    #[must_use]
    pub fn new(now: Millis) -> Usage {
        Usage {
            last_use: now,
            last_called: now,
            last_progress: now,
            no_progress: None,
            began: now,
            hint: None,
            history: History::default(),
            early_wakes: 0,
            prewake_missed: false,
            next_use: None,
        }
    }

    /// Time without use after which the container is idle, in milliseconds. With `keep_alive =
    /// "learned"` this time is learned from the container's pauses, if there were enough of them.
    /// After an idle hint it is 0.
    #[must_use]
    pub fn idle_after_ms(&self, policy: &Policy) -> Millis {
        if self.hinted_idle() {
            return 0;
        }
        let most = policy.idle_timeout_ms;
        if policy.keep_alive == KeepAlive::Fixed {
            return most;
        }
        let learned = self.history.keep_alive_ms().unwrap_or(most);
        (learned << self.early_wakes.saturating_sub(THRASH).min(MAX_EARLY)).min(most)
    }

    /// Records that a CUDA call woke the container. `offloaded_ms`: time since the container was
    /// offloaded because it was idle for its idle timeout. After two early wakes in a row, each
    /// further one doubles the learned keep-alive (the time without use after which the container
    /// is idle), at most five times.
    pub fn woken_after(&mut self, offloaded_ms: Millis) {
        let early = offloaded_ms < EARLY_MS;
        self.early_wakes = if early { self.early_wakes.saturating_add(1) } else { 0 };
    }

    /// Records that the container is used again, and adds the pause before to the history if it was
    /// a second or longer. `node`: the pauses of all containers. `wish`: the objective by which the
    /// keep-alive (the time without use after which the container is idle) is learned, `None` if it
    /// is fixed. Returns the length of the pause in milliseconds.
    pub fn pause_ends(
        &mut self,
        now: Millis,
        node: &mut Pauses,
        wish: Option<KeepAliveTarget>,
    ) -> Millis {
        let pause_ms = now.saturating_sub(self.last_use);
        if pause_ms >= PAUSE_MS {
            let use_ms = self.last_use.saturating_sub(self.began);
            self.history.observe(use_ms, pause_ms, node, wish);
            self.began = now;
        }
        pause_ms
    }

    /// Whether an idle hint is in effect. Use of the container cancels an idle hint.
    #[must_use]
    pub fn hinted_idle(&self) -> bool {
        matches!(self.hint, Some((Hint::Idle, _)))
    }

    /// Time at which a busy hint expires. `None`: there is no busy hint.
    #[must_use]
    pub fn busy_until(&self) -> Option<Millis> {
        match self.hint {
            Some((Hint::Busy, said)) => Some(said + BUSY_MS),
            _ => None,
        }
    }

    /// Cancels an idle hint, because the container was used. A hint that is less than a second old
    /// stays.
    pub fn used(&mut self, now: Millis) {
        let settled = |said: Millis| now.saturating_sub(said) > SETTLE_MS;
        if matches!(self.hint, Some((Hint::Idle, said)) if settled(said)) {
            self.hint = None;
        }
    }
}
