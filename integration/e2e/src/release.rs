//! The containerd releases with which the tests can run: the release on the machine, and releases
//! that `cargo xtask deps` unpacked.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use crate::artifacts::Artifacts;

/// A release line of containerd. All releases of a line have the same interface to shims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Line {
    /// containerd 1.6: it runs a shim's `start` once per container. `start` replies with an address
    /// as text.
    #[serde(rename = "1.6")]
    V1_6,
    /// containerd 1.7: like 1.6, but containerd passes more environment variables to a shim.
    #[serde(rename = "1.7")]
    V1_7,
    /// containerd 2.x: a shim's `start` replies with JSON. This line also has sandboxes, and runs a
    /// shim with `-info`.
    #[serde(rename = "2")]
    V2,
}

impl Line {
    /// All release lines, the oldest first.
    pub const ALL: [Line; 3] = [Line::V1_6, Line::V1_7, Line::V2];

    /// Returns the release line of a version such as `1.7.24~ds1`. `None` if the line is unknown.
    #[must_use]
    pub fn of(version: &str) -> Option<Line> {
        let version = version.trim_start_matches('v');
        [("1.6.", Line::V1_6), ("1.7.", Line::V1_7), ("2.", Line::V2)]
            .into_iter()
            .find_map(|(prefix, line)| version.starts_with(prefix).then_some(line))
    }

    /// Usual name of the release line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Line::V1_6 => "1.6",
            Line::V1_7 => "1.7",
            Line::V2 => "2.x",
        }
    }
}

/// One release of containerd, with the `ctr` and the stock shim of the same release.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Release {
    /// Release line to which this release belongs.
    pub line: Line,
    /// Version that `containerd --version` prints.
    pub version: String,
    /// Folder with `containerd`, `ctr` and `containerd-shim-runc-v2`.
    pub bin_dir: PathBuf,
}

/// The containerd releases that `cargo xtask deps` found or downloaded, from `cache/releases.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Releases {
    /// Releases that can be used.
    pub available: Vec<Release>,
    /// Release lines that cannot be used, each with the reason.
    pub unavailable: BTreeMap<String, String>,
}

impl Releases {
    /// Path of the file that lists the releases.
    #[must_use]
    pub fn file(artifacts: &Artifacts) -> PathBuf {
        artifacts.cache_dir().join("releases.json")
    }

    /// Reads the list of releases.
    ///
    /// # Errors
    /// When the file is missing or invalid.
    pub fn read(artifacts: &Artifacts) -> Result<Self> {
        let file = Self::file(artifacts);
        let text = std::fs::read(&file)
            .with_context(|| format!("cannot read {}: run `cargo xtask deps`", file.display()))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("cannot parse {}: run `cargo xtask deps`", file.display()))
    }

    /// Returns the release of a line. `None` if this machine has no release of the line. In this
    /// case the reason is printed to stderr.
    ///
    /// # Errors
    /// When the list does not mention the line.
    pub fn get(&self, line: Line) -> Result<Option<&Release>> {
        if let Some(release) = self.available.iter().find(|release| release.line == line) {
            return Ok(Some(release));
        }
        self.unavailable.get(line.as_str()).map(|_| None).ok_or_else(|| {
            anyhow!("containerd {} is not in the list: run `cargo xtask deps`", line.as_str())
        })
    }

    /// Returns the machine's own containerd, which is the first in the list.
    ///
    /// # Errors
    /// When the list is empty.
    pub fn own(&self) -> Result<&Release> {
        self.available.first().context("no containerd: run `cargo xtask deps`")
    }
}

impl Release {
    /// Runs the containerd in this folder to find its version, and returns the release.
    ///
    /// # Errors
    /// When containerd cannot be run, or its line is unknown.
    pub fn probe(bin_dir: &Path) -> Result<Self> {
        let program = bin_dir.join("containerd");
        let output = std::process::Command::new(&program)
            .arg("--version")
            .output()
            .with_context(|| format!("cannot run {}", program.display()))?;
        // Example of the output: containerd github.com/containerd/containerd/v2 2.1.9+unknown
        // 1234abc
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .split_whitespace()
            .nth(2)
            .context("cannot find the version in containerd's output")?;
        let line = Line::of(version).with_context(|| {
            format!("containerd {version} is not supported: 1.6, 1.7 or 2.x is needed")
        })?;
        Ok(Self { line, version: version.to_owned(), bin_dir: bin_dir.to_path_buf() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart() {
        assert_eq!(Line::of("1.6.20~ds1"), Some(Line::V1_6));
        assert_eq!(Line::of("1.7.24~ds1"), Some(Line::V1_7));
        assert_eq!(Line::of("v2.1.9+unknown"), Some(Line::V2));
        assert_eq!(Line::of("1.5.9"), None);
    }
}
