//! Builds the newest containerd from the source of Go's module proxy.

use std::{fs, process::Command};

use affinode_e2e::{artifacts::Artifacts, release::Release};
use anyhow::{Context, Result, bail};

use crate::{output, sh};

const MODULE: &str = "github.com/containerd/containerd/v2";
/// Version of containerd that is built. It was the newest release at the time of the last update.
pub const VERSION: &str = "2.4.2";
const PROGRAMS: [&str; 3] = ["containerd", "ctr", "containerd-shim-runc-v2"];

/// Builds the newest containerd, unless it is built already.
pub fn release(artifacts: &Artifacts) -> Result<Release> {
    let folder = artifacts.cache_dir().join("containerd-newest");
    let bin = folder.join("bin");
    if let Ok(known) = Release::probe(&bin)
        && known.version == VERSION
    {
        return Ok(known);
    }
    if sh::find("go").is_none() {
        bail!("go is missing: install Go 1.26 or later to build containerd");
    }
    output::step(&format!("Building containerd {VERSION} (once; some minutes)"));
    fs::create_dir_all(&bin).with_context(|| format!("cannot make {}", bin.display()))?;
    let module = format!("module affinode.io/test\n\ngo 1.26.0\n\nrequire {MODULE} v{VERSION}\n");
    fs::write(folder.join("go.mod"), module)?;
    let mut go = Command::new("nice");
    go.args(["go", "build", "-trimpath", "-ldflags"]);
    go.arg(format!("-s -w -X {MODULE}/version.Version={VERSION}")).arg("-o").arg(&bin);
    go.args(PROGRAMS.map(|program| format!("{MODULE}/cmd/{program}")));
    go.current_dir(&folder).env("CGO_ENABLED", "0");
    go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false -p=2");
    sh::run(&mut go)?;
    Release::probe(&bin)
}
