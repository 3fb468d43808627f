//! Takes a snapshot of a node's files, to compare their names, modes and contents later.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// Names of files and folders in a testbed's folder that containerd, the containers or the test
/// program create. A snapshot omits them, because they are not part of the node.
const RUNTIME: [&str; 8] = ["images.tar", "io", "pods", "run", "sim", "state", "store", "tools"];

/// Every file and folder of a node, with its mode and content.
#[derive(Clone, PartialEq, Eq)]
pub struct Snapshot(BTreeMap<PathBuf, String>);

impl Snapshot {
    /// Reads all files in a testbed's folder, except logs and sockets.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn of(dir: &Path) -> Result<Self> {
        let mut seen = BTreeMap::new();
        let mut folders = vec![dir.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder)
                .with_context(|| format!("cannot read {}", folder.display()))?;
            for entry in entries {
                let path = entry?.path();
                let name = path.strip_prefix(dir)?.to_owned();
                let data = fs::symlink_metadata(&path)?;
                let log = path.extension().is_some_and(|extension| extension == "log");
                let passing = RUNTIME.iter().any(|runtime| name == Path::new(runtime));
                if log || passing || data.file_type().is_socket() {
                    continue;
                }
                let content = if data.is_dir() {
                    folders.push(path);
                    "folder".to_owned()
                } else if data.is_symlink() {
                    format!("link to {}", fs::read_link(&path)?.display())
                } else {
                    digest(&path)?
                };
                seen.insert(name, format!("{:o} {content}", data.permissions().mode()));
            }
        }
        Ok(Self(seen))
    }

    /// Number of files and folders in the snapshot.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Requires that `after` is equal to this snapshot.
    ///
    /// # Errors
    /// When the snapshots differ. The error lists the differences.
    pub fn same_as(&self, after: &Snapshot) -> Result<()> {
        let names = self.0.keys().chain(after.0.keys());
        let mut differing: Vec<String> = names
            .filter(|name| self.0.get(*name) != after.0.get(*name))
            .map(|name| match (self.0.contains_key(name), after.0.contains_key(name)) {
                (true, false) => format!("{} was removed", name.display()),
                (false, true) => format!("{} was added", name.display()),
                _ => format!("{} has changed", name.display()),
            })
            .collect();
        differing.sort();
        differing.dedup();
        match differing.is_empty() {
            true => Ok(()),
            false => bail!("the node's files differ: {}", differing.join(", ")),
        }
    }
}

/// Returns the SHA-256 of a file, in hexadecimal.
///
/// # Errors
/// When the file cannot be read.
pub fn digest(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
