//! The conditions of an environment of a campaign.

use std::time::Duration;

use crate::{gpu::Gpu, wait::WAIT_TIMEOUT};

/// Conditions of an environment: the duration of moves in the simulated driver, and whether host
/// memory is short. The longer a move takes, the more faults can occur during it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// A move takes slightly longer than the copy of the memory.
    Quick,
    /// Moves take seconds, as moves of many GiB do. They can exceed time limits that quick moves
    /// never exceed.
    Slow,
    /// Short moves, with too little VRAM and too little host memory for all containers. The memory
    /// limit of the containers' cgroup is below the memory that they need while all are offloaded.
    Squeezed,
}

impl Setup {
    /// The setup for the block of this round. Of ten blocks, one is slow and one is squeezed. On a
    /// real GPU every block is `Quick`, because the real driver determines the duration of moves.
    #[must_use]
    pub fn of(round: u64, gpu: &Gpu) -> Self {
        match gpu {
            Gpu::Simulated { .. } if round / super::BLOCK % 10 == 4 => Setup::Slow,
            Gpu::Simulated { .. } if round / super::BLOCK % 10 == 7 => Setup::Squeezed,
            _ => Setup::Quick,
        }
    }

    /// Duration of a move in the simulated driver, in milliseconds.
    pub(super) fn move_ms(self) -> &'static str {
        match self {
            Setup::Quick | Setup::Squeezed => "30",
            Setup::Slow => "2500",
        }
    }

    /// Time limit until a scene's watched container enters the state at which the fault is caused.
    #[must_use]
    pub fn step_patience(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed => Duration::from_millis(600),
            Setup::Slow => Duration::from_secs(8),
        }
    }

    /// Time limit for an automatic offload.
    pub(super) fn automatic(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed => Duration::from_secs(20),
            Setup::Slow => Duration::from_secs(80),
        }
    }

    /// Time limit of a round. It is far longer than a round takes on a healthy machine.
    pub(super) fn patience(self) -> Duration {
        match self {
            Setup::Quick | Setup::Squeezed => WAIT_TIMEOUT,
            // In the worst case, each of seven processes is offloaded and restored, one after the
            // other, on a busy machine.
            Setup::Slow => 4 * WAIT_TIMEOUT,
        }
    }
}
