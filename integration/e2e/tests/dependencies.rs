//! What is used from elsewhere: licences and sources as deny.toml has them, no wildcard versions;
//! and one Rust version, declared and tested.
//!
//! `cargo deny check` reads the same file and also knows published faults. No package of apt has it,
//! so CI, which would have to build it, has these checks instead.

use std::{collections::BTreeSet, fs, process::Command};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The registry that `[sources]` of deny.toml leaves.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

#[test]
fn dependencies_are_what_deny_toml_allows() -> Result<()> {
    let allowed = allowed_licences(&read("deny.toml")?)?;
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    assert!(packages.len() > 100, "{} packages are not all", packages.len());
    let faults: Vec<String> = packages.iter().flat_map(|p| faults(p, &allowed)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

#[test]
fn declared_rust_version_is_the_tested_one() -> Result<()> {
    let channel = value(&read("rust-toolchain.toml")?, "channel")?;
    let tested = channel.rsplit_once('.').map_or(channel.as_str(), |(minor, _)| minor);
    let declared = value(&read("Cargo.toml")?, "rust-version")?;
    assert_eq!(declared, tested, "rust-version of Cargo.toml, channel of rust-toolchain.toml");
    let metadata = metadata()?;
    for package in metadata["packages"].as_array().context("no packages")? {
        if package["source"].is_null() {
            let own = package["rust_version"].as_str().unwrap_or("none");
            assert_eq!(own, declared, "rust-version of {}", package["name"]);
        }
    }
    Ok(())
}

#[test]
fn faults_of_packages_are_found() -> Result<()> {
    let allowed = allowed_licences("[licenses]\nallow = [\"MIT\", \"A-1.0 WITH E-exception\"]\n")?;
    let package = |licence: &str, source: &str, version: &str| {
        let dependencies = serde_json::json!([{ "name": "d", "req": version }]);
        serde_json::json!({ "name": "p", "license": licence, "source": source, "dependencies": dependencies })
    };
    let count = |package: &Value| faults(package, &allowed).len();
    assert_eq!(count(&package("MIT", REGISTRY, "*")), 0, "the versions of others are theirs");
    assert_eq!(count(&package("GPL-3.0", REGISTRY, "1")), 1);
    assert_eq!(count(&package("MIT", "git+https://example.com", "1")), 1);
    let mut own = package("MIT", REGISTRY, "*");
    own["source"] = Value::Null;
    assert_eq!(count(&own), 1);
    own["dependencies"][0]["path"] = "/x".into();
    assert_eq!(count(&own), 0);
    for (licence, fine) in [
        ("MIT OR GPL-3.0", true),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR GPL-3.0) AND A-1.0 WITH E-exception", true),
        ("MIT AND (GPL-3.0 OR BSL-1.0)", false),
        ("A-1.0", false),
        ("", false),
    ] {
        assert_eq!(is_allowed(licence, &allowed), fine, "{licence}");
    }
    Ok(())
}

/// Violations of deny.toml by a package, one line each.
fn faults(package: &Value, allowed: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    let name = &package["name"];
    let licence = package["license"].as_str().unwrap_or_default();
    if !is_allowed(licence, allowed) {
        found.push(format!("{name}: licence {licence:?} is not in deny.toml"));
    }
    match package["source"].as_str() {
        Some(REGISTRY) => {}
        Some(other) => found.push(format!("{name}: from {other}")),
        None => {
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let any = dependencies.filter(|of| of["req"] == "*" && of["path"].is_null());
            found.extend(any.map(|of| format!("{name}: any version of {}", of["name"])));
        }
    }
    found
}

/// Whether a licence expression of SPDX holds with these licences alone.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut tokens = spaced.split_whitespace().peekable();
    let holds = any_of(&mut tokens, allowed);
    holds && tokens.next().is_none()
}

type Tokens<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(tokens: &mut Tokens<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = all_of(tokens, allowed);
    while tokens.next_if_eq(&"OR").is_some() {
        holds |= all_of(tokens, allowed);
    }
    holds
}

fn all_of(tokens: &mut Tokens<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = one(tokens, allowed);
    while tokens.next_if_eq(&"AND").is_some() {
        holds &= one(tokens, allowed);
    }
    holds
}

fn one(tokens: &mut Tokens<'_>, allowed: &BTreeSet<String>) -> bool {
    if tokens.next_if_eq(&"(").is_some() {
        let holds = any_of(tokens, allowed);
        return tokens.next_if_eq(&")").is_some() && holds;
    }
    let mut licence = tokens.next().unwrap_or_default().to_owned();
    if tokens.next_if_eq(&"WITH").is_some() {
        licence += &format!(" WITH {}", tokens.next().unwrap_or_default());
    }
    allowed.contains(&licence)
}

/// The list `allow` of `[licenses]`.
fn allowed_licences(deny: &str) -> Result<BTreeSet<String>> {
    let section = deny.split("[licenses]").nth(1).context("deny.toml has no [licenses]")?;
    let list = section.split("allow = [").nth(1).context("deny.toml has no allow")?;
    let list = list.split(']').next().unwrap_or_default();
    let words: BTreeSet<String> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    if words.is_empty() {
        bail!("deny.toml allows no licence");
    }
    Ok(words)
}

/// The text of the first `key = "text"`.
fn value(toml: &str, key: &str) -> Result<String> {
    let text = toml.lines().find_map(|line| {
        line.strip_prefix(key)?
            .trim_start()
            .strip_prefix('=')?
            .trim()
            .strip_prefix('"')?
            .strip_suffix('"')
    });
    Ok(text.with_context(|| format!("there is no {key}"))?.to_owned())
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(workspace_dir().join(path)).with_context(|| format!("cannot read {path}"))
}

/// All packages of this platform; what is built here is fetched already.
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
