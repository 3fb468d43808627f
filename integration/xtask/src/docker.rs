//! Provides the dockerd that the tests use. It comes from the distribution's package, which is
//! unpacked but not installed. Debian 12 has an older version, so there dockerd comes from a later
//! suite of Debian.

use std::{fs, path::Path, process::Command};

use affinode_e2e::{artifacts::Artifacts, docker::DockerPrograms};
use anyhow::{Context, Result, bail};

use crate::{
    apt::{self, Distribution, Suites},
    output, sh,
};

/// Debian's suites that have a sufficiently new version of Docker, the oldest suite first.
const SUITES: [&str; 3] = ["trixie", "forky", "sid"];
/// Packages that contain dockerd and the command `docker`.
const PACKAGES: [&str; 2] = ["docker.io", "docker-cli"];
/// Oldest major version of Docker that the tests support.
const MIN_VERSION: u32 = 26;

/// Unpacks dockerd, unless it is unpacked already. If this machine cannot have dockerd, prints the
/// reason. Tests that need dockerd are then recorded as skipped.
pub fn prepare(artifacts: &Artifacts) {
    if let Err(error) = fetch(artifacts) {
        output::note(&format!("dockerd is not available: {error:#}"));
    }
}

fn fetch(artifacts: &Artifacts) -> Result<()> {
    let folder = artifacts.docker_dir();
    if examine(&folder).is_ok() {
        return Ok(());
    }
    output::step("Fetching dockerd (once)");
    let here = Distribution::here()?;
    if here.id != "debian" {
        clear(&folder)?;
        apt::unpack_own(PACKAGES[0], &folder)?;
        return examine(&folder);
    }
    let suites = Suites::open(&artifacts.cache_dir().join("apt-docker"), &here.codename, &SUITES)?;
    let unpacked = newest(&suites, &folder);
    suites.remove()?;
    unpacked
}

/// Unpacks the newest version of dockerd that runs on this machine. A version may need a newer C
/// library than the machine has.
fn newest(suites: &Suites, folder: &Path) -> Result<()> {
    let mut last = None;
    for (version, _) in suites.versions(PACKAGES[0])? {
        clear(folder)?;
        let unpacked =
            PACKAGES.iter().try_for_each(|package| suites.unpack(package, &version, folder));
        match unpacked.and_then(|()| examine(folder)) {
            Ok(()) => return Ok(()),
            Err(error) => last = Some(error.context(version)),
        }
    }
    clear(folder)?;
    Err(last.context("no suite of Debian has docker.io at present")?)
}

fn clear(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    Ok(())
}

fn examine(folder: &Path) -> Result<()> {
    let programs = DockerPrograms::in_folder(folder)
        .context("the package contains no dockerd or no docker")?;
    for program in [&programs.daemon, &programs.command] {
        let said = sh::read(Command::new(program).arg("--version"))?;
        match major(&said) {
            Some(version) if version >= MIN_VERSION => {}
            _ => bail!("{}: version {MIN_VERSION} or newer is needed", said.trim()),
        }
    }
    Ok(())
}

/// Parses the major version from the output of docker, for example 28 from `Docker version
/// 28.5.2+dfsg4, build 3ef3c07`.
fn major(said: &str) -> Option<u32> {
    said.split_whitespace().nth(2)?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_each_packager_is_read() {
        assert_eq!(major("Docker version 28.5.2+dfsg4, build 3ef3c07c883b\n"), Some(28));
        assert_eq!(major("Docker version 26.1.5+dfsg1, build a72d7cd\n"), Some(26));
        assert_eq!(major("docker: not found"), None);
    }
}
