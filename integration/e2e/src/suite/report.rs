//! The report of the suite, with its results as rows of a table and as JSON.

use std::fmt::{self, Write};

use anyhow::Result;
use serde::Serialize;

use super::goals;
use crate::testbed::Testbed;

/// Error of a part of the suite: software that the part needs is not installed. The value is the
/// reason.
#[derive(Debug)]
pub struct NotHere(pub String);

impl fmt::Display for NotHere {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "not here: {}", self.0)
    }
}

impl std::error::Error for NotHere {}

/// One measured value of a part of the suite.
#[derive(Debug, Serialize)]
pub struct Row {
    part: String,
    what: String,
    value: f64,
    unit: &'static str,
    /// Description of the goal for the measured value. Empty if there is no goal.
    goal: String,
    met: bool,
}

/// The rows of one part of the suite.
#[derive(Default)]
pub struct Rows {
    rows: Vec<(String, f64, &'static str, String, bool)>,
}

impl Rows {
    /// Adds a row with a measured value that has no goal.
    pub fn tell(&mut self, what: &str, value: f64, unit: &'static str) {
        self.rows.push((what.into(), value, unit, String::new(), true));
    }

    /// Adds a row with a measured value and its goal. `met` is true if the value meets the goal.
    pub fn want(&mut self, what: &str, value: f64, unit: &'static str, goal: &str, met: bool) {
        self.rows.push((what.into(), value, unit, goal.into(), met));
    }

    /// Appends all rows of `others` to these rows.
    pub(super) fn append(&mut self, mut others: Rows) {
        self.rows.append(&mut others.rows);
    }

    /// Describes each value that missed its goal.
    #[must_use]
    pub fn missed(&self) -> Vec<String> {
        let missed = self.rows.iter().filter(|row| !row.4);
        missed
            .map(|(what, value, unit, goal, _)| format!("{what}: {value} {unit}, not {goal}"))
            .collect()
    }

    /// Returns the values of all rows.
    #[cfg(test)]
    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().map(|row| row.1)
    }

    /// Prints the rows of a part before the run ends, so that they are not lost if the run is
    /// interrupted.
    #[expect(clippy::print_stderr, reason = "what is being done now")]
    fn say(&self, part: &str) {
        for (what, value, unit, ..) in &self.rows {
            eprintln!("{part}: {what}: {value:.3} {unit}");
        }
    }

    /// Adds a row that counts successes: `good` of `of` attempts succeeded. The goal is met if all
    /// attempts succeeded.
    pub fn count(&mut self, what: &str, good: usize, of: usize) {
        self.want(what, good as f64, "", &format!("{of} of {of}"), good == of);
    }
}

/// All results of a run of the suite.
#[derive(Debug, Serialize)]
pub struct Report {
    gpu: String,
    gpu_name: String,
    containerd: String,
    rows: Vec<Row>,
    /// Name of each part that failed, and its error.
    errors: Vec<(String, String)>,
    /// Name of each part that this machine cannot run, and the reason.
    skipped: Vec<(String, String)>,
    #[serde(skip)]
    wanted: Vec<String>,
}

impl Report {
    /// Creates an empty report for the parts in `wanted`.
    pub(super) fn new(world: &Testbed, wanted: &[&str]) -> Self {
        Self {
            gpu: world.gpu().as_str().into(),
            gpu_name: String::new(),
            containerd: world.containerd().release().version.clone(),
            rows: Vec::new(),
            errors: Vec::new(),
            skipped: Vec::new(),
            wanted: wanted.iter().map(|&word| word.into()).collect(),
        }
    }

