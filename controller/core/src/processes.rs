//! All processes of the node, found by number or by container.
//!
//! To handle most inputs, the node needs two results over all processes: the VRAM that the
//! processes want on each GPU, and the partly restored containers. Both results are cached. Before
//! a cached result is returned, it is updated for the containers whose processes may have changed.

use std::collections::{BTreeSet, HashMap};

use affinode_proto::wire::Phase;
use foldhash::fast::FixedState;
use indexmap::{IndexMap, map};

use super::{DeviceBytes, Key, ProcessId, process::Process};

/// All processes of the node, grouped by container. For each input, the node looks up the few
/// processes of one container many times. The grouping makes these look-ups fast, even if the node
/// has a thousand containers.
#[derive(Debug, Default)]
pub struct Processes {
    by_key: IndexMap<Key, Siblings, FixedState>,
    /// For each process, the index of its container in `by_key`.
    places: HashMap<ProcessId, usize, FixedState>,
    /// Containers whose processes may have changed since the cached results were last updated.
    touched: Vec<Key>,
    wanted: HashMap<String, u128, FixedState>,
    half_way: BTreeSet<Key>,
}

/// The processes of one container.
#[derive(Debug, Default)]
struct Siblings {
    /// The processes, ordered by number.
    list: Vec<(ProcessId, Process)>,
    touched: bool,
    /// VRAM of this container's processes that is included in the cached sum over all containers.
    wants: Vec<DeviceBytes>,
}

impl Siblings {
    fn touch(&mut self, key: &Key, touched: &mut Vec<Key>) {
        if !std::mem::replace(&mut self.touched, true) {
            touched.push(key.clone());
        }
    }

    fn wants(&self) -> impl Iterator<Item = &DeviceBytes> {
        self.list.iter().flat_map(|(_, process)| wants(process))
    }

    /// Whether the container is partly restored or partly offloaded. Then not all of its gates are
    /// open, and at least one of its processes is locked by the driver, or is not offloaded and holds
    /// VRAM, or is copied out in part.
    fn is_half_way(&self) -> bool {
        let (mut half_way, mut resident) = (false, true);
        for (_, p) in &self.list {
            half_way |= p.agent.phase == Phase::Locked
                || p.is_partly_out()
                || !p.agent.phase.is_offloaded() && p.vram_bytes() > 0;
            // If the gates of all its processes are open, the container is resident. Even if it
            // waits for an allocation, it can be evicted again and needs no precedence.
            resident &= p.agent.phase == Phase::Open;
        }
        half_way && !resident
    }
}

/// VRAM that a process has or, if it is offloaded, had before its offload and needs again.
pub(super) fn wants(p: &Process) -> &[DeviceBytes] {
    match p.agent.phase {
        Phase::Checkpointed | Phase::CopiedOut => {
            p.memory.offloaded_vram().unwrap_or(&p.memory.vram)
        }
        _ => &p.memory.vram,
    }
}

impl Processes {
    /// Inserts a process. It replaces a process with the same number.
    pub fn insert(&mut self, id: ProcessId, process: Process) {
        self.remove(&id);
        let key = process.key.clone();
        let entry = self.by_key.entry(key.clone());
        self.places.insert(id, entry.index());
        let siblings = entry.or_default();
        siblings.touch(&key, &mut self.touched);
        let place = siblings.list.partition_point(|(other, _)| *other < id);
        siblings.list.insert(place, (id, process));
    }

    /// Removes a process and returns it.
    pub fn remove(&mut self, id: &ProcessId) -> Option<Process> {
        let (key, siblings) = self.by_key.get_index_mut(self.places.remove(id)?)?;
        siblings.touch(key, &mut self.touched);
        let place = siblings.list.iter().position(|(other, _)| other == id)?;
        Some(siblings.list.remove(place).1)
    }

    /// Finds the process with this number.
    #[must_use]
    pub fn get(&self, id: &ProcessId) -> Option<&Process> {
        let (_, siblings) = self.by_key.get_index(*self.places.get(id)?)?;
        siblings.list.iter().find(|(other, _)| other == id).map(|(_, process)| process)
    }

    /// Finds the process with this number and returns it for changes. Its key must not change.
    pub fn get_mut(&mut self, id: &ProcessId) -> Option<&mut Process> {
        let (key, siblings) = self.by_key.get_index_mut(*self.places.get(id)?)?;
        siblings.touch(key, &mut self.touched);
        siblings.list.iter_mut().find(|(other, _)| other == id).map(|(_, process)| process)
    }

    /// Finds the process with this number and returns it for a change that affects neither its
    /// phase nor its VRAM. The cached results stay valid and are not updated. Counter readings, the
    /// most frequent input, use this function.
    pub fn get_mut_uncounted(&mut self, id: &ProcessId) -> Option<&mut Process> {
        let (_, siblings) = self.by_key.get_index_mut(*self.places.get(id)?)?;
        siblings.list.iter_mut().find(|(other, _)| other == id).map(|(_, process)| process)
    }

    /// Numbers of all processes, in order.
    #[must_use]
    pub fn ids(&self) -> Vec<ProcessId> {
        let mut ids: Vec<ProcessId> = self.places.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// All processes, grouped by container.
    pub fn values(&self) -> impl Iterator<Item = &Process> {
        self.by_key.values().flat_map(|siblings| &siblings.list).map(|(_, process)| process)
    }

    /// All processes, grouped by container, for changes. Their keys must not change.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Process> {
        for (key, siblings) in &mut self.by_key {
            siblings.touch(key, &mut self.touched);
        }
        let all = self.by_key.values_mut().flat_map(|siblings| &mut siblings.list);
        all.map(|(_, process)| process)
    }

