//! Builds all programs and libraries into one folder, under the file names that the programs
//! expect.

use std::{fs, path::Path, process::Command};

use affinode_e2e::artifacts::{Artifacts, target_dir, workspace_dir};
use anyhow::{Context, Result};

use crate::{output, sh};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// A build without optimisation, which is quick. It is for tests and the demo.
    Dev,
    /// A build with optimisation. It is for benches and GPU machines.
    Release,
}

impl Profile {
    /// Returns the profile that a `--release` flag selects.
    pub fn from_release(release: bool) -> Self {
        if release { Profile::Release } else { Profile::Dev }
    }

    fn cargo_name(self) -> &'static str {
        match self {
            Profile::Dev => "dev",
            Profile::Release => "release",
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Profile::Dev => "debug",
            Profile::Release => "release",
        }
    }

    /// Returns the folder of the built files.
    pub fn artifacts(self) -> Artifacts {
        let root = target_dir().join("affinode");
        Artifacts::at(match self {
            Profile::Dev => root,
            Profile::Release => root.join("release"),
        })
    }
}

/// Cargo packages, and the binaries that they contain.
const BINARIES: [(&str, &str); 8] = [
    ("affinode-shim", "containerd-shim-affinode-v1"),
    ("affinode-shim", "affinode-runtime"),
    ("affinode-cli", "affinode"),
    ("affinode-cluster", "affinode-cluster"),
    ("affinode-cluster", "kubectl-affinode"),
    ("affinode-sim-gpud", "affinode-sim-gpud"),
    ("affinode-e2e", "affinode-keeper"),
    ("affinode-e2e", "affinode-gpu-suite"),
];
/// Cargo packages of the simulated driver, the files that they build, and the names under which
/// programs load these files.
const SIMULATED: [(&str, &str, &str); 2] = [
    ("affinode-sim-cuda", "libaffinode_sim_cuda.so", "libcuda.so.1"),
    ("affinode-sim-nvml", "libaffinode_sim_nvml.so", "libnvidia-ml.so.1"),
];
const PRELOAD: &str = "libaffinode_preload.so";

pub fn all(profile: Profile) -> Result<Artifacts> {
    let artifacts = profile.artifacts();
    output::step("Building shim, controller, command and simulated GPU");
    let mut build = cargo(&["build", "--profile", profile.cargo_name()]);
    match profile {
        // A selection by target builds shared crates with the features that the whole workspace
        // enables, as the tests do, so that nothing is built twice.
        Profile::Dev => {
            build.arg("--lib");
            for (_, binary) in BINARIES {
                build.args(["--bin", binary]);
            }
        }
        // A selection by package leaves out what only tests enable.
        Profile::Release => {
            let simulated = SIMULATED.iter().map(|(package, ..)| package);
            let packages = BINARIES.iter().map(|(package, _)| package).chain(simulated);
            for package in packages {
                build.args(["-p", package]);
            }
        }
    }
    sh::run(&mut build)?;
    let built = target_dir().join(profile.folder());
    for (_, binary) in BINARIES {
        place(&built.join(binary), &artifacts.bin_dir().join(binary))?;
    }
    for (_, file, name) in SIMULATED {
        place(&built.join(file), &artifacts.sim_dir().join(name))?;
    }
    output::step("Building the preload library");
    sh::run(&mut cargo(&[
        "rustc",
        "-p",
        "affinode-preload",
        "--profile",
        "preload",
        "--lib",
        "--crate-type",
        "cdylib",
    ]))?;
    place(&target_dir().join("preload").join(PRELOAD), &artifacts.lib_dir().join(PRELOAD))?;
    output::step("Building the CUDA programs");
    clients(&artifacts)?;
    Ok(artifacts)
}

/// Copies a file under a temporary name, and then renames the copy to its final path. A process
/// that has mapped the old file keeps the old contents.
fn place(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("the file's path has no folder")?;
    fs::create_dir_all(folder)?;
    // The temporary name contains the process id, because another build may write the same file at
    // this time.
    let fresh = to.with_extension(format!("new-{}", std::process::id()));
    fs::copy(from, &fresh).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::rename(&fresh, to).with_context(|| format!("cannot place {}", to.display()))
}

fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(workspace_dir()).args(arguments).arg("--quiet");
    command
}

/// Builds the client programs with their own build script, and the programs of the GPU suite.
fn clients(artifacts: &Artifacts) -> Result<()> {
    let sources = workspace_dir().join("integration/clients");
    let target = artifacts.clients_dir();
    sh::run(Command::new("sh").arg(sources.join("build.sh")).arg(&target))?;
    let own = workspace_dir().join("integration/e2e/programs");
    for program in ["attack", "call_cost", "lie", "links", "memory_cost", "scribble"] {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-Wall", "-o"]).arg(target.join(program)).arg("-I").arg(&sources);
        gcc.arg(own.join(program).with_extension("c"));
        gcc.args(["client.c", "load_dlsym.c"].map(|file| sources.join(file)))
            .args(["-ldl", "-pthread"]);
        sh::run(&mut gcc)?;
    }
    // The programs import each other, so all of them are copied.
    for entry in fs::read_dir(&own)? {
        let program = entry?.path();
        if program.extension().is_some_and(|ending| ending == "py") {
            place(
                &program,
                &target.join(program.file_name().context("the path has no file name")?),
            )?;
        }
    }
    Ok(())
}
