//! The root folder of a node: Debian's packages, unpacked once and copied for each run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result, bail};

use crate::{apt, output, packages, sh};

/// Programs that create and boot a root folder, and their packages.
const TOOLS: [(&str, &str); 2] =
    [("mmdebstrap", "mmdebstrap"), ("systemd-nspawn", "systemd-container")];
/// Packages that are unpacked in addition to Debian's essential packages.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,iproute2,containerd,runc,kmod,munge,\
                        slurmctld,slurmd,slurm-client";
/// File that is written last when the root folder is created, so it shows that the folder is
/// complete. It lists the packages that were unpacked.
const MADE: &str = "etc/affinode-node";

/// Returns the root folder that is copied for each run. It is created if it does not exist.
pub fn base(artifacts: &Artifacts) -> Result<PathBuf> {
    packages::install(&TOOLS)?;
    let here = apt::Distribution::here()?;
    if here.id != "debian" {
        bail!(
            "this command needs Debian, because it makes a node from Debian's packages; this machine is {}",
            here.id
        );
    }
    let tree = artifacts.cache_dir().join("systemd-node");
    let wanted = format!("{} {PACKAGES}\n", here.codename);
    if fs::read_to_string(tree.join(MADE)).is_ok_and(|made| made == wanted) {
        return Ok(tree);
    }
    output::step("Making a Debian tree with systemd, containerd and Slurm");
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    fs::create_dir_all(artifacts.cache_dir())?;
    let mut command = Command::new("mmdebstrap");
    command.args(["--mode=root", "--variant=minbase", "--include", PACKAGES]);
    command.arg(&here.codename).arg(&tree).arg(apt::source_line(&here.codename)?);
    sh::read(&mut command).context("cannot make the node's tree")?;
    fs::write(tree.join(MADE), wanted)?;
    Ok(tree)
}

/// Copies the root folder. A node may change the copy.
pub fn copy(tree: &Path, to: &Path) -> Result<()> {
    sh::read(Command::new("cp").args(["--archive", "--reflink=auto"]).arg(tree).arg(to)).map(drop)
}
