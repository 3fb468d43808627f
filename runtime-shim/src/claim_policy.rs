//! Reads the policy (settings of Affinode) that ResourceClaims of Kubernetes (DRA) give to a
//! container. The node agent writes a claim's policy into files of the run directory, and a CDI
//! specification mounts these files into the containers that use the claim. CDI cannot set
//! annotations of a container, so the shim finds the policy by these mounts.
//!
//! A mount counts only if its source is in the run directory. Only root can write there, and a pod
//! can mount such a file itself only if it may mount any folder of the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use affinode_proto::annotations::{CLAIM, CLAIMED_VRAM, set_the_same};
use affinode_proto::api::control::Announcement;
use affinode_proto::paths::{CLAIMS_DIR, CONTAINER_CLAIMS_DIR};
use serde_json::Value;
use tracing::warn;

use crate::metadata::{MAX_ANNOTATION_BYTES, MAX_ANNOTATIONS, may_be_claimed};
use crate::spec;

/// Maximum number of policy files that are read for one container. It is the maximum number of
/// devices of a claim.
const MAX_FILES: usize = 32;
/// Maximum size of a policy file. The node agent writes at most 32 settings of 512 bytes.
const MAX_BYTES: u64 = 32 << 10;

/// Adds the policy of the container's claims to the annotations in its announcement. An annotation
/// of the pod has precedence. If several claims set the same setting, the claim whose UID is
/// alphabetically last has precedence, so that a container has the same policy after each start.
pub fn add(run_dir: &Path, spec: &Value, announcement: &mut Announcement) {
    let mut claimed = BTreeMap::<String, String>::new();
    let mut memory = ClaimedMemory::default();
    let mut names = BTreeSet::new();
    let mut files: Vec<_> = files(&run_dir.join(CLAIMS_DIR), spec).collect();
    // A container engine may add the devices of a container in any order.
    files.sort();
    if files.len() > MAX_FILES {
        let (id, count) = (&announcement.id, files.len());
        warn!(
            "container {id}: its resource claims have {count} policy files, but Affinode uses only \
             {MAX_FILES} of them"
        );
        files.truncate(MAX_FILES);
    }
    for file in files {
        match read(&file) {
            Ok(policy) => {
                memory.add(policy.get(CLAIMED_VRAM));
                names.extend(policy.get(CLAIM).cloned());
                claimed.retain(|name, _| !sets_any(&policy, name));
                claimed.extend(policy);
            }
            Err(error) => {
                let (id, file) = (&announcement.id, file.display());
                warn!("container {id}: cannot use policy file {file} of its claim: {error}");
            }
        }
    }
    let own = announcement.annotations.clone().into_iter().collect();
    for (name, value) in claimed {
        if sets_any(&own, &name) {
            continue;
        }
        let full = announcement.annotations.len() >= MAX_ANNOTATIONS;
        if !full && may_be_claimed(&name, &value) {
            announcement.annotations.entry(name).or_insert(value);
        }
    }
    // A pod with the maximum number of annotations must not escape its limit.
    if let Some(bytes) = memory.limit_bytes() {
        announcement.annotations.insert(CLAIMED_VRAM.into(), bytes.to_string());
    }
    if let Some(names) = joined(names) {
        announcement.annotations.insert(CLAIM.into(), names);
    }
}

/// Joins the names of a container's claims. Leaves out the names that would make the annotation too
/// long. `None`: there is no name.
fn joined(names: BTreeSet<String>) -> Option<String> {
    let room = MAX_ANNOTATION_BYTES - CLAIM.len();
    let join = |sum: String, name: String| match sum.is_empty() {
        true if name.len() <= room => name,
        false if sum.len() + 1 + name.len() <= room => format!("{sum},{name}"),
        _ => sum,
    };
    Some(names.into_iter().fold(String::new(), join)).filter(|joined| !joined.is_empty())
}

/// GPU memory that Kubernetes has allocated to a container's claims, for each device.
#[derive(Default)]
struct ClaimedMemory {
    /// Bytes of each device, summed over the claims of the container.
    of_devices: BTreeMap<String, u64>,
}

