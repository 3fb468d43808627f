//! What was seen, step by step, as a table for people and as JSON.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

use crate::{output, step::Tried};

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
    #[serde(flatten)]
    tried: Tried,
}

impl Rows {
    /// Without a row yet.
    pub fn new(node: String) -> Self {
        Self { node, rows: Vec::new() }
    }

    /// Tries the steps of a part in order; those behind a failed one are not tried.
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

    /// Rows that are not as they should be.
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
