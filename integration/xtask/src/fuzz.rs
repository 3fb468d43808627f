//! `cargo xtask fuzz`: runs libFuzzer, guided by code coverage, on every target of
//! `integration/fuzz`. The stable compiler is used, with LLVM's own coverage passes.
//!
//! New inputs of a run are stored in `target/fuzz/corpus`, and failing inputs in
//! `target/fuzz/artifacts`. A failure ends the command.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::{target_dir, workspace_dir};
use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{output, sh};

/// Time in seconds after which an input counts as a failure.
const SLOW_S: u32 = 10;
/// Memory limit in MiB. No parser may need more for an input of a few KiB.
const MEMORY_MIB: u32 = 1024;

#[derive(Args)]
pub struct Options {
    /// Seconds to run each target.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only these targets: page, messages, hostile, ttrpc, …
    targets: Vec<String>,
    /// Build without optimisation, with the dependencies that the tests use. The build takes two
    /// minutes less, and a target tries a half to a tenth of the inputs in the same time.
    #[arg(long)]
    quick: bool,
    /// Reduce the inputs to the smallest set with the same coverage, and store it in the checked-in
    /// corpora.
    #[arg(long)]
    keep: bool,
}

/// Builds all targets once, then runs each target.
pub fn run(options: &Options) -> Result<()> {
    let corpora = workspace_dir().join("integration/fuzz/corpus");
    let known = names(&corpora)?;
    if let Some(unknown) = options.targets.iter().find(|name| !known.contains(name)) {
        bail!("unknown target {unknown}; targets: {}", known.join(", "));
    }
    let chosen = if options.targets.is_empty() { &known } else { &options.targets };
    let work = target_dir().join("fuzz");
    let binary = build(options.quick)?;
    for name in chosen {
        let seeds = corpora.join(name);
        let found = work.join("corpus").join(name);
        let artifacts = work.join("artifacts").join(name);
        fs::create_dir_all(&found)?;
        fs::create_dir_all(&artifacts)?;
        output::step(&format!("Fuzzing {name} for {} s", options.seconds));
        let mut fuzzer = fuzzer(&binary, name);
        fuzzer.arg(format!("-max_total_time={}", options.seconds));
        fuzzer.arg(format!("-artifact_prefix={}/", artifacts.display()));
        sh::run(fuzzer.arg(&found).arg(&seeds))
            .with_context(|| format!("target {name}: the input is in {}", artifacts.display()))?;
        if options.keep {
            keep(&binary, name, &[&found, &seeds], &seeds)?;
        }
    }
    Ok(())
}

fn fuzzer(binary: &Path, name: &str) -> Command {
    let mut command = Command::new(binary);
    command.env("AFFINODE_FUZZ_TARGET", name);
    command.args([
        format!("-timeout={SLOW_S}"),
        format!("-rss_limit_mb={MEMORY_MIB}"),
        "-max_len=4096".into(),
        "-print_final_stats=1".into(),
        "-verbosity=0".into(),
        "-print_funcs=0".into(),
    ]);
    command
}

/// Replaces a corpus (stored test inputs) by the smallest set of inputs with the same coverage.
fn keep(binary: &Path, name: &str, from: &[&Path], corpus: &Path) -> Result<()> {
    let merged = corpus.with_extension("merged");
    fs::create_dir_all(&merged)?;
    sh::run(fuzzer(binary, name).arg("-merge=1").arg(&merged).args(from))?;
    fs::remove_dir_all(corpus)?;
    fs::rename(&merged, corpus)?;
    Ok(())
}

fn names(corpora: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(corpora).with_context(|| corpora.display().to_string())?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn build(quick: bool) -> Result<PathBuf> {
    output::step("Building the fuzz targets");
    let (profile, folder) = if quick { ("dev", "debug") } else { ("fuzz", "fuzz") };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let wrapper = workspace_dir().join("integration/fuzz/rustc.sh");
    command.current_dir(workspace_dir()).env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    // `--bin` and not `--package`, so that the dependencies have the features that the tests use.
    command.args(["build", "--quiet", "--bin=affinode-fuzz", "--features=affinode-fuzz/coverage"]);
    sh::run(command.args(["--profile", profile]))?;
    Ok(target_dir().join(folder).join("affinode-fuzz"))
}
