//! Tests that a container that lies about its VRAM, or forges its limit or its claim, harms only
//! itself.

use std::{fs, path::PathBuf};

use affinode_e2e::{
    container::Spec,
    gpu::Gpu,
    liar,
    processes::{descriptors, resident_bytes},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use affinode_proto::paths;
use anyhow::{Context, Result};

use crate::offload::MANUAL;

const VRAM_MIB: u64 = 1024;
const LIMIT_MIB: u64 = 256;
const OUT_OF_MEMORY: i32 = 2;
/// Highest resident memory of the controller during an attack, in bytes.
const MAX_RESIDENT_BYTES: u64 = 100 * MIB;
/// Highest number of open descriptors of the controller during an attack.
const MAX_DESCRIPTORS: usize = 700;

fn world() -> Result<Testbed> {
    TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: VRAM_MIB * MIB })
        .config(MANUAL)
        .world()
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Checks that a container with a limit of 256 MiB and 64 MiB in use gets exactly its limit, and
/// that it can be offloaded and woken.
fn gets_its_limit(world: &Testbed, id: &str, worker: &mut Worker) -> Result<()> {
    worker.call("alloc 100")?;
    assert_eq!(worker.ask("alloc 100")?.result, OUT_OF_MEMORY, "{id}: beyond its limit");
    assert!(worker.verify()?, "{id}");
    world.cli().move_out(id)?;
    assert!(worker.verify()?, "{id}: after an offload");
    assert_eq!(worker.ask("alloc 100")?.result, OUT_OF_MEMORY, "{id}: after a restore");
    worker.call("free")?;
    Ok(())
}

/// Two containers lie without end about their VRAM on the GPU of an honest container. They claim to
/// have allocations in progress of any size, forge the epoch of their recalls, and never report
/// that they took an allowance.
#[test]
fn lies_about_vram_do_not_change_other_limits() -> Result<()> {
    let world = world()?;
    let limit = format!("{LIMIT_MIB}Mi");
    let honest = Worker::spec("honest", USUAL, 64).annotation("affinode.io/vram-limit", &limit);
    let mut honest = start(&world, honest)?;
    let controller = world.controller()?.context("no controller is running")?.pid;
    let uuid = liar::shown_vram(&world, "honest")?.uuid;
    let liars = [
        ("small", liar::start(&world, "small", "1Mi", uuid)?),
        ("large", liar::start(&world, "large", "900Mi", uuid)?),
    ];
    for _ in 0..3 {
        gets_its_limit(&world, "honest", &mut honest)?;
        let (open, resident) =
            (descriptors(controller.as_raw())?.len(), resident_bytes(controller.as_raw())?);
        assert!(open < MAX_DESCRIPTORS, "the controller has {open} open descriptors");
        assert!(resident < MAX_RESIDENT_BYTES, "the controller has {resident} resident bytes");
    }
    let now = world.controller()?.map(|process| process.pid);
    assert_eq!(now, Some(controller), "the controller has not ended");
    let shown = liar::shown_vram(&world, "honest")?;
    assert_eq!(shown.limit_bytes, LIMIT_MIB * MIB);
    assert!((64 * MIB..=shown.limit_bytes).contains(&shown.used_bytes), "{shown:?}");
    for (id, liar) in liars {
        let row = world.cli().known(id)?;
        assert_eq!((row.vram_bytes, row.offloaded_bytes), (0, 0), "NVML shows what it has");
        liar.running.kill(&world)?;
        liar.running.delete(&world)?;
        until("the controller to forget the liar", || {
            Ok(world.cli().container(id)?.is_none().then_some(()))
        })?;
    }
    gets_its_limit(&world, "honest", &mut honest)
}

