//! Counts the TCP connections of offloaded containers. If the container's setting `wake_on` is
//! `connection` and enough VRAM is free, a new connection restores the container.

use affinode_core::{Input, Key};

use super::actor::NodeActor;
use crate::inventory::network;

/// Maximum number of containers whose connections are counted per tick. Each count reads a small
/// file of /proc.
const MAX_CONTAINERS_PER_TURN: usize = 64;

impl NodeActor {
    /// Counts the connections of some containers. Starts after the container that was counted last.
    pub(super) fn read_connections(&mut self) {
        let all: Vec<(Key, u32)> =
            self.node.listening().map(|(key, pid)| (key.clone(), pid)).collect();
        let after = |key: &Key| self.counted.as_ref().is_none_or(|last| key > last);
        let begin = all.iter().position(|(key, _)| after(key)).unwrap_or(0);
        for (key, pid) in
            all.iter().cycle().skip(begin).take(all.len().min(MAX_CONTAINERS_PER_TURN))
        {
            // If the process has ended, the read fails. The end itself is reported by the process's
            // pidfd.
            if let Ok(count) = network::connections(*pid) {
                self.feed(Input::Connections(key.clone(), count));
            }
            self.counted = Some(key.clone());
        }
    }
}
