//! Chooses victims: containers to evict for a waiter, which is a container that waits for VRAM. A
//! victim is on the same GPU, is not in use, and has at most the waiter's priority. The lowest
//! priority is evicted first. Within a priority, the rule decides.

use super::{DeviceBytes, Key, Millis};

/// The rule for the order in which neighbours of the same priority are evicted. Neighbours are
/// containers on the same GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VictimRule {
    /// Evicts the container with the highest score first. The score is the expected time until the
    /// container's next use, times the VRAM that its offload frees, divided by the cost of its
    /// restore.
    #[default]
    Expected,
    /// Evicts first the container that has not been used for the longest time.
    Lru,
    /// Evicts first the container with the largest product of VRAM and idle time.
    SizeIdle,
    /// Evicts containers in a pseudo-random order with this seed. Simulations use this rule for
    /// comparison.
    #[serde(skip)]
    Random(u64),
}

/// A container that may be evicted for another container on its GPU.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Key of the candidate container.
    pub key: Key,
    /// Priority of the candidate. For a candidate that is already offloaded, only its CUDA context
    /// can be evicted. The container is not in use, so its priority must not protect the context:
    /// the field contains at most the waiter's priority.
    pub priority: i32,
    /// Time since the candidate's last use, in milliseconds.
    pub idle_ms: Millis,
    /// Expected time until the candidate's next use, in milliseconds.
    pub return_ms: Millis,
    /// Time by which the eviction is expected to lengthen the candidate's next restore, in
    /// milliseconds.
    pub delay_ms: Millis,
    /// VRAM that an offload of the candidate frees.
    pub holds: Vec<DeviceBytes>,
}

impl Candidate {
    fn bytes(&self) -> u64 {
        self.holds.iter().map(|held| held.bytes).fold(0, u64::saturating_add)
    }

    /// Score of the candidate under the rule. The candidate with the higher score is evicted first.
    fn score(&self, rule: VictimRule, now: Millis) -> u128 {
        let bytes = self.bytes();
        match rule {
            VictimRule::Expected => {
                // The freed VRAM is divided by the cost of the restore. The cost has a fixed part,
                // so several small restores cost more than one large restore. A restore that only
                // copies, without the context, costs least.
                u128::from(self.return_ms) * u128::from(bytes) / u128::from(self.delay_ms.max(1))
            }
            VictimRule::Lru => self.idle_ms.into(),
            VictimRule::SizeIdle => u128::from(bytes) * u128::from(self.idle_ms),
            VictimRule::Random(seed) => {
                let text = self.key.as_str().bytes();
                text.fold(u128::from(seed ^ now), |hash, byte| {
                    (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_01b3) & u128::from(u64::MAX)
                })
            }
        }
    }
}

/// Chooses candidates that together free the missing VRAM, and none that is not needed. If all
/// candidates together cannot free enough, the result depends on `partly`. If it is false, none is
/// chosen. If it is true (the waiter has waited long), all candidates that free some of the missing
/// VRAM are chosen.
#[must_use]
pub fn choose(
    mut candidates: Vec<Candidate>,
    asker_priority: i32,
    mut missing: Vec<DeviceBytes>,
    rule: VictimRule,
    now: Millis,
    partly: bool,
) -> Vec<Key> {
    candidates.retain(|c| c.priority <= asker_priority);
    candidates
        .sort_by_cached_key(|c| (c.priority, std::cmp::Reverse(c.score(rule, now)), c.key.clone()));
    let wanted = missing.clone();
    let mut chosen: Vec<Candidate> = Vec::new();
    for candidate in candidates {
        let helps = |held: &&DeviceBytes| {
            held.bytes > 0 && missing.iter().any(|need| need.uuid == held.uuid && need.bytes > 0)
        };
        if !candidate.holds.iter().any(|held| helps(&held)) {
            continue;
        }
        for held in &candidate.holds {
            for need in missing.iter_mut().filter(|need| need.uuid == held.uuid) {
                need.bytes = need.bytes.saturating_sub(held.bytes);
            }
        }
        chosen.push(candidate);
    }
    if missing.iter().all(|need| need.bytes == 0) {
        spare(&mut chosen, &wanted);
    } else if !partly {
        chosen.clear();
    }
    chosen.into_iter().map(|candidate| candidate.key).collect()
}

