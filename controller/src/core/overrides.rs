//! What operators have chosen for this node, beside its configuration: whether anything is
//! offloaded without being asked for, and which containers stay where they are. It outlives
//! the controller: see [`crate::overrides`].

use std::collections::BTreeSet;

use affinode_proto::reason::Reason;

use super::{Key, Node};

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorOverrides {
    /// Whether containers are offloaded without being asked for.
    pub auto_offload: bool,
    /// Containers that are not offloaded at all.
    pub pinned: BTreeSet<Key>,
}

impl Default for OperatorOverrides {
    fn default() -> OperatorOverrides {
        OperatorOverrides { auto_offload: true, pinned: BTreeSet::new() }
    }
}

impl Node {
    /// What is chosen now.
    #[must_use]
    pub fn wishes(&self) -> &OperatorOverrides {
        &self.overrides
    }

    /// Takes over what an earlier controller was told.
    pub fn remember(&mut self, wishes: OperatorOverrides) {
        self.overrides = wishes;
    }

    /// Turns offloads that nobody asked for on or off, those under pressure included. Who is
    /// away stays away until it is called. `true`: that is a change.
    pub fn set_auto_offload(&mut self, on: bool) -> bool {
        std::mem::replace(&mut self.overrides.auto_offload, on) != on
    }

    /// Keeps a container where it is, or no longer. `true`: that is a change.
    pub fn pin(&mut self, key: &Key, pinned: bool) -> bool {
        if pinned {
            self.overrides.pinned.insert(key.clone())
        } else {
            self.overrides.pinned.remove(key)
        }
    }

    /// Why an operator's choice keeps it; `asked`: an offload by hand.
    pub(super) fn wished(&self, key: &Key, asked: bool) -> Result<(), Reason> {
        if self.overrides.pinned.contains(key) {
            return Err(Reason::Pinned);
        }
        if asked || self.overrides.auto_offload { Ok(()) } else { Err(Reason::AutoOff) }
    }
}
