//! The results of all steps, which are printed as a table or as JSON.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

use crate::{output, step::Tried};

/// A test step: its name, and the function that runs it and returns the observation.
pub type Step<T> = (&'static str, fn(&mut T) -> Result<String>);

/// Results of all steps so far.
#[derive(Serialize)]
pub struct Rows {
    /// Description of the node on which the steps ran.
    pub node: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    part: &'static str,
    step: &'static str,
    #[serde(flatten)]
    tried: Tried,
}

impl Rows {
    /// Creates a table without rows.
    pub fn new(node: String) -> Self {
        Self { node, rows: Vec::new() }
    }

    /// Runs the steps of a part in order. Steps after a failed step are not run. Returns whether
    /// all steps passed.
    pub fn part<T>(&mut self, part: &'static str, steps: &[Step<T>], state: &mut T) -> bool {
        output::step(part);
        let mut holds = true;
        for (step, work) in steps {
            let tried = match holds {
                true => Tried::step(step, || work(state)),
                false => Tried::not_tried(),
            };
            holds = tried.passed();
            self.rows.push(Row { part, step, tried });
        }
        holds
    }

    /// Number of steps that did not pass.
    pub fn failures(&self) -> usize {
        self.rows.iter().filter(|row| !row.tried.passed()).count()
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.node)?;
        writeln!(f, "| | step | | s | seen |\n|---|---|---|---|---|")?;
        for row in &self.rows {
            let Row { part, step, tried } = row;
            let (sign, seconds) = (tried.sign(), tried.seconds());
            let seen = tried.seen().replace('|', "\\|");
            writeln!(f, "| {part} | {step} | {sign} | {seconds:.1} | {seen} |")?;
        }
        Ok(())
    }
}
