//! A step that was tried, and how it ended: what the tables of `matrix` and `systemd` are made of.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::output;

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Passed,
    Failed,
    /// An earlier step failed that it builds on.
    NotTried,
}

/// A step's end.
#[derive(Serialize)]
pub struct Tried {
    outcome: Outcome,
    /// What was seen, or what failed.
    seen: String,
    elapsed_ms: u64,
}

impl Tried {
    /// Tries a step, and says so: what it returns is what was seen.
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

    /// A step that an earlier one stands in the way of.
    pub fn not_tried() -> Self {
        Self {
            outcome: Outcome::NotTried,
            seen: "a step before it failed".to_owned(),
            elapsed_ms: 0,
        }
    }

    /// Whether it is as it should be.
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }

    /// For a cell of a table.
    pub fn sign(&self) -> &'static str {
        match self.outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::NotTried => "not tried",
        }
    }

    /// What was seen, on one line.
    pub fn seen(&self) -> String {
        self.seen.trim().replace('\n', " / ")
    }

    /// How long it took.
    pub fn seconds(&self) -> f64 {
        self.elapsed_ms as f64 / 1000.0
    }
}
