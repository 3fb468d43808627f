//! Tests of the packing step on a small tree: the bytes are reproducible, and the contents are
//! complete.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Cursor, Read},
    process::Command,
};

use serde_json::{Value, json};

use super::*;

fn about() -> About {
    About { version: "0.1.0-rc.1".into(), epoch_seconds: 1_790_000_000, glibc: "2.31".into() }
}

fn tree() -> Tree {
    let mut tree = Tree::default();
    // The order in which files are added must not affect the packed order.
    tree.link("/usr/bin/affinode", "../lib/affinode/bin/affinode");
    tree.file("/usr/share/doc/affinode/copyright", "Apache-2.0");
    tree.program("/usr/lib/affinode/bin/affinode", vec![7; 100_000]);
    tree
}

fn packed() -> Packages {
    pack(&about(), &tree(), &tree(), b"{}").unwrap()
}

#[test]
fn packing_again_gives_the_same_bytes() {
    let first = packed();
    // The second build has a later time, another umask and other temporary folders.
    let since = std::time::Instant::now();
    affinode_e2e::wait::until("a second", || Ok((since.elapsed().as_secs() >= 1).then_some(())))
        .unwrap();
    let mask = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let again = packed();
    nix::sys::stat::umask(mask);
    assert_eq!(first.keys().collect::<Vec<_>>(), again.keys().collect::<Vec<_>>());
    for (name, bytes) in first {
        assert!(bytes == again[&name], "{name}");
    }
}

#[test]
fn deb_has_root_owner_and_commit_time() {
    let packages = packed();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("affinode.deb");
    std::fs::write(&path, &packages["affinode_0.1.0~rc.1_amd64.deb"]).unwrap();
    let ask = |what: &str| sh::read(Command::new("dpkg-deb").arg(what).arg(&path)).unwrap();
    let listed = ask("--contents");
    let row = |end: &str| {
        let found = listed.lines().find(|line| line.ends_with(end));
        found.unwrap_or_else(|| panic!("{end} is not in {listed}"))
    };
    let program = row("./usr/lib/affinode/bin/affinode");
    assert!(program.starts_with("-rwxr-xr-x root/root    100000 2026-09-21"), "{program}");
    assert!(row("./usr/share/doc/affinode/copyright").starts_with("-rw-r--r--"));
    assert!(row("./usr/bin/affinode -> ../lib/affinode/bin/affinode").starts_with('l'));
    let said = ask("--info");
    for line in ["Version: 0.1.0~rc.1", "Depends: libc6 (>= 2.31), libgcc-s1", "postinst", "prerm"]
    {
        assert!(said.contains(line), "{line} is not in {said}");
    }
}

#[test]
fn the_rpm_holds_the_tree_and_what_it_needs() {
    let packages = packed();
    let bytes = &packages["affinode-0.1.0~rc.1-1.x86_64.rpm"];
    let package = ::rpm::Package::parse(&mut bytes.as_slice()).unwrap();
    assert_eq!(package.metadata.get_version().unwrap(), "0.1.0~rc.1");
    let entries = package.metadata.get_file_entries().unwrap();
    let modes: BTreeMap<String, u16> = entries
        .iter()
        .map(|entry| (entry.path().to_string_lossy().into_owned(), entry.mode().permissions()))
        .collect();
    assert_eq!(modes["/usr/lib/affinode/bin/affinode"], 0o755);
    assert_eq!(modes["/usr/share/doc/affinode/copyright"], 0o644);
    assert!(modes.contains_key("/usr/bin/affinode") && modes.contains_key("/usr/lib/affinode"));
    assert!(!modes.contains_key("/usr/bin"), "shared folders are not part of the package");
    let needs = package.metadata.get_requires().unwrap();
    assert!(needs.iter().any(|need| need.name == "libc.so.6(GLIBC_2.31)(64bit)"));
}

