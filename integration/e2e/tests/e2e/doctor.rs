//! Tests of `affinode doctor` on machines with and without faults.

use std::process::Output;

use affinode_e2e::{
    testbed::{Testbed, TestbedConfig},
    worker::Worker,
};
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde::Deserialize;

use crate::{matrix::on_every_containerd, offload::MANUAL};

#[derive(Debug, Deserialize)]
struct Findings {
    healthy: bool,
    checks: Vec<Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    name: String,
    verdict: String,
    found: String,
    hint: String,
}

impl Findings {
    fn check(&self, name: &str) -> Result<&Check> {
        let found = self.checks.iter().find(|check| check.name == name);
        found.with_context(|| format!("no check {name}: {self:?}"))
    }
}

fn run(world: &Testbed, arguments: &[&str]) -> Result<Output> {
    let socket = world.containerd().socket();
    let mut command = world.host_gpu_command(&world.artifacts().bin("affinode")?);
    command.env("AFFINODE_RUN_DIR", world.cli().run_dir()).arg("doctor").args(arguments);
    Ok(command.arg("--containerd").arg(socket).output()?)
}

fn findings(world: &Testbed) -> Result<(Findings, Option<i32>)> {
    let output = run(world, &["-o", "json"])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let findings = serde_json::from_str(&text)
        .with_context(|| format!("cannot parse the output of affinode doctor: {text}"))?;
    Ok((findings, output.status.code()))
}

on_every_containerd!(
    TestbedConfig::default().config(MANUAL);
    finds_nothing_wrong_where_containers_run,
);

/// Runs `affinode doctor` on a machine on which containers run. It must report no fault.
fn finds_nothing_wrong_where_containers_run(world: &Testbed) -> Result<()> {
    let _worker = Worker::start(world, "runs", 32)?;
    let (findings, code) = findings(world)?;
    assert!(findings.healthy && code == Some(0), "{findings:?}");
    assert!(findings.check("device")?.found.contains("no real GPU"), "{findings:?}");
    let controller = findings.check("controller")?;
    let pid = world.cli().ps()?.controller_pid;
    assert!(controller.found.contains(&format!("process {pid}")), "{controller:?}");
    for name in ["version", "handler", "shim", "stock shim", "library", "cgroups"] {
        assert_eq!(findings.check(name)?.verdict, "good", "{findings:?}");
    }
    Ok(())
}

/// Causes faults. `affinode doctor` must report each fault, with a hint and exit status 1.
#[test]
fn doctor_finds_faults() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("libaffinode_preload.so"), "not a library")?;
    let lib_dir = folder.path().to_string_lossy();
    let world = TestbedConfig::default()
        .env("AFFINODE_LIB_DIR", &lib_dir)
        .config("[policy]\nmode = \"sometimes\"\n")
        .world()?;
    let (found, code) = findings(&world)?;
    assert_eq!((found.healthy, code), (false, Some(1)), "{found:?}");
    for (name, said) in [("library", "not an ELF file"), ("configuration", "sometimes")] {
        let check = found.check(name)?;
        assert_eq!(check.verdict, "bad", "{check:?}");
        assert!(check.found.contains(said) && !check.hint.is_empty(), "{check:?}");
    }
    let text = String::from_utf8(run(&world, &[])?.stdout)?;
    assert!(text.contains("× library"), "{text}");
    assert!(text.contains("√ driver"), "{text}");

    world.containerd().stop(Signal::SIGTERM)?;
    let (found, _) = findings(&world)?;
    assert_eq!(found.check("daemon")?.verdict, "bad", "{found:?}");
    Ok(())
}
