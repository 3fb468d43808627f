//! The files of prepared claims on the node: a CDI specification for each claim, and a file with the
//! policy for each device that has one.
//!
//! Each file is written under another name, and then renamed, so a reader sees a whole file. A claim
//! is prepared if its specification exists. Therefore the specification is written last and removed
//! first. The folders are on a tmpfs: after a restart of the machine, the kubelet prepares the
//! claims of its pods again.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    cdi::{ClaimSpec, ClaimUid, device_name},
    policy::Annotations,
};

/// Beginning of the name of a claim's specification.
const SPEC_PREFIX: &str = "gpu.affinode.io-claim_";
/// End of the name of a claim's specification.
const SPEC_SUFFIX: &str = ".json";
/// Maximum size of a specification that is read.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// The folders of the files.
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
    /// Reads the specification of a claim. `None`: the claim is not prepared, or its file is not
    /// what this driver writes.
    #[must_use]
    pub fn spec(&self, uid: &ClaimUid) -> Option<ClaimSpec> {
        let file = self.spec_file(uid);
        let small = fs::metadata(&file).is_ok_and(|data| data.len() <= MAX_SPEC_BYTES);
        let text = small.then(|| fs::read(&file).ok())??;
        serde_json::from_slice(&text).ok()
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
        Ok(())
    }

    /// UIDs of the claims that are prepared on this node.
    ///
    /// # Errors
    /// [`FileError`]: the folder cannot be read.
    pub fn prepared(&self) -> Result<Vec<ClaimUid>, FileError> {
        let uid = |name: String| {
            name.strip_prefix(SPEC_PREFIX)?.strip_suffix(SPEC_SUFFIX)?.parse::<ClaimUid>().ok()
        };
        Ok(names(&self.cdi_dir)?.into_iter().filter_map(uid).collect())
    }

    fn spec_file(&self, uid: &ClaimUid) -> PathBuf {
        self.cdi_dir.join(format!("{SPEC_PREFIX}{uid}{SPEC_SUFFIX}"))
    }
}

/// Names of the files in a folder. A missing folder has none.
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

/// Name of a file until it is complete. containerd reads only files that end with .json or .yaml.
fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Removes a file, and what an interrupted write has left of it.
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::node::dra::{
        allocation::AllocatedGpu,
        cdi::{ClaimDevice, ClaimName},
    };

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
        };
        let gpu = "nvidia.com/gpu=GPU-A".into();
        ClaimSpec::new(&name, &[ClaimDevice { allocated, gpu, policy_file: None }])
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
        assert!(files(folder.path()).prepared().unwrap().is_empty(), "no folder yet");
        files(folder.path()).write_spec(&first, &spec(&first)).unwrap();
        let again = files(folder.path());
        assert_eq!(again.prepared().unwrap(), vec![first.clone()]);
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
        assert_eq!(listed(&files.policy_dir), ["u-1-2-0"]);
    }

    #[test]
    fn damaged_specification_counts_as_prepared() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let uid: ClaimUid = "u-1".parse().unwrap();
        files.write_spec(&uid, &spec(&uid)).unwrap();
        fs::write(files.spec_file(&uid), "{").unwrap();
        assert_eq!((files.spec(&uid), files.prepared().unwrap()), (None, vec![uid.clone()]));
        files.remove(&uid).unwrap();
        assert!(files.prepared().unwrap().is_empty());
    }
}
