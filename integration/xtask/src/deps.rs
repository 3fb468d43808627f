//! Provides the containerd releases that the tests use, and an old C library.
//!
//! The machine's own containerd is listed first. Packages of other release lines come from other
//! suites of the same distribution, and are unpacked into the cache. All suites of an Ubuntu
//! release have the same release line of containerd, so on Ubuntu only the machine's own containerd
//! is used.

use std::{
    fs,
    path::{Path, PathBuf},
};

use affinode_e2e::{
    artifacts::{Artifacts, target_dir},
    release::{Line, Release, Releases},
};
use anyhow::{Context, Result};

use crate::{
    apt::{self, Distribution, Suites},
    crio, docker, output, packages, podman, runc, sh,
};

/// Debian's suites in which the release lines of containerd are searched.
const SUITES: [&str; 5] = [OLD_SUITE, "bookworm", "trixie", "forky", "sid"];
/// The Debian suite whose old C library is used in the tests' old images.
const OLD_SUITE: &str = "bullseye";
/// Packages that are taken from the suite `OLD_SUITE`: the C library, and a few programs that were
/// built for it.
const OLD_PACKAGES: [&str; 3] = ["libc6", "dash", "coreutils"];
/// Name of the folder in the cache that contains the old C library.
pub const OLD_LIBC: &str = "libc-old";

/// Installs missing packages, and fills the folder `target/affinode/cache`.
pub fn all() -> Result<Releases> {
    packages::install_missing()?;
    let artifacts = Artifacts::at(target_dir().join("affinode"));
    let cache = artifacts.cache_dir();
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    runc::prepare(&artifacts);
    docker::prepare(&artifacts);
    podman::prepare();
    if let Ok(known) = Releases::read(&artifacts)
        && complete(&known)
    {
        return Ok(known);
    }
    let releases = collect(&cache)?;
    fs::write(Releases::file(&artifacts), serde_json::to_vec_pretty(&releases)?)?;
    for release in &releases.available {
        output::note(&format!("containerd {} in {}", release.version, release.bin_dir.display()));
    }
    for (line, reason) in &releases.unavailable {
        output::note(&format!("containerd {line} is not available: {reason}"));
    }
    Ok(releases)
}

/// Installs and builds all programs that the tests use, also those that take minutes to build or
/// that only single tests need. Tests whose programs are missing are recorded as skipped.
pub fn everything() -> Result<()> {
    all()?;
    crio::prepare(&Artifacts::at(target_dir().join("affinode")));
    promtool()?;
    Ok(())
}

/// Returns the folder that contains `promtool`, Prometheus's own checker of metrics and rules. It
/// is fetched if the machine has none.
pub fn promtool() -> Result<PathBuf> {
    let unpacked = Artifacts::at(target_dir().join("affinode")).cache_dir().join("prometheus");
    let program = match sh::find("promtool") {
        Some(program) => program,
        None => unpacked.join("usr/bin/promtool"),
    };
    if !program.is_file() {
        output::step("Fetching promtool");
        apt::unpack_own("prometheus", &unpacked)
            .context("promtool is missing: install it, or add an apt source that has it")?;
    }
    Ok(program.parent().unwrap_or(Path::new("/usr/bin")).to_owned())
}

/// Returns the machine's own containerd release, which is enough for the demo.
pub fn own() -> Result<Release> {
    packages::install_missing()?;
    let program = sh::find("containerd").context("containerd is not installed")?;
    Release::probe(program.parent().unwrap_or(Path::new("/usr/bin")))
}

fn complete(known: &Releases) -> bool {
    let usable = known.available.iter().all(|release| {
        Release::probe(&release.bin_dir).is_ok_and(|now| now.version == release.version)
    });
    usable && known.unavailable.is_empty() && !known.available.is_empty()
}

fn collect(cache: &Path) -> Result<Releases> {
    let mut releases = Releases::default();
    releases.available.push(own()?);
    let here = Distribution::here()?;
    let own = releases.available[0].line;
    let missing = Line::ALL.into_iter().filter(move |line| *line != own);
    if here.id != "debian" {
        for line in missing {
            let reason = format!("{} has no other suite with it", here.id);
            releases.unavailable.insert(line.as_str().into(), reason);
        }
        return Ok(releases);
    }
    output::step("Fetching other containerd releases and an old C library from Debian");
    let suites = Suites::open(&cache.join("apt"), &here.codename, &SUITES)?;
    let versions = suites.versions("containerd")?;
    for line in missing {
        let Some((version, _)) =
            versions.iter().find(|(version, _)| Line::of(version) == Some(line))
        else {
            releases
                .unavailable
                .insert(line.as_str().into(), "no suite of Debian has it at present".into());
            continue;
        };
        let folder = cache.join(format!("containerd-{}", line.as_str()));
        suites.unpack("containerd", version, &folder)?;
        match Release::probe(&folder.join("usr/bin")) {
            Ok(release) => releases.available.push(release),
            Err(error) => {
                let reason = format!("{version} does not run here: {error:#}");
                releases.unavailable.insert(line.as_str().into(), reason);
            }
        }
    }
    for package in OLD_PACKAGES {
        let old = suites.versions(package)?.into_iter().find(|(_, suite)| suite == OLD_SUITE);
        let (version, _) = old.with_context(|| format!("{OLD_SUITE} has no {package}"))?;
        suites.unpack(package, &version, &cache.join(OLD_LIBC))?;
    }
    suites.remove()?;
    Ok(releases)
}
