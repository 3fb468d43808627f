//! The container's state as users see it, with its reason.

use affinode_proto::{reason::Reason, state::State};

use super::super::Millis;

/// The container's state as users see it, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownState {
    /// The state of the container, from a fixed list.
    pub state: State,
    /// When the state changed last.
    pub since: Millis,
    /// The reason for the state, with a detail: why the container was offloaded, why it stays
    /// resident, or what it waits for.
    pub reason: (Reason, String),
    /// Reason in the last event that reported why the container is not offloaded. The controller
    /// publishes no second event in a row with the same reason.
    pub refused: Option<Reason>,
}

impl ShownState {
    /// The state of a container that was just announced.
    #[must_use]
    pub fn new(now: Millis) -> ShownState {
        ShownState {
            state: State::Unregistered,
            since: now,
            reason: (Reason::NotRegistered, String::new()),
            refused: None,
        }
    }
}
