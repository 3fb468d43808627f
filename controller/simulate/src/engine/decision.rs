//! The node's decisions in a simulation, with the time of each.

use affinode_core::{Change, Millis};
use affinode_proto::state::State;

/// A decision of the node that moves a container towards the state Offloaded or Active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// Time of the decision in the trace, in milliseconds.
    pub at_ms: Millis,
    /// Key of the container.
    pub key: String,
    /// The new state of the container, as one word.
    pub to: String,
    /// The reason of the decision, as one word.
    pub reason: String,
}

impl PolicyDecision {
    /// Returns the decision that a change of a container's state shows. `None`: the change moves
    /// nothing, for example from idle to active, so it is no decision.
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
