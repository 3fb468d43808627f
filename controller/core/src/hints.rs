//! Hints that a container is idle or busy, from an application, its sidecar or an operator.
//!
//! ```text
//! none ──"idle"──> idle: offloaded as soon as no call is in progress ──next use──> none
//!   └─────"busy"──> busy: counts as in use ──"idle", or an hour──> none
//! ```
//!
//! A hint may come from inside the container, and can be false. It therefore has no more effect
//! than the container's calls have: "busy" keeps a container resident, as constant calls would.

use affinode_proto::{event::EventKind, reason::Reason};

use super::{Key, event::NodeEvent, node_state::NodeState};

/// The content of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The GPU will not be used for a while.
    Idle,
    /// The GPU is in use, or about to be.
    Busy,
}

impl Hint {
    /// The word for the hint in files, events and commands.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Hint::Idle => "idle",
            Hint::Busy => "busy",
        }
    }

    /// Parses a text and returns the last word in it that is a hint. White space separates words.
    /// Unknown words are skipped.
    #[must_use]
    pub fn last(text: &[u8]) -> Option<Hint> {
        text.split(u8::is_ascii_whitespace).rev().find_map(|word| match word {
            b"idle" => Some(Hint::Idle),
            b"busy" => Some(Hint::Busy),
            _ => None,
        })
    }
}

/// Handles a hint. `who` is the name of the hint's source, for the event. A repeated hint publishes
/// no event.
pub(super) fn hinted(node: &mut NodeState, key: &Key, hint: Hint, who: &str) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    let before = container.usage.hint.replace((hint, now));
    if hint == Hint::Busy {
        container.usage.last_use = now;
    }
    if before.is_none_or(|(before, _)| before != hint) {
        let reason = match hint {
            Hint::Idle => Reason::HintedIdle,
            Hint::Busy => Reason::HintedBusy,
        };
        let text = format!("hint {} from {who}", hint.as_str());
        node.publish(key, NodeEvent::new(EventKind::Hint, text).because(reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_known_hint_word_counts() {
        assert_eq!(Hint::last(b"idle\n"), Some(Hint::Idle));
        assert_eq!(Hint::last(b"idle\nbusy\n\xff\xfe garbage"), Some(Hint::Busy));
        assert_eq!(Hint::last(b"idlebusy"), None);
        assert_eq!(Hint::last(b""), None);
    }
}
