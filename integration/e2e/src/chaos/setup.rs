//! The setup of an environment of a crash campaign.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Result;
use tempfile::TempDir;

use crate::{gpu::Gpu, memory_cgroup, wait::WAIT_TIMEOUT};

/// Size of the host pool in the setups that use it, in MiB. Each process needs at least 128 MiB of it
/// and each twin 272 MiB, so it does not suffice for all containers.
const SMALL_POOL_MIB: u64 = 700;
/// Maximum size of all disk files in the setups that use the disk, in MiB: enough for all containers,
/// or for a part of them.
const LARGE_DISK_MIB: u64 = 8192;
const SMALL_DISK_MIB: u64 = 260;
/// Number of the next host pool's cgroup.
static NEXT_POOL: AtomicU64 = AtomicU64::new(0);

/// Setup of an environment: how long offloads and restores take in the simulated driver, and
/// whether host memory is limited. During longer offloads and restores, more faults can occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// An offload or restore takes only slightly longer than the copy of the memory.
    Quick,
    /// An offload or restore takes seconds, as with many GiB of memory. Only in this setup can an
    /// offload or restore exceed certain time limits.
    Slow,
    /// Short offloads and restores, but VRAM and host memory do not suffice for all containers. The
    /// memory limit of the containers' cgroup is below the memory that they need while all are
    /// offloaded.
    Squeezed,
    /// Short offloads and restores. The content goes to the host pool, which is too small for all of
    /// it, and moves on to disk at once.
    Pooled,
    /// Same as `Pooled`, but the disk has space for a part of the content only.
    FullDisk,
}

impl Setup {
    /// Returns the setup of the block that contains this round. Of ten blocks, one is slow, one is
    /// squeezed, and three use the host pool and the disk. On a real GPU every block is `Quick`,
    /// because the real driver determines how long offloads take.
    #[must_use]
    pub fn of(round: u64, gpu: &Gpu) -> Self {
        match gpu {
            Gpu::Simulated { .. } if round / super::BLOCK % 10 == 4 => Setup::Slow,
            Gpu::Simulated { .. } if round / super::BLOCK % 10 == 7 => Setup::Squeezed,
            Gpu::Simulated { .. } if round / super::BLOCK % 10 == 9 => Setup::FullDisk,
            Gpu::Simulated { .. } if matches!(round / super::BLOCK % 10, 2 | 6) => Setup::Pooled,
            _ => Setup::Quick,
        }
    }

    /// Minimum duration of an offload or restore in the simulated driver, in milliseconds.
    pub(super) fn move_ms(self) -> &'static str {
        match self {
            Setup::Quick | Setup::Squeezed | Setup::Pooled | Setup::FullDisk => "30",
            Setup::Slow => "2500",
        }
    }

    /// Whether content goes to the host pool and from there to disk. Content of twins is not shared
    /// then.
    #[must_use]
    pub fn uses_host_pool(self) -> bool {
        matches!(self, Setup::Pooled | Setup::FullDisk)
    }

    /// Creates the folder for disk files, in a setup that uses the disk.
    pub(super) fn disk_folder(self) -> Result<Option<TempDir>> {
        Ok(self.uses_host_pool().then(|| tempfile::tempdir_in("/var/tmp")).transpose()?)
    }

    /// Returns the campaign's configuration with a small host pool and with this folder for disk
    /// files. Dedup excludes the host pool.
    pub(super) fn with_disk(self, config: &str, folder: &Path) -> Result<String> {
        let max_mib = if self == Setup::FullDisk { SMALL_DISK_MIB } else { LARGE_DISK_MIB };
        // The pool's cgroup is outside of the testbed, so its name is unique.
        let memory = format!(
            "[memory]\nhost_pool_percent = {}\nhost_pool_cgroup = \"affinode-chaos-{}-{}\"\n\
             disk_folder = \"{}\"\ndisk_max_mib = {max_mib}",
            (SMALL_POOL_MIB * 100).div_ceil(memory_cgroup::node_mib()?).min(90),
            std::process::id(),
            NEXT_POOL.fetch_add(1, Ordering::Relaxed),
            folder.display(),
        );
        let config = config.replace("dedup = true", "dedup = false\ndisk_after = \"1ms\"");
        Ok(config.replace("[memory]", &memory))
    }

    /// Time limit until the watched container of a scene enters the state that triggers the fault.
    #[must_use]
    pub fn step_patience(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed | Setup::Pooled | Setup::FullDisk => {
                Duration::from_millis(600)
            }
            Setup::Slow => Duration::from_secs(8),
        }
    }

    /// Time within which the controller must offload the containers without a request of the test.
    pub(super) fn automatic(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed | Setup::Pooled | Setup::FullDisk => {
                Duration::from_secs(20)
            }
            Setup::Slow => Duration::from_secs(80),
        }
    }

    /// Time limit for a wait in a round, such as the wait for the replies of all processes. On a
    /// healthy machine, a wait is far shorter.
    pub(super) fn patience(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed | Setup::Pooled | Setup::FullDisk => WAIT_TIMEOUT,
            // In the worst case, each of seven processes is offloaded and restored, one after the
            // other, on a busy machine.
            Setup::Slow => 4 * WAIT_TIMEOUT,
        }
    }
}
