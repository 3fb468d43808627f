//! What the controller works towards, with the data that exists only while it does so.
//!
//! ```text
//! Resident(Restore) ──request──> OffloadRequested(Offload) ──survey: fits──> Offloaded(Offload)
//!     ^                                  │ in use, no host memory                 │ call, failure
//!     └──────────────────────────────────┴────────────────────────────────────────┘
//! ```
//!
//! If the context of an offloaded container is to be evicted too, the goal is `OffloadRequested`
//! again. If the eviction fails, the container goes back to `Offloaded`.

use super::super::Millis;

/// Whether the controller works towards a resident or an offloaded container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The container is to be resident: the gate of every process, at which CUDA calls wait during
    /// a move, is open.
    Resident(Restore),
    /// An offload was requested. The controller waits for the survey (readings of host memory and
    /// GPUs) and has not changed any process yet.
    OffloadRequested(Offload),
    /// The container is to be offloaded: every process is checkpointed or copied out.
    Offloaded(Offload),
}

/// An offload, from its request until a restore is requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// When the offload began. `None`: it is complete and counted, or an earlier controller began
    /// it.
    pub began: Option<Millis>,
    /// Whether the offload also checkpoints the CUDA context, because another container needs the
    /// context's VRAM.
    pub evict_context: bool,
    /// Whether the offload is forced, which means that a CUDA call does not cancel it.
    pub forced: bool,
}

impl Offload {
    /// An offload that begins now. It keeps the contexts on the GPU if the engine can, and a call
    /// cancels it.
    #[must_use]
    pub fn begins(now: Millis) -> Offload {
        Offload { began: Some(now), ..Offload::default() }
    }

    /// Like [`begins`](Offload::begins), but the contexts leave the GPU too.
    #[must_use]
    pub fn deep(now: Millis) -> Offload {
        Offload { evict_context: true, ..Offload::begins(now) }
    }
}

/// A restore. If the container is resident already, all fields are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restore {
    /// When the first process was ordered to restore.
    pub began: Option<Millis>,
    /// Why one process was not restored although its VRAM was granted. The value is kept while
    /// restores of the container's other processes run.
    pub incomplete: Option<IncompleteRestore>,
}

/// Why a process was not restored although the VRAM was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncompleteRestore {
    /// The process received the order to restore too late.
    Late,
    /// The copy in found no VRAM. Contains the text of the driver's error.
    NoVram(String),
}

impl Default for Goal {
    fn default() -> Goal {
        Goal::Resident(Restore::default())
    }
}

impl Goal {
    /// Whether the container is to be resident.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        matches!(self, Goal::Resident(_))
    }

    /// Whether an offload waits for its survey.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        matches!(self, Goal::OffloadRequested(_))
    }

    /// Whether the container is to be offloaded, after its survey.
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        matches!(self, Goal::Offloaded(_))
    }

    /// The offload. `None`: the container is to be resident.
    #[must_use]
    pub fn offload(&self) -> Option<&Offload> {
        match self {
            Goal::Resident(_) => None,
            Goal::OffloadRequested(offload) | Goal::Offloaded(offload) => Some(offload),
        }
    }

    /// Like [`offload`](Goal::offload), to change it.
    pub fn offload_mut(&mut self) -> Option<&mut Offload> {
        match self {
            Goal::Resident(_) => None,
            Goal::OffloadRequested(offload) | Goal::Offloaded(offload) => Some(offload),
        }
    }

    /// The restore. `None`: the container is to be offloaded.
    pub fn restore_mut(&mut self) -> Option<&mut Restore> {
        match self {
            Goal::Resident(restore) => Some(restore),
            Goal::OffloadRequested(_) | Goal::Offloaded(_) => None,
        }
    }

    /// Whether the offload is forced.
    #[must_use]
    pub fn is_forced(&self) -> bool {
        self.offload().is_some_and(|offload| offload.forced)
    }

    /// Whether the offload also checkpoints the CUDA context.
    #[must_use]
    pub fn evicts_context(&self) -> bool {
        self.offload().is_some_and(|offload| offload.evict_context)
    }

    /// Ends the offload, if there is one: from now on, the container is to be resident. A restore
    /// in progress goes on.
    pub fn become_resident(&mut self) {
        if !self.is_resident() {
            *self = Goal::default();
        }
    }

    /// Continues a requested offload after its survey. Other goals stay.
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
        let offload = Offload { began: Some(1), evict_context: true, forced: true };
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