#[test]
fn image_has_its_name_and_valid_digests() {
    let packages = packed();
    let mut archive = tar::Archive::new(Cursor::new(&packages["affinode-0.1.0-rc.1-image.tar"]));
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        if let Some(digest) = path.strip_prefix("blobs/sha256/") {
            let sum: String = Sha256::digest(&content).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(sum, digest);
        }
        files.insert(path, content);
    }
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().replace(':', "/");
        files[&format!("blobs/{digest}")].clone()
    };
    let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
    let named = &index["manifests"][0];
    let name = &named["annotations"]["io.containerd.image.name"];
    assert_eq!(name, "docker.io/affinode/affinode:0.1.0-rc.1");
    let manifest: Value = serde_json::from_slice(&blob(named)).unwrap();
    let layer = blob(&manifest["layers"][0]);
    let mut layer = tar::Archive::new(Cursor::new(layer));
    let names: Vec<String> = layer
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().to_string_lossy().into_owned())
        .collect();
    assert!(names.contains(&"usr/lib/affinode/bin/affinode".to_owned()), "{names:?}");
}

#[test]
fn bill_lists_linked_crates_only() {
    let package = |name: &str| json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0" });
    let on = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
    let packages = ["affinode-shim", "linked", "deep", "tested", "built", "stray"].map(package);
    let metadata = json!({
        "packages": packages,
        "resolve": { "nodes": [
            { "id": "affinode-shim", "deps": [
                on("linked", Value::Null), on("tested", "dev".into()), on("built", "build".into()),
            ] },
            { "id": "linked", "deps": [on("deep", Value::Null)] },
            { "id": "deep", "deps": [] },
        ] },
    });
    let sums = BTreeMap::from([("pkg:cargo/deep@1.0.0".to_owned(), "ab".to_owned())]);
    let bill = sbom::of(&about(), &metadata, &sums).unwrap();
    let components = bill["components"].as_array().unwrap();
    let names: Vec<&str> = components.iter().filter_map(|c| c["name"].as_str()).collect();
    assert_eq!(names, ["affinode-shim", "deep", "linked"]);
    assert_eq!(components[1]["hashes"][0]["content"], "ab");
    assert_eq!(components[1]["licenses"][0]["expression"], "MIT OR Apache-2.0");
    assert_eq!(bill["dependencies"][0]["dependsOn"], json!(["pkg:cargo/linked@1.0.0"]));
    assert_eq!(bill["metadata"]["timestamp"], "2026-09-21T14:13:20Z");
}

#[test]
fn version_other_than_the_programs_is_rejected() {
    let own = env!("CARGO_PKG_VERSION");
    assert_eq!(version(None).unwrap(), own);
    assert_eq!(version(Some(&format!("v{own}"))).unwrap(), own);
    assert_eq!(version(Some(&format!("{own}-rc.1"))).unwrap(), format!("{own}-rc.1"));
    for bad in ["9.9.9", "", "v", &format!("{own}1"), &format!("{own}-a b")] {
        assert!(version(Some(bad)).is_err(), "{bad:?}");
    }
}

/// Targets of the links in a document that begin with `prefix`, without the heading.
fn links<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter_map(move |link| link.strip_prefix(prefix))
}

#[test]
fn documents_include_linked_pages() {
    let documents = files::documents().unwrap();
    let text = |name: &str| std::str::from_utf8(&documents[name]).unwrap();
    let pages: Vec<&str> = links(text("ARCHITECTURE.md"), "docs/design/").collect();
    assert!(!pages.is_empty());
    for page in pages {
        assert!(documents.contains_key(&format!("docs/design/{page}")), "{page}");
    }
    let guides = documents.keys().filter(|name| name.starts_with("docs/") && name.ends_with(".md"));
    let results: BTreeSet<&str> =
        guides.flat_map(|name| links(text(name), "../integration/")).collect();
    assert!(results.len() > 2, "{results:?}");
    for page in results {
        assert!(documents.contains_key(&format!("integration/{page}")), "{page}");
    }
}

/// The documents of the package name files of `config`. Each such file must be in the package.
#[test]
fn files_that_documents_name_are_packed() {
    let (documents, shared) = (files::documents().unwrap(), files::shared().unwrap());
    let mut seen = 0;
    for (name, text) in documents.iter().filter(|(name, _)| name.ends_with(".md")) {
        let text = std::str::from_utf8(text).unwrap();
        for rest in text.split("config/").skip(1) {
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
            let path = rest[..end].trim_end_matches(['.', '/']);
            let source = workspace_dir().join("config").join(path);
            if path.is_empty() || !source.exists() {
                continue;
            }
            let is_packed =
                shared.keys().any(|to| to == path || to.starts_with(&format!("{path}/")))
                    || documents.contains_key(path)
                    || documents.contains_key(&format!("config/{path}"));
            assert!(is_packed, "{name} names config/{path}");
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen} paths");
}
