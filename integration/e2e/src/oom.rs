//! Counts processes that the kernel's OOM killer has killed in memory cgroups.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result};

/// Time between two readings of the kill counters. A container runtime takes far longer than this
/// to remove the cgroup of a killed process, so no kill is missed.
const LOOK: Duration = Duration::from_millis(2);

/// Returns the number of processes that the kernel has killed because a memory limit was reached.
/// The limit may belong to this cgroup or to a cgroup above it. `None` if the folder does not
/// exist, or the hierarchy does not count memory.
#[must_use]
pub fn kills(folder: &Path) -> Option<u64> {
    // `memory.events` is the file of cgroup version 2, `memory.oom_control` that of version 1.
    let text = ["memory.events", "memory.oom_control"]
        .iter()
        .find_map(|file| std::fs::read_to_string(folder.join(file)).ok())?;
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok())
}

/// Returns the host memory in use in a cgroup and the cgroups below it, in bytes. Anonymous and
/// shared memory count. Files that the kernel may drop do not count.
///
/// # Errors
/// When the cgroup's hierarchy does not count memory.
pub fn spent_bytes(folder: &Path) -> Result<u64> {
    let file = folder.join("memory.stat");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let value = |name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    // cgroup v1 has separate fields for the sums of descendants.
    let anonymous = value("total_rss").or_else(|| value("anon"));
    let shared = value("total_shmem").or_else(|| value("shmem"));
    Ok(anonymous.context("memory.stat has no line anon")?
        + shared.context("memory.stat has no line shmem")?)
}

/// Polls the OOM kill counters of cgroups and keeps the highest count. Polling is necessary because
/// a runtime removes a container's cgroup, and the counter with it, when the container ends.
pub struct OomWatch {
    seen: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl OomWatch {
    /// Starts to poll the cgroups with these folders.
    #[must_use]
    pub fn start(folders: Vec<PathBuf>) -> Self {
        let (seen, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, ends) = (Arc::clone(&seen), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let now = folders.iter().filter_map(|folder| kills(folder)).max().unwrap_or(0);
                count.fetch_max(now, Ordering::SeqCst);
                std::thread::sleep(LOOK);
            }
        });
        Self { seen, over, thread: Some(thread) }
    }

    /// Returns the highest number of kills in any of the folders so far.
    #[must_use]
    pub fn kills(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }
}

impl Drop for OomWatch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_read_of_both_versions() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        assert_eq!(kills(folder.path()), None);
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        std::fs::write(folder.path().join("memory.oom_control"), v1)?;
        assert_eq!(kills(folder.path()), Some(2));
        let v2 = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n";
        std::fs::write(folder.path().join("memory.events"), v2)?;
        assert_eq!(kills(folder.path()), Some(3));
        Ok(())
    }
}
