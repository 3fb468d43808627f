//! The table of results of the hazard suite.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

use super::Found;

/// Result of a hazard that was run.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the hazard.
    pub hazard: String,
    /// The result without Affinode.
    pub without: String,
    /// The result with Affinode.
    pub with: String,
    /// Whether all processes that must survive have survived, with their memory intact.
    pub survived: bool,
}

/// The results of all hazards.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Kind of GPU: simulated or real.
    pub gpu: String,
    /// One row for each hazard that was run.
    pub rows: Vec<Row>,
    /// Hazards that cannot occur on this machine, with the reason.
    pub skipped: Vec<(String, String)>,
}

impl Report {
    pub(super) fn new(gpu: &str) -> Self {
        Self { gpu: gpu.into(), rows: Vec::new(), skipped: Vec::new() }
    }

    pub(super) fn add(&mut self, hazard: &str, found: Result<Found>) {
        let (without, with, survived) = match found {
            Ok(Found::Row { without, with }) => (without, with, true),
            Ok(Found::Skipped(why)) => {
                self.skipped.push((hazard.into(), why));
                return;
            }
            Err(error) => (String::new(), format!("{error:#}"), false),
        };
        self.rows.push(Row { hazard: hazard.into(), without, with, survived });
    }

    /// Whether a hazard failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|row| !row.survived)
    }

    /// Returns the report as a table for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let widest = |column: fn(&Row) -> &str, title: &str| {
            let longest = self.rows.iter().map(|row| column(row).chars().count()).max();
            longest.unwrap_or(0).max(title.len())
        };
        let hazard = widest(|row| &row.hazard, "HAZARD");
        let without = widest(|row| &row.without, "WITHOUT AFFINODE");
        let mut text =
            format!("{:<hazard$}  {:<without$}  WITH IT\n", "HAZARD", "WITHOUT AFFINODE");
        for row in &self.rows {
            let verdict = if row.survived { "" } else { "NOT SURVIVED: " };
            let _ = writeln!(
                text,
                "{:<hazard$}  {:<without$}  {verdict}{}",
                row.hazard, row.without, row.with
            );
        }
        let survived = self.rows.iter().filter(|row| row.survived).count();
        let _ = writeln!(text, "\n{} GPU: {survived} of {} survived", self.gpu, self.rows.len());
        for (hazard, why) in &self.skipped {
            let _ = writeln!(text, "skipped {hazard}: {why}");
        }
        text
    }
}
