//! Builds the programs of a release. Programs that load NVML are linked against an old C library,
//! so that they run on old nodes. The programs of the cluster are linked statically. No program
//! contains a path of this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::{Artifacts, target_dir, workspace_dir};
use anyhow::{Context, Result, bail};

use crate::{
    apt::{Distribution, Suites},
    build::{self, Profile},
    deps, output, sh,
};

const GNU: &str = "x86_64-unknown-linux-gnu";
const MUSL: &str = "x86_64-unknown-linux-musl";
/// The Debian suite whose C library the programs are linked against. Distributions since 2020 have
/// this version of the library or a newer version.
const OLD_SUITE: &str = "bullseye";
/// Version of the C library in [`OLD_SUITE`]. If a program needs a newer version, it was linked
/// against another C library by mistake.
const OLD_GLIBC: (u32, u32) = (2, 31);
/// Packages that are needed to compile and link against the old C library.
const OLD_PACKAGES: [&str; 4] = ["libc6", "libc6-dev", "libgcc-s1", "linux-libc-dev"];

pub struct Built {
    pub command: PathBuf,
    pub shim: PathBuf,
    pub runtime: PathBuf,
    pub library: PathBuf,
    pub cluster: PathBuf,
    pub plugin: PathBuf,
}

impl Built {
    /// Returns the newest version of the C library that a program needs, such as `2.31`.
    pub fn glibc(&self) -> Result<String> {
        let (major, minor) = self.newest_glibc()?;
        Ok(format!("{major}.{minor}"))
    }

    fn newest_glibc(&self) -> Result<(u32, u32)> {
        let mut newest = (2, 17);
        for program in [&self.command, &self.shim, &self.runtime, &self.library] {
            let needs = sh::read(Command::new("readelf").arg("--version-info").arg(program))?;
            newest = needs.split("Name: GLIBC_").skip(1).filter_map(version).fold(newest, Ord::max);
        }
        Ok(newest)
    }
}

/// Parses the version of the C library in a line such as `2.34  Flags: none …`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().next()?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub fn dev() -> Result<Built> {
    of(&build::all(Profile::Dev)?)
}

/// Returns the files of an existing build in the form of a release's files.
pub fn of(artifacts: &Artifacts) -> Result<Built> {
    Ok(Built {
        command: artifacts.bin("affinode")?,
        shim: artifacts.bin("containerd-shim-affinode-v1")?,
        runtime: artifacts.bin("affinode-runtime")?,
        library: artifacts.lib_dir().join("libaffinode_preload.so"),
        cluster: artifacts.bin("affinode-cluster")?,
        plugin: artifacts.bin("kubectl-affinode")?,
    })
}

/// The programs of the packages, each with its target, its crate and its name. They are built one
/// at a time, because cargo refuses linker arguments for several programs.
const PROGRAMS: [(&str, &str, &str); 5] = [
    (GNU, "affinode-cli", "affinode"),
    (GNU, "affinode-shim", "containerd-shim-affinode-v1"),
    (GNU, "affinode-shim", "affinode-runtime"),
    (MUSL, "affinode-cluster", "affinode-cluster"),
    (MUSL, "affinode-cluster", "kubectl-affinode"),
];

pub fn release() -> Result<Built> {
    deps::own()?;
    let sysroot = sysroot()?;
    output::step("Building the programs of the release");
    let old = sysroot.as_deref();
    add_musl()?;
    for (target, package, program) in PROGRAMS {
        let sysroot = old.filter(|_| target == GNU);
        cargo(target, sysroot, &["--release", "-p", package, "--bin", program])?;
    }
    let library = ["--profile", "preload", "-p", "affinode-preload", "--lib"];
    cargo(GNU, old, &[&library[..], &["--crate-type", "cdylib"]].concat())?;
    let built = |target: &str, file: &str| folder().join(target).join(file);
    let built = Built {
        command: built(GNU, "release/affinode"),
        shim: built(GNU, "release/containerd-shim-affinode-v1"),
        runtime: built(GNU, "release/affinode-runtime"),
        library: built(GNU, "preload/libaffinode_preload.so"),
        cluster: built(MUSL, "release/affinode-cluster"),
        plugin: built(MUSL, "release/kubectl-affinode"),
    };
    if old.is_some() && built.newest_glibc()? > OLD_GLIBC {
        bail!("built against {OLD_SUITE}, but a program needs glibc {}", built.glibc()?);
    }
    Ok(built)
}

/// Returns the target folder of the packages' build. It is not the usual target folder, because
/// this build has other compiler flags. In a shared folder, cargo would rebuild everything at each
/// change between the two sets of flags.
fn folder() -> PathBuf {
    target_dir().join("package")
}

