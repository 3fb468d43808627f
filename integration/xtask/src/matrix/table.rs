//! The results of the matrix, which are printed as a table or as JSON.

use std::{
    env,
    fmt::{self, Write},
    process::Command,
};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::{sh, step::Tried};

#[derive(Serialize)]
pub struct Table {
    /// Date of the run, in the form 2026-01-31.
    date: String,
    runc: String,
    kernel: String,
    /// The columns of the table, one for each containerd release.
    pub columns: Vec<Column>,
}

#[derive(Serialize)]
pub struct Column {
    containerd: String,
    cells: Vec<Cell>,
}

/// Result of one step on one containerd release.
#[derive(Serialize)]
struct Cell {
    step: String,
    #[serde(flatten)]
    tried: Tried,
}

impl Column {
    /// Creates a column without cells for a containerd release.
    pub fn new(containerd: &str) -> Self {
        let containerd = containerd.trim_start_matches('v').to_owned();
        Self { containerd, cells: Vec::new() }
    }

    /// Runs a step and records the text that it returns. Returns whether the step passed.
    pub fn step(&mut self, step: &str, work: impl FnOnce() -> Result<String>) -> bool {
        let tried = Tried::step(step, work);
        let passed = tried.passed();
        self.cells.push(Cell { step: step.into(), tried });
        passed
    }

    /// Records a step as failed because its preparation failed.
    pub fn failed(&mut self, step: &str, error: &anyhow::Error) {
        self.step(step, || bail!("{error:#}"));
    }

    /// Records a step that was not run because an earlier step failed.
    pub fn not_tried(&mut self, step: &str) {
        self.cells.push(Cell { step: step.into(), tried: Tried::not_tried() });
    }
}

impl Table {
    /// Creates a table for this machine, without columns.
    pub fn here() -> Result<Self> {
        let read = |program: &str, argument: &str| sh::read(Command::new(program).arg(argument));
        let runc = read("runc", "--version")?;
        let kernel = read("uname", "--kernel-release")?;
        Ok(Self {
            date: read("date", "--iso-8601")?.trim().to_owned(),
            runc: runc.lines().next().unwrap_or("runc").to_owned(),
            // The text after the first hyphen is the distribution's suffix.
            kernel: kernel.trim().split('-').next().unwrap_or_default().to_owned(),
            columns: Vec::new(),
        })
    }

    /// Number of failed cells.
    pub fn failures(&self) -> usize {
        let cells = self.columns.iter().flat_map(|column| &column.cells);
        cells.filter(|cell| !cell.tried.passed()).count()
    }

    pub fn page(&self) -> String {
        format!(
            "# Matrix\n\n\
             Printed by `cargo xtask matrix`: the life cycle of an installation on each containerd, with the\n\
             simulated GPU and a test program in place of systemctl. Each cell contains what was observed.\n\
             `NODE` is the folder of the test's node.\n\n\
             {}: {}, Linux {}.\n\n{}",
            self.date,
            self.runc,
            self.kernel,
            without_folders(&self.to_string())
        )
    }
}

/// Replaces the folders of the test's nodes in a text, because they differ from run to run.
fn without_folders(text: &str) -> String {
    let begin = env::temp_dir().join("afn-").display().to_string();
    let mut parts = text.split(&begin);
    let mut page = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.find('/').map_or("", |end| &part[end..]);
        page.push_str("NODE");
        page.push_str(rest);
    }
    page
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::from("| |");
        for column in &self.columns {
            let _ = write!(line, " {} |", column.containerd);
        }
        writeln!(f, "{line}\n|---{}", "|---".repeat(self.columns.len()) + "|")?;
        let mut steps: Vec<&str> = Vec::new();
        for cell in self.columns.iter().flat_map(|column| &column.cells) {
            if !steps.contains(&cell.step.as_str()) {
                steps.push(&cell.step);
            }
        }
        for step in &steps {
            write!(f, "| {step} |")?;
            for column in &self.columns {
                let cell = column.cells.iter().find(|cell| cell.step == *step);
                write!(f, " {} |", cell.map_or("-", |cell| cell.tried.sign()))?;
            }
            writeln!(f)?;
        }
        writeln!(f)?;
        for column in &self.columns {
            writeln!(f, "containerd {}:\n", column.containerd)?;
            for cell in &column.cells {
                let (step, tried) = (&cell.step, &cell.tried);
                let (sign, seconds) = (tried.sign(), tried.seconds());
                writeln!(f, "- {step} ({sign}, {seconds:.1} s): {}", tried.seen())?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_names_no_folder_of_the_test() {
        let folder = env::temp_dir().join("afn-4802-2f/etc/a.toml");
        let text = format!("cannot read {0} or {0}: no such file", folder.display());
        let expected = "cannot read NODE/etc/a.toml or NODE/etc/a.toml: no such file";
        assert_eq!(without_folders(&text), expected);
    }
}
