//! Installs packages of the distribution that the commands need on this machine.

use std::{path::Path, process::Command};

use anyhow::{Result, bail};
use nix::unistd::Uid;

use crate::{output, sh};

/// Packages that every command needs: a program or file that exists if the package is installed,
/// and the package's name.
const NEEDED: [(&str, &str); 8] = [
    ("containerd", "containerd"),
    ("runc", "runc"),
    ("gcc", "gcc"),
    ("musl-gcc", "musl-tools"),
    ("readelf", "binutils"),
    ("nsenter", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("/usr/include/stdio.h", "libc6-dev"),
];

/// Installs the packages that every command needs, with apt, if they are missing.
pub fn install_missing() -> Result<()> {
    install(&NEEDED)
}

/// Installs packages with apt if they are missing. A package counts as installed if its file
/// exists. If no package is missing, does nothing.
pub fn install(needed: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> =
        needed.iter().filter(|(sign, _)| !is_there(sign)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !Uid::effective().is_root() {
        bail!(
            "missing: {}; run as root to install them, or install them yourself",
            missing.join(" ")
        );
    }
    if sh::find("apt-get").is_none() {
        bail!(
            "missing: {}; this machine has no apt, so install them by other means",
            missing.join(" ")
        );
    }
    output::step(&format!("Installing {}", missing.join(" ")));
    sh::read(Command::new("apt-get").arg("update"))?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    install.args(["install", "--yes", "--no-install-recommends"]).args(missing);
    // The package of containerd starts the machine's own containerd service. The tests do not use
    // it.
    sh::read(&mut install).map(|_| ())
}

fn is_there(sign: &str) -> bool {
    if sign.starts_with('/') {
        return Path::new(sign).exists();
    }
    sh::find(sign).is_some()
}
