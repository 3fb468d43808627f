//! Causes each fault of an installation, with the machine's own containerd. After a fault, the node
//! must be unchanged, or Affinode must be installed correctly. `cargo xtask matrix` causes the same
//! faults with every containerd release.

use affinode_e2e::{
    faults,
    release::Line,
    testbed::{Testbed, TestbedConfig},
};
use anyhow::{Context, Result};

use crate::matrix;

fn fault(name: &str) -> Result<()> {
    with(name, TestbedConfig::default().node().world()?)
}

fn with(name: &str, world: Testbed) -> Result<()> {
    let fault = faults::ALL.iter().find(|(known, _)| *known == name);
    let (_, fault) = fault.with_context(|| format!("no fault {name}"))?;
    fault(&world).map(drop).inspect_err(|_| world.show_logs())
}

#[test]
fn failed_restart_restores_configuration() -> Result<()> {
    fault("containerd fails to restart")
}

#[test]
fn a_full_disk_leaves_nothing_behind() -> Result<()> {
    fault("full disk")
}

#[test]
fn read_only_path_is_named() -> Result<()> {
    fault("read-only /etc")
}

#[test]
fn a_broken_import_is_not_built_upon() -> Result<()> {
    fault("broken import")?;
    // containerd 2 reports the invalid import only when it fails to start.
    match matrix::world(Line::V2, TestbedConfig::default().node())? {
        Some(world) => with("broken import", world),
        None => Ok(()),
    }
}

#[test]
fn a_second_installer_is_refused() -> Result<()> {
    fault("a second installer")
}

#[test]
fn next_install_repairs_a_killed_one() -> Result<()> {
    fault("kill -9 at every step")
}
