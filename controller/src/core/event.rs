//! What users are told: changes of state, refusals, news of processes.

use affinode_proto::{event::EventKind, reason::Reason};

use super::Key;

/// An event. The edge gives it a number and a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// What kind of event it is.
    pub kind: EventKind,
    /// Key of the container; `None` if the event concerns no container.
    pub key: Option<Key>,
    /// Name of the container for users; may be empty.
    pub container: String,
    /// Reason of the event, if there is one.
    pub reason: Option<Reason>,
    /// What happened, in plain text.
    pub text: String,
    /// Bytes that the event is about; 0 if none.
    pub bytes: u64,
}

impl NodeEvent {
    /// An event that concerns no container and has no reason.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> NodeEvent {
        let text = text.into();
        NodeEvent { kind, key: None, container: String::new(), reason: None, text, bytes: 0 }
    }

    /// The same event with a reason.
    #[must_use]
    pub fn because(self, reason: Reason) -> NodeEvent {
        NodeEvent { reason: Some(reason), ..self }
    }

    /// The same event about this many bytes.
    #[must_use]
    pub fn of_bytes(self, bytes: u64) -> NodeEvent {
        NodeEvent { bytes, ..self }
    }
}
