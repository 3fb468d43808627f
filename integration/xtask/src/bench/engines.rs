//! Compares the engines (methods to move GPU memory), and prints each figure with its goal, in the
//! same form as the suite for GPU machines.

use std::process::Command;

use affinode_e2e::{
    artifacts::{ARTIFACTS_ENV, Artifacts, target_dir},
    gpu::Gpu,
    release::Release,
};
use anyhow::Result;

use crate::output;

/// Compares the engines on the machine's GPU, or on the simulated GPU if the machine has none. The
/// figures of the simulated GPU depend only on this machine's memory. Returns whether every goal
/// was met and no part failed.
pub fn measure(artifacts: &Artifacts, release: &Release) -> Result<bool> {
    let file = target_dir().join("bench-engines.json");
    let mut suite = Command::new(artifacts.bin("affinode-gpu-suite")?);
    suite.env(ARTIFACTS_ENV, artifacts.root()).arg(&release.bin_dir).arg(&file);
    if !Gpu::real_is_there() {
        output::out(
            "The GPU is simulated. The results show that the engines work, but not how fast they are on a real GPU.",
        );
        suite.arg("simulated");
    }
    // A missed goal is shown in the table. It is an error only with `--strict`.
    let ended = suite.arg("engines").status()?;
    if !ended.success() {
        output::out("A goal was missed, or a part failed: see the output above.");
    }
    output::out(&format!("{}: the same results as JSON", file.display()));
    Ok(ended.success())
}
