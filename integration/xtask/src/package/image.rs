//! Builds the container image. It contains all programs, the library, and the C library that the
//! programs need on a node. It has neither a shell nor a package manager.

use std::{collections::BTreeSet, path::PathBuf};

use affinode_e2e::{
    artifacts::workspace_dir,
    image::{Archive, Layer},
    shared_libs,
};
use anyhow::Result;
use serde_json::json;

use super::{
    About,
    build::Built,
    files::{Programs, read},
    tree::{Node, Tree},
};

/// User id and group id of programs that do not need root.
const UNPRIVILEGED: u32 = 65532;

/// Folder of the image that contains the programs. The chart expects them in this folder, and
/// `affinode install` finds the shim there.
const PREFIX: &str = "/usr/local";
/// The variable PATH of the image. The installer also uses it after it has entered the node's root
/// folder.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the files of the image as a tree.
pub fn tree(programs: &Programs, built: &Built, bill: &[u8]) -> Result<Tree> {
    let mut tree = Tree::default();
    for (name, program) in [
        ("affinode", &programs.command),
        ("affinode-cluster", &programs.cluster),
        ("containerd-shim-affinode-v1", &programs.shim),
    ] {
        tree.program(format!("{PREFIX}/bin/{name}"), program.clone());
    }
    let library = format!("{PREFIX}/lib/affinode/libaffinode_preload.so");
    tree.file(library, programs.library.clone());
    for library in libraries(built)? {
        let content = read(&library)?;
        tree.program(library, content);
    }
    let users = format!(
        "root:x:0:0:root:/:/sbin/nologin\naffinode:x:{UNPRIVILEGED}:{UNPRIVILEGED}::/:/sbin/nologin\n"
    );
    tree.file("/etc/passwd", users);
    tree.file("/etc/group", format!("root:x:0:\naffinode:x:{UNPRIVILEGED}:\n"));
    tree.file("/usr/share/doc/affinode/copyright", read(&workspace_dir().join("LICENSE"))?);
    tree.file("/usr/share/doc/affinode/sbom.cdx.json", bill);
    Ok(tree)
}

/// Returns the shared libraries that the image's programs need, including the loader.
pub fn libraries(built: &Built) -> Result<BTreeSet<PathBuf>> {
    let mut all = BTreeSet::new();
    for program in [&built.command, &built.shim, &built.cluster] {
        all.extend(shared_libs::libraries(program)?);
    }
    Ok(all)
}

/// Returns the image's name, in the form that `ctr images import` and the kubelet use.
pub fn name(about: &About) -> String {
    format!("docker.io/affinode/affinode:{}", about.version)
}

/// Packs the files into an OCI archive.
pub fn pack(about: &About, files: &Tree) -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    for folder in files.folders() {
        layer.folder(folder, 0o755)?;
    }
    for (path, node) in files.iter() {
        let inside = path.strip_prefix("/").unwrap_or(path);
        match node {
            Node::File { content, mode } => layer.file(inside, u32::from(*mode), content)?,
            Node::Link(target) => layer.link(path, target)?,
        }
    }
    let process = json!({
        "Env": [PATH],
        "Entrypoint": [format!("{PREFIX}/bin/affinode")],
        "Labels": {
            "org.opencontainers.image.title": "affinode",
            "org.opencontainers.image.version": about.version,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    });
    let mut archive = Archive::default();
    archive.image(&name(about), &layer.finish()?, &process)?;
    archive.into_bytes()
}
