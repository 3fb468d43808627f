//! Builds CRI-O from source that Go's module proxy provides. CRI-O also needs programs of Podman's
//! package, and the runc that [`deps`](crate::deps) builds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result, bail};

use crate::{output, sh};

const MODULE: &str = "github.com/cri-o/cri-o";
/// Release of CRI-O. Go's module proxy had no newer release at the time of the last update.
pub const VERSION: &str = "1.34.0";
/// Go build tags that leave out the parts of CRI-O that need C libraries. No test uses these parts.
const TAGS: &str = "containers_image_openpgp,exclude_graphdriver_btrfs,btrfs_noversion";
/// Source files of `pinns`, the program that makes the namespaces of a pod.
const PINNS: [&str; 2] = ["pinns/src/pinns.c", "pinns/src/sysctl.c"];

/// Builds CRI-O, unless it is built already. If it cannot be built, prints the reason. Tests that
/// need CRI-O are then recorded as skipped.
pub fn prepare(artifacts: &Artifacts) {
    if let Err(error) = build(artifacts) {
        output::note(&format!("CRI-O is not available: {error:#}"));
    }
}

/// Builds CRI-O and pinns, unless both are built already.
pub fn build(artifacts: &Artifacts) -> Result<()> {
    let folder = artifacts.crio_dir();
    let (crio, pinns) = (folder.join("crio"), folder.join("pinns"));
    let known = Command::new(&crio).arg("--version").output();
    if known.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains(VERSION)) {
        return Ok(());
    }
    if sh::find("go").is_none() {
        bail!("go is missing: install Go 1.26 or later to build it");
    }
    output::step(&format!("Building CRI-O {VERSION} (once; two minutes)"));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let module = format!("module affinode.io/test\n\ngo 1.26.0\n\nrequire {MODULE} v{VERSION}\n");
    fs::write(folder.join("go.mod"), module)?;
    let source = source(&folder)?;
    // CRI-O requires modules that Go's checksum database may lack, so CRI-O's own list is used.
    let sums = fs::read(source.join("go.sum")).context("cannot read the go.sum of CRI-O")?;
    fs::write(folder.join("go.sum"), sums)?;
    let fresh = crio.with_extension("new");
    let mut go = go(&folder);
    go.args(["build", "-trimpath", "-ldflags", "-s -w", "-tags", TAGS, "-o"]).arg(&fresh);
    sh::run(go.arg(format!("{MODULE}/cmd/crio")))?;
    build_pinns(&source, &pinns)?;
    // CRI-O gets its name last, so that an interrupted build is repeated.
    Ok(fs::rename(fresh, crio)?)
}

/// Fetches the source of CRI-O, and returns the folder in which Go stores it.
fn source(folder: &Path) -> Result<PathBuf> {
    sh::read(go(folder).args(["mod", "download", MODULE]))?;
    let found = sh::read(go(folder).args(["list", "-m", "-f", "{{.Dir}}", MODULE]))?;
    Ok(found.trim().into())
}

fn build_pinns(source: &Path, program: &Path) -> Result<()> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c99", "-Os", "-static", "-o"]).arg(program);
    sh::run(gcc.args(PINNS.map(|file| source.join(file))))
}

fn go(folder: &Path) -> Command {
    let mut go = Command::new("nice");
    go.arg("go").current_dir(folder).env("CGO_ENABLED", "1");
    go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false -p=2");
    go
}
