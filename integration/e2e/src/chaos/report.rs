//! The report of a crash campaign.

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;

/// Text in the report for a fault that targets a copier while no copier runs. It stands in the
/// place of a container's state.
pub(super) const NO_COPIER: &str = "(no copier)";

/// A violated invariant, and the round in which it was found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Number of the round. Together with the seed it reproduces the finding.
    pub round: u64,
    /// Kind of finding: lost, stuck, corrupted, leaked or error.
    pub kind: &'static str,
    /// Description of the finding.
    pub text: String,
}

/// The findings and counts of a campaign.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Kind of GPU: simulated or real.
    pub gpu: String,
    /// Seed that replays the campaign.
    pub seed: u64,
    /// Number of rounds that ran.
    pub rounds: u64,
    /// Number of faults by kind, and by the state of the container that the fault hit.
    pub strikes: BTreeMap<&'static str, BTreeMap<String, u64>>,
    /// Number of process verifications, summed over all rounds.
    pub verified: u64,
    /// Number of restores, summed over the rounds that reached the check for leaks. Restores that a
    /// user requested count as well.
    pub wakes: u64,
    /// Number of rounds that began while the twins shared contents.
    pub together: u64,
    /// Number of containers whose content moved to disk, summed over all rounds.
    pub stored: u64,
    /// Longest time from the kill of a controller to the first reply of the next controller, in
    /// milliseconds. The time includes the start of the command that receives the reply.
    pub longest_return_ms: u64,
    /// Duration of the campaign in seconds.
    pub seconds: f64,
    /// Findings of the campaign. Empty if all invariants held.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether the campaign has findings.
    #[must_use]
    pub fn failed(&self) -> bool {
        !self.findings.is_empty()
    }

    /// Adds the results of a round.
    pub(super) fn add(&mut self, round: Report) {
        self.rounds += 1;
        for (fault, by_state) in round.strikes {
            for (state, times) in by_state {
                *self.strikes.entry(fault).or_default().entry(state).or_default() += times;
            }
        }
        self.verified += round.verified;
        self.wakes += round.wakes;
        self.together += round.together;
        self.stored += round.stored;
        self.longest_return_ms = self.longest_return_ms.max(round.longest_return_ms);
        self.findings.extend(round.findings);
    }

    pub(super) fn count(&mut self, fault: &'static str, state: &str) {
        let state = if state.is_empty() { "unknown" } else { state };
        *self.strikes.entry(fault).or_default().entry(state.to_owned()).or_default() += 1;
    }

    /// Returns the report as a table for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let states = [
            "Active",
            "Idle",
            "Closing",
            "Offloading",
            "Offloaded",
            "Queued",
            "Restoring",
            "Unregistered",
            NO_COPIER,
            "unknown",
        ];
        let _ = write!(text, "{:<20}", "STRUCK IN");
        for state in states {
            let _ = write!(text, " {state:>12}");
        }
        text.push('\n');
        for (fault, by_state) in &self.strikes {
            let _ = write!(text, "{fault:<20}");
            for state in states {
                let _ = write!(text, " {:>12}", by_state.get(state).copied().unwrap_or(0));
            }
            text.push('\n');
        }
        let of = |kind: &str| self.findings.iter().filter(|finding| finding.kind == kind).count();
        let _ = writeln!(
            text,
            "\n{} GPU, seed {}: {} rounds in {:.0} s, {} of them from content held once; {} processes \
             verified, {} wakes, {} moves to disk, first answer of a controller within {} ms\nlost {}, stuck {}, corrupted {}, leaked {}, errors {}",
            self.gpu,
            self.seed,
            self.rounds,
            self.seconds,
            self.together,
            self.verified,
            self.wakes,
            self.stored,
            self.longest_return_ms,
            of("lost"),
            of("stuck"),
            of("corrupted"),
            of("leaked"),
            of("error"),
        );
        for finding in &self.findings {
            let _ = writeln!(text, "  round {}: {}: {}", finding.round, finding.kind, finding.text);
        }
        text
    }
}
