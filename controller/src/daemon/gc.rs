//! Finds containers that were not withdrawn because their shim was killed. They have ended once
//! containerd has removed their bundle. Also finds jobs whose last process has ended.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use affinode_proto::paths;

use crate::{core::Key, jobs};

/// Time between two scans.
const INTERVAL: Duration = Duration::from_secs(5);

/// Finds containers whose bundle does not exist any longer.
#[derive(Debug)]
pub struct GarbageCollector {
    run_dir: PathBuf,
    last: Instant,
}

impl GarbageCollector {
    /// Creates a collector whose first scan is due after one interval.
    pub fn new(run_dir: &Path) -> GarbageCollector {
        GarbageCollector { run_dir: run_dir.to_owned(), last: Instant::now() }
    }

    /// Returns the containers of `deserted` that do not exist any longer. `deserted` lists the
    /// containers without processes, with their bundles. `None`: the interval has not passed yet.
    pub fn gone<'a>(
        &mut self,
        deserted: impl Iterator<Item = (&'a Key, &'a str)>,
    ) -> Option<Vec<Key>> {
        if self.last.elapsed() < INTERVAL {
            return None;
        }
        self.last = Instant::now();
        Some(gone(deserted))
    }

    /// Removes the folder of a container in the run directory.
    pub fn remove_folder(&self, key: &Key) {
        let folder = self.run_dir.join(paths::CONTAINERS_DIR).join(key.as_str());
        if let Err(error) = fs::remove_dir_all(&folder)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "cannot remove {}", folder.display());
        }
    }
}

/// Returns the containers whose bundle is known to be missing. A container that cannot be examined
/// may still exist. The bundle of a job is its lock file: a job has ended when no process holds
/// that lock.
fn gone<'a>(deserted: impl Iterator<Item = (&'a Key, &'a str)>) -> Vec<Key> {
    deserted
        .filter(|(_, bundle)| {
            let path = Path::new(bundle);
            let over = path.ends_with(jobs::LOCK_FILE) && jobs::unused(path);
            !bundle.is_empty() && (over || matches!(path.try_exists(), Ok(false)))
        })
        .map(|(key, _)| key.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_bundle_counts() {
        let here = tempfile::tempdir().unwrap();
        let keys: Vec<Key> = (0..3).map(|n| Key::parse(&format!("{n:032x}")).unwrap()).collect();
        let bundles = [here.path().to_str().unwrap(), "/nonexistent/bundle", ""];
        assert_eq!(gone(keys.iter().zip(bundles)), [keys[1].clone()]);
    }

    #[test]
    fn a_folder_that_is_gone_already_is_fine() {
        let run_dir = tempfile::tempdir().unwrap();
        let key = Key::parse(&"0".repeat(32)).unwrap();
        let folder = run_dir.path().join(paths::CONTAINERS_DIR).join(key.as_str());
        fs::create_dir_all(folder.join(paths::MOUNT_DIR)).unwrap();
        let sweep = GarbageCollector::new(run_dir.path());
        sweep.remove_folder(&key);
        sweep.remove_folder(&key);
        assert!(!folder.exists());
    }
}
