//! The goal of a container: the state that the controller works towards, with the data that exists
//! only while it does so.
//!
//! ```text
//! Resident(Restore) ──request──> OffloadRequested(Offload) ──survey: fits──> Offloaded(Offload)
//!     ^                                  │ in use, no host memory                 │ call, failure
//!     └──────────────────────────────────┴────────────────────────────────────────┘
//! ```
//!
//! If the CUDA context of an offloaded container is to be evicted too, the goal is
//! `OffloadRequested` again. If the eviction fails, the goal is `Offloaded` again.

use super::super::Millis;

/// The goal of a container: whether the controller works towards a resident or an offloaded
/// container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The container is to be resident. Every process's gate, at which CUDA calls wait during a
    /// move, is to be open.
    Resident(Restore),
    /// An offload was requested. The controller waits for the survey (readings of host memory and
    /// GPUs) and has not changed any process yet.
    OffloadRequested(Offload),
    /// The container is to be offloaded: every process is to be checkpointed or copied out.
    Offloaded(Offload),
}

/// Data of an offload. It exists from the request for the offload until a restore is requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// When the offload began. `None`: it is complete and counted, or an earlier controller began
    /// it.
    pub began: Option<Millis>,
    /// When the offload, or the later eviction of the CUDA contexts, was requested. For an offload of an
    /// earlier controller: when the container's first process registered again. `None`: not requested yet.
    pub requested_at: Option<Millis>,
    /// Whether the offload also checkpoints the CUDA context, because another container needs the
    /// context's VRAM.
    pub evict_context: bool,
    /// Whether the CUDA contexts stay on the GPU, because host memory does not suffice for an
    /// offload with them.
    pub keeps_context: bool,
    /// Whether the offload is forced, which means that a CUDA call does not cancel it.
    pub forced: bool,
}

impl Offload {
    /// Creates an offload that begins now. The CUDA contexts stay on the GPU if the container's
    /// engine supports this. A CUDA call cancels the offload.
    #[must_use]
    pub fn begins(now: Millis) -> Offload {
        Offload { began: Some(now), ..Offload::default() }
    }

    /// Creates an offload that begins now and also moves the CUDA contexts out of VRAM. A CUDA call
    /// cancels it.
    #[must_use]
    pub fn deep(now: Millis) -> Offload {
        Offload { evict_context: true, ..Offload::begins(now) }
    }
}

/// Data of a restore. If the container is resident already, all fields are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restore {
    /// When the first process was ordered to restore.
    pub began: Option<Millis>,
    /// Why one process was not restored although its VRAM was granted. The value stays set while
    /// the container's other processes are being restored.
    pub incomplete: Option<IncompleteRestore>,
}

/// Why a process was not restored although the VRAM was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncompleteRestore {
    /// The order to restore reached the process too late and was not carried out.
    Late,
    /// The copy of the memory back into VRAM found no free VRAM. Contains the text of the driver's
    /// error.
    NoVram(String),
}

impl Default for Goal {
    fn default() -> Goal {
        Goal::Resident(Restore::default())
    }
}

impl Goal {
    /// Whether the goal is that the container is resident.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        matches!(self, Goal::Resident(_))
    }

    /// Whether an offload was requested and waits for its survey (readings of host memory and
    /// GPUs).
    #[must_use]
    pub fn is_requested(&self) -> bool {
        matches!(self, Goal::OffloadRequested(_))
    }

    /// Whether the goal is that the container is offloaded. False while the offload waits for its
    /// survey (readings of host memory and GPUs).
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        matches!(self, Goal::Offloaded(_))
    }

    /// The requested offload. `None`: the container is to be resident.
    #[must_use]
    pub fn offload(&self) -> Option<&Offload> {
        match self {
            Goal::Resident(_) => None,
            Goal::OffloadRequested(offload) | Goal::Offloaded(offload) => Some(offload),
        }
    }

    /// Returns the requested offload for changes. `None`: the container is to be resident.
    pub fn offload_mut(&mut self) -> Option<&mut Offload> {
        match self {
            Goal::Resident(_) => None,
            Goal::OffloadRequested(offload) | Goal::Offloaded(offload) => Some(offload),
        }
    }

    /// Returns the restore for changes. `None`: the container is to be offloaded.
    pub fn restore_mut(&mut self) -> Option<&mut Restore> {
        match self {
            Goal::Resident(restore) => Some(restore),
            Goal::OffloadRequested(_) | Goal::Offloaded(_) => None,
        }
    }

    /// Whether there is an offload and it is forced, so that a CUDA call does not cancel it.
    #[must_use]
    pub fn is_forced(&self) -> bool {
        self.offload().is_some_and(|offload| offload.forced)
    }

    /// Whether there is an offload that also checkpoints the CUDA contexts.
    #[must_use]
    pub fn evicts_context(&self) -> bool {
        self.offload().is_some_and(|offload| offload.evict_context)
    }

    /// Sets the goal to resident, which ends an offload. A restore in progress continues.
    pub fn become_resident(&mut self) {
        if !self.is_resident() {
            *self = Goal::default();
        }
    }

    /// Changes the goal from `OffloadRequested` to `Offloaded` after a successful survey. Does
    /// nothing if no offload is requested.
    pub fn proceed(&mut self) {
        if let Goal::OffloadRequested(offload) = *self {
            *self = Goal::Offloaded(offload);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_and_restore_end_each_other() {
        let offload = Offload { forced: true, ..Offload::deep(1) };
        let mut goal = Goal::OffloadRequested(offload);
        goal.proceed();
        assert_eq!(goal, Goal::Offloaded(offload));
        goal.become_resident();
        assert_eq!(goal, Goal::default());
        assert!(!goal.is_forced() && !goal.evicts_context());
    }

    #[test]
    fn request_to_be_resident_keeps_the_restore() {
        let restoring = Goal::Resident(Restore { began: Some(1), incomplete: None });
        let mut goal = restoring.clone();
        goal.become_resident();
        goal.proceed();
        assert_eq!(goal, restoring);
    }
}
