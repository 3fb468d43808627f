//! Connections at the networks of containers that are out and come back for them.

use super::actor::NodeActor;
use crate::{
    core::{Input, Key},
    inventory::network,
};

/// So many containers have their turn at once: each is a small file.
const MAX_CONTAINERS_PER_TURN: usize = 64;

impl NodeActor {
    /// Counts the connections of some, those after whoever was counted last first.
    pub(super) fn read_connections(&mut self) {
        let all: Vec<(Key, u32)> =
            self.node.listening().map(|(key, pid)| (key.clone(), pid)).collect();
        let after = |key: &Key| self.counted.as_ref().is_none_or(|last| key > last);
        let begin = all.iter().position(|(key, _)| after(key)).unwrap_or(0);
        for (key, pid) in
            all.iter().cycle().skip(begin).take(all.len().min(MAX_CONTAINERS_PER_TURN))
        {
            // Of one that is gone its end is told.
            if let Ok(count) = network::connections(*pid) {
                self.feed(Input::Connections(key.clone(), count));
            }
            self.counted = Some(key.clone());
        }
    }
}
