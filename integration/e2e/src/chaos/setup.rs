//! The setup of an environment of a crash campaign.

use std::time::Duration;

use crate::{gpu::Gpu, wait::WAIT_TIMEOUT};

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
    /// squeezed, and three use the host pool and the disk. On a real GPU every block is `Quick`, because the real driver determines how
    /// long offloads take.
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
