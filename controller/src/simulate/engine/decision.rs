//! What the node decided, and when.

use affinode_proto::{api::control::Event, state::State};

use crate::core::Millis;

/// A step of a container on its way out or home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// In milliseconds of the trace.
    pub at_ms: Millis,
    /// The container's key.
    pub key: String,
    /// The word of the state that it is in from now on.
    pub to: String,
    /// Why, in the word for it.
    pub reason: String,
}

impl Decision {
    /// The decision that an event tells, if it tells one. That somebody is shown idle, or in use
    /// again, is none: nothing moves.
    #[must_use]
    pub fn of(at_ms: Millis, event: &Event) -> Option<Decision> {
        let word = |state: State| event.to == state.as_str();
        let from_idle = event.from == State::Idle.as_str();
        let shown = word(State::Idle) || word(State::Active) && from_idle;
        (event.kind == "state" && !shown).then(|| Decision {
            at_ms,
            key: event.key.clone(),
            to: event.to.clone(),
            reason: event.reason.clone(),
        })
    }
}
