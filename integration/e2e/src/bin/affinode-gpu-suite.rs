//! Program that runs the test suite for machines with a real GPU. Its arguments are
//! `CONTAINERD_BIN_DIR REPORT.json [simulated]
//! [suite|suite:WORD|engines|programs|programs:WORD|gpus|steps|steps:WORD|host-memory|host-memory:WORD|calibration|dashboard|hazards|hazards:WORD|chaos|chaos:ROUND]...`.
//! If the arguments name no part, all parts run.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use affinode_e2e::{
    chaos,
    gpu::Gpu,
    hazards,
    release::Release,
    suite,
    testbed::{PLENTY_BYTES, TestbedConfig},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, to_value};

/// Number of rounds of the crash campaign (the part `chaos`).
const ROUNDS: u64 = 30;
/// Number of times that a hazard test wakes two containers at the same time.
const TURNS: usize = 10;
const PARTS: [&str; 10] = [
    "suite",
    "engines",
    "gpus",
    "programs",
    "steps",
    HOST_MEMORY,
    "calibration",
    "dashboard",
    "hazards",
    "chaos",
];
/// Name of the part in which simultaneous offloads need more host memory than the machine has.
const HOST_MEMORY: &str = "host-memory";
/// Parts that belong to `suite` but can also be selected by their own names.
const IN_SUITE: [&str; 2] = ["engines", "gpus"];
/// Parts that can be narrowed: `PART:WORD` runs only the tests of the part that the word selects,
/// and `chaos:ROUND` begins at that round.
const NARROWED: [&str; 6] = ["suite", "programs", "steps", HOST_MEMORY, "hazards", "chaos"];

/// Function that runs one part of the suite and returns a separate report for it. The last argument
/// contains words that select tests of the part. If it is empty, all tests run.
type MakeReport = fn(&Release, Gpu, &[&str]) -> Result<suite::Report>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Runs the chosen parts. Returns whether every goal was met, every hazard was survived, and no
/// process was lost.
fn run() -> Result<bool> {
    let mut arguments = std::env::args_os().skip(1);
    let usage = "usage: affinode-gpu-suite CONTAINERD_BIN_DIR REPORT.json [simulated] [PART]...";
    let release = Release::probe(&PathBuf::from(arguments.next().context(usage)?))?;
    let file = PathBuf::from(arguments.next().context(usage)?);
    let mut words: Vec<String> =
        arguments.map(|word| word.to_string_lossy().into_owned()).collect();
    let simulated = words.iter().any(|word| word == "simulated");
    words.retain(|word| word != "simulated");
    // `suite:WORD` selects only the parts of the suite whose names contain WORD. The other parts of
    // `NARROWED` select in the same way, but `chaos:ROUND` begins at that round.
    let narrowed = |part: &str| -> Vec<String> {
        let prefix = format!("{part}:");
        words.iter().filter_map(|word| word.strip_prefix(&prefix).map(str::to_owned)).collect()
    };
    let mut only = narrowed("suite");
    let loads = narrowed(HOST_MEMORY);
    let hazards = narrowed("hazards");
    let first_round: Option<u64> = match narrowed("chaos").first() {
        Some(round) => Some(round.parse().context("chaos:ROUND needs the number of a round")?),
        None => None,
    };
    let is_narrowed = |word: &str| {
        let part = word.split_once(':').map(|(part, _)| part);
        part.is_some_and(|part| NARROWED.contains(&part))
    };
    for word in words.iter().filter(|word| !is_narrowed(word)) {
        ensure!(
            PARTS.contains(&word.as_str()),
            "unknown part {word:?}; parts: {}",
            PARTS.join(", ")
        );
    }
    let gpu = if simulated { Gpu::Simulated { vram_bytes: PLENTY_BYTES } } else { Gpu::Real };
    let wanted = |part: &str| words.is_empty() || words.iter().any(|word| word == part);

    let recipe = || TestbedConfig::default().release(&release);
    let mut whole = Map::new();
    let mut good = true;
    // The parts in `IN_SUITE` can also be selected by their own names.
    only.extend(words.iter().filter(|word| IN_SUITE.contains(&word.as_str())).cloned());
    if wanted("suite") {
        only.clear();
    }
    if wanted("suite") || !only.is_empty() {
        let only: Vec<&str> = only.iter().map(String::as_str).collect();
        let report = suite::run(&release, gpu.clone(), &only)?;
        print(&report.table());
        good &= !report.failed();
        if let Value::Object(fields) = to_value(&report)? {
            whole.extend(fields);
        }
    }
    if wanted(HOST_MEMORY) || !loads.is_empty() {
        let loads: Vec<&str> = loads.iter().map(String::as_str).collect();
        let report = suite::host_memory(&release, gpu.clone(), &loads)?;
        print(&report.table());
        good &= !report.failed();
        whole.insert(HOST_MEMORY.into(), to_value(&report)?);
    }
    let more: [(&str, MakeReport); 2] = [("programs", suite::programs), ("steps", suite::steps)];
    for (part, make) in more {
        let words = narrowed(part);
        if !wanted(part) && words.is_empty() {
            continue;
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let report = make(&release, gpu.clone(), &words)?;
        print(&report.table());
        good &= !report.failed();
        whole.insert(part.into(), to_value(&report)?);
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    if wanted("calibration") {
        for made in suite::calibrations(&release, gpu.clone(), folder)? {
            say(&format!("{}: for affinode simulate --calibration", made.display()));
        }
    }
    if wanted("dashboard") {
        for made in suite::record(&release, gpu.clone(), folder)? {
            say(&format!("{}: for cargo xtask browser --recorded", made.display()));
        }
    }
    if wanted("hazards") || !hazards.is_empty() {
        let options = hazards::Options { gpu: gpu.clone(), filters: hazards, turns: TURNS };
        let report = hazards::run(&recipe, &options, &mut say)?;
        print(&report.table());
        good &= !report.failed();
        whole.insert("hazards".into(), to_value(&report)?);
    }
    if wanted("chaos") || first_round.is_some() {
        let gpus = gpu.count().clamp(1, 2);
        let first = first_round.unwrap_or(0);
        let rounds = ROUNDS.saturating_sub(first);
        let campaign = chaos::Options { seed: 1, first, rounds, gpu, worlds: 1, gpus };
        let report = chaos::run(&recipe, &campaign, &mut say)?;
        print(&report.table());
        good &= !report.failed();
        whole.insert("chaos".into(), to_value(&report)?);
    }
    std::fs::write(&file, serde_json::to_vec_pretty(&whole)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(good)
}

#[expect(clippy::print_stdout, reason = "the result, for people")]
fn print(table: &str) {
    println!("{table}");
}

#[expect(clippy::print_stderr, reason = "what is being done now")]
fn say(text: &str) {
    eprintln!("{text}");
}

#[expect(clippy::print_stderr, reason = "why there is no result")]
fn complain(error: &anyhow::Error) {
    eprintln!("affinode-gpu-suite: {error:#}");
}
