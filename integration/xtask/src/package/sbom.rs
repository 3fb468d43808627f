//! Creates the bill of materials (SBOM) in the format CycloneDX 1.5. It lists the system libraries
//! in the image, and every crate that is linked into a program of a release, with licence, checksum
//! and dependencies.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Command,
    time::{Duration, UNIX_EPOCH},
};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::About;
use crate::sh;

/// Crates of the released programs. The bill of materials begins with them and follows their
/// dependencies.
const ROOTS: [&str; 4] = ["affinode-cli", "affinode-cluster", "affinode-preload", "affinode-shim"];

/// Creates the bill of materials of a release with these system libraries.
pub fn bill(about: &About, libraries: &BTreeSet<PathBuf>) -> Result<Vec<u8>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut metadata = Command::new(cargo);
    metadata.current_dir(workspace_dir()).args(["metadata", "--format-version", "1", "--locked"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata: Value = serde_json::from_str(&sh::read(&mut metadata)?)?;
    let lock = std::fs::read_to_string(workspace_dir().join("Cargo.lock"))?;
    let mut bill = of(about, &metadata, &checksums(&lock))?;
    for package in debian(libraries)? {
        if let Some(components) = bill["components"].as_array_mut() {
            components.push(package);
        }
    }
    Ok(serde_json::to_vec_pretty(&bill)?)
}

/// Creates the bill of materials from cargo's metadata.
pub fn of(about: &About, metadata: &Value, sums: &BTreeMap<String, String>) -> Result<Value> {
    let packages: BTreeMap<&str, &Value> = list(&metadata["packages"])
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let uses: BTreeMap<&str, Vec<&str>> = list(&metadata["resolve"]["nodes"])
        .filter_map(|node| Some((node["id"].as_str()?, linked(node))))
        .collect();
    let mut queue: Vec<&str> = packages
        .iter()
        .filter(|(_, package)| ROOTS.iter().any(|root| package["name"] == *root))
        .map(|(id, _)| *id)
        .collect();
    let mut reached = BTreeSet::new();
    while let Some(id) = queue.pop() {
        if reached.insert(id) {
            queue.extend(uses.get(id).into_iter().flatten());
        }
    }
    let known = |id: &str| packages.get(id).map(|package| url(package));
    let mut components = BTreeMap::new();
    let mut dependencies = BTreeMap::new();
    for id in reached {
        let package =
            packages.get(id).with_context(|| format!("cargo's metadata does not contain {id}"))?;
        let url = url(package);
        components.insert(url.clone(), component(package, &url, sums.get(&url)));
        let mut on: Vec<String> =
            uses.get(id).into_iter().flatten().filter_map(|id| known(id)).collect();
        on.sort();
        dependencies.insert(url.clone(), json!({ "ref": url, "dependsOn": on }));
    }
    let made = UNIX_EPOCH + Duration::from_secs(about.epoch_seconds.into());
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": humantime::format_rfc3339_seconds(made).to_string(),
            "component": {
                "type": "application", "bom-ref": "affinode", "name": "affinode",
                "version": about.version, "licenses": [{ "expression": "Apache-2.0" }],
            },
        },
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": dependencies.into_values().collect::<Vec<_>>(),
    }))
}

/// Returns the crates that are linked into a crate. Dependencies of tests and build scripts are
/// omitted.
fn linked(node: &Value) -> Vec<&str> {
    let is_linked =
        |dependency: &&Value| list(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null());
    list(&node["deps"]).filter(is_linked).filter_map(|d| d["pkg"].as_str()).collect()
}

fn component(package: &Value, url: &str, sum: Option<&String>) -> Value {
    let mut component = json!({
        "type": "library", "bom-ref": url, "purl": url,
        "name": package["name"], "version": package["version"],
    });
    if let Some(licence) = package["license"].as_str() {
        component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
    }
    if let Some(sum) = sum {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    if let Some(place) = package["repository"].as_str() {
        component["externalReferences"] = json!([{ "type": "vcs", "url": place }]);
    }
    component
}

fn url(package: &Value) -> String {
    let text = |key: &str| package[key].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", text("name"), text("version"))
}

/// Returns the SHA-256 of each crate's archive from Cargo.lock, by the crate's package URL.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let entry = |entry: &str| {
        let field = |key: &str| {
            let line = entry.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
            line.map(|rest| rest.trim_end_matches('"').to_owned())
        };
        let url = format!("pkg:cargo/{}@{}", field("name")?, field("version")?);
        Some((url, field("checksum")?))
    };
    lock.split("[[package]]").filter_map(entry).collect()
}

/// Returns the Debian packages of this machine that contain the libraries, as far as dpkg knows
/// them.
fn debian(libraries: &BTreeSet<PathBuf>) -> Result<Vec<Value>> {
    let mut owners = BTreeSet::new();
    for library in libraries {
        // dpkg may list a file under its real path, without the link /lib.
        let real = std::fs::canonicalize(library)?;
        let names = [library.clone(), PathBuf::from("/usr").join(library.strip_prefix("/")?), real];
        let owner = names.iter().find_map(|name| {
            let line = sh::read(Command::new("dpkg-query").arg("--search").arg(name)).ok()?;
            Some(line.split(": ").next()?.to_owned())
        });
        owners.extend(owner);
    }
    let describe = |owner: String| {
        let mut query = Command::new("dpkg-query");
        query.args(["--show", "--showformat", "${Package} ${Version} ${Architecture}", &owner]);
        let text = sh::read(&mut query)?;
        let mut words = text.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let (name, version, architecture) = (next(), next(), next());
        let url = format!("pkg:deb/debian/{name}@{version}?arch={architecture}");
        Ok(json!({
            "type": "library", "bom-ref": url, "purl": url, "name": name, "version": version,
            "properties": [{ "name": "affinode:in", "value": "image" }],
        }))
    };
    owners.into_iter().map(describe).collect()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
