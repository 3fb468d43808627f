//! Restores containers before an expected call (prewake), and tells when the next decision about a
//! container is due.

use affinode_proto::{reason::Reason, state::State};

use super::{Key, Millis, Node, container::Prewake, ledger::margin_bytes, policy::Mode};

/// Time between a prewake and the expected call.
const LEAD_MS: Millis = 5_000;

impl Node {
    /// Prewakes a container whose next call is expected soon, if its restore needs no eviction.
    pub(super) fn expect(&mut self, key: &Key) {
        let Some(at) = self.prewake_at(key) else { return };
        let until = self.prewake_until(key);
        if self.now < at || self.now >= until || !self.has_room_to_spare(key) {
            return;
        }
        if let Some(container) = self.containers.get_mut(key) {
            container.usage.history.prewoken();
        }
        self.prewake(key, Reason::Expected, until);
    }

    /// Whether a container can be restored without an eviction and without delaying a waiter.
    pub(super) fn has_room_to_spare(&self, key: &Key) -> bool {
        let needs = self.container_needs(key);
        self.queue.is_empty() && self.gpu_error.is_none() && self.fits(key, &needs, margin_bytes)
    }

    /// Restores a container before an expected call, and keeps it resident until `until` if no call
    /// comes.
    pub(super) fn prewake(&mut self, key: &Key, why: Reason, until: Millis) {
        let Some(container) = self.containers.get_mut(key) else { return };
        container.goal.become_resident();
        container.cause = why;
        container.prewake = Some(Prewake { until, why });
        self.prewakes += 1;
    }

    /// Time at which an offloaded container is prewoken. `None`: no prewake is planned.
    #[must_use]
    pub fn prewake_at(&self, key: &Key) -> Option<Millis> {
        let c = self.containers.get(key)?;
        let out = c.rests_offloaded() && c.policy.prewake;
        let wanted = c.cause != Reason::Requested && c.policy.mode != Mode::Off;
        let offloaded = self.processes.of(key).all(|(_, p)| p.phase.is_offloaded());
        let (begin, _) = c.usage.history.prewake(LEAD_MS).filter(|_| out && wanted && offloaded)?;
        // A missed prewake shows that the history does not predict the present use, so the
        // container stays offloaded until it is called.
        let worth = !c.usage.prewake_missed && self.now < self.prewake_until(key);
        worth.then(|| c.usage.last_use.saturating_add(begin))
    }

    fn prewake_until(&self, key: &Key) -> Millis {
        self.containers
            .get(key)
            .and_then(|c| Some(c.usage.last_use + c.usage.history.prewake(LEAD_MS)?.1))
            .unwrap_or(0)
    }

    /// Next time at which a decision about the container is due, as far as it is known now. `None`:
    /// no decision is planned.
    #[must_use]
    pub fn due_at(&self, key: &Key) -> Option<Millis> {
        let c = self.containers.get(key)?;
        match c.shown.state {
            State::Active | State::Idle if c.goal.is_resident() => {
                if !self.leaves_when_idle(key) {
                    return None;
                }
                let rested = c.figures.restored_at.map_or(0, |t| t + c.policy.minimum_residency_ms);
                let expected =
                    c.prewake.map(|prewake| prewake.until).or(c.usage.busy_until()).unwrap_or(0);
                Some(
                    (c.usage.last_use + c.idle_after_ms())
                        .max(rested)
                        .max(expected)
                        .max(c.offload_failures.not_before),
                )
            }
            State::Offloaded => self.prewake_at(key),
            _ => None,
        }
    }
}
