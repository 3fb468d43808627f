//! Builds test programs from Go source, which is fetched from Go's module proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{output, sh};

/// Builds the Go tests of a folder into one program, unless it is built already.
pub fn build_tests(folder: &Path, program: &Path) -> Result<()> {
    if program.is_file() {
        return Ok(());
    }
    output::step(&format!("Building {}", program.display()));
    let mut build = Command::new("go");
    build.args(["test", "-c", "-o"]).arg(program).arg(".").current_dir(folder);
    sh::run(build.env("GOFLAGS", "-buildvcs=false"))
}

/// Fetches the source of a Go module, and copies it because Go's own cache is read-only.
pub fn source(cache: &Path, module: &str, version: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Module {
        #[serde(rename = "Dir")]
        dir: PathBuf,
    }

    let copy = cache.join(format!("source-{version}"));
    if copy.is_dir() {
        return Ok(copy);
    }
    if sh::find("go").is_none() {
        bail!("go is missing: install Go 1.24 or later to build the suite");
    }
    output::step(&format!("Fetching {module} {version}"));
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let mut download = Command::new("go");
    download.args(["mod", "download", "-json", &format!("{module}@{version}")]);
    let told = sh::read(download.current_dir(cache))?;
    let found: Module =
        serde_json::from_str(&told).context("cannot parse go's output about the module")?;
    let half = cache.join(format!("source-{version}.new"));
    sh::read(Command::new("rm").arg("-rf").arg(&half))?;
    sh::read(Command::new("cp").args(["-r", "--no-preserve=mode"]).arg(&found.dir).arg(&half))?;
    fs::rename(&half, &copy)?;
    Ok(copy)
}
