//! Kinds of events, each with one word that the API, metrics, log, dashboard and CLI use.

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $word:literal;)*) => {
        /// Kind of an event that the controller publishes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum EventKind { $($(#[$doc])* $name,)* }

        impl EventKind {
            /// All kinds of events, in the order of declaration.
            pub const ALL: &'static [EventKind] = &[$(EventKind::$name,)*];

            /// Returns the kind's stable word, which JSON, events and metric labels use.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(EventKind::$name => $word,)* }
            }
        }
    };
}

kinds! {
    /// A container changed its state, for example from idle to offloading.
    State = "state";
    /// An offload was refused or cancelled, or an order to an agent failed.
    Refused = "refused";
    /// An annotation of a container is invalid, or has no effect.
    Annotation = "annotation";
    /// A single process registered, ended or changed otherwise.
    Process = "process";
    /// An operator requested an action.
    Request = "request";
    /// An allocation of a container began to wait for VRAM, or its wait ended.
    Allocation = "allocation";
    /// A hint (a program's own report) stated that a container is idle or busy.
    Hint = "hint";
    /// Pressure (a wait for VRAM of a GPU) began or ended.
    Pressure = "pressure";
    /// The controller ends a process, because another container needs its VRAM.
    Ended = "ended";
    /// A container was restored early by a prewake, and the expected CUDA call followed.
    Prewake = "prewake";
    /// A container was restored early by a prewake, but no CUDA call followed.
    PrewakeInVain = "prewake-in-vain";
    /// The memory of a process was different after a restore than before the offload.
    Damaged = "damaged";
    /// A container holds a GPU, or waits for one, but makes no progress.
    NoProgress = "no-progress";
    /// A process called the driver on a path that Affinode's hooks do not intercept.
    HiddenWay = "hidden-way";
    /// The content of an offloaded container was moved from host memory to disk.
    StoredOnDisk = "stored-on-disk";
    /// The content of an offloaded container could not be moved from host memory to disk.
    DiskFailed = "disk-failed";
}

impl EventKind {
    /// Returns the kind with this word, or `None` if no kind has it.
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