    /// Whether this part of the suite is selected. It is selected if its name contains one of the
    /// words with which the report was created, or if there are no such words.
    pub(super) fn wants(&self, part: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|word| part.contains(word.as_str()))
    }

    /// Runs a part of the suite, and adds its rows. If the part fails, the rows so far are kept and
    /// its containers are removed.
    pub(super) fn part(
        &mut self,
        world: &Testbed,
        part: &str,
        work: impl FnOnce(&Testbed, &mut Rows) -> Result<()>,
    ) {
        if !self.wants(part) {
            return;
        }
        let mut rows = Rows::default();
        let outcome = work(world, &mut rows);
        rows.say(part);
        self.add(part, rows);
        if let Err(error) = outcome.and_then(|()| world.remove_containers()) {
            let list = if error.is::<NotHere>() { &mut self.skipped } else { &mut self.errors };
            list.push((part.into(), format!("{error:#}")));
            // Containers of this part would disturb the next part.
            let _ = world.remove_containers();
        }
    }

    fn add(&mut self, part: &str, rows: Rows) {
        for (what, value, unit, goal, met) in rows.rows {
            self.rows.push(Row { part: part.into(), what, value, unit, goal, met });
        }
    }

    /// Records that a part cannot run on this machine.
    pub(super) fn skip(&mut self, part: &str, why: &str) {
        self.skipped.push((part.into(), why.into()));
    }

    /// Compares values of the report with the project's goals, and adds a row for each comparison.
    /// The goals apply to one GPU model only, so on other GPUs nothing is added.
    pub(super) fn judge(&mut self) {
        if self.gpu != "real" || !self.gpu_name.contains("H200") {
            return;
        }
        let value = |part: &str, what: &str, unit: &str| {
            let is = |row: &&Row| (&*row.part, &*row.what, row.unit) == (part, what, unit);
            self.rows.iter().find(is).map(|row| row.value)
        };
        let mut goals = Rows::default();
        goals::judge(value, &mut goals);
        self.add("goals", goals);
    }

    /// Records the name of the GPU.
    pub fn name_gpu(&mut self, name: &str) {
        name.clone_into(&mut self.gpu_name);
    }

    /// Whether the run failed: a part failed, a goal was missed, or the requested words matched the
    /// name of no part.
    #[must_use]
    pub fn failed(&self) -> bool {
        !self.errors.is_empty() || self.rows.iter().any(|row| !row.met) || self.is_empty()
    }

    fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.errors.is_empty() && self.skipped.is_empty()
    }

    /// Whether at least one part failed with an error.
    pub(super) fn broke(&self) -> bool {
        !self.errors.is_empty()
    }

    /// Returns the report as a table for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text =
            format!("{} GPU {}, containerd {}\n\n", self.gpu, self.gpu_name, self.containerd);
        let mut part = "";
        for row in &self.rows {
            if row.part != part {
                part = &row.part;
                let _ = writeln!(text, "{part}");
            }
            let verdict = match (row.goal.as_str(), row.met) {
                ("", _) => "",
                (_, true) => "met",
                (_, false) => "MISSED",
            };
            let _ = writeln!(
                text,
                "  {:<52} {:>12.3} {:<6} {:<28} {verdict}",
                row.what, row.value, row.unit, row.goal
            );
        }
        for (part, error) in &self.errors {
            let _ = writeln!(text, "\nFAILED  {part}: {error}");
        }
        if self.is_empty() {
            let _ = writeln!(text, "FAILED  no part's name contains {}", self.wanted.join(" or "));
        }
        for (part, why) in &self.skipped {
            let _ = writeln!(text, "\nskipped {part}: {why}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_without_a_part_is_an_error() {
        let report = || Report {
            gpu: String::new(),
            gpu_name: String::new(),
            containerd: String::new(),
            rows: Vec::new(),
            errors: Vec::new(),
            skipped: Vec::new(),
            wanted: vec!["nonsense".into()],
        };
        let nothing = report();
        assert!(nothing.failed() && !nothing.wants("torch") && nothing.wants("a nonsense part"));
        assert!(nothing.table().contains("no part's name contains nonsense"));
        let mut skipped = report();
        skipped.skip("torch", "no torch here");
        assert!(!skipped.failed() && !skipped.table().contains("no part's name"));
    }
}
