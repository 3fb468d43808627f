//! The files of prepared claims on the node: a CDI specification for each claim, and a file with the
//! policy for each device that has one.
//!
//! Each file is written under a temporary name and then renamed, so that it is complete whenever it
//! exists. A claim is prepared if its specification exists. Therefore the specification is written
//! last and removed first. The folders are on a tmpfs: after a restart of the machine, the kubelet
//! prepares the claims of its pods again.
//!
//! A third file of each claim records that the kubelet has asked for the claim. It prevents the
//! removal of the driver, because the kubelet needs the driver to end the pod. The kubelet needs
//! the driver even for a claim whose preparation failed. Therefore the file is written before all
//! steps that can fail.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    cdi::{ClaimName, ClaimSpec, ClaimUid, device_name},
    policy::Annotations,
};

/// Beginning of the name of a claim's specification.
const SPEC_PREFIX: &str = "gpu.affinode.io-claim_";
/// End of the name of a claim's specification.
const SPEC_SUFFIX: &str = ".json";
/// Name of the folder that has a file for each claim that the kubelet has asked for. The folder is
/// in the folder of policies.
const REQUESTED_DIR: &str = "requested";
/// Maximum size of a specification, in bytes. A larger file is not read.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// Reads, writes and removes the files of claims in these folders of the node.
#[derive(Clone, Debug)]
pub struct ClaimFiles {
    /// Folder of CDI specifications, as this process sees it.
    pub cdi_dir: PathBuf,
    /// Folder of policies, as this process sees it.
    pub policy_dir: PathBuf,
    /// The folder of policies, as the node sees it.
    pub policy_dir_on_node: PathBuf,
}

/// A file could not be read, written or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}; check the free space and the rights of the folder", path.display())]
pub struct FileError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl ClaimFiles {
    /// Reads the specification of a claim. `None`: the claim is not prepared, or this driver cannot
    /// parse the file of the claim.
    #[must_use]
    pub fn spec(&self, uid: &ClaimUid) -> Option<ClaimSpec> {
        let file = self.spec_file(uid);
        let small = fs::metadata(&file).is_ok_and(|data| data.len() <= MAX_SPEC_BYTES);
        let text = small.then(|| fs::read(&file).ok())??;
        serde_json::from_slice(&text).ok()
    }

    /// Records that the kubelet has asked for the preparation of a claim. The record exists until
    /// [`ClaimFiles::remove`].
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be written.
    pub fn record_request(&self, claim: &ClaimName) -> Result<(), FileError> {
        let file = self.request_file(&claim.uid);
        let text = format!("{}/{}", claim.namespace, claim.name);
        write(&file, text.as_bytes()).map_err(|source| FileError {
            verb: "write",
            path: file,
            source,
        })
    }

    /// Returns whether the kubelet has asked for the preparation of this claim, and has not
    /// reverted the request.
    #[must_use]
    pub fn is_requested(&self, uid: &ClaimUid) -> bool {
        self.request_file(uid).exists()
    }

    /// Writes the policy of a device. Returns the path of the file on the node.
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be written.
    pub fn write_policy(
        &self,
        uid: &ClaimUid,
        number: usize,
        policy: &Annotations,
    ) -> Result<PathBuf, FileError> {
        let name = device_name(uid, number);
        let text = serde_json::to_vec(policy).map_err(io::Error::other);
        let file = self.policy_dir.join(&name);
        let written = text.and_then(|text| write(&file, &text));
        written.map_err(|source| FileError { verb: "write", path: file, source })?;
        Ok(self.policy_dir_on_node.join(name))
    }

    /// Writes the specification of a claim. The claim is prepared afterwards.
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be written.
    pub fn write_spec(&self, uid: &ClaimUid, spec: &ClaimSpec) -> Result<(), FileError> {
        let file = self.spec_file(uid);
        let text = serde_json::to_vec_pretty(spec).map_err(io::Error::other);
        let written = text.and_then(|text| write(&file, &text));
        written.map_err(|source| FileError { verb: "write", path: file, source })
    }

    /// Removes the files of a claim. Missing files are not an error.
    ///
    /// # Errors
    /// [`FileError`]: a file exists and cannot be removed.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), FileError> {
        remove(&self.spec_file(uid))?;
        let start = format!("{uid}-");
        for name in names(&self.policy_dir)? {
            // UIDs contain hyphens, so the rest must be the number alone.
            let number = name.strip_prefix(&start).and_then(|rest| rest.parse::<usize>().ok());
            if number.is_some() {
                remove(&self.policy_dir.join(name))?;
            }
        }
        remove(&self.request_file(uid))
    }

    /// Returns the claims that the kubelet has asked for or that are prepared. The key is the UID.
    /// The value is `namespace/name`, or the UID again if the name is unknown.
    ///
    /// # Errors
    /// [`FileError`]: a folder cannot be read.
    pub fn held(&self) -> Result<BTreeMap<String, String>, FileError> {
        let is_uid = |text: &str| text.parse::<ClaimUid>().is_ok();
        let mut held = BTreeMap::new();
        for name in names(&self.cdi_dir)? {
            let uid =
                name.strip_prefix(SPEC_PREFIX).and_then(|rest| rest.strip_suffix(SPEC_SUFFIX));
            if let Some(uid) = uid.filter(|uid| is_uid(uid)) {
                held.insert(uid.to_owned(), uid.to_owned());
            }
        }
        let folder = self.policy_dir.join(REQUESTED_DIR);
        for uid in names(&folder)?.into_iter().filter(|name| is_uid(name)) {
            let claim = fs::read_to_string(folder.join(&uid)).unwrap_or_else(|_| uid.clone());
            held.insert(uid, claim);
        }
        Ok(held)
    }

    fn request_file(&self, uid: &ClaimUid) -> PathBuf {
        self.policy_dir.join(REQUESTED_DIR).join(uid.to_string())
    }

    fn spec_file(&self, uid: &ClaimUid) -> PathBuf {
        self.cdi_dir.join(format!("{SPEC_PREFIX}{uid}{SPEC_SUFFIX}"))
    }
}

