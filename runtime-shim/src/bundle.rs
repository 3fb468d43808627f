//! A container's bundle folder: config.json, the address files that containerd reads after a
//! restart, and the note that Affinode stores next to them.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::probe::ShimIdentity;

/// Maximum size of config.json. Most are below 1 MiB.
const CONFIG_MAX_BYTES: u64 = 16 << 20;
/// Maximum size of each file in a bundle other than config.json.
const NOTE_MAX_BYTES: u64 = 64 << 10;
const CONFIG: &str = "config.json";
const NOTE: &str = "affinode.json";
/// Default folder for runc's state. The stock shim passes it to runc unless the runtime options
/// name another folder.
const RUNC_ROOT: &str = "/run/containerd/runc";
const MEMBERS: &str = "affinode-members";

/// The folder of one container with config.json and the shim's files.
#[derive(Clone, Debug)]
pub struct Bundle(PathBuf);

/// Reason why a file of a bundle could not be read or replaced.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file to read.
        path: PathBuf,
        /// Error of the read.
        source: io::Error,
    },
    /// The file is larger than the maximum size that the shim reads.
    #[error("{path} is larger than {max_bytes} bytes")]
    TooLarge {
        /// Path of the rejected file.
        path: PathBuf,
        /// The maximum size in bytes.
        max_bytes: u64,
    },
    /// The file does not parse as JSON.
    #[error("{path} is not JSON")]
    NotJson {
        /// Path of the rejected file.
        path: PathBuf,
        /// Syntax error with its position.
        source: serde_json::Error,
    },
    /// The file cannot be replaced.
    #[error("cannot replace {path}")]
    Write {
        /// Path of the file to replace.
        path: PathBuf,
        /// Error of the write.
        source: io::Error,
    },
}

/// Record that the command `start` writes into the bundle, and that `delete` reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleNote {
    /// Address that the proxy serves.
    pub address: String,
    /// Address that the stock shim serves.
    pub upstream: String,
    /// Identity of the stock shim to which the proxy forwards.
    pub shim: ShimIdentity,
}

impl Bundle {
    /// Returns the bundle whose folder is at this path.
    pub fn new(path: impl Into<PathBuf>) -> Bundle {
        Bundle(path.into())
    }

    /// Path of the bundle folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reads and parses config.json, the container's spec.
    pub fn read_spec(&self) -> Result<Value, BundleError> {
        let path = self.0.join(CONFIG);
        let bytes = read_bounded(&path, CONFIG_MAX_BYTES)?;
        serde_json::from_slice(&bytes).map_err(|source| BundleError::NotJson { path, source })
    }

    /// Replaces config.json and keeps its owner and mode.
    pub fn write_spec(&self, spec: &Value) -> Result<(), BundleError> {
        let path = self.0.join(CONFIG);
        let write = || {
            let bytes = serde_json::to_vec(spec)?;
            replace(&path, &bytes)
        };
        write().map_err(|source| BundleError::Write { path: path.clone(), source })
    }

    /// Replaces the stock shim's address in the bundle's file `address` by the proxy's address.
    /// containerd 1.x reads this file after a restart, and would otherwise bypass the proxy. If the
    /// bundle has no such file, none is created.
    pub fn rewrite_address(&self, address: &str) -> Result<(), BundleError> {
        let path = self.0.join("address");
        if !path.exists() {
            return Ok(());
        }
        replace(&path, address.as_bytes()).map_err(|source| BundleError::Write { path, source })
    }

    /// Returns the address at which containerd finds this container's shim, as recorded in the
    /// bundle.
    #[must_use]
    pub fn recorded_address(&self) -> Option<String> {
        if let Ok(bytes) = read_bounded(&self.0.join("bootstrap.json"), NOTE_MAX_BYTES) {
            let value: Value = serde_json::from_slice(&bytes).ok()?;
            return Some(value.get("address")?.as_str()?.to_owned());
        }
        let bytes = read_bounded(&self.0.join("address"), NOTE_MAX_BYTES).ok()?;
        Some(String::from_utf8(bytes).ok()?.trim().to_owned())
    }

    /// Writes the record that the command `delete` reads later.
    pub fn write_note(&self, note: &BundleNote) -> Result<(), BundleError> {
        let path = self.0.join(NOTE);
        let write = || {
            let bytes = serde_json::to_vec(note)?;
            replace(&path, &bytes)
        };
        write().map_err(|source| BundleError::Write { path: path.clone(), source })
    }

    /// Reads the record that `start` wrote. Returns `None` if there is none, or if it does not
    /// parse.
    #[must_use]
    pub fn note(&self) -> Option<BundleNote> {
        let bytes = read_bounded(&self.0.join(NOTE), NOTE_MAX_BYTES).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Records the ids of the containers that the daemon of this bundle serves, for `delete`. If
    /// the shim of a group has ended, containerd 2.x removes the bundles of the group's other
    /// containers before it runs `delete`. The record is then the only list of these containers.
    pub fn write_members<'a>(&self, ids: impl Iterator<Item = &'a str>) -> Result<(), BundleError> {
        let path = self.0.join(MEMBERS);
        let lines: String = ids.flat_map(|id| [id, "\n"]).collect();
        replace(&path, lines.as_bytes()).map_err(|source| BundleError::Write { path, source })
    }

    /// Returns the ids of the containers that the daemon last recorded in this bundle.
    #[must_use]
    pub fn members(&self) -> Vec<String> {
        let bytes = read_bounded(&self.0.join(MEMBERS), NOTE_MAX_BYTES).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        text.lines()
            // An id is used as a file name, so entries that are not plain file names are dropped.
            .filter(|id| !id.is_empty() && !id.contains('/') && *id != "." && *id != "..")
            .map(str::to_owned)
            .collect()
    }

