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
    /// The container is announced; no process of it has made a CUDA call.
    Unregistered,
    /// The container called CUDA recently, or a call is in progress.
    Active,
    /// The container made no call for the idle timeout. It still holds its VRAM.
    Idle,
    /// The gate is closing: new calls wait, calls in progress may finish.
    Closing,
    /// The VRAM is being moved to host memory.
    Offloading,
    /// The GPU memory is in host memory. The next CUDA call restores it.
    Offloaded,
    /// The restore waits for free VRAM.
    Queued,
    /// The GPU memory is being moved back to VRAM.
    Restoring,
    /// The driver reported that it cannot restore a process.
    Lost,
}

impl State {
    /// All states, in the order of a container's life.
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

    /// The word for the state, the same in every output.
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

    /// The state with this word; `None` if there is none.
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
