//! Kinds of events, each with one word that the API, metrics, log, dashboard and CLI use.

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $word:literal;)*) => {
        /// The kind of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum EventKind { $($(#[$doc])* $name,)* }

        impl EventKind {
            /// Every kind, in the order of declaration.
            pub const ALL: &'static [EventKind] = &[$(EventKind::$name,)*];

            /// The stable word that JSON, events and metric labels use.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(EventKind::$name => $word,)* }
            }
        }
    };
}

kinds! {
    /// The state of a container changed.
    State = "state";
    /// An offload was refused or cancelled, or an order failed.
    Refused = "refused";
    /// An annotation is invalid, or has no effect.
    Annotation = "annotation";
    /// A fact about a single process, such as its registration or end.
    Process = "process";
    /// An operator made a request.
    Request = "request";
    /// An allocation waits for VRAM, or its wait ended.
    Allocation = "allocation";
    /// A hint reported a container as idle or busy.
    Hint = "hint";
    /// The pressure on a GPU began or ended.
    Pressure = "pressure";
    /// A process is ended, because another container needs its VRAM.
    Ended = "ended";
    /// A call followed a prewake.
    Prewake = "prewake";
    /// No call followed a prewake.
    PrewakeInVain = "prewake-in-vain";
    /// The memory of a process differs after a restore.
    Damaged = "damaged";
    /// A process called the driver on a path without a hook.
    HiddenWay = "hidden-way";
}

impl EventKind {
    /// The kind with this word; `None` if there is none.
    #[must_use]
    pub fn parse(word: &str) -> Option<EventKind> {
        EventKind::ALL.iter().copied().find(|kind| kind.as_str() == word)
    }
}

impl core::fmt::Display for EventKind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::EventKind;

    #[test]
    fn event_word_is_read_back() {
        for kind in EventKind::ALL {
            assert_eq!(EventKind::parse(kind.as_str()), Some(*kind));
            assert_eq!(format!("{kind:>16}"), format!("{:>16}", kind.as_str()));
        }
        assert_eq!(EventKind::parse("State"), None);
    }
}
