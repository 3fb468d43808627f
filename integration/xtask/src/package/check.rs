//! Tests the packages. dpkg and rpm install them in private root folders and remove them again. A
//! private containerd runs the image. The only change to this machine is the installation of `rpm`,
//! if it is missing.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{containerd, testbed::TestbedConfig};
use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Uid;

use super::{About, image};
use crate::{
    build::{self, Profile},
    deps, output, sh,
};

/// Path of the file in which `affinode install` records the installation, below a root folder.
const RECORD: &str = "var/lib/affinode/install.json";

pub fn all(out: &Path, about: &About) -> Result<()> {
    if !Uid::effective().is_root() {
        bail!("installing packages needs root");
    }
    deps::own()?;
    let version = about.package_version();
    debian(&out.join(format!("affinode_{version}_amd64.deb")))?;
    red_hat(&out.join(format!("affinode-{version}-1.x86_64.rpm")))?;
    let root = tempfile::tempdir()?;
    sh::read(
        Command::new("dpkg-deb")
            .arg("--extract")
            .arg(out.join(format!("affinode_{version}_amd64.deb")))
            .arg(root.path()),
    )?;
    containers(&out.join(format!("affinode-{}-image.tar", about.version)), root.path(), about)
}

fn debian(package: &Path) -> Result<()> {
    output::step("Installing the .deb in a root of its own");
    let root = tempfile::tempdir()?;
    let root = root.path();
    for folder in ["info", "updates", "triggers"] {
        fs::create_dir_all(root.join("var/lib/dpkg").join(folder))?;
    }
    fs::write(root.join("var/lib/dpkg/status"), "")?;
    let dpkg = |arguments: &[&str]| {
        let mut command = Command::new("dpkg");
        command.arg(format!("--root={}", root.display()));
        // This root has neither a C library nor a shell, so dependencies are ignored and the
        // machine's shell runs the scripts.
        command.args(["--force-depends", "--force-script-chrootless", "--log=/dev/null"]);
        sh::read(command.args(arguments))
    };
    let package = package.to_string_lossy();
    let said = dpkg(&["--install", &package])?;
    ensure!(said.contains("run affinode install to register"), "unexpected output of dpkg: {said}");
    runs(root)?;
    let record = root.join(RECORD);
    fs::create_dir_all(record.parent().context("the record's path has no folder")?)?;
    fs::write(&record, "{}")?;
    let said = dpkg(&["--install", &package])?;
    ensure!(
        said.contains("/usr/bin/affinode install to put this version"),
        "unexpected output of dpkg: {said}"
    );
    let said = dpkg(&["--remove", "affinode"])?;
    ensure!(
        said.contains("/usr/local/bin/affinode uninstall"),
        "unexpected output of dpkg: {said}"
    );
    ensure!(record.is_file(), "the record of affinode install was removed");
    fs::remove_file(record)?;
    left_nothing(root, &["var"])
}

fn red_hat(package: &Path) -> Result<()> {
    output::step("Installing the .rpm in a root of its own");
    if sh::find("rpm").is_none() {
        sh::read(Command::new("apt-get").args([
            "install",
            "--yes",
            "--no-install-recommends",
            "rpm",
        ]))
        .context("rpm is missing: install it")?;
    }
    let root = tempfile::tempdir()?;
    let root = root.path();
    let rpm = |arguments: &[&str]| {
        let mut command = Command::new("rpm");
        // Debian's rpm would otherwise use a database folder below `/root`.
        command.arg("--root").arg(root).args(["--dbpath", "/var/lib/rpm"]);
        sh::read(command.args(arguments))
    };
    let path = package.to_string_lossy();
    let checked = rpm(&["--checksig", "--nosignature", &path])?;
    ensure!(checked.trim().ends_with("OK"), "unexpected output of rpm: {checked}");
    // This root has neither a C library nor a shell, so dependencies and scripts are skipped.
    rpm(&["--install", "--nodeps", "--noscripts", &path])?;
    let listed = rpm(&["--query", "--list", "affinode"])?;
    for path in listed.lines() {
        ensure!(root.join(path.trim_start_matches('/')).exists(), "{path} is missing");
    }
    rpm(&["--verify", "--nodeps", "affinode"])?;
    runs(root)?;
    rpm(&["--erase", "--noscripts", "affinode"])?;
    left_nothing(root, &["var", "usr/bin", "usr/lib/.build-id"])
}

/// Checks that the programs installed below a root folder run.
fn runs(root: &Path) -> Result<()> {
    for program in ["affinode", "kubectl-affinode"] {
        let path = root.join("usr/bin").join(program);
        let said = sh::read(Command::new(path).arg("--version"))?;
        let expected = format!("{program} {}", env!("CARGO_PKG_VERSION"));
        ensure!(said.trim() == expected, "unexpected output of {program} --version: {said}");
    }
    Ok(())
}

/// Checks that no files are left below a root folder, except in the folders `but`.
fn left_nothing(root: &Path, but: &[&str]) -> Result<()> {
    let mut left = BTreeSet::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if but.iter().any(|but| path == root.join(but)) {
                continue;
            }
            if path.symlink_metadata()?.is_dir() {
                folders.push(path)
            } else {
                left.insert(path);
            }
        }
    }
    ensure!(left.is_empty(), "files are left after the removal: {left:?}");
    Ok(())
}

/// Checks that the image's programs run in containerd. Also checks that `affinode install
/// --dry-run`, run from the unpacked package, finds the files that it would copy.
fn containers(archive: &Path, package: &Path, about: &About) -> Result<()> {
    output::step("Running the image");
    let world = TestbedConfig::default().artifacts(build::all(Profile::Dev)?).world()?;
    let (keeper, daemon) = (world.keeper(), world.containerd());
    daemon.import(keeper, "default", archive)?;
    let name = image::name(about);
    for (id, program) in [("node", "affinode"), ("cluster", "affinode-cluster")] {
        let mut ctr = daemon.ctr(keeper, "default");
        ctr.args(["run", "--rm", "--read-only", &name, id, program]);
        let said = containerd::run(ctr.arg("--version"))?;
        ensure!(
            said.contains(env!("CARGO_PKG_VERSION")),
            "unexpected output of {program} --version: {said}"
        );
    }
    let state = tempfile::tempdir()?;
    let mut install = Command::new(package.join("usr/bin/affinode"));
    // The name differs from the handler `affinode`, which the testbed's containerd already has.
    install.args(["install", "--dry-run", "--runtime-name", "packaged"]);
    install.arg("--containerd").arg(daemon.socket());
    install.arg("--state-dir").arg(state.path()).arg("--prefix").arg(state.path());
    let said = sh::read(&mut install)?;
    let copied: PathBuf = state.path().join("lib/affinode/libaffinode_preload.so");
    ensure!(
        said.contains(&format!("copy {}", copied.display())),
        "unexpected steps of affinode install --dry-run: {said}"
    );
    Ok(())
}
