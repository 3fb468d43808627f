//! The states of a container's GPU memory, each with one word that the API, metrics, dashboard and
//! CLI use.
//!
//! ```text
//! Unregistered ──first CUDA call──> Active
//!
//! Active ──idle for T──> Idle ──policy──> Closing ──drained──> Offloading ──> Offloaded
//!   ^         │                              │ busy or unsafe: back, reason kept   │ wake
//!   └─any call┘                              v                                     v
//!   ^                                     Active                                 Queued
//!   └────────────────────── Restoring <──────── VRAM reserved and proven free ─────┘
//! ```

/// State of a container's GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// The container is announced, but none of its processes has made a CUDA call.
    Unregistered,
    /// A process of the container called CUDA recently, or is in a call now.
    Active,
    /// No process of the container made a CUDA call for the idle timeout. The container still holds
    /// its VRAM.
    Idle,
    /// The gates of the container's processes are closing. New CUDA calls wait, and calls in
    /// progress may finish.
    Closing,
    /// The container's GPU memory is being moved to host memory.
    Offloading,
    /// The container's GPU memory is in host memory. The next CUDA call restores it.
    Offloaded,
    /// A CUDA call needs a restore, and the restore waits for free VRAM.
    Queued,
    /// The container's GPU memory is being moved back into VRAM.
    Restoring,
    /// The driver reported that it cannot restore a process of the container.
    Lost,
}

impl State {
    /// All states, in the order in which a container reaches them.
    pub const ALL: [State; 9] = [
        State::Unregistered,
        State::Active,
        State::Idle,
        State::Closing,
        State::Offloading,
        State::Offloaded,
        State::Queued,
        State::Restoring,
        State::Lost,
    ];

    /// Returns the word for the state, which is the same in every output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            State::Unregistered => "Unregistered",
            State::Active => "Active",
            State::Idle => "Idle",
            State::Closing => "Closing",
            State::Offloading => "Offloading",
            State::Offloaded => "Offloaded",
            State::Queued => "Queued",
            State::Restoring => "Restoring",
            State::Lost => "Lost",
        }
    }

    /// Returns the state with this word, or `None` if no state has it.
    #[must_use]
    pub fn parse(word: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

impl core::fmt::Display for State {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_found_by_its_word() {
        for state in State::ALL {
            assert_eq!(State::parse(state.as_str()), Some(state));
        }
        assert_eq!(State::parse("active"), None);
    }
}
