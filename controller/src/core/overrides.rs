//! What operators have chosen for this node, beside its configuration: whether anything is
//! offloaded without being asked for, and which containers stay where they are. It outlives
//! the controller: see [`crate::overrides`].

use std::collections::BTreeSet;

use affinode_proto::reason::Reason;

use super::{Key, Node};

/// The choices of operators that outlive the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorOverrides {
    /// Whether containers are offloaded without a request.
    pub auto_offload: bool,
    /// Pinned containers: never offloaded.
    pub pinned: BTreeSet<Key>,
}

impl Default for OperatorOverrides {
    fn default() -> OperatorOverrides {
        OperatorOverrides { auto_offload: true, pinned: BTreeSet::new() }
    }
}

impl Node {
    /// The overrides that hold now.
    #[must_use]
    pub fn wishes(&self) -> &OperatorOverrides {
        &self.overrides
    }

    /// Takes over the overrides of an earlier controller.
    pub fn remember(&mut self, wishes: OperatorOverrides) {
        self.overrides = wishes;
    }

    /// Turns offloads without a request on or off, evictions included. Offloaded containers stay
    /// offloaded until they are called. Returns whether this is a change.
    pub fn set_auto_offload(&mut self, on: bool) -> bool {
        std::mem::replace(&mut self.overrides.auto_offload, on) != on
    }

    /// Pins or unpins a container. Returns whether this is a change.
    pub fn pin(&mut self, key: &Key, pinned: bool) -> bool {
        if pinned {
            self.overrides.pinned.insert(key.clone())
        } else {
            self.overrides.pinned.remove(key)
        }
    }

    /// Whether the overrides allow an offload, otherwise the reason. `asked`: an operator
    /// requested it.
    pub(super) fn wished(&self, key: &Key, asked: bool) -> Result<(), Reason> {
        if self.overrides.pinned.contains(key) {
            return Err(Reason::Pinned);
        }
        if asked || self.overrides.auto_offload { Ok(()) } else { Err(Reason::AutoOff) }
    }
}
