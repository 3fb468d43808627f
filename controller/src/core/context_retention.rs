//! How deep a container of the engine `auto` leaves: with its context, or without.
//!
//! ```text
//! first absence: all of it goes ──> second: the context stays ──> what both cost is known
//!     from then on it stays where that saves a tenth of the return and more
//!                   than the way after it costs those for whom it had to go in the end
//! ```
//!
//! Contexts that stay take an eighth of a GPU at most, and none stays while anybody waits. Who needs
//! the room gets it in any case (`room`), only later.

use affinode_proto::wire::Phase;

use super::{
    DeviceBytes, Key, Millis, Node, container::Container, merge_needs, plan::OffloadMethod,
    policy::Engine, process::Process, transitions,
};

/// What an absence has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// The way out.
    pub out_ms: Millis,
    /// The way home, from when there was room.
    pub home_ms: Millis,
}

/// What the last absences of a container have cost, with its context and without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// All of it went.
    pub deep: Option<Cost>,
    /// The context stayed.
    pub shallow: Option<Cost>,
    /// Absences since one of them was measured.
    since: u32,
}

/// What is known is measured again after so many absences.
const AGAIN: u32 = 32;
/// Of how many absences the share that others have cut short is kept, about.
const REMEMBERED: u32 = 8;
/// The share that is all of them.
const ALL: u32 = 1 << 10;

impl Costs {
    /// Whether the context is to stay. `pushed`: the share, of [`ALL`], of such absences in which
    /// it had to go after all.
    fn keeps_context(&self, pushed: u32) -> bool {
        let (Some(deep), Some(shallow)) = (self.deep, self.shallow) else {
            return self.deep.is_some();
        };
        let saved = deep.home_ms.saturating_sub(shallow.home_ms);
        let push = deep.out_ms.saturating_sub(shallow.out_ms).max(saved);
        let kept = u64::from(ALL - pushed.min(ALL));
        let stays = saved * 10 >= deep.home_ms.max(1) && saved * kept > push * u64::from(pushed);
        // Now and then the other way, which may cost something else by now.
        stays != (self.since >= AGAIN)
    }

    fn learn(&mut self, shallow: bool, cost: Cost) {
        let known = if shallow { &mut self.shallow } else { &mut self.deep };
        *known = Some(cost);
        self.since = if self.since >= AGAIN { 0 } else { self.since + 1 };
    }
}

impl Node {
    /// A container is about to leave: whether its context stays.
    pub(super) fn choose_context_retention(&mut self, key: &Key) {
        let stays = self.keeps_context(key);
        if let Some(container) = self.containers.get_mut(key) {
            container.retain_context = stays;
        }
    }

    fn keeps_context(&self, key: &Key) -> bool {
        let Some(container) = self.containers.get(key) else { return false };
        let is_bound = self.processes.of(key).all(|(_, p)| p.keeps_context());
        if container.policy.engine == Engine::Auto && is_bound {
            return true;
        }
        // Who has left its context here comes back nowhere else.
        let moves_on = container.policy.allow_gpu_migration && self.gpus.len() > 1;
        container.policy.engine == Engine::Auto
            && !moves_on
            && container.costs.keeps_context(self.context_evicted_share)
            && self.queue.is_empty()
            && self
                .processes
                .of(key)
                .all(|(_, p)| transitions::method_of(p, Engine::Copy) == OffloadMethod::Copy)
            && self.have_room_for_contexts(key)
    }

    /// Whether what the parked have on their GPUs, or will have in a moment, and this one would, is
    /// an eighth of each at most.
    fn have_room_for_contexts(&self, key: &Key) -> bool {
        let stays = |p: &Process| match p.phase {
            Phase::CopiedOut => p.vram.clone(),
            // Its own, and those on their way.
            _ if p.key == *key || self.containers.get(&p.key).is_some_and(|c| c.retain_context) => {
                p.remaining()
            }
            _ => Vec::new(),
        };
        let all: Vec<DeviceBytes> = self.processes.values().flat_map(stays).collect();
        merge_needs(&all).iter().all(|kept| {
            let gpu = self.gpus.iter().find(|gpu| gpu.uuid == kept.uuid);
            gpu.is_some_and(|gpu| kept.bytes <= gpu.total_bytes / 8)
        })
    }

    /// An absence has ended.
    pub(super) fn learn_cost(&mut self, key: &Key) {
        let Some(container) = self.containers.get_mut(key) else { return };
        let Container { evict_context: deep, retain_context: shallow, .. } = *container;
        if container.policy.engine != Engine::Auto {
            return;
        }
        if shallow {
            let last = if deep { ALL } else { 0 };
            self.context_evicted_share =
                (self.context_evicted_share * (REMEMBERED - 1) + last) / REMEMBERED;
        }
        // Who went after all tells nothing of either.
        if !(shallow && deep) {
            let (out_ms, home_ms) = (container.last_offload_ms, container.last_restore_ms);
            container.costs.learn(shallow, Cost { out_ms, home_ms });
        }
    }
}

impl Process {
    /// What stays on its devices where it parks.
    fn remaining(&self) -> Vec<DeviceBytes> {
        let gone = self.vram_freed_by_copy();
        let left = self.vram.iter().zip(gone);
        left.map(|(all, gone)| DeviceBytes {
            bytes: all.bytes.saturating_sub(gone.bytes),
            ..all.clone()
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(deep: (Millis, Millis), shallow: (Millis, Millis)) -> Costs {
        let cost = |(out_ms, home_ms)| Some(Cost { out_ms, home_ms });
        Costs { deep: cost(deep), shallow: cost(shallow), since: 0 }
    }

    #[test]
    fn both_ways_are_measured_before_one_is_chosen() {
        let mut known = Costs::default();
        assert!(!known.keeps_context(0), "all of it is given back first");
        known.learn(false, Cost { out_ms: 900, home_ms: 500 });
        assert!(known.keeps_context(0), "then the other way");
        known.learn(true, Cost { out_ms: 500, home_ms: 490 });
        assert!(!known.keeps_context(0), "2 % are not worth a context");
    }

    /// The figures are those of an H200: 1 GiB and 24 GiB of a process.
    #[test]
    fn a_context_stays_where_that_saves_more_than_it_costs_others() {
        let small = costs((450, 186), (60, 40));
        assert!(small.keeps_context(0));
        assert!(small.keeps_context(ALL / 4), "146 ms in three of four, 390 ms in one");
        assert!(!small.keeps_context(ALL / 2));
        assert!(!costs((1_300, 508), (800, 480)).keeps_context(0), "the copy is most of it");
        assert!(!costs((10, 0), (10, 0)).keeps_context(0));
    }

    #[test]
    fn the_other_way_is_measured_again_now_and_then() {
        let mut known = costs((450, 186), (60, 40));
        let mut other = 0;
        for _ in 0..4 * AGAIN {
            let shallow = known.keeps_context(0);
            other += u32::from(!shallow);
            known
                .learn(shallow, if shallow { known.shallow.unwrap() } else { known.deep.unwrap() });
        }
        assert_eq!(other, 3, "once in {AGAIN} and one");
    }
}