/// Builds one program or library. Arguments after `--` apply only to its linking.
fn cargo(target: &str, sysroot: Option<&Path>, arguments: &[&str]) -> Result<()> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let home = |variable: &str, folder: &str| {
        let own = || Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(folder);
        std::env::var_os(variable).map_or_else(own, PathBuf::from)
    };
    let mut flags: Vec<String> = [
        (home("CARGO_HOME", ".cargo"), "/cargo"),
        (home("RUSTUP_HOME", ".rustup"), "/rustup"),
        (workspace_dir(), "/affinode"),
    ]
    .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
    .into();
    let mut link = Vec::new();
    let mut command = Command::new(program);
    if let Some(sysroot) = sysroot {
        let root = format!("--sysroot={}", sysroot.display());
        command.env(format!("CFLAGS_{}", target.replace('-', "_")), &root);
        flags.push(format!("-Clink-arg={root}"));
        // gcc searches its own folders before those below the sysroot, so the sysroot's folders are
        // named explicitly.
        for folder in ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"] {
            let folder = sysroot.join(folder);
            for option in ["-B", "-L"] {
                link.push(format!("-Clink-arg={option}{}", folder.display()));
            }
        }
    }
    let name = target.replace('-', "_").to_uppercase();
    command
        .current_dir(workspace_dir())
        .args(["rustc", "--quiet", "--locked", "--target", target])
        .args(arguments)
        .arg("--")
        .args(link)
        .env("CARGO_TARGET_DIR", folder())
        .env(format!("CARGO_TARGET_{name}_RUSTFLAGS"), flags.join(" "))
        .env_remove("RUSTFLAGS");
    sh::run(&mut command)
}

fn add_musl() -> Result<()> {
    let known =
        sh::read(Command::new("rustc").args(["--print", "target-libdir", "--target", MUSL]));
    if known.is_ok_and(|folder| Path::new(folder.trim()).is_dir()) {
        return Ok(());
    }
    sh::run(Command::new("rustup").args(["target", "add", MUSL]))
        .with_context(|| format!("install Rust's standard library for {MUSL}"))
}

/// Returns the folder with the old C library. Returns `None` on a distribution other than Debian.
fn sysroot() -> Result<Option<PathBuf>> {
    let here = Distribution::here()?;
    if here.id != "debian" {
        output::note("not on Debian: linked to this machine's C library");
        return Ok(None);
    }
    let folder = target_dir().join("affinode/cache").join(format!("sysroot-{OLD_SUITE}"));
    let done = folder.join("complete");
    if done.is_file() {
        return Ok(Some(folder));
    }
    output::step(&format!("Fetching the C library of {OLD_SUITE}"));
    let suites = Suites::open(&folder.with_extension("apt"), &here.codename, &[OLD_SUITE])?;
    for package in OLD_PACKAGES {
        let versions = suites.versions(package)?;
        let Some((version, _)) = versions.first() else {
            bail!("{OLD_SUITE} has no {package}");
        };
        suites.unpack(package, version, &folder)?;
    }
    suites.remove()?;
    stay_inside(&folder, &folder)?;
    fs::write(done, "")?;
    Ok(Some(folder))
}

/// Changes symbolic links with absolute targets, so that the targets are below `root`.
fn stay_inside(root: &Path, folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            stay_inside(root, &path)?;
        } else if kind.is_symlink()
            && let Ok(target) = fs::read_link(&path)?.strip_prefix("/")
        {
            fs::remove_file(&path)?;
            std::os::unix::fs::symlink(root.join(target), &path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    /// [`PROGRAMS`] must list exactly the programs of the packages' crates, so that each of them is
    /// built.
    #[test]
    fn every_program_of_the_crates_is_built() -> Result<()> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(workspace_dir());
        cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
        let metadata: Value = serde_json::from_str(&sh::read(&mut cargo)?)?;
        let built: BTreeSet<(&str, &str)> =
            PROGRAMS.iter().map(|(_, package, program)| (*package, *program)).collect();
        let crates: BTreeSet<&str> = built.iter().map(|(package, _)| *package).collect();
        let mut known = BTreeSet::new();
        for package in metadata["packages"].as_array().context("cargo lists no packages")? {
            let name = package["name"].as_str().unwrap_or_default();
            let targets = package["targets"].as_array().into_iter().flatten();
            let programs = targets.filter(|target| target["kind"][0] == "bin");
            if crates.contains(name) {
                known.extend(programs.filter_map(|p| Some((name, p["name"].as_str()?))));
            }
        }
        assert_eq!(built, known);
        Ok(())
    }
}
