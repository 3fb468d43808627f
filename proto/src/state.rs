//! The life of a container's GPU state, word for word as the API, the metrics,
//! the dashboard and the CLI show it.
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

/// Where the GPU state of a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// No process of the container has made a CUDA call yet.
    Unregistered,
    /// In use: a call was made lately, or is in progress.
    Active,
    /// No call for the idle timeout; still holds its VRAM.
    Idle,
    /// The gate is closing: calls in progress are waited for.
    Closing,
    /// The driver is moving VRAM to host memory.
    Offloading,
    /// No VRAM is held. The next CUDA call brings it back.
    Offloaded,
    /// A caller waits; VRAM for the return is not there yet.
    Queued,
    /// The driver is moving the state back to VRAM.
    Restoring,
    /// The driver reported a failure from which it knows no way back.
    Lost,
}

impl State {
    /// Every state, in the order of a container's life.
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

    /// The word for it, as every output has it.
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

    /// The state whose word this is, if there is one.
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
