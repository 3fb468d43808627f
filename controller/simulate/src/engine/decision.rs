//! The decisions of the node, with the time of each.

use affinode_core::{Change, Millis};
use affinode_proto::state::State;

/// A step of a container towards Offloaded or Active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// Time in milliseconds of the trace.
    pub at_ms: Millis,
    /// Key of the container.
    pub key: String,
    /// The new state of the container, as one word.
    pub to: String,
    /// The reason of the decision, as one word.
    pub reason: String,
}

impl PolicyDecision {
    /// The decision that a state change shows. `None` for other changes: a change between idle and
    /// active is not a decision, because nothing is moved.
    #[must_use]
    pub fn of(at_ms: Millis, change: &Change) -> Option<PolicyDecision> {
        let shown =
            matches!((change.from, change.to), (_, State::Idle) | (State::Idle, State::Active));
        (!shown).then(|| PolicyDecision {
            at_ms,
            key: change.key.to_string(),
            to: change.to.to_string(),
            reason: change.reason.to_string(),
        })
    }
}
