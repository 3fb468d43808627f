//! The engines side by side, and their goals, as the suite for GPU machines prints them.

use std::process::Command;

use affinode_e2e::{
    artifacts::{ARTIFACTS_ENV, Artifacts, target_dir},
    gpu::Gpu,
    release::Release,
};
use anyhow::Result;

use crate::output;

/// Runs them on the machine's GPU, or else on the simulated one, whose figures are those of this
/// machine's memory and of nothing else. Whether every goal was met and no part failed.
pub fn measure(artifacts: &Artifacts, release: &Release) -> Result<bool> {
    let file = target_dir().join("bench-engines.json");
    let mut suite = Command::new(artifacts.bin("affinode-gpu-suite")?);
    suite.env(ARTIFACTS_ENV, artifacts.root()).arg(&release.bin_dir).arg(&file);
    if !Gpu::real_is_there() {
        output::out("The GPU is simulated: what is shown is that it works, not how fast.");
        suite.arg("simulated");
    }
    // What misses a goal is in the table, and a failure of a strict bench alone.
    let ended = suite.arg("engines").status()?;
    if !ended.success() {
        output::out("A goal was missed, or a part failed: see above.");
    }
    output::out(&format!("{}: the same as JSON", file.display()));
    Ok(ended.success())
}
