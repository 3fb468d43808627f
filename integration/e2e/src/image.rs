//! Container images made from the machine's own files, without a registry or network.
//!
//! The images share one layer: the dynamic loader and C library, a shell, a few tools, and Python
//! if the machine has one. They differ in their configuration.

mod layer;
mod oci;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Result, anyhow};
use serde_json::json;

use crate::shared_libs;

pub use layer::Layer;
pub use oci::Archive;

/// Name of the image whose program, a shell, runs as root.
pub const PLAIN: &str = "localhost/affinode/plain:1";
/// Name of an image like [`PLAIN`], but its program runs as uid and gid 1000.
pub const UNPRIVILEGED: &str = "localhost/affinode/user:1";
/// Name of the image of a pod's sandbox.
pub const PAUSE: &str = "localhost/affinode/pause:1";

/// Programs that are copied from the machine into the images, if they exist.
const TOOLS: [&str; 16] = [
    "/bin/sh",
    "/bin/cat",
    "/bin/chmod",
    "/bin/echo",
    "/bin/env",
    "/bin/false",
    "/bin/grep",
    "/bin/id",
    "/bin/ls",
    "/bin/mount",
    "/bin/rm",
    "/bin/sleep",
    "/bin/stty",
    "/bin/true",
    "/usr/bin/tty",
    "/usr/bin/python3",
];
/// Libraries that are copied into the images for programs that are built on this machine. The
/// images' tools need other libraries as well, which are found with `ldd`.
const LIBRARIES: [&str; 5] =
    ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"];
/// Parts of Python's standard library that no test imports. They are not copied into the images.
const PYTHON_LEFT_OUT: [&str; 12] = [
    "test",
    "__pycache__",
    "lib2to3",
    "idlelib",
    "tkinter",
    "pydoc_data",
    "distutils",
    "ensurepip",
    "unittest",
    "email",
    "asyncio",
    "venv",
];

/// Writes an OCI archive with the images [`PLAIN`], [`UNPRIVILEGED`] and [`PAUSE`] to the file
/// `archive`.
///
/// # Errors
/// When a file of the machine cannot be read, or the archive cannot be written.
pub fn write_usual(archive: &Path) -> Result<()> {
    let layer = shared_layer()?;
    let path = json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]);
    let mut images = Archive::default();
    images.image(PLAIN, layer, &json!({"Env": path, "Cmd": ["/bin/sh"]}))?;
    images.image(
        UNPRIVILEGED,
        layer,
        &json!({"Env": path, "Cmd": ["/bin/sh"], "User": "1000:1000"}),
    )?;
    images.image(PAUSE, layer, &json!({"Env": path, "Entrypoint": ["/bin/sleep", "infinity"]}))?;
    images.write(archive)
}

/// Returns the layer that all images share. It is built once per process, because reading the
/// machine's files is slow.
fn shared_layer() -> Result<&'static [u8]> {
    static LAYER: OnceLock<Result<Vec<u8>, String>> = OnceLock::new();
    let make = || usual_layer().and_then(Layer::finish).map_err(|error| format!("{error:#}"));
    let made = LAYER.get_or_init(make);
    made.as_deref().map_err(|error| anyhow!("{error}"))
}

/// Returns the layer that all images share, for tests that add files to it.
///
/// # Errors
/// When a file of the machine cannot be read.
pub fn usual_layer() -> Result<Layer> {
    let mut layer = Layer::base()?;
    for file in files()? {
        layer.copy(&file, &file)?;
    }
    Ok(layer)
}

/// Returns the paths of the tools, of Python's modules, and of every library that they need.
fn files() -> Result<BTreeSet<PathBuf>> {
    let mut files: BTreeSet<PathBuf> =
        TOOLS.iter().map(PathBuf::from).filter(|tool| tool.is_file()).collect();
    if let Some(modules) = python_modules() {
        collect(&modules, &mut files)?;
    }
    let programs: Vec<PathBuf> = files.iter().filter(|file| is_elf(file)).cloned().collect();
    for program in programs {
        files.extend(shared_libs::libraries(&program)?);
    }
    let libc = files.iter().find(|file| file.ends_with("libc.so.6")).cloned();
    let near_libc =
        LIBRARIES.iter().filter_map(|library| Some(libc.as_ref()?.with_file_name(library)));
    files.extend(near_libc.filter(|file| file.is_file()));
    Ok(files)
}

/// Finds the folder `/usr/lib/python3.N` of the machine's own Python.
fn python_modules() -> Option<PathBuf> {
    let real = std::fs::canonicalize("/usr/bin/python3").ok()?;
    let modules = Path::new("/usr/lib").join(real.file_name()?);
    modules.is_dir().then_some(modules)
}

fn collect(folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let left_out = PYTHON_LEFT_OUT.iter().any(|out| name == *out);
        if left_out || name.to_string_lossy().starts_with("config-") {
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
