//! A test step and its outcome. The tables of `matrix` and `systemd` have one cell for each step.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::output;

/// Outcome of a step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Passed,
    Failed,
    /// The step was not run, because a step on which it depends failed.
    NotTried,
}

/// A step that was executed or skipped: its outcome, with the observation or error.
#[derive(Serialize)]
pub struct Tried {
    outcome: Outcome,
    /// Text of the observation or of the error.
    seen: String,
    elapsed_ms: u64,
}

impl Tried {
    /// Runs a step and prints its outcome. The closure returns the observation.
    pub fn step(name: &str, work: impl FnOnce() -> Result<String>) -> Self {
        let began = Instant::now();
        let (outcome, seen) = match work() {
            Ok(seen) => (Outcome::Passed, seen),
            Err(error) => (Outcome::Failed, format!("{error:#}")),
        };
        let elapsed_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let tried = Self { outcome, seen, elapsed_ms };
        output::note(&format!("{} {name}: {}", tried.sign(), tried.seen));
        tried
    }

    /// Creates the outcome of a step that is skipped after a failure.
    pub fn not_tried() -> Self {
        Self {
            outcome: Outcome::NotTried,
            seen: "an earlier step failed".to_owned(),
            elapsed_ms: 0,
        }
    }

    /// Whether the step passed.
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }

    /// Symbol for the outcome in the cell of a table.
    pub fn sign(&self) -> &'static str {
        match self.outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::NotTried => "not tried",
        }
    }

    /// The observation or the error, on one line.
    pub fn seen(&self) -> String {
        self.seen.trim().replace('\n', " / ")
    }

    /// Duration of the step in seconds.
    pub fn seconds(&self) -> f64 {
        self.elapsed_ms as f64 / 1000.0
    }
}
