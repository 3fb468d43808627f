//! Checks that Cargo.toml and rust-toolchain.toml name the same Rust version, so that the tests run
//! with the declared version.

use std::{fs, process::Command};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};
use serde_json::Value;

#[test]
fn declared_rust_version_is_the_tested_one() -> Result<()> {
    let channel = value(&read("rust-toolchain.toml")?, "channel")?;
    let tested = channel.rsplit_once('.').map_or(channel.as_str(), |(minor, _)| minor);
    let declared = value(&read("Cargo.toml")?, "rust-version")?;
    assert_eq!(
        declared, tested,
        "rust-version in Cargo.toml differs from channel in rust-toolchain.toml"
    );
    let metadata = metadata()?;
    for package in metadata["packages"].as_array().context("no packages")? {
        if package["source"].is_null() {
            let own = package["rust_version"].as_str().unwrap_or("none");
            assert_eq!(
                own, declared,
                "rust-version of package {} differs from that of the workspace",
                package["name"]
            );
        }
    }
    Ok(())
}

/// Returns the text in the first line of the form `key = "text"`.
fn value(toml: &str, key: &str) -> Result<String> {
    let text = toml.lines().find_map(|line| {
        line.strip_prefix(key)?
            .trim_start()
            .strip_prefix('=')?
            .trim()
            .strip_prefix('"')?
            .strip_suffix('"')
    });
    Ok(text.with_context(|| format!("the file has no line `{key} = …`"))?.to_owned())
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace_dir().join(path)).with_context(|| format!("cannot read {path}"))
}

/// Returns Cargo's metadata of all packages for this platform. The build has already downloaded
/// these packages.
fn metadata() -> Result<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(workspace_dir())
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).with_context(|| format!("cargo metadata: {error}"))
}
