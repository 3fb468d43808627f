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

impl OperatorOverrides {
    /// The same overrides with offloads without a request, evictions included, turned on or off.
    /// Offloaded containers stay offloaded until they are called.
    #[must_use]
    pub fn with_auto_offload(&self, on: bool) -> OperatorOverrides {
        OperatorOverrides { auto_offload: on, ..self.clone() }
    }

    /// The same overrides with a container pinned or unpinned.
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

impl Node {
    /// The overrides that hold now. [`super::Input::Overridden`] replaces them.
    #[must_use]
    pub fn overrides(&self) -> &OperatorOverrides {
        &self.overrides
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
