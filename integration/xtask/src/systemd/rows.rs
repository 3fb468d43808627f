//! What was seen, step by step, as a table for people and as JSON.

use std::{fmt, time::Instant};

use anyhow::Result;
use serde::Serialize;

use crate::say;

/// A step: its name, and what it does; it returns what was seen.
pub type Step<T> = (&'static str, fn(&mut T) -> Result<String>);

/// All steps that were tried.
#[derive(Serialize)]
pub struct Rows {
    /// What it was seen on.
    pub node: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    part: &'static str,
    step: &'static str,
    outcome: Outcome,
    /// What was seen, or what failed.
    seen: String,
    elapsed_ms: u128,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Passed,
    Failed,
    /// An earlier step failed that it builds on.
    NotTried,
}

impl Outcome {
    fn sign(self) -> &'static str {
        match self {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::NotTried => "not tried",
        }
    }
}

impl Rows {
    /// Without a row yet.
    pub fn new(node: String) -> Self {
        Self { node, rows: Vec::new() }
    }

    /// Tries the steps of a part in order; those behind a failed one are not tried.
    pub fn part<T>(&mut self, part: &'static str, steps: &[Step<T>], state: &mut T) -> bool {
        say::step(part);
        let mut holds = true;
        for (step, work) in steps {
            let began = Instant::now();
            let (outcome, seen) = match holds.then(|| work(state)) {
                None => (Outcome::NotTried, "a step before it failed".to_owned()),
                Some(Ok(seen)) => (Outcome::Passed, seen),
                Some(Err(error)) => (Outcome::Failed, format!("{error:#}")),
            };
            holds = outcome == Outcome::Passed;
            say::note(&format!("{} {step}: {seen}", outcome.sign()));
            let elapsed_ms = began.elapsed().as_millis();
            self.rows.push(Row { part, step, outcome, seen, elapsed_ms });
        }
        holds
    }

    /// Rows that are not as they should be.
    pub fn failures(&self) -> usize {
        self.rows.iter().filter(|row| row.outcome != Outcome::Passed).count()
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.node)?;
        writeln!(f, "| | step | | s | seen |\n|---|---|---|---|---|")?;
        for row in &self.rows {
            let (sign, seconds) = (row.outcome.sign(), row.elapsed_ms as f64 / 1000.0);
            let seen = row.seen.trim().replace('\n', " / ").replace('|', "\\|");
            writeln!(f, "| {} | {} | {sign} | {seconds:.1} | {seen} |", row.part, row.step)?;
        }
        Ok(())
    }
}