    /// Returns the number by which the controller identifies each process of a container, in
    /// ascending order.
    pub fn ids_of(&self, key: &Key) -> impl Iterator<Item = ProcessId> + '_ {
        self.of(key).map(|(id, _)| id)
    }

    /// Processes of a container, each with its number, in ascending order of the numbers.
    pub fn of(&self, key: &Key) -> impl Iterator<Item = (ProcessId, &Process)> + '_ {
        let list = self.by_key.get(key).map(|siblings| siblings.list.as_slice());
        list.unwrap_or_default().iter().map(|(id, process)| (*id, process))
    }

    /// VRAM of one GPU that all processes hold, or need again after an offload, in bytes.
    pub fn wanted_bytes(&mut self, uuid: &str) -> u128 {
        self.count();
        self.wanted.get(uuid).copied().unwrap_or(0)
    }

    /// Partly restored or offloaded containers. In such a container, not all gates are open, and at
    /// least one process is locked by the driver, or is not offloaded and holds VRAM, or is copied
    /// out in part.
    pub fn half_way(&mut self) -> &BTreeSet<Key> {
        self.count();
        &self.half_way
    }

    fn count(&mut self) {
        for key in std::mem::take(&mut self.touched) {
            let map::Entry::Occupied(mut entry) = self.by_key.entry(key) else { continue };
            let siblings = entry.get_mut();
            siblings.touched = false;
            if !siblings.wants().eq(&siblings.wants) {
                let wants: Vec<DeviceBytes> = siblings.wants().cloned().collect();
                for want in std::mem::replace(&mut siblings.wants, wants) {
                    if let Some(sum) = self.wanted.get_mut(&want.uuid) {
                        *sum = sum.saturating_sub(want.bytes.into());
                    }
                }
                for want in &siblings.wants {
                    *self.wanted.entry(want.uuid.clone()).or_default() += u128::from(want.bytes);
                }
            }
            if siblings.is_half_way() {
                self.half_way.insert(entry.key().clone());
            } else if !self.half_way.is_empty() {
                self.half_way.remove(entry.key());
            }
            if entry.get().list.is_empty() {
                let place = entry.index();
                entry.swap_remove();
                // `swap_remove` has moved the last container to this index.
                for (id, _) in self.by_key.get_index(place).iter().flat_map(|(_, s)| &s.list) {
                    self.places.insert(*id, place);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::{Capabilities, Hazards};
    use proptest::prelude::*;

    use super::*;
    use crate::host_memory::HostPoolPermission;
    use crate::input::Identity;
    use crate::process::{
        AgentStatus, FailedMoves, PrefaultOrder, ProcessActivity, ProcessHolds, ProcessMemory,
    };

    const PHASES: [Phase; 4] = [Phase::Open, Phase::Closed, Phase::Locked, Phase::Checkpointed];

    fn key(n: u64) -> Key {
        Key::parse(&format!("{n:032x}")).unwrap()
    }

    fn process(of: u64) -> Process {
        Process {
            key: key(of),
            identity: Identity { pid: 1, start_ticks: 1, ..Identity::default() },
            agent: AgentStatus {
                connected: true,
                phase: Phase::Open,
                generation: 1,
                hazards: Hazards::default(),
                capabilities: Capabilities::default(),
            },
            pending: None,
            memory: ProcessMemory::default(),
            failed_moves: FailedMoves::default(),
            host_pool: HostPoolPermission::default(),
            prefault: PrefaultOrder::default(),
            holds: ProcessHolds::default(),
            activity: ProcessActivity::default(),
            termination: None,
            alloc_wait: None,
        }
    }

    fn held(device: u64, bytes: u64) -> Vec<DeviceBytes> {
        vec![DeviceBytes { uuid: format!("GPU-{device}"), bytes }]
    }

    proptest! {
        /// After any changes, the cached sums must equal sums that are computed anew, even if the
        /// cached sums are rarely queried.
        #[test]
        fn cached_sums_equal_a_new_count(
            steps in proptest::collection::vec((0_u8..6, 0_u64..6, 0_u64..3, 0_usize..4, 0_u64..9), 1..80),
        ) {
            let mut all = Processes::default();
            for (step, n, device, phase, bytes) in steps {
                let id = ProcessId(n);
                match step {
                    0 => all.insert(id, process(n / 2)),
                    1 => drop(all.remove(&id)),
                    2 => all.values_mut().for_each(|p| p.memory.vram = held(device, bytes)),
                    3 | 4 => if let Some(p) = all.get_mut(&id) {
                        p.agent.phase = PHASES[phase];
                        let is_off = p.agent.phase == Phase::Checkpointed;
                        p.memory.set_offloaded_vram(is_off.then(|| held(device, bytes)));
                    },
                    _ => {
                        for id in all.ids() {
                            prop_assert_eq!(all.get(&id).map(|p| p.key.clone()), Some(key(id.0 / 2)));
                        }
                        for device in 0..3 {
                            let uuid = format!("GPU-{device}");
                            let of_device = all.values().flat_map(wants).filter(|w| w.uuid == uuid);
                            let sum: u128 = of_device.map(|w| u128::from(w.bytes)).sum();
                            prop_assert_eq!(all.wanted_bytes(&uuid), sum);
                        }
                        let lists = all.by_key.iter().filter(|(_, s)| s.is_half_way());
                        let half_way: BTreeSet<Key> = lists.map(|(key, _)| key.clone()).collect();
                        prop_assert_eq!(all.half_way(), &half_way);
                    }
                }
            }
        }
    }
}
