//! Collects the contents of the package for a node. The installation of the package changes no
//! runtime. Only `affinode install` does: it copies the programs and the library from the package,
//! and changes the node's runtime.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};

use super::{build::Built, tree::Tree};
use crate::sh;

/// Folder of the package that contains the programs and the library.
pub const HOME: &str = "/usr/lib/affinode";
/// Shells with completion: the name of each for `affinode completion`, and the folder of its
/// completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "/usr/share/bash-completion/completions/affinode"),
    ("zsh", "/usr/share/zsh/site-functions/_affinode"),
    ("fish", "/usr/share/fish/vendor_completions.d/affinode.fish"),
];
/// Folders of `config` whose files are packed without changes. `.` is `config` itself.
const SHARED: [&str; 18] = [
    ".",
    "containerd",
    "crio",
    "grafana",
    "helm/affinode",
    "helm/affinode/files",
    "helm/affinode/files/grafana",
    "helm/affinode/presets",
    "helm/affinode/templates",
    "helm/affinode/templates/tests",
    "jupyterhub",
    "kubernetes",
    "kubernetes/autoscaling",
    "kubernetes/sharing",
    "podman",
    "prometheus",
    "slurm",
    "systemd",
];
/// Documents outside of the folder `docs`: path in the repository, and path in the package.
const DOCUMENTS: [(&str, &str); 11] = [
    ("README.md", "README.md"),
    ("ARCHITECTURE.md", "ARCHITECTURE.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("CONTRIBUTING.md", "CONTRIBUTING.md"),
    ("SECURITY.md", "SECURITY.md"),
    // README.md and pages in docs link to these files.
    ("integration/conformance.md", "integration/conformance.md"),
    ("integration/conformance-dra.md", "integration/conformance-dra.md"),
    ("integration/matrix.md", "integration/matrix.md"),
    ("config/dashboard.png", "config/dashboard.png"),
    ("LICENSE", "copyright"),
    ("config/config.toml", "config.toml"),
];

/// Contents of the preload library, and of the programs without symbols.
pub struct Programs {
    pub command: Vec<u8>,
    pub shim: Vec<u8>,
    pub runtime: Vec<u8>,
    pub cluster: Vec<u8>,
    pub plugin: Vec<u8>,
    pub library: Vec<u8>,
}

impl Programs {
    pub fn of(built: &Built) -> Result<Programs> {
        Ok(Programs {
            command: stripped(&built.command)?,
            shim: stripped(&built.shim)?,
            runtime: stripped(&built.runtime)?,
            cluster: stripped(&built.cluster)?,
            plugin: stripped(&built.plugin)?,
            library: read(&built.library)?,
        })
    }
}

pub fn all(programs: &Programs, built: &Built, bill: &[u8]) -> Result<Tree> {
    let mut tree = Tree::default();
    for (name, program) in [
        ("affinode", &programs.command),
        ("containerd-shim-affinode-v1", &programs.shim),
        ("affinode-runtime", &programs.runtime),
        ("kubectl-affinode", &programs.plugin),
    ] {
        tree.program(format!("{HOME}/bin/{name}"), program.clone());
    }
    tree.file(format!("{HOME}/lib/libaffinode_preload.so"), programs.library.clone());
    for command in ["affinode", "kubectl-affinode"] {
        tree.link(format!("/usr/bin/{command}"), format!("../lib/affinode/bin/{command}"));
    }
    for (shell, path) in COMPLETIONS {
        let script = sh::read(Command::new(&built.command).args(["completion", shell]))?;
        tree.file(path, script);
    }
    manuals(&mut tree, &built.command)?;
    for (to, text) in documents()? {
        tree.file(format!("/usr/share/doc/affinode/{to}"), text);
    }
    tree.file("/usr/share/doc/affinode/sbom.cdx.json", bill);
    for (to, text) in shared()? {
        tree.file(format!("/usr/share/affinode/{to}"), text);
    }
    Ok(tree)
}

/// Returns the files of `config` by their path below it, without the files that are
/// [`documents`].
pub fn shared() -> Result<BTreeMap<String, Vec<u8>>> {
    let config = workspace_dir().join("config");
    let mut shared = BTreeMap::new();
    for folder in SHARED {
        for entry in fs::read_dir(config.join(folder))? {
            let path = entry?.path();
            let name = path.file_name().context("the path has no file name")?.to_string_lossy();
            let to = if folder == "." { name.to_string() } else { format!("{folder}/{name}") };
            let is_document = DOCUMENTS.iter().any(|(from, _)| *from == format!("config/{to}"));
            if path.is_file() && !is_document {
                shared.insert(to, read(&path)?);
            }
        }
    }
    Ok(shared)
}

/// Returns the documents by their path in the package. Pages below `docs` keep their relative path,
/// because README.md and ARCHITECTURE.md link to them.
pub fn documents() -> Result<BTreeMap<String, Vec<u8>>> {
    let root = workspace_dir();
    let mut documents = BTreeMap::new();
    for (from, to) in DOCUMENTS {
        documents.insert(to.to_owned(), read(&root.join(from))?);
    }
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let path = folder.join(entry?.file_name());
            if root.join(&path).is_dir() {
                folders.push(path);
            } else {
                let text = read(&root.join(&path))?;
                documents.insert(path.to_string_lossy().into_owned(), text);
            }
        }
    }
    Ok(documents)
}

/// Adds the manual pages to the tree, compressed as packages require.
fn manuals(tree: &mut Tree, command: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    sh::read(Command::new(command).arg("man").arg(folder.path()))?;
    for entry in fs::read_dir(folder.path())? {
        let path = entry?.path();
        let name =
            path.file_name().context("the path has no file name")?.to_string_lossy().into_owned();
        // The gzip header has neither name nor time, so that the bytes are reproducible.
        let mut packed = GzBuilder::new().write(Vec::new(), Compression::best());
        packed.write_all(&read(&path)?)?;
        tree.file(format!("/usr/share/man/man1/{name}.gz"), packed.finish()?);
    }
    Ok(())
}

/// Returns the contents of a program without its symbols.
fn stripped(program: &Path) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    sh::run(Command::new("strip").arg("--strip-all").arg("-o").arg(file.path()).arg(program))?;
    read(file.path())
}

pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
