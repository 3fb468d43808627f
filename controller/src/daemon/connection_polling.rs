//! Selects the offloaded containers whose TCP connections are counted at a tick. If a container's
//! setting `wake_on` is `connection` and enough VRAM is free, a new connection restores the
//! container.

use affinode_core::Key;

/// Maximum number of containers whose TCP connections are counted per tick. Each count reads a
/// small file of /proc.
const MAX_CONTAINERS_PER_TURN: usize = 64;

/// Selects the containers whose connections are counted at a tick: at most
/// [`MAX_CONTAINERS_PER_TURN`]. They follow the containers of the previous tick, so that every
/// container has its turn.
#[derive(Debug, Default)]
pub(super) struct ConnectionPolling {
    /// Key of the container whose connections were counted last.
    counted: Option<Key>,
}

impl ConnectionPolling {
    /// Returns the containers whose connections are counted at this tick, each with the pid of one
    /// of its processes. The selection continues after the container that was counted last. `all`
    /// lists all containers in the order of their keys.
    pub(super) fn turn(&mut self, all: Vec<(Key, u32)>) -> Vec<(Key, u32)> {
        let after = |key: &Key| self.counted.as_ref().is_none_or(|last| key > last);
        let begin = all.iter().position(|(key, _)| after(key)).unwrap_or(0);
        let count = all.len().min(MAX_CONTAINERS_PER_TURN);
        let turn: Vec<_> = all.iter().cycle().skip(begin).take(count).cloned().collect();
        if let Some((key, _)) = turn.last() {
            self.counted = Some(key.clone());
        }
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_container_has_its_turn() {
        let all: Vec<(Key, u32)> =
            (0..100).map(|n| (Key::parse(&format!("{n:032x}")).unwrap(), n)).collect();
        let mut polling = ConnectionPolling::default();
        let mut turn = || polling.turn(all.clone()).iter().map(|(_, pid)| *pid).collect::<Vec<_>>();
        assert_eq!(turn(), (0..64).collect::<Vec<_>>());
        assert_eq!(turn(), (64..100).chain(0..28).collect::<Vec<_>>());
        assert_eq!(turn()[0], 28);
        assert!(polling.turn(Vec::new()).is_empty());
        assert_eq!(polling.turn(all[..2].to_vec()).len(), 2, "each container once per turn");
    }
}
