//! The processes of the node, found by number and by container.

use std::collections::{BTreeMap, BTreeSet, btree_map};

use super::{Key, ProcessId, process::Process};

/// Every process, with an index by container: a node of a thousand containers asks for
/// the few of one container at every input.
#[derive(Debug, Default)]
pub struct Processes {
    by_id: BTreeMap<ProcessId, Process>,
    by_key: BTreeMap<Key, BTreeSet<ProcessId>>,
}

impl Processes {
    /// Takes a process in, in place of one of the same number.
    pub fn insert(&mut self, id: ProcessId, process: Process) {
        self.remove(&id);
        self.by_key.entry(process.key.clone()).or_default().insert(id);
        self.by_id.insert(id, process);
    }

    /// Takes a process out.
    pub fn remove(&mut self, id: &ProcessId) -> Option<Process> {
        let process = self.by_id.remove(id)?;
        if let btree_map::Entry::Occupied(mut ids) = self.by_key.entry(process.key.clone()) {
            ids.get_mut().remove(id);
            if ids.get().is_empty() {
                ids.remove();
            }
        }
        Some(process)
    }

    /// The process of that number.
    #[must_use]
    pub fn get(&self, id: &ProcessId) -> Option<&Process> {
        self.by_id.get(id)
    }

    /// The process of that number. Its key stays as it is.
    pub fn get_mut(&mut self, id: &ProcessId) -> Option<&mut Process> {
        self.by_id.get_mut(id)
    }

    /// All, by number.
    pub fn iter(&self) -> btree_map::Iter<'_, ProcessId, Process> {
        self.by_id.iter()
    }

    /// All numbers.
    pub fn keys(&self) -> btree_map::Keys<'_, ProcessId, Process> {
        self.by_id.keys()
    }

    /// All processes.
    pub fn values(&self) -> btree_map::Values<'_, ProcessId, Process> {
        self.by_id.values()
    }

    /// All processes. Their keys stay as they are.
    pub fn values_mut(&mut self) -> btree_map::ValuesMut<'_, ProcessId, Process> {
        self.by_id.values_mut()
    }

    /// Numbers of a container's processes, in order.
    pub fn ids_of(&self, key: &Key) -> impl Iterator<Item = ProcessId> + '_ {
        self.by_key.get(key).into_iter().flatten().copied()
    }

    /// A container's processes, in order of number.
    pub fn of(&self, key: &Key) -> impl Iterator<Item = (ProcessId, &Process)> + '_ {
        self.ids_of(key).filter_map(|id| self.by_id.get(&id).map(|process| (id, process)))
    }
}