impl ClaimedMemory {
    /// Adds the amount of one policy file: `DEVICE=BYTES`.
    fn add(&mut self, amount: Option<&String>) {
        let Some((device, bytes)) = amount.and_then(|amount| amount.split_once('=')) else {
            return;
        };
        if let Ok(bytes) = bytes.parse::<u64>() {
            let sum = self.of_devices.entry(device.to_owned()).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Returns the limit of the container's VRAM on each GPU. A container has the same limit on all
    /// its GPUs, so the limit is the amount of the device with the largest amount.
    fn limit_bytes(&self) -> Option<u64> {
        self.of_devices.values().max().copied()
    }
}

/// Whether any of these annotations sets the same setting as the annotation `name`.
fn sets_any(annotations: &BTreeMap<String, String>, name: &str) -> bool {
    annotations.keys().any(|other| set_the_same(other, name))
}

/// Returns the files of this folder that are mounted into the container's folder for policies of
/// claims ([`CONTAINER_CLAIMS_DIR`]).
fn files(folder: &Path, spec: &Value) -> impl Iterator<Item = PathBuf> {
    let folder = identity(folder);
    spec::mounts(spec).filter_map(move |(source, destination)| {
        let (source, destination) = (Path::new(source), Path::new(destination));
        let inside = destination.parent() == Some(Path::new(CONTAINER_CLAIMS_DIR));
        // A path that ends in `..` has no file name, and leads out of its parent.
        source.file_name()?;
        let ours = inside && folder.is_some() && identity(source.parent()?) == folder;
        ours.then(|| source.to_owned())
    })
}

/// Returns device and inode of a folder, to compare it with another path. The node agent may name
/// the folder by another path than the shim, for example below /var/run.
fn identity(folder: &Path) -> Option<(u64, u64)> {
    let data = std::fs::metadata(folder).ok()?;
    Some((data.dev(), data.ino()))
}

fn read(file: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut text = Vec::new();
    File::open(file)?.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    /// Returns the announced annotations of a container that has the annotations `own` and mounts
    /// these files of the run directory.
    fn annotations(files: &[(&str, &str)], own: &[(&str, &str)]) -> BTreeMap<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(CLAIMS_DIR);
        fs::create_dir(&folder).unwrap();
        let mounts: Vec<Value> = files
            .iter()
            .map(|(name, text)| {
                fs::write(folder.join(name), text).unwrap();
                let destination = format!("{CONTAINER_CLAIMS_DIR}/{name}");
                json!({"source": folder.join(name), "destination": destination})
            })
            .collect();
        added(dir.path(), &json!({ "mounts": mounts }), own)
    }

    fn added(run_dir: &Path, spec: &Value, own: &[(&str, &str)]) -> BTreeMap<String, String> {
        let mut announcement = Announcement::new();
        let own = own.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        announcement.annotations.extend(own);
        add(run_dir, spec, &mut announcement);
        announcement.annotations.into_iter().collect()
    }

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn names_of_claims_come_from_their_files() {
        let named = |name: &str| format!(r#"{{"affinode.io/claim": "{name}"}}"#);
        let [first, second] = ["ml/b", "ml/a"].map(named);
        let own = [("affinode.io/offload", "off")];
        // The devices of a claim have a file each.
        let files = [("u-1-0", &*first), ("u-1-1", &*first), ("u-2-0", &*second)];
        let got = annotations(&files, &own);
        assert_eq!(got["affinode.io/claim"], "ml/a,ml/b");
        let long = named(&format!("ml/{}", "x".repeat(600)));
        let got = annotations(&[("u-1-0", &first), ("u-2-0", &long)], &[]);
        assert_eq!(got, map(&[("affinode.io/claim", "ml/b")]), "a name that is too long");
    }

    #[test]
    fn claims_fill_in_what_the_pod_leaves_open() {
        let first = r#"{"affinode.io/priority": "1", "affinode.io/offload": "eager"}"#;
        let second = r#"{"affinode.io/priority": "2"}"#;
        let own = [("affinode.io/offload", "off")];
        let got = annotations(&[("u-1-0", first), ("u-2-0", second)], &own);
        assert_eq!(got, map(&[("affinode.io/offload", "off"), ("affinode.io/priority", "2")]));
    }

    #[test]
    fn claims_are_merged_in_order_of_their_names() {
        let first = r#"{"affinode.io/priority": "1"}"#;
        let second = r#"{"affinode.io/priority": "2"}"#;
        let expected = map(&[("affinode.io/priority", "2")]);
        for files in [[("u-1-0", first), ("u-2-0", second)], [("u-2-0", second), ("u-1-0", first)]]
        {
            assert_eq!(annotations(&files, &[]), expected);
        }
    }

    /// The pod and its claim use different annotations for the same setting: when the container is
    /// offloaded. The pod's annotation must replace the claim's.
    #[test]
    fn pod_replaces_the_same_setting_of_its_claim() {
        let claim = r#"{"affinode.io/latency-sensitive": "true"}"#;
        let own = [("affinode.io/offload", "eager")];
        assert_eq!(annotations(&[("u-1-0", claim)], &own), map(&own));
        let later = r#"{"affinode.io/offload": "auto"}"#;
        let got = annotations(&[("u-1-0", claim), ("u-2-0", later)], &[]);
        assert_eq!(got, map(&[("affinode.io/offload", "auto")]));
    }

    #[test]
    fn memory_of_claims_is_summed_by_device() {
        let amount = |text: &str| format!(r#"{{"affinode.io/claimed-vram": "{text}"}}"#);
        let [one, two, other] = ["gpu-a=100", "gpu-a=50", "gpu-b=120"].map(amount);
        let of = |files: &[(&str, &str)]| annotations(files, &[]);
        assert_eq!(of(&[("u-1-0", &one)]), map(&[("affinode.io/claimed-vram", "100")]));
        let all = [("u-1-0", &*one), ("u-2-0", &two), ("u-2-1", &other)];
        assert_eq!(of(&all), map(&[("affinode.io/claimed-vram", "150")]));
        assert_eq!(of(&[("u-1-0", &amount("gpu-a"))]), map(&[]));
    }

    #[test]
    fn pod_with_many_annotations_keeps_its_limit() {
        let file = r#"{"affinode.io/claimed-vram": "gpu-a=100"}"#;
        let many: Vec<String> =
            (0..MAX_ANNOTATIONS).map(|number| format!("affinode.io/{number}")).collect();
        let own: Vec<_> = many.iter().map(|name| (&**name, "v")).collect();
        assert_eq!(annotations(&[("u-1-0", file)], &own)["affinode.io/claimed-vram"], "100");
    }

    #[test]
    fn other_names_and_large_files_do_not_count() {
        let other = r#"{"example.com/x": "1", "affinode.io/inject": "false"}"#;
        let large = format!(r#"{{"affinode.io/priority": "{}"}}"#, " ".repeat(40_000));
        let files = [("a", other), ("b", &large), ("c", "[]")];
        assert_eq!(annotations(&files, &[]), map(&[]));
    }

    #[test]
    fn mounts_of_other_places_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let policy = r#"{"affinode.io/priority": "9"}"#;
        fs::create_dir_all(dir.path().join(CLAIMS_DIR)).unwrap();
        for file in ["policy", "claims/policy"] {
            fs::write(dir.path().join(file), policy).unwrap();
        }
        let place = |path: &str| dir.path().join(path).display().to_string();
        let inside = format!("{CONTAINER_CLAIMS_DIR}/policy");
        for (source, destination) in [
            (place("policy"), inside.as_str()),
            (place("claims/../policy"), inside.as_str()),
            (place("claims/policy"), "/mnt/policy"),
            (place("claims/policy"), "/.affinode/claims/../policy"),
        ] {
            let spec = json!({"mounts": [{"source": source, "destination": destination}]});
            assert_eq!(added(dir.path(), &spec, &[]), map(&[]), "{source} at {destination}");
        }
        let spec = json!({"mounts": [{"source": place("claims/policy"), "destination": inside}]});
        assert_eq!(added(dir.path(), &spec, &[]), map(&[("affinode.io/priority", "9")]));
    }
}
