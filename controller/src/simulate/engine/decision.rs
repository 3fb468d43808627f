//! What the node decided, and when.

use affinode_proto::state::State;

use crate::core::{Change, Millis};

/// A step of a container on its way out or home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// In milliseconds of the trace.
    pub at_ms: Millis,
    /// The container's key.
    pub key: String,
    /// The word of the state that it is in from now on.
    pub to: String,
    /// Why, in the word for it.
    pub reason: String,
}

impl PolicyDecision {
    /// The decision behind a change, if there is one. That somebody is shown idle, or in use
    /// again, is none: nothing moves.
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
