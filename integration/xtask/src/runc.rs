//! Builds a runc that supports id-mapped mounts (1.2 and later). Pods with a user namespace need
//! it. The distribution's runc may be older, so a newer runc is built from source that Go's module
//! proxy provides.

use std::{fs, process::Command};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result};

use crate::{output, sh};

const MODULE: &str = "github.com/opencontainers/runc";
/// Version of runc that is built. It was the newest release at the time of the last update.
const VERSION: &str = "1.4.3";

/// Builds runc, unless it is built already. If Go is missing or too old, prints a note. Tests that
/// need this runc are then recorded as skipped.
pub fn prepare(artifacts: &Artifacts) {
    if let Err(error) = build(artifacts) {
        output::note(&format!("runc for user namespaces is not available: {error:#}"));
    }
}

fn build(artifacts: &Artifacts) -> Result<()> {
    let bin = artifacts.own_users_runc_dir();
    let program = bin.join("runc");
    let known = Command::new(&program).arg("--version").output();
    if known.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains(VERSION)) {
        return Ok(());
    }
    if sh::find("go").is_none() {
        output::note(
            "runc for user namespaces is not available: it is built with Go, which is missing",
        );
        return Ok(());
    }
    output::step(&format!("Building runc {VERSION} (once; a minute)"));
    fs::create_dir_all(&bin).with_context(|| format!("cannot make {}", bin.display()))?;
    let module = format!("module affinode.io/test\n\ngo 1.26.0\n\nrequire {MODULE} v{VERSION}\n");
    fs::write(bin.join("go.mod"), module)?;
    let mut go = Command::new("nice");
    go.args(["go", "build", "-trimpath", "-ldflags"]);
    go.arg(format!("-s -w -X main.version={VERSION}")).arg("-o").arg(&program).arg(MODULE);
    // runc enters namespaces in C code, so the build needs cgo. It is built without libseccomp,
    // because no test uses seccomp filters.
    go.current_dir(&bin).env("CGO_ENABLED", "1");
    sh::run(go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false -p=2"))
}
