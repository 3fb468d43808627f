//! Events that are shown to users: changes of state, refused offloads, and reports about processes.

use affinode_proto::{event::EventKind, reason::Reason};

use super::Key;

/// An event for users, before the publisher adds its number and time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// Kind of the event.
    pub kind: EventKind,
    /// Key of the container; `None` if the event concerns no container.
    pub key: Option<Key>,
    /// Name of the container for users; may be empty.
    pub container: String,
    /// Reason of the event, if there is one.
    pub reason: Option<Reason>,
    /// Description of the event in plain text.
    pub text: String,
    /// Number of bytes that the event is about. 0: the event is not about an amount of memory.
    pub bytes: u64,
}

impl NodeEvent {
    /// Creates an event that concerns no container and has no reason.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> NodeEvent {
        let text = text.into();
        NodeEvent { kind, key: None, container: String::new(), reason: None, text, bytes: 0 }
    }

    /// Returns the event with this reason.
    #[must_use]
    pub fn because(self, reason: Reason) -> NodeEvent {
        NodeEvent { reason: Some(reason), ..self }
    }

    /// Returns the event with this number of bytes.
    #[must_use]
    pub fn of_bytes(self, bytes: u64) -> NodeEvent {
        NodeEvent { bytes, ..self }
    }
}
