//! How long the controller has owed an answer.

use affinode_proto::wire::Phase;
use affinode_proto::wire::message::{RESCUE_AFTER_MS, WAKE_REPEAT_MS};

/// What the agent sees at one moment.
#[derive(Clone, Copy, Debug)]
pub struct GateActivity {
    /// A caller waits at the gate.
    pub waiters: bool,
    /// Where the process is.
    pub phase: Phase,
    /// Allocations are held.
    pub allocations_held: bool,
    /// A controller manages the process.
    pub connected: bool,
    /// An order or an acknowledgement has come since the last look.
    pub heard: bool,
}

impl GateActivity {
    fn answer_is_owed(self) -> bool {
        let held = self.phase != Phase::Open || self.allocations_held;
        // Without a controller, a process that has lost nothing yet goes on; one that
        // is away stays away until it is called.
        let stranded = !self.connected && matches!(self.phase, Phase::Closed | Phase::Locked);
        (held && self.waiters) || stranded
    }
}

/// Time without an answer, as the agent has lived through it: a process that was frozen
/// or a machine that slept has not been left alone.
#[derive(Debug)]
pub struct ControllerWatchdog {
    last_us: u64,
    owed: bool,
    silent_us: u64,
}

impl ControllerWatchdog {
    /// Nothing is owed yet.
    pub fn new(now_us: u64) -> ControllerWatchdog {
        ControllerWatchdog { last_us: now_us, owed: false, silent_us: 0 }
    }

    /// Takes note; true when the process must be brought back without the controller.
    /// To be called at least every [`WAKE_REPEAT_MS`] while something is owed.
    pub fn is_too_long(&mut self, now_us: u64, situation: GateActivity) -> bool {
        let lived_us = now_us.saturating_sub(self.last_us).min(2 * WAKE_REPEAT_MS * 1_000);
        self.last_us = now_us;
        let owed = situation.answer_is_owed();
        self.silent_us =
            if !owed || !self.owed || situation.heard { 0 } else { self.silent_us + lived_us };
        self.owed = owed;
        self.silent_us >= RESCUE_AFTER_MS * 1_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: GateActivity = GateActivity {
        waiters: true,
        phase: Phase::Checkpointed,
        allocations_held: false,
        connected: true,
        heard: false,
    };

    /// Seconds until it is too long, looking once a second, up to 20.
    fn seconds(silence: &mut ControllerWatchdog, situation: GateActivity) -> Option<u64> {
        let start = silence.last_us;
        (0..20).find(|s| silence.is_too_long(start + s * 1_000_000, situation))
    }

    #[test]
    fn a_waiting_caller_is_left_alone_for_five_seconds() {
        assert_eq!(seconds(&mut ControllerWatchdog::new(0), HELD), Some(5));
        let heard = GateActivity { heard: true, ..HELD };
        assert_eq!(seconds(&mut ControllerWatchdog::new(0), heard), None);
    }

    #[test]
    fn without_callers_only_a_controller_that_is_gone_counts_and_only_before_away() {
        for (phase, connected, expected) in [
            (Phase::Checkpointed, false, None),
            (Phase::Locked, true, None),
            (Phase::Locked, false, Some(5)),
            (Phase::Closed, false, Some(5)),
            (Phase::Open, false, None),
        ] {
            let situation = GateActivity { waiters: false, phase, connected, ..HELD };
            assert_eq!(
                seconds(&mut ControllerWatchdog::new(0), situation),
                expected,
                "{situation:?}"
            );
        }
    }

    #[test]
    fn held_allocations_count_like_a_closed_gate() {
        let situation = GateActivity { phase: Phase::Open, allocations_held: true, ..HELD };
        assert_eq!(seconds(&mut ControllerWatchdog::new(0), situation), Some(5));
    }

    #[test]
    fn an_hour_in_the_freezer_is_no_silence() {
        let mut silence = ControllerWatchdog::new(0);
        assert!(!silence.is_too_long(1_000_000, HELD));
        assert!(!silence.is_too_long(3_600_000_000, HELD));
    }
}
