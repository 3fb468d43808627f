//! What an application, its sidecar or a person says of a container: idle now, or busy.
//!
//! ```text
//! nothing ──"idle"──> idle: leaves as soon as no call is in progress ──next use──> nothing
//!    └─────"busy"──> busy: counts as in use ──"idle", or an hour──> nothing
//! ```
//!
//! It comes from a container, too, and is believed as far as a container's calls are: who
//! says busy keeps what it has as long as one that calls would.

use affinode_proto::{api::control::Event, reason::Reason};

use super::{Key, Millis, Node, container::Container};

/// Who says busy and then nothing is not believed any longer.
const BUSY_MS: Millis = 3_600_000;
/// Counters that are read so soon after it may show calls that were made before it.
const SETTLE_MS: Millis = 1_000;

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing will be asked of the GPU for a while.
    Idle,
    /// It is in use, or about to be.
    Busy,
}

impl Hint {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Hint::Idle => "idle",
            Hint::Busy => "busy",
        }
    }

    /// Reads the last of the words that were written one after the other; white space is
    /// between them, anything else is passed over.
    #[must_use]
    pub fn last(text: &[u8]) -> Option<Hint> {
        text.split(u8::is_ascii_whitespace).rev().find_map(|word| match word {
            b"idle" => Some(Hint::Idle),
            b"busy" => Some(Hint::Busy),
            _ => None,
        })
    }
}

impl Container {
    /// It was said that it is idle, and it was not used since.
    #[must_use]
    pub fn hinted_idle(&self) -> bool {
        matches!(self.hint, Some((Hint::Idle, _)))
    }

    /// Until when it is in use because it was said so.
    #[must_use]
    pub fn busy_until(&self) -> Option<Millis> {
        match self.hint {
            Some((Hint::Busy, said)) => Some(said + BUSY_MS),
            _ => None,
        }
    }

    /// It was used: that it is idle does not hold any more.
    pub(super) fn used(&mut self, now: Millis) {
        let settled = |said: Millis| now.saturating_sub(said) > SETTLE_MS;
        if matches!(self.hint, Some((Hint::Idle, said)) if settled(said)) {
            self.hint = None;
        }
    }
}

impl Node {
    /// Takes a hint; `who` said it, for the event. One that says nothing new is not told.
    pub(super) fn hinted(&mut self, key: &Key, hint: Hint, who: &str) {
        let now = self.now;
        let Some(container) = self.containers.get_mut(key) else { return };
        let before = container.hint.replace((hint, now));
        if hint == Hint::Busy {
            container.last_use = now;
        }
        if before.is_none_or(|(before, _)| before != hint) {
            let event = Event {
                kind: "hint".into(),
                reason: match hint {
                    Hint::Idle => Reason::HintedIdle.to_string(),
                    Hint::Busy => Reason::HintedBusy.to_string(),
                },
                text: format!("{who} says that it is {}", hint.as_str()),
                ..Event::default()
            };
            self.publish(key, event);
        }
        self.due(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_counts_and_nonsense_is_passed_over() {
        assert_eq!(Hint::last(b"idle\n"), Some(Hint::Idle));
        assert_eq!(Hint::last(b"idle\nbusy\n\xff\xfe garbage"), Some(Hint::Busy));
        assert_eq!(Hint::last(b"idlebusy"), None);
        assert_eq!(Hint::last(b""), None);
    }
}
