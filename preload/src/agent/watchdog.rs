//! Measures for how long a response of the controller is overdue, and reports when the agent must
//! act without it.

use affinode_proto::wire::Phase;
use affinode_proto::wire::message::{RESCUE_AFTER_MS, WAKE_REPEAT_MS};

/// State of the process and its connection at one check of the watchdog.
#[derive(Clone, Copy, Debug)]
pub struct GateActivity {
    /// True if a caller waits at the gate.
    pub waiters: bool,
    /// Phase of the process: the step of an offload or a restore.
    pub phase: Phase,
    /// True if the gate holds allocations.
    pub allocations_held: bool,
    /// True if a controller manages the process.
    pub connected: bool,
    /// True if an order or an acknowledgement has arrived since the last check.
    pub heard: bool,
}

impl GateActivity {
    fn answer_is_owed(self) -> bool {
        let held = self.phase != Phase::Open || self.allocations_held;
        // Without a controller, a process whose memory is still on the device opens its gate
        // itself. An offloaded process stays offloaded until a call waits.
        let stranded = !self.connected && matches!(self.phase, Phase::Closed | Phase::Locked);
        (held && self.waiters) || stranded
    }
}

/// Watchdog that measures the time for which a response of the controller is overdue. Time in which
/// the process was frozen or the machine suspended does not count.
#[derive(Debug)]
pub struct ControllerWatchdog {
    last_us: u64,
    owed: bool,
    silent_us: u64,
}

impl ControllerWatchdog {
    /// Creates a watchdog that starts at `now_us`, with no response overdue.
    pub fn new(now_us: u64) -> ControllerWatchdog {
        ControllerWatchdog { last_us: now_us, owed: false, silent_us: 0 }
    }

    /// Updates the watchdog at one check. True: the process must be restored without the
    /// controller. The agent must call this at least every [`WAKE_REPEAT_MS`] while a response is
    /// overdue.
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

    /// Returns the second at which the watchdog fires, if checked once a second for 20 s; `None`:
    /// never.
    fn seconds(silence: &mut ControllerWatchdog, situation: GateActivity) -> Option<u64> {
        let start = silence.last_us;
        (0..20).find(|s| silence.is_too_long(start + s * 1_000_000, situation))
    }

    #[test]
    fn watchdog_fires_after_five_seconds() {
        assert_eq!(seconds(&mut ControllerWatchdog::new(0), HELD), Some(5));
        let heard = GateActivity { heard: true, ..HELD };
        assert_eq!(seconds(&mut ControllerWatchdog::new(0), heard), None);
    }

    #[test]
    fn lost_controller_counts_before_checkpoint() {
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