/// Removes victims without which the others still free enough, the smallest first. A victim that was
/// chosen early can be one: for example the context of an offloaded container, if a large container
/// has to leave as well. Victims of a lower priority than others stay, because they go first.
fn spare(chosen: &mut Vec<Candidate>, wanted: &[DeviceBytes]) {
    let Some(highest) = chosen.iter().map(|victim| victim.priority).max() else { return };
    let mut smallest_first: Vec<(u64, Key)> = chosen
        .iter()
        .filter(|victim| victim.priority == highest)
        .map(|victim| (victim.bytes(), victim.key.clone()))
        .collect();
    smallest_first.sort();
    for (_, key) in smallest_first {
        let suffices = wanted.iter().all(|need| {
            let others = chosen.iter().filter(|victim| victim.key != key);
            let held = others.flat_map(|victim| &victim.holds).filter(|on| on.uuid == need.uuid);
            held.map(|on| on.bytes).fold(0, u64::saturating_add) >= need.bytes
        });
        if suffices {
            chosen.retain(|victim| victim.key != key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU: &str = "GPU-0";

    fn bytes(bytes: u64) -> Vec<DeviceBytes> {
        vec![DeviceBytes { uuid: GPU.into(), bytes }]
    }

    fn candidate(
        n: u64,
        priority: i32,
        idle_ms: Millis,
        return_ms: Millis,
        size: u64,
    ) -> Candidate {
        let key = Key::parse(&format!("{n:032x}")).unwrap();
        let delay_ms = 200 + size / 5_800_000;
        Candidate { key, priority, idle_ms, return_ms, delay_ms, holds: bytes(size) }
    }

    fn first(rule: VictimRule, candidates: &[Candidate]) -> String {
        let chosen = choose(candidates.to_vec(), 0, bytes(1), rule, 0, false);
        chosen[0].as_str().trim_start_matches('0').to_owned()
    }

    #[test]
    fn each_rule_chooses_its_own_victim() {
        let candidates = [
            candidate(1, 0, 900, 10, 10 << 30),
            candidate(2, 0, 100, 90_000, 10 << 30),
            candidate(3, 0, 800, 10, 40 << 30),
        ];
        assert_eq!(first(VictimRule::Lru, &candidates), "1");
        assert_eq!(first(VictimRule::Expected, &candidates), "2");
        assert_eq!(first(VictimRule::SizeIdle, &candidates), "3");
    }

    #[test]
    fn no_victim_where_too_little_is_freed() {
        let candidates = vec![candidate(1, 0, 1, 1, 5)];
        let ask = |partly| choose(candidates.clone(), 0, bytes(9), VictimRule::Lru, 0, partly);
        assert_eq!(ask(false), []);
        assert_eq!(ask(true).len(), 1);
    }

    /// The rule chooses a small container first, but a large one has to leave as well, and frees enough
    /// alone.
    #[test]
    fn victim_that_is_not_needed_is_spared() {
        let victims = |priority| {
            let small = candidate(1, priority, 900, 900, 1);
            let large = candidate(2, 0, 1, 1, 40);
            let chosen = choose(vec![small, large], 0, bytes(30), VictimRule::Lru, 0, false);
            chosen
                .iter()
                .map(|key| key.as_str().trim_start_matches('0').to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(victims(0), ["2"]);
        assert_eq!(victims(-1), ["1", "2"], "a lower priority goes first");
    }

    proptest! {
        /// Chooses victims from random candidates. No victim may have a priority above the
        /// waiter's. No candidate that stays may have a lower priority than a victim. All victims
        /// together must free enough.
        #[test]
        fn victims_respect_priority_and_suffice(
            all in proptest::collection::vec((-3_i32..4, 0_u64..1000, 0_u64..1000, 0_u64..100), 0..20),
            asker in -3_i32..4, need in 1_u64..500, rule in 0..4,
        ) {
            let rule = [VictimRule::Expected, VictimRule::Lru, VictimRule::SizeIdle, VictimRule::Random(1)][rule as usize];
            let candidates: Vec<Candidate> = all.iter().zip(0..)
                .map(|((p, idle, back, size), n)| candidate(n, *p, *idle, *back, *size)).collect();
            let chosen = choose(candidates.clone(), asker, bytes(need), rule, 7, false);
            let taken = |c: &&Candidate| chosen.contains(&c.key);
            let highest = candidates.iter().filter(taken).map(|c| c.priority).max();
            if let Some(highest) = highest {
                prop_assert!(highest <= asker);
                let freed: u64 = candidates.iter().filter(taken).map(Candidate::bytes).sum();
                prop_assert!(freed >= need);
                for victim in candidates.iter().filter(taken).filter(|c| c.priority == highest) {
                    prop_assert!(freed - victim.bytes() < need, "a victim is not needed");
                }
                for spared in candidates.iter().filter(|c| !taken(c) && c.bytes() > 0) {
                    prop_assert!(spared.priority >= highest);
                }
            }
            prop_assert_eq!(chosen, choose(candidates, asker, bytes(need), rule, 7, false));
        }
    }
}