/// Returns the names of the files in a folder. For a missing folder, the list is empty.
fn names(folder: &Path) -> Result<Vec<String>, FileError> {
    let failed = |source| FileError { verb: "read the folder", path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

fn write(file: &Path, text: &[u8]) -> io::Result<()> {
    if fs::read(file).is_ok_and(|there| there == text) {
        return Ok(());
    }
    fs::create_dir_all(file.parent().unwrap_or(file))?;
    let fresh = unfinished(file);
    fs::write(&fresh, text)?;
    fs::rename(&fresh, file)
}

/// Returns the name that a file has until it is completely written. containerd ignores this name,
/// because it reads only files that end with .json or .yaml.
fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Removes a file, and its unfinished copy if a write was interrupted.
fn remove(file: &Path) -> Result<(), FileError> {
    for path in [file.to_owned(), unfinished(file)] {
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(FileError { verb: "remove", path, source });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::dra::{allocation::AllocatedGpu, cdi::ClaimDevice};

    fn files(folder: &Path) -> ClaimFiles {
        ClaimFiles {
            cdi_dir: folder.join("cdi"),
            policy_dir: folder.join("claims"),
            policy_dir_on_node: "/run/affinode/claims".into(),
        }
    }

    fn spec(uid: &ClaimUid) -> ClaimSpec {
        let name = ClaimName { namespace: "ml".into(), name: "gpu".into(), uid: uid.clone() };
        let allocated = AllocatedGpu {
            request: "gpu".into(),
            pool: "one".into(),
            device: "gpu-a".into(),
            share_id: None,
            policy: BTreeMap::new(),
            memory_bytes: None,
        };
        let gpu = "nvidia.com/gpu=GPU-A".into();
        ClaimSpec::new(&name, &[ClaimDevice { allocated, gpu, policy_file: None }])
    }

    fn held(claims: &[(&str, &str)]) -> BTreeMap<String, String> {
        claims.iter().map(|(uid, claim)| ((*uid).into(), (*claim).into())).collect()
    }

    fn listed(folder: &Path) -> Vec<String> {
        let mut names = names(folder).unwrap();
        names.sort();
        names
    }

    #[test]
    fn new_agent_reads_what_was_prepared() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["u-1", "u-12"].map(|uid| uid.parse::<ClaimUid>().unwrap());
        assert!(files(folder.path()).held().unwrap().is_empty(), "no folder yet");
        files(folder.path()).write_spec(&first, &spec(&first)).unwrap();
        let again = files(folder.path());
        assert_eq!(again.held().unwrap(), held(&[("u-1", "u-1")]));
        assert_eq!(again.spec(&first), Some(spec(&first)));
        assert_eq!(again.spec(&second), None);
    }

    #[test]
    fn removal_leaves_the_files_of_other_claims() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let [first, longer] = ["u-1", "u-1-2"].map(|uid| uid.parse::<ClaimUid>().unwrap());
        let policy = BTreeMap::from([("affinode.io/priority".into(), "5".into())]);
        for uid in [&first, &longer] {
            let path = files.write_policy(uid, 0, &policy).unwrap();
            assert_eq!(path, Path::new(&format!("/run/affinode/claims/{uid}-0")));
            files.write_spec(uid, &spec(uid)).unwrap();
        }
        fs::write(folder.path().join("cdi/nvidia.yaml"), "").unwrap();
        fs::write(unfinished(&files.spec_file(&first)), "{").unwrap();
        files.remove(&first).unwrap();
        files.remove(&first).unwrap();
        let rest = ["gpu.affinode.io-claim_u-1-2.json", "nvidia.yaml"];
        assert_eq!(listed(&files.cdi_dir), rest);
        assert_eq!(listed(&files.policy_dir), ["u-1-2-0"], "no request was recorded");
    }

    #[test]
    fn claim_is_held_before_it_is_prepared() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let uid: ClaimUid = "u-1".parse().unwrap();
        let name = ClaimName { namespace: "ml".into(), name: "gpu".into(), uid: uid.clone() };
        files.record_request(&name).unwrap();
        assert!(files.is_requested(&uid));
        assert_eq!(files.held().unwrap(), held(&[("u-1", "ml/gpu")]));
        files.write_spec(&uid, &spec(&uid)).unwrap();
        assert_eq!(files.held().unwrap(), held(&[("u-1", "ml/gpu")]), "counted once");
        files.remove(&uid).unwrap();
        assert!(!files.is_requested(&uid) && files.held().unwrap().is_empty());
    }

    #[test]
    fn damaged_specification_counts_as_prepared() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let uid: ClaimUid = "u-1".parse().unwrap();
        files.write_spec(&uid, &spec(&uid)).unwrap();
        fs::write(files.spec_file(&uid), "{").unwrap();
        assert_eq!((files.spec(&uid), files.held().unwrap()), (None, held(&[("u-1", "u-1")])));
        files.remove(&uid).unwrap();
        assert!(files.held().unwrap().is_empty());
    }
}
