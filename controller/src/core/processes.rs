//! The processes of the node, found by number and by container.

use std::collections::{BTreeMap, HashMap, btree_map, hash_map};

use foldhash::fast::FixedState;

use super::{Key, ProcessId, process::Process};

/// Every process, by container: a node of a thousand containers asks for the few of one
/// container many times at every input.
#[derive(Debug, Default)]
pub struct Processes {
    /// Those of a container lie beside each other, in order of number.
    by_key: HashMap<Key, Vec<(ProcessId, Process)>, FixedState>,
    keys: BTreeMap<ProcessId, Key>,
}

impl Processes {
    /// Takes a process in, in place of one of the same number.
    pub fn insert(&mut self, id: ProcessId, process: Process) {
        self.remove(&id);
        self.keys.insert(id, process.key.clone());
        let siblings = self.by_key.entry(process.key.clone()).or_default();
        let place = siblings.partition_point(|(other, _)| *other < id);
        siblings.insert(place, (id, process));
    }

    /// Takes a process out.
    pub fn remove(&mut self, id: &ProcessId) -> Option<Process> {
        let key = self.keys.remove(id)?;
        let hash_map::Entry::Occupied(mut siblings) = self.by_key.entry(key) else { return None };
        let place = siblings.get().iter().position(|(other, _)| other == id)?;
        let (_, process) = siblings.get_mut().remove(place);
        if siblings.get().is_empty() {
            siblings.remove();
        }
        Some(process)
    }

    /// The process of that number.
    #[must_use]
    pub fn get(&self, id: &ProcessId) -> Option<&Process> {
        let siblings = self.by_key.get(self.keys.get(id)?)?;
        siblings.iter().find(|(other, _)| other == id).map(|(_, process)| process)
    }

    /// The process of that number. Its key stays as it is.
    pub fn get_mut(&mut self, id: &ProcessId) -> Option<&mut Process> {
        let siblings = self.by_key.get_mut(self.keys.get(id)?)?;
        siblings.iter_mut().find(|(other, _)| other == id).map(|(_, process)| process)
    }

    /// All numbers, in order.
    pub fn keys(&self) -> btree_map::Keys<'_, ProcessId, Key> {
        self.keys.keys()
    }

    /// All processes, container by container.
    pub fn values(&self) -> impl Iterator<Item = &Process> {
        self.by_key.values().flatten().map(|(_, process)| process)
    }

    /// All processes, container by container. Their keys stay as they are.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Process> {
        self.by_key.values_mut().flatten().map(|(_, process)| process)
    }

    /// Numbers of a container's processes, in order.
    pub fn ids_of(&self, key: &Key) -> impl Iterator<Item = ProcessId> + '_ {
        self.of(key).map(|(id, _)| id)
    }

    /// A container's processes, in order of number.
    pub fn of(&self, key: &Key) -> impl Iterator<Item = (ProcessId, &Process)> + '_ {
        let siblings = self.by_key.get(key).map(Vec::as_slice).unwrap_or_default();
        siblings.iter().map(|(id, process)| (*id, process))
    }
}
