//! Choices of operators for this node, in addition to its configuration: whether containers are
//! offloaded automatically, and which containers are pinned. The choices stay in effect when the
//! controller restarts; see `overrides.rs` of the controller.

use std::collections::BTreeSet;

use affinode_proto::reason::Reason;

use super::{Key, node_state::NodeState};

/// The choices of operators. They stay in effect when the controller restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorOverrides {
    /// Whether containers are offloaded automatically. If false, they are offloaded only at the
    /// request of an operator.
    pub auto_offload: bool,
    /// Keys of pinned containers, which are never offloaded.
    pub pinned: BTreeSet<Key>,
}

impl Default for OperatorOverrides {
    fn default() -> OperatorOverrides {
        OperatorOverrides { auto_offload: true, pinned: BTreeSet::new() }
    }
}

impl OperatorOverrides {
    /// Returns a copy of the overrides in which automatic offloads and evictions are on or off.
    /// Containers that are offloaded already stay offloaded until their next CUDA call.
    #[must_use]
    pub fn with_auto_offload(&self, on: bool) -> OperatorOverrides {
        OperatorOverrides { auto_offload: on, ..self.clone() }
    }

    /// Returns a copy of the overrides in which a container is pinned or unpinned.
    #[must_use]
    pub fn with_pin(&self, key: &Key, pinned: bool) -> OperatorOverrides {
        let mut changed = self.clone();
        if pinned {
            changed.pinned.insert(key.clone());
        } else {
            changed.pinned.remove(key);
        }
        changed
    }
}

/// Checks whether the operators' choices allow an offload. `Err`: the reason why not. `asked`: an
/// operator requests the offload.
pub(super) fn permitted(node: &NodeState, key: &Key, asked: bool) -> Result<(), Reason> {
    if node.overrides.pinned.contains(key) {
        return Err(Reason::Pinned);
    }
    if asked || node.overrides.auto_offload { Ok(()) } else { Err(Reason::AutoOff) }
}
