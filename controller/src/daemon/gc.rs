//! Finds ended containers that no shim has withdrawn.
//!
//! | container | counts as ended when |
//! | --- | --- |
//! | whose shim was killed | containerd has removed the container's bundle |
//! | of Podman or CRI-O, which use no shim | the container's first process has ended |
//! | a job | the job's last process has ended |

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use affinode_core::{ContainerSpec, Key};
use affinode_proto::paths;

use crate::{inventory::process, jobs};

/// Time between two scans for ended containers.
const INTERVAL: Duration = Duration::from_secs(5);

/// Key of a container that has ended, and the generation of its announcement.
pub type EndedContainer = (Key, u64);

/// Finds containers that do not exist any longer, and removes their folders.
#[derive(Debug)]
pub struct GarbageCollector {
    run_dir: PathBuf,
    last: Instant,
    /// Ended containers whose folders could not be removed yet, because another program held the
    /// lock on the folder of all containers.
    remaining: Vec<EndedContainer>,
}

impl GarbageCollector {
    /// Creates a collector, whose first scan is due after one interval.
    pub fn new(run_dir: &Path) -> GarbageCollector {
        GarbageCollector {
            run_dir: run_dir.to_owned(),
            last: Instant::now(),
            remaining: Vec::new(),
        }
    }

    /// Returns those containers of `deserted` that do not exist any longer. `deserted` lists the
    /// containers without processes. Returns `None` if the interval between two scans has not
    /// passed yet.
    pub fn gone<'a>(
        &mut self,
        deserted: impl Iterator<Item = (&'a Key, &'a ContainerSpec)>,
    ) -> Option<Vec<EndedContainer>> {
        if self.last.elapsed() < INTERVAL {
            return None;
        }
        self.last = Instant::now();
        self.remove_remaining();
        Some(gone(deserted))
    }

    /// Removes the folder of an ended container from the run directory, unless the folder already
    /// belongs to a later container with the same id. Generation 0 matches every container. If a
    /// program prepares a container at this moment, the folder is removed at a later scan.
    pub fn remove_folder(&mut self, key: &Key, generation: u64) {
        let containers = self.run_dir.join(paths::CONTAINERS_DIR);
        let folder = containers.join(key.as_str());
        match remove_owned(&containers, &folder, generation) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.remaining.push((key.clone(), generation));
            }
            Err(error) => {
                tracing::warn!(%error, "container {key}: cannot remove its folder {}", folder.display())
            }
        }
    }

    fn remove_remaining(&mut self) {
        for (key, generation) in std::mem::take(&mut self.remaining) {
            self.remove_folder(&key, generation);
        }
    }
}

fn remove_owned(containers: &Path, folder: &Path, generation: u64) -> io::Result<()> {
    // A program that prepares a container holds this lock. That program may be stopped, and the
    // controller must not wait for it.
    let lock = File::open(containers)?;
    lock.try_lock()?;
    let text = fs::read_to_string(folder.join(paths::GENERATION_FILE)).unwrap_or_default();
    let owner = text.parse().unwrap_or(0);
    let removes = owner == 0 || generation == 0 || owner == generation;
    if removes { fs::remove_dir_all(folder) } else { Ok(()) }
}

/// Returns those containers that are known to have ended. If a container cannot be examined, it may
/// still exist and is not returned.
fn gone<'a>(deserted: impl Iterator<Item = (&'a Key, &'a ContainerSpec)>) -> Vec<EndedContainer> {
    deserted
        .filter(|(_, spec)| has_ended(spec))
        .map(|(key, spec)| (key.clone(), spec.generation))
        .collect()
}

/// Returns whether a container has ended. For a job, `spec.bundle` is the path of its lock file. A
/// job has ended when no process holds the lock.
fn has_ended(spec: &ContainerSpec) -> bool {
    if let Some((pid, start_ticks)) = spec.init {
        return !process::lives(pid, start_ticks);
    }
    let path = Path::new(&spec.bundle);
    let over = path.ends_with(jobs::LOCK_FILE) && jobs::unused(path);
    !spec.bundle.is_empty() && (over || matches!(path.try_exists(), Ok(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Vec<Key> {
        (0..3).map(|n| Key::parse(&format!("{n:032x}")).unwrap()).collect()
    }

    #[test]
    fn only_a_missing_bundle_counts() {
        let here = tempfile::tempdir().unwrap();
        let specs = [here.path().to_str().unwrap(), "/nonexistent/bundle", ""]
            .map(|bundle| ContainerSpec { bundle: bundle.into(), ..ContainerSpec::default() });
        let keys = keys();
        assert_eq!(gone(keys.iter().zip(&specs)), [(keys[1].clone(), 0)]);
    }

    /// The first process of one container of Podman runs, and that of another container has ended.
    /// The bundles of both exist, because Podman keeps a bundle until `podman rm`. Only the second
    /// container must count as ended.
    #[test]
    fn end_of_the_first_process_is_the_end() {
        let own = process::identity(std::process::id()).unwrap();
        let specs = [own.start_ticks, own.start_ticks + 1].map(|start_ticks| ContainerSpec {
            bundle: "/".into(),
            generation: 5,
            init: Some((own.pid, start_ticks)),
            ..ContainerSpec::default()
        });
        let keys = keys();
        assert_eq!(gone(keys.iter().zip(&specs)), [(keys[1].clone(), 5)]);
    }

    #[test]
    fn folder_of_a_later_container_stays() {
        let run_dir = tempfile::tempdir().unwrap();
        let key = Key::parse(&"0".repeat(32)).unwrap();
        let folder = run_dir.path().join(paths::CONTAINERS_DIR).join(key.as_str());
        fs::create_dir_all(folder.join(paths::MOUNT_DIR)).unwrap();
        fs::write(folder.join(paths::GENERATION_FILE), "6").unwrap();
        let mut sweep = GarbageCollector::new(run_dir.path());
        sweep.remove_folder(&key, 5);
        assert!(folder.exists());
        let preparing = File::open(run_dir.path().join(paths::CONTAINERS_DIR)).unwrap();
        preparing.lock().unwrap();
        sweep.remove_folder(&key, 6);
        assert!(folder.exists(), "another program has the lock");
        drop(preparing);
        sweep.remove_remaining();
        assert!(!folder.exists());
        sweep.remove_folder(&key, 6);
    }
}