/// A container tries to change, replace and cover each file of Affinode that it sees.
#[test]
fn files_of_a_limit_cannot_be_changed() -> Result<()> {
    let world = world()?;
    let file = claim_file(&world, "u-1-0", r#"{"affinode.io/claimed-vram": "gpu-a=268435456"}"#)?;
    let inside = format!("{}/u-1-0", paths::CONTAINER_CLAIMS_DIR);
    let spec = |id: &str| {
        let mut spec = Worker::spec(id, USUAL, 64);
        spec.mounts.push((file.clone(), inside.clone().into()));
        spec
    };
    let mut worker = start(&world, spec("limited"))?;
    let before = liar::shown_vram(&world, "limited")?;
    let names = ["vram", "engine", "state", "pressure", "agent.sock"];
    let mut paths: Vec<String> =
        names.iter().map(|name| format!("/.affinode/run/{name}")).collect();
    paths.extend([inside.clone(), "/.affinode/lib/libaffinode_preload.so".into()]);
    let mut words = vec![liar::program(), "files".into()];
    words.extend(paths);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    // The folder of a claim's file belongs to the container's own files. Only a mount in it counts.
    let wanted = format!("{inside}: created beside it\ndone");
    assert_eq!(worker.running.exec(&world, &words)?.trim(), wanted, "no other change succeeded");
    assert_eq!(liar::shown_vram(&world, "limited")?, before);
    gets_its_limit(&world, "limited", &mut worker)?;
    // A container that starts later finds the same files.
    let mut next = start(&world, spec("next"))?;
    gets_its_limit(&world, "next", &mut next)
}

/// A container forges its claim in all places that it controls: its environment, its annotations,
/// and files that it mounts where the files of claims are.
#[test]
fn forged_claims_change_nothing() -> Result<()> {
    let world = world()?;
    let text = r#"{"affinode.io/claimed-vram": "gpu-a=268435456", "affinode.io/claim": "ml/real"}"#;
    let real = claim_file(&world, "u-1-0", text)?;
    let forged = world.dir().join("u-2-0");
    let text =
        r#"{"affinode.io/claimed-vram": "gpu-a=1000000000", "affinode.io/claim": "other/claim"}"#;
    fs::write(&forged, text)?;
    let mut spec = Worker::spec("forger", USUAL, 64)
        .env("AFFINODE_CLAIM", "other/claim")
        .annotation("affinode.io/claimed-vram", "1000000000")
        .annotation("affinode.io/claim", "other/claim")
        .annotation("affinode.io/vram-limit", "900Mi");
    for (source, name) in [(real, "u-1-0"), (forged, "u-2-0")] {
        spec.mounts.push((source, format!("{}/{name}", paths::CONTAINER_CLAIMS_DIR).into()));
    }
    let mut forger = start(&world, spec)?;
    let total = forger.call("meminfo")?.total_bytes;
    assert_eq!(total, Some(LIMIT_MIB * MIB), "the limit is the amount of the real claim");
    gets_its_limit(&world, "forger", &mut forger)?;
    let row = world.cli().known("forger")?;
    assert_eq!((row.claim.as_str(), row.vram_limit_bytes), ("ml/real", LIMIT_MIB * MIB));
    // The pod's own limit is named as ignored. Its forged claim is not even read.
    assert!(row.warnings.len() == 1 && row.warnings[0].contains("vram-limit"), "{row:?}");
    is_reported(&world, "ml/real")
}

/// Checks that the report has one line by claim: this claim, with the GPU time that it requested.
/// The claim has a quarter of the GPU, and its container used less than that.
fn is_reported(world: &Testbed, claim: &str) -> Result<()> {
    let row = until("the report to contain the claim", || {
        let text = world.cli().run(&["report", "--by", "claim", "-o", "json"])?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        let rows = report["rows"].as_array().cloned().unwrap_or_default();
        let whole = |row: &&serde_json::Value| {
            ["requested_gpu_seconds", "resident_gpu_seconds", "returned_gpu_seconds"]
                .iter()
                .all(|name| row[name].as_f64() > Some(0.0))
        };
        Ok((rows.len() == 1).then(|| rows.first().filter(whole).cloned()).flatten())
    })?;
    assert_eq!(row["claim"], claim);
    let seconds = |name: &str| row[name].as_f64().unwrap_or_default();
    let held = seconds("resident_gpu_seconds") + seconds("returned_gpu_seconds");
    assert!(held < seconds("requested_gpu_seconds"), "{row}");
    let table = world.cli().run(&["report", "--by", "claim", "-o", "wide"])?;
    assert!(table.contains("REQUESTED") && table.contains(claim), "{table}");
    let teams = world.cli().run(&["report", "--by", "team", "-o", "csv"])?;
    let [head, line, ..] = &teams.lines().collect::<Vec<_>>()[..] else {
        anyhow::bail!("the report by team has no line: {teams}");
    };
    assert!(head.ends_with("currency,requested_gpu_seconds,resident_gpu_seconds,requested_price,used_price,resident_price,claim"));
    assert!(line.starts_with("default,,,"), "the namespace is the team: {teams}");
    Ok(())
}

/// Writes a file of a claim as the node agent does, and returns its path.
fn claim_file(world: &Testbed, name: &str, text: &str) -> Result<PathBuf> {
    let folder = world.cli().run_dir().join(paths::CLAIMS_DIR);
    fs::create_dir_all(&folder)?;
    let file = folder.join(name);
    fs::write(&file, text)?;
    Ok(file)
}
