//! `cargo xtask test`: every test of this machine.

use std::{ffi::OsStr, process::Command};

use affinode_e2e::artifacts::{ARTIFACTS_ENV, workspace_dir};
use anyhow::{Result, bail};
use clap::Args;
use nix::unistd::Uid;

use crate::{build, deps, say, sh};

/// What to run.
#[derive(Args)]
pub struct Options {
    /// Only the end-to-end tests.
    #[arg(long)]
    e2e: bool,
    /// Passed to the tests: a filter, or flags after `--`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Builds, then runs crate tests, then end-to-end tests.
pub fn run(options: &Options) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("the end-to-end tests start containerd and mount: run as root");
    }
    deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let path = [deps::promtool()?.into_os_string(), std::env::var_os("PATH").unwrap_or_default()];
    let path = path.join(OsStr::new(":"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let test = |selection: &[&str]| {
        let mut command = Command::new(&cargo);
        command.current_dir(workspace_dir()).arg("test").args(selection).args(&options.rest);
        command.env(ARTIFACTS_ENV, artifacts.root()).env("PATH", &path);
        // It is there: a test that cannot find it is broken.
        command.env("AFFINODE_NEEDS_PROMTOOL", "1");
        // A failed check names what failed: a backtrace of it says nothing more.
        command.env("RUST_LIB_BACKTRACE", "0");
        sh::run(&mut command)
    };
    if !options.e2e {
        say::step("Tests of the crates");
        test(&["--workspace", "--exclude", "affinode-e2e"])?;
    }
    say::step("End-to-end tests");
    test(&["-p", "affinode-e2e"])
}
