//! Provides helm for the tests that render the chart. It is built from source that Go's module
//! proxy provides, because few distributions have a package of helm.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result};

use crate::{output, sh};

pub const MODULE: &str = "helm.sh/helm/v3";
/// Version of helm to build. It was the newest release at the time of the last update.
pub const VERSION: &str = "v3.22.0";

/// Returns the folder of a `helm` program: the machine's own, or a program that is built here once.
/// Returns `None` if Go is missing or too old. The reason is then printed, and tests that need helm
/// are recorded as skipped.
pub fn prepare(artifacts: &Artifacts) -> Option<PathBuf> {
    match folder(artifacts) {
        Ok(folder) => folder,
        Err(error) => {
            output::note(&format!("helm is not available: {error:#}"));
            None
        }
    }
}

fn folder(artifacts: &Artifacts) -> Result<Option<PathBuf>> {
    if let Some(own) = sh::find("helm") {
        return Ok(own.parent().map(Path::to_owned));
    }
    let folder = artifacts.cache_dir().join("helm");
    let bin = folder.join("bin");
    // A helm that was built from a module does not print its version, so the version is stored in a
    // file.
    let built = folder.join("built");
    if fs::read_to_string(&built).is_ok_and(|version| version == VERSION) {
        return Ok(Some(bin));
    }
    if sh::find("go").is_none() {
        output::note("helm is not available: it is built with Go, which is missing");
        return Ok(None);
    }
    output::step(&format!("Building helm {VERSION} (once; a few minutes)"));
    fs::create_dir_all(&bin).with_context(|| format!("cannot make {}", bin.display()))?;
    let module = format!("module affinode.io/test\n\ngo 1.26.0\n\nrequire {MODULE} {VERSION}\n");
    fs::write(folder.join("go.mod"), module)?;
    let mut go = Command::new("nice");
    go.args(["go", "build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(&bin);
    go.arg(format!("{MODULE}/cmd/helm")).current_dir(&folder).env("CGO_ENABLED", "0");
    sh::run(go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false -p=2"))?;
    fs::write(built, VERSION)?;
    Ok(Some(bin))
}