    /// Returns the folder in which runc stores the container's state until the container is
    /// deleted.
    #[must_use]
    pub fn runc_state(&self, namespace: &str, id: &str) -> PathBuf {
        // `options.json` is the stock shim's copy of its options. There is no such file if the
        // stock shim got no options.
        let bytes = read_bounded(&self.0.join("options.json"), NOTE_MAX_BYTES).unwrap_or_default();
        let options: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let root = options["root"].as_str().filter(|root| !root.is_empty());
        Path::new(root.unwrap_or(RUNC_ROOT)).join(namespace).join(id)
    }

    /// Returns the bundle of another container in the same namespace.
    #[must_use]
    pub fn sibling(&self, id: &str) -> Bundle {
        Bundle(self.0.with_file_name(id))
    }

    /// Returns the bundles of all other containers in the same namespace.
    #[must_use]
    pub fn siblings(&self) -> Vec<Bundle> {
        let Some(entries) = self.0.parent().and_then(|dir| fs::read_dir(dir).ok()) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .filter(|path| *path != self.0)
            .map(Bundle)
            .collect()
    }

    /// Returns the container's id, which is the name of the bundle's folder. Returns `None` if it
    /// is not UTF-8.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        self.0.file_name()?.to_str()
    }
}

fn read_bounded(path: &Path, max_bytes: u64) -> Result<Vec<u8>, BundleError> {
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?.take(max_bytes + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|source| BundleError::Read { path: path.to_owned(), source })?;
    if bytes.len() as u64 > max_bytes {
        return Err(BundleError::TooLarge { path: path.to_owned(), max_bytes });
    }
    Ok(bytes)
}

/// Writes a new file next to `path` and renames it over `path`, so that a reader sees either the
/// old or the new file as a whole. Owner and mode stay those of the old file, if there was one.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = path.with_file_name(format!(".{name}.affinode"));
    // Remove the file of an earlier attempt that was killed.
    let _ = fs::remove_file(&fresh);
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(bytes)?;
        match fs::metadata(path) {
            Ok(old) => {
                std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
                file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        fs::rename(&fresh, path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&fresh);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle() -> (tempfile::TempDir, Bundle) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("box");
        fs::create_dir(&path).unwrap();
        (dir, Bundle::new(path))
    }

    #[test]
    fn replaced_spec_keeps_its_mode() {
        let (_dir, bundle) = bundle();
        let path = bundle.path().join(CONFIG);
        fs::write(&path, "{\"b\":1,\"a\":18446744073709551615}").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let spec = bundle.read_spec().unwrap();
        bundle.write_spec(&spec).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "{\"b\":1,\"a\":18446744073709551615}",
            "order and numbers stay"
        );
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(bundle.path()).unwrap().count(), 1);
    }

    #[test]
    fn bad_specs_are_named() {
        let (_dir, bundle) = bundle();
        let missing = bundle.read_spec().unwrap_err().to_string();
        assert!(missing.contains("cannot read"), "{missing}");
        fs::write(bundle.path().join(CONFIG), "{not json").unwrap();
        let error = bundle.read_spec().unwrap_err().to_string();
        assert!(error.ends_with("box/config.json is not JSON"), "{error}");
        File::create(bundle.path().join(CONFIG)).unwrap().set_len(CONFIG_MAX_BYTES + 1).unwrap();
        let error = bundle.read_spec().unwrap_err().to_string();
        assert!(error.contains("larger than"), "{error}");
    }

    #[test]
    fn only_an_existing_address_file_is_replaced() {
        let (_dir, bundle) = bundle();
        bundle.rewrite_address("unix:///ours").unwrap();
        assert!(bundle.recorded_address().is_none());
        fs::write(bundle.path().join("address"), "unix:///stock").unwrap();
        bundle.rewrite_address("unix:///ours").unwrap();
        assert_eq!(bundle.recorded_address().as_deref(), Some("unix:///ours"));
        let json = r#"{"version":3,"address":"unix:///two","protocol":"ttrpc"}"#;
        fs::write(bundle.path().join("bootstrap.json"), json).unwrap();
        assert_eq!(bundle.recorded_address().as_deref(), Some("unix:///two"));
    }

    #[test]
    fn members_are_ids_and_nothing_else() {
        let (_dir, bundle) = bundle();
        assert!(bundle.members().is_empty());
        bundle.write_members(["a", "b-1"].into_iter()).unwrap();
        assert_eq!(bundle.members(), ["a", "b-1"]);
        assert_eq!(bundle.sibling("a").id(), Some("a"));
        fs::write(bundle.path().join(MEMBERS), "a\n../x\n\n..\n.\nb").unwrap();
        assert_eq!(bundle.members(), ["a", "b"]);
    }

    #[test]
    fn the_state_of_runc_is_where_the_options_say() {
        let (_dir, bundle) = bundle();
        let state = || bundle.runc_state("k8s.io", "box");
        assert_eq!(state(), Path::new("/run/containerd/runc/k8s.io/box"));
        fs::write(bundle.path().join("options.json"), r#"{"systemd_cgroup":true}"#).unwrap();
        assert_eq!(state(), Path::new("/run/containerd/runc/k8s.io/box"));
        fs::write(bundle.path().join("options.json"), r#"{"root":"/run/other"}"#).unwrap();
        assert_eq!(state(), Path::new("/run/other/k8s.io/box"));
    }

    #[test]
    fn siblings_are_the_other_folders() {
        let (dir, bundle) = bundle();
        fs::create_dir(dir.path().join("two")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let ids: Vec<_> = bundle.siblings().iter().map(|b| b.id().unwrap().to_owned()).collect();
        assert_eq!(ids, ["two"]);
    }
}
