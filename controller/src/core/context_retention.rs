//! Decides whether an offload with the engine `auto` retains the CUDA context on the GPU.
//!
//! ```text
//! first offload: without context ──> second: context retained ──> both costs are known
//!     then retained where that saves at least a tenth of the restore, and more
//!                   than the later eviction of contexts costs their waiters
//! ```
//!
//! Retained contexts take at most an eighth of a GPU. None is retained while a container waits. A
//! later waiter that needs their VRAM evicts them (`eviction.rs`).

use affinode_proto::wire::Phase;

use super::{
    DeviceBytes, Key, Millis, Node, container::Container, merge_needs, plan::OffloadMethod,
    policy::Engine, process::Process, transitions,
};

/// Measured durations of an offload and its restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Duration of the offload, in milliseconds.
    pub out_ms: Millis,
    /// Duration of the restore after VRAM was granted, in milliseconds.
    pub restore_ms: Millis,
}

/// Costs of the container's last offloads, with the context retained and without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Last cost with the context checkpointed.
    pub deep: Option<Cost>,
    /// Last cost with the context retained.
    pub shallow: Option<Cost>,
    /// Number of offloads since the other variant (context retained or checkpointed) was measured.
    since: u32,
}

/// Number of offloads after which the other variant is measured again.
const AGAIN: u32 = 32;
/// Weight of earlier offloads in the average of `context_evicted_share`, as a number of offloads.
const REMEMBERED: u32 = 8;
/// Denominator of `context_evicted_share`: the value for a share of 100 %.
const ALL: u32 = 1 << 10;

impl Costs {
    /// Whether to keep the CUDA context on the GPU. `pushed` is the fraction (in 1/[`ALL`]) of
    /// earlier context-retaining offloads whose context had to be checkpointed later.
    fn keeps_context(&self, pushed: u32) -> bool {
        let (Some(deep), Some(shallow)) = (self.deep, self.shallow) else {
            return self.deep.is_some();
        };
        let saved = deep.restore_ms.saturating_sub(shallow.restore_ms);
        let push = deep.out_ms.saturating_sub(shallow.out_ms).max(saved);
        let kept = u64::from(ALL - pushed.min(ALL));
        let stays = saved * 10 >= deep.restore_ms.max(1) && saved * kept > push * u64::from(pushed);
        // Measure the other way now and then: its cost may have changed.
        stays != (self.since >= AGAIN)
    }

    fn learn(&mut self, shallow: bool, cost: Cost) {
        let known = if shallow { &mut self.shallow } else { &mut self.deep };
        *known = Some(cost);
        self.since = if self.since >= AGAIN { 0 } else { self.since + 1 };
    }
}

impl Node {
    /// Decides whether the offload that begins retains the context.
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
        // A container with a retained context can be restored on its own GPU only.
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

    /// Whether retained contexts take at most an eighth of each GPU. Includes this container's
    /// contexts and those of offloads in progress.
    fn have_room_for_contexts(&self, key: &Key) -> bool {
        let stays = |p: &Process| match p.phase {
            Phase::CopiedOut => p.vram.clone(),
            // This container's processes, and those of offloads in progress.
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

    /// Records the cost of an offload after its restore.
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
        // An offload whose context was evicted later is a sample of neither kind.
        if !(shallow && deep) {
            let (out_ms, restore_ms) = (container.last_offload_ms, container.last_restore_ms);
            container.costs.learn(shallow, Cost { out_ms, restore_ms });
        }
    }
}

impl Process {
    /// VRAM that stays in use on the process's GPUs after a copy out.
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
        let cost = |(out_ms, restore_ms)| Some(Cost { out_ms, restore_ms });
        Costs { deep: cost(deep), shallow: cost(shallow), since: 0 }
    }

    #[test]
    fn context_costs_are_measured_before_choice() {
        let mut known = Costs::default();
        assert!(!known.keeps_context(0), "all of it is given back first");
        known.learn(false, Cost { out_ms: 900, restore_ms: 500 });
        assert!(known.keeps_context(0), "then the other way");
        known.learn(true, Cost { out_ms: 500, restore_ms: 490 });
        assert!(!known.keeps_context(0), "2 % are not worth a context");
    }

    /// The figures were measured on an H200, for processes with 1 GiB and 24 GiB.
    #[test]
    fn context_is_kept_where_it_saves_more_time() {
        let small = costs((450, 186), (60, 40));
        assert!(small.keeps_context(0));
        assert!(small.keeps_context(ALL / 4), "146 ms in three of four, 390 ms in one");
        assert!(!small.keeps_context(ALL / 2));
        assert!(!costs((1_300, 508), (800, 480)).keeps_context(0), "the copy is most of it");
        assert!(!costs((10, 0), (10, 0)).keeps_context(0));
    }

    #[test]
    fn other_context_choice_is_measured_again() {
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
