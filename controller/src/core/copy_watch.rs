//! Copies out in progress, and the host memory that others take meanwhile.
//!
//! A copy was promised its memory before its first byte, but a neighbour in the pod, or anything
//! else on the node, may take some of it while it is filled. The library sees the node and its
//! container's own limit; the limits above are seen from here alone:
//!
//! ```text
//! copy ordered ──> levels read, again and again ──> less free than the copy has still to touch?
//!                                                     no: goes on
//!                                                     yes: turned back ──> NoHostMemory, undone
//! ```
//!
//! What a copy has still to touch stands in its process's counters: the container's claim. So it is
//! compared with what is free for that container alone: a false claim turns back its own copies, or
//! leaves them to their own limits.

use affinode_proto::wire::message::Action;

use super::{Effect, Key, Millis, Node, ProcessId, host_memory::MemoryPool, process::Process};

/// The levels of host memory are read this often while a copy out is in progress.
pub const LEVELS_INTERVAL_MS: Millis = 20;

/// A copy out in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyInProgress {
    /// The container that is copied out.
    pub key: Key,
    /// The processes that copy now, and their host pids.
    pub processes: Vec<(ProcessId, u32)>,
}

/// What is free for a container at each level that pays for its memory.
pub type Levels = (Key, Vec<MemoryPool>);

impl Node {
    /// The copies out in progress.
    #[must_use]
    pub fn copies_in_progress(&self) -> Vec<CopyInProgress> {
        let copies = self.containers.keys().map(|key| {
            let copying = self.processes.of(key).filter(|(_, process)| is_copying(process));
            let processes = copying.map(|(id, process)| (id, process.identity.pid)).collect();
            CopyInProgress { key: key.clone(), processes }
        });
        copies.filter(|copy| !copy.processes.is_empty()).collect()
    }

    /// Turns back the copies for which too little is left. The counters of their processes were read
    /// after these levels: what a copy has touched in between makes it look smaller, never larger.
    pub(super) fn host_levels_read(&mut self, levels: Vec<Levels>) {
        for (key, pools) in levels {
            let copying = self.processes.of(&key).filter(|(_, process)| is_copying(process));
            let copying: Vec<(ProcessId, u64)> =
                copying.map(|(id, process)| (id, bytes_to_touch(process))).collect();
            let need_bytes = copying.iter().fold(0_u64, |sum, (_, left)| sum.saturating_add(*left));
            let short = pools.into_iter().find(|pool| pool.free_bytes < need_bytes);
            let Some(short) = short.filter(|_| need_bytes > 0) else { continue };
            self.host_ledger.turn_back(&key, MemoryPool { need_bytes, ..short });
            // Until it has ended: a word that was not read does no harm a second time.
            let told = copying.into_iter().map(|(id, _)| Effect::TurnBack(id));
            self.effects.extend(told);
        }
    }
}

fn is_copying(process: &Process) -> bool {
    let copies = |action| matches!(action, Action::CopyOut { .. });
    process.connected && process.pending.is_some_and(|order| copies(order.action))
}

fn bytes_to_touch(process: &Process) -> u64 {
    process.counters.as_ref().map_or(0, |counters| counters.filling_bytes)
}
