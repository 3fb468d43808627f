//! Images made by hand from the machine's own files: no registry, no network.
//!
//! All images share one layer: the dynamic loader and C library, a shell, a few
//! tools, Python when the machine has one. They differ in their configuration.

use std::{
    collections::BTreeSet,
    io::Write,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::closure;

/// Runs as root; starts a shell.
pub const PLAIN: &str = "localhost/affinode/plain:1";
/// The same, but runs as uid and gid 1000.
pub const UNPRIVILEGED: &str = "localhost/affinode/user:1";
/// The sandbox of a pod.
pub const PAUSE: &str = "localhost/affinode/pause:1";

/// Programs of the machine that images carry, where they exist.
const TOOLS: [&str; 14] = [
    "/bin/sh",
    "/bin/cat",
    "/bin/echo",
    "/bin/env",
    "/bin/false",
    "/bin/id",
    "/bin/ls",
    "/bin/mkfifo",
    "/bin/mount",
    "/bin/sleep",
    "/bin/stty",
    "/bin/true",
    "/usr/bin/tty",
    "/usr/bin/python3",
];
/// Python's own modules: its standard library, less what no test imports.
const PYTHON_LIBRARY: &str = "/usr/lib";
const PYTHON_LEFT_OUT: [&str; 9] = [
    "test",
    "__pycache__",
    "lib2to3",
    "idlelib",
    "tkinter",
    "pydoc_data",
    "distutils",
    "ensurepip",
    "unittest",
];

/// Writes an OCI archive with all images to `archive`.
///
/// # Errors
/// When a file of the machine cannot be read, or the archive cannot be written.
pub fn write_archive(archive: &Path) -> Result<()> {
    let layer = shared_layer()?;
    let mut files: Vec<(String, Vec<u8>)> =
        vec![("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec())];
    let mut manifests = Vec::new();
    let layer_descriptor = store(&mut files, layer, "application/vnd.oci.image.layer.v1.tar");
    let shell = json!({"Entrypoint": [], "Cmd": ["/bin/sh"]});
    let user = json!({"User": "1000:1000", "Cmd": ["/bin/sh"]});
    let pause = json!({"Entrypoint": ["/bin/sleep", "infinity"]});
    for (name, mut process) in [(PLAIN, shell), (UNPRIVILEGED, user), (PAUSE, pause)] {
        process["Env"] =
            json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]);
        let config = json!({
            "architecture": architecture(), "os": "linux", "config": process,
            "rootfs": {"type": "layers", "diff_ids": [layer_descriptor["digest"]]},
        });
        let config = store(
            &mut files,
            serde_json::to_vec(&config)?,
            "application/vnd.oci.image.config.v1+json",
        );
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer_descriptor],
        });
        let mut manifest = store(&mut files, serde_json::to_vec(&manifest)?, MANIFEST);
        manifest["annotations"] = json!({"io.containerd.image.name": name});
        manifests.push(manifest);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests});
    files.push(("index.json".into(), serde_json::to_vec(&index)?));

    let file = std::fs::File::create(archive)
        .with_context(|| format!("cannot write {}", archive.display()))?;
    let mut tar = tar::Builder::new(std::io::BufWriter::new(file));
    for (path, content) in files {
        append(&mut tar, Path::new(&path), 0o644, &content)?;
    }
    Ok(tar.into_inner()?.flush()?)
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Adds a blob and returns its descriptor. One content is stored once.
fn store(files: &mut Vec<(String, Vec<u8>)>, content: Vec<u8>, media_type: &str) -> Value {
    let digest: String =
        Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    let descriptor = json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()});
    let path = format!("blobs/sha256/{digest}");
    if files.iter().all(|(known, _)| *known != path) {
        files.push((path, content));
    }
    descriptor
}

/// The layer, made once per process: reading the machine's files is the slow part.
fn shared_layer() -> Result<Vec<u8>> {
    static LAYER: OnceLock<Result<Vec<u8>, String>> = OnceLock::new();
    LAYER
        .get_or_init(|| make_layer().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!(error))
}

fn make_layer() -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for (folder, mode) in [
        ("tmp", 0o1777),
        ("proc", 0o755),
        ("sys", 0o755),
        ("dev", 0o755),
        ("run", 0o755),
        ("root", 0o700),
    ] {
        append_folder(&mut tar, Path::new(folder), mode)?;
    }
    append(
        &mut tar,
        Path::new("etc/passwd"),
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n",
    )?;
    append(&mut tar, Path::new("etc/group"), 0o644, b"root:x:0:\nuser:x:1000:\n")?;
    for file in files()? {
        let content =
            std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        append(&mut tar, file.strip_prefix("/")?, 0o755, &content)?;
    }
    Ok(tar.into_inner()?)
}

/// Tools, Python's modules, and every library that one of them needs.
fn files() -> Result<BTreeSet<PathBuf>> {
    let tools: Vec<PathBuf> =
        TOOLS.iter().map(PathBuf::from).filter(|tool| tool.is_file()).collect();
    let mut files: BTreeSet<PathBuf> = tools.iter().cloned().collect();
    if let Some(modules) = python_modules() {
        collect(&modules, &mut files)?;
    }
    let programs: Vec<PathBuf> = files.iter().filter(|file| is_elf(file)).cloned().collect();
    for program in programs {
        files.extend(closure::libraries(&program)?);
    }
    // What programs built here need, although no tool does.
    for extra in ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"] {
        let near_libc = files
            .iter()
            .find(|file| file.ends_with("libc.so.6"))
            .map(|libc| libc.with_file_name(extra));
        files.extend(near_libc.filter(|file| file.is_file()));
    }
    Ok(files)
}

/// `/usr/lib/python3.N` of the machine's own Python.
fn python_modules() -> Option<PathBuf> {
    let real = std::fs::canonicalize("/usr/bin/python3").ok()?;
    let modules = Path::new(PYTHON_LIBRARY).join(real.file_name()?);
    modules.is_dir().then_some(modules)
}

fn collect(folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let left_out = PYTHON_LEFT_OUT.iter().any(|out| name == *out)
            || name.to_string_lossy().starts_with("config-");
        if left_out {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            collect(&entry.path(), files)?;
        } else if kind.is_file() {
            files.insert(entry.path());
        }
    }
    Ok(())
}

fn is_elf(file: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    std::fs::File::open(file)
        .and_then(|mut file| file.read_exact(&mut magic))
        .is_ok_and(|()| magic == *b"\x7fELF")
}

fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    path: &Path,
    mode: u32,
    content: &[u8],
) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    Ok(tar.append_data(&mut header, path, content)?)
}

fn append_folder<W: Write>(tar: &mut tar::Builder<W>, path: &Path, mode: u32) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(0);
    header.set_entry_type(tar::EntryType::Directory);
    Ok(tar.append_data(&mut header, path, std::io::empty())?)
}
