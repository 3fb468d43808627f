//! The memory cgroup of the host pool. Version 1 and 2 of cgroups are supported.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::HostPoolError;

/// Where the kernel's cgroups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Files with the size of a cgroup's memory in bytes, for version 2 and 1.
const USAGE_FILES: [&str; 2] = ["memory.current", "memory.usage_in_bytes"];

/// Returns the folder of the memory cgroup `name` of this node.
#[must_use]
pub fn cgroup_path(name: &str) -> PathBuf {
    cgroup_path_in(Path::new(ROOT), name)
}

/// Returns the folder of the memory cgroup `name`, if cgroups are mounted at `root`.
#[must_use]
pub fn cgroup_path_in(root: &Path, name: &str) -> PathBuf {
    if root.join("cgroup.controllers").exists() {
        root.join(name)
    } else {
        root.join("memory").join(name)
    }
}

/// Returns the size in bytes of the memory that is charged to a cgroup.
///
/// # Errors
/// The cgroup does not exist, or the kernel does not count its memory.
pub fn used_bytes(cgroup: &Path) -> io::Result<u64> {
    let [current, v1] = USAGE_FILES;
    let text = match fs::read_to_string(cgroup.join(current)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::read_to_string(cgroup.join(v1))?
        }
        other => other?,
    };
    text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Creates the cgroup if it does not exist, and moves this process into it.
///
/// # Errors
/// [`HostPoolError::Cgroup`]: the cgroup cannot be created or entered.
/// [`HostPoolError::Uncounted`]: the kernel does not count its memory.
pub(crate) fn enter(cgroup: &Path) -> Result<(), HostPoolError> {
    if let Some(parent) = cgroup.parent() {
        // Version 1 has no such file. In version 2 the controller may be enabled already, even if
        // this program may not enable it. Therefore only the usage file decides.
        let _ = write(&parent.join("cgroup.subtree_control"), "+memory");
    }
    let failed = |step, path: &Path| {
        let path = path.to_owned();
        move |source| HostPoolError::Cgroup { step, path, source }
    };
    fs::create_dir_all(cgroup).map_err(failed("create the cgroup", cgroup))?;
    let processes = cgroup.join("cgroup.procs");
    write(&processes, "0")
        .map_err(failed("move the host pool into its cgroup by writing to", &processes))?;
    used_bytes(cgroup)
        .map_err(|source| HostPoolError::Uncounted { path: cgroup.to_owned(), source })?;
    Ok(())
}

/// Writes to a file that must exist already.
fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_are_read() {
        let root = tempfile::tempdir().unwrap();
        let v1 = cgroup_path_in(root.path(), "affinode");
        assert_eq!(v1, root.path().join("memory/affinode"));
        fs::create_dir_all(&v1).unwrap();
        assert!(used_bytes(&v1).is_err(), "nothing counts its memory");
        fs::write(v1.join("memory.usage_in_bytes"), "4096\n").unwrap();
        assert_eq!(used_bytes(&v1).unwrap(), 4096);

        fs::write(root.path().join("cgroup.controllers"), "memory\n").unwrap();
        let v2 = cgroup_path_in(root.path(), "affinode");
        assert_eq!(v2, root.path().join("affinode"));
        fs::create_dir(&v2).unwrap();
        fs::write(v2.join("memory.current"), "8192\n").unwrap();
        assert_eq!(used_bytes(&v2).unwrap(), 8192);
        fs::write(v2.join("memory.current"), "max\n").unwrap();
        assert!(used_bytes(&v2).is_err());
    }

    #[test]
    fn entered_cgroup_has_the_memory_controller() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = root.path().join("affinode");
        let refused = enter(&cgroup).unwrap_err();
        assert!(
            matches!(&refused, HostPoolError::Cgroup { path, .. } if path.starts_with(&cgroup))
        );
        assert!(!root.path().join("cgroup.subtree_control").exists(), "version 1 has no such file");
        // The folder is not a cgroup, so the kernel creates no files in it.
        fs::write(cgroup.join("cgroup.procs"), "").unwrap();
        fs::write(root.path().join("cgroup.subtree_control"), "").unwrap();
        assert!(matches!(enter(&cgroup), Err(HostPoolError::Uncounted { .. })));
        fs::write(cgroup.join("memory.current"), "0\n").unwrap();
        enter(&cgroup).unwrap();
        let written = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
        assert_eq!(written("affinode/cgroup.procs"), "0");
        assert_eq!(written("cgroup.subtree_control"), "+memory");
    }
}
