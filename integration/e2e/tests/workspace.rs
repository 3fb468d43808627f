//! Checks the structure of the repository: the dependencies between its crates, and the names in
//! its root folder.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};
use serde_json::Value;

/// Folder of each crate, and the crates of the workspace on which it may depend.
///
/// `integration` uses the product only as binaries. If it linked the product's crates, the tests
/// would test programs that users do not run.
const ALLOWED: [(&str, &[&str]); 13] = [
    ("proto", &[]),
    ("preload/cuda-sys", &[]),
    ("preload", &["affinode-proto", "affinode-cuda-sys"]),
    ("controller/core", &["affinode-proto"]),
    ("controller/copier", &["affinode-proto", "affinode-cuda-sys"]),
    ("controller/host-pool", &["affinode-proto"]),
    ("controller/simulate", &["affinode-proto", "affinode-core"]),
    ("controller/installer", &["affinode-proto", "affinode-core", "affinode-controller"]),
    (
        "controller/cli",
        &[
            "affinode-proto",
            "affinode-core",
            "affinode-controller",
            "affinode-installer",
            "affinode-simulate",
        ],
    ),
    (
        "controller/cluster",
        &[
            "affinode-proto",
            "affinode-core",
            "affinode-cli",
            "affinode-controller",
            "affinode-installer",
        ],
    ),
    (
        "controller",
        &[
            "affinode-proto",
            "affinode-cuda-sys",
            "affinode-core",
            "affinode-copier",
            "affinode-host-pool",
        ],
    ),
    (
        "runtime-shim",
        &["affinode-proto", "affinode-controller", "affinode-copier", "affinode-host-pool"],
    ),
    ("integration", &["affinode-proto", "affinode-e2e", "affinode-sim-protocol", TEST_NOTES]),
];

/// Crates on which `controller/core` may depend. `controller/core` makes the controller's
/// decisions, so these crates include no async runtime, no network protocol and no system calls.
const DECISIONS_LINK: [&str; 6] =
    ["affinode-proto", "foldhash", "humantime", "indexmap", "serde", "thiserror"];

/// File and folder names that the repository's root may contain, in addition to names with a
/// leading dot.
const ROOT: [&str; 15] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "config",
    "controller",
    "docs",
    "integration",
    "preload",
    "proto",
    "runtime-shim",
];
/// Configuration files of tools that search for them only in the repository's root folder.
const TOOL_FILES: [&str; 4] = ["clippy.toml", "deny.toml", "rust-toolchain.toml", "rustfmt.toml"];

/// Name of the crate for test notes. The tests of all crates may use it, but no product program
/// links it.
const TEST_NOTES: &str = "affinode-test-notes";
/// Name of the crate with the fuzz tests. It links the product crates whose functions parse bytes.
/// No crate links it.
const FUZZ: &str = "affinode-fuzz";

#[test]
fn crates_use_only_whom_they_may() -> Result<()> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let ours: BTreeSet<&str> =
        packages.iter().filter_map(|package| package["name"].as_str()).collect();
    for package in packages.iter().filter(|package| package["name"] != FUZZ) {
        let folder = folder_of(package)?;
        // The rule of the longest matching folder holds, so a crate may have rules of its own.
        let (_, allowed) = ALLOWED
            .iter()
            .filter(|(name, _)| folder.starts_with(name))
            .max_by_key(|(name, _)| name.len())
            .with_context(|| format!("{} is not below a known folder", folder.display()))?;
        for dependency in
            package["dependencies"].as_array().context("a package has no list of dependencies")?
        {
            let name = dependency["name"].as_str().context("a dependency has no name")?;
            let of_tests = dependency["kind"] == "dev" && name == TEST_NOTES;
            let fine = !ours.contains(name) || allowed.contains(&name) || of_tests;
            assert!(fine, "{} must not use {name}", package["name"]);
        }
    }
    Ok(())
}

#[test]
fn shim_names_controller_only_in_main() -> Result<()> {
    let sources = workspace_dir().join("runtime-shim/src");
    let mains = ["main.rs", "bin/affinode-runtime.rs"].map(|main| sources.join(main));
    let mut folders = vec![sources];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if !mains.contains(&path) {
                let text = std::fs::read_to_string(&path)?;
                assert!(!text.contains("affinode_controller"), "{}", path.display());
            }
        }
    }
    Ok(())
}

#[test]
fn decisions_link_no_runtime_and_no_protocol() -> Result<()> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("cargo's metadata has no packages")?;
    let core = packages.iter().find(|package| package["name"] == "affinode-core");
    let dependencies = core.context("the workspace has no crate affinode-core")?["dependencies"]
        .as_array()
        .context("a package has no list of dependencies")?;
    let linked = || dependencies.iter().filter(|dependency| dependency["kind"].is_null());
    let names: BTreeSet<&str> = linked().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(names, BTreeSet::from(DECISIONS_LINK));
    // With its feature `api`, this crate contains the generated protocol and an async runtime.
    let proto = linked().find(|dependency| dependency["name"] == "affinode-proto");
    let proto = proto.context("affinode-core does not use affinode-proto")?;
    assert_eq!(proto["uses_default_features"], false);
    assert_eq!(proto["features"].as_array().map(Vec::len), Some(0));
    Ok(())
}

#[test]
fn the_root_holds_what_the_design_says() -> Result<()> {
    let listed =
        Command::new("git").args(["ls-files", "-z"]).current_dir(workspace_dir()).output()?;
    let text = String::from_utf8(listed.stdout)?;
    let names: BTreeSet<&str> = text
        .split('\0')
        .filter_map(|path| path.split('/').next())
        .filter(|name| !name.is_empty() && !name.starts_with('.'))
        .collect();
    for name in &names {
        let known = ROOT.contains(name) || TOOL_FILES.contains(name);
        assert!(known, "{name} does not belong in the root");
    }
    // Outside of a git checkout, as in an unpacked release, git lists no files to compare with.
    if listed.status.success() {
        for name in ROOT {
            assert!(names.contains(name), "{name} is missing from the root");
        }
    }
    Ok(())
}

fn folder_of(package: &Value) -> Result<PathBuf> {
    let manifest = package["manifest_path"].as_str().context("a package has no manifest")?;
    let inside = Path::new(manifest).strip_prefix(workspace_dir())?;
    Ok(inside.parent().context("the manifest is not in a folder")?.to_owned())
}

fn metadata() -> Result<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(workspace_dir())
        .output()?;
    serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")
}
