//! `cargo xtask install`: builds Affinode from source and installs it on this machine.

use std::process::Command;

use affinode_e2e::artifacts::{ARTIFACTS_ENV, Artifacts};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, output, sh};

/// Arguments of the installation.
#[derive(Args)]
pub struct Options {
    /// Passed to `affinode install`, for example --dry-run.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Builds Affinode and runs `affinode install`. If `AFFINODE_ARTIFACTS` names built files, these
/// are installed without a build.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!(
            "an installation writes to /usr/local and to the configuration of containerd or Docker: run as root"
        );
    }
    let artifacts = match std::env::var_os(ARTIFACTS_ENV) {
        Some(_) => Artifacts::find()?,
        None => build::all(build::Profile::Release)?,
    };
    output::step("Installing on this machine; `affinode uninstall` reverts it");
    sh::run(Command::new(artifacts.bin("affinode")?).arg("install").args(&options.rest))
}
