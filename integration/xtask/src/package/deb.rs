//! Builds the .deb package with dpkg-deb. All times are set from `SOURCE_DATE_EPOCH`.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    About,
    tree::{Node, Tree},
};
use crate::sh;

const DESCRIPTION: &str = "\
lets containers share GPUs by offloading idle GPU memory
 A containerd runtime shim that moves the GPU memory of idle containers to host
 memory and restores it at the next CUDA call. The package does not change the
 node's configuration: affinode install registers the runtime, affinode uninstall
 removes it.";
/// Script that dpkg runs after it has unpacked the package. It only prints the next steps and does
/// not install Affinode, because an installation may restart containerd.
pub const AFTER: &str = include_str!("after.sh");
/// Script that dpkg runs before it removes the package. It prints what remains on the node.
pub const BEFORE_REMOVAL: &str = include_str!("before-removal.sh");

pub fn pack(about: &About, files: &Tree) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let root = folder.path().join("root");
    lay_out(files, &root)?;
    let control = root.join("DEBIAN");
    make(&control)?;
    fs::write(control.join("control"), control_file(about, files))?;
    for (name, script) in [("postinst", AFTER), ("prerm", BEFORE_REMOVAL)] {
        put(&control.join(name), script.as_bytes(), 0o755)?;
    }
    let package = folder.path().join("affinode.deb");
    sh::read(
        Command::new("dpkg-deb")
            .env("SOURCE_DATE_EPOCH", about.epoch_seconds.to_string())
            // Several threads would divide the data differently, so the bytes would vary. xz is
            // used because old versions of dpkg support it.
            .args(["--root-owner-group", "-Zxz", "--threads-max=1", "--build"])
            .args([&root, &package]),
    )?;
    Ok(fs::read(package)?)
}

fn control_file(about: &About, files: &Tree) -> String {
    format!(
        "Package: affinode\n\
         Version: {}\n\
         Architecture: amd64\n\
         Maintainer: Affinode maintainers <maintainers@affinode.io>\n\
         Installed-Size: {}\n\
         Depends: libc6 (>= {}), libgcc-s1\n\
         Recommends: containerd | containerd.io\n\
         Section: admin\n\
         Priority: optional\n\
         Description: {DESCRIPTION}\n",
        about.package_version(),
        files.size_bytes().div_ceil(1024),
        about.glibc,
    )
}

/// Writes a tree of files into a folder, independent of the umask.
pub fn lay_out(files: &Tree, root: &Path) -> Result<()> {
    make(root)?;
    for folder in files.folders() {
        make(&below(root, folder))?;
    }
    for (path, node) in files.iter() {
        let path = below(root, path);
        match node {
            Node::File { content, mode } => put(&path, content, u32::from(*mode))?,
            Node::Link(target) => symlink(target, &path)?,
        }
    }
    Ok(())
}

fn below(root: &Path, path: &Path) -> std::path::PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?)
}

fn put(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}
