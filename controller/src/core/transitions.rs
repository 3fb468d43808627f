//! The way out and the way home of a container, step by step.
//!
//! ```text
//! Home ──idle, policy──> Leaving ──survey says go──> Out: close, lock, survey, journal, checkpoint
//!   ^                       │ in use or no room        │ busy, error, wake
//!   └───────────────────────┴──────────────────────────┘ unlock, open; what is away is queued for its return
//! ```
//!
//! Whether it goes is decided in `verdict.rs`; the two ways are in `way_out.rs` and
//! `way_home.rs`, the ends of orders in `reports.rs`.

use affinode_proto::{reason::Reason, state::State, wire::ProcessFlags};

use super::{
    DeviceBytes, Effect, Key, Node, ProcessId, Record, RecordedProcess,
    container::Goal,
    plan::{OffloadMethod, ProcessPosition},
    policy::Engine,
    process::Process,
};

/// A record's step: processes go, or are gone.
pub(super) const CHECKPOINT: &str = "checkpoint";
/// A record's step: they may be taking their VRAM.
pub(super) const RESTORE: &str = "restore";

impl Node {
    /// Notes every process of the container that is away, or about to be. One that an earlier
    /// controller moved and that has not come forward yet stays in the record: the controller
    /// after this one must know what it needs, too.
    pub(super) fn journal(&mut self, key: &Key, step: &str) {
        let known = self.processes.of(key).filter_map(|(_, p)| {
            let (pid, start_ticks) = (p.identity.pid, p.identity.start_ticks);
            let to = p.target_gpu.clone().filter(|_| step == RESTORE);
            p.offloaded_vram.clone().map(|away| RecordedProcess { pid, start_ticks, away, to })
        });
        let processes = known.chain(self.recalled_of(key)).collect();
        let step = if self.is_restoring_unseen(key) { RESTORE } else { step };
        self.effects
            .push(Effect::Journal(key.clone(), Some(Record { step: step.to_owned(), processes })));
    }

    /// Nobody who has come forward is away: the record goes, unless somebody is still to come.
    pub(super) fn clear_journal(&mut self, key: &Key) {
        if self.recalled_of(key).next().is_some() {
            self.journal(key, CHECKPOINT);
        } else {
            self.effects.push(Effect::Journal(key.clone(), None));
        }
    }

    fn recalled_of<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = RecordedProcess> + 'a {
        let of_key = self.unclaimed_journal.iter().filter(move |((other, ..), _)| other == key);
        of_key.map(|((_, pid, start_ticks), recalled)| RecordedProcess {
            pid: *pid,
            start_ticks: *start_ticks,
            away: recalled.away.clone(),
            to: recalled.to.clone(),
        })
    }

    pub(super) fn cause(&self, key: &Key) -> Reason {
        self.containers.get(key).map_or(Reason::Requested, |c| c.cause)
    }

    pub(super) fn positions(&self, key: &Key) -> Vec<ProcessPosition> {
        let container = self.containers.get(key);
        let out = container.is_some_and(|c| c.goal == Goal::Offloaded);
        let moves = self.moves(key);
        self.processes
            .of(key)
            .map(|(id, p)| ProcessPosition {
                process: id,
                phase: p.phase,
                occupied: !p.connected || p.pending.is_some() || (out && p.holds > 0),
                moves: moves(p),
            })
            .collect()
    }

    /// What takes the processes of a container off their devices.
    pub(super) fn moves(&self, key: &Key) -> impl Fn(&Process) -> OffloadMethod + use<> {
        let container = self.containers.get(key);
        let engine = match container {
            Some(container) if container.retain_context => Engine::Copy,
            container => container.map_or(Engine::Checkpoint, |c| c.policy.engine),
        };
        let deep = container.is_some_and(|c| c.evict_context);
        move |process| match method_of(process, engine) {
            OffloadMethod::Copy if deep && !process.keeps_context() => {
                OffloadMethod::CopyAndCheckpoint
            }
            moves => moves,
        }
    }

    /// Whether VRAM is promised to somebody now, in a grant of any state.
    #[must_use]
    pub fn has_grants(&self) -> bool {
        !self.grants.is_empty()
    }

    /// Whether nobody waits for VRAM, and none is promised.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !self.has_grants() && self.queue.in_order(self.now).is_empty()
    }

    /// The GPU that a process leaves to be copied first and checkpointed then, and what it has
    /// there, in bytes. `None`: it goes another way, has memory on several, or has found the last
    /// time that no copier can bring it home.
    #[must_use]
    pub fn offloads_through_copier(&self, id: ProcessId) -> Option<(String, u64)> {
        let process = self.processes.get(&id)?;
        self.for_copier(process, process.offloaded_vram.as_deref()?)
    }

    /// The same for memory that a process has, or had when it left.
    pub(super) fn for_copier(
        &self,
        process: &Process,
        held: &[DeviceBytes],
    ) -> Option<(String, u64)> {
        let both = self.moves(&process.key)(process) == OffloadMethod::CopyAndCheckpoint;
        let vain = process
            .counters
            .as_ref()
            .is_some_and(|page| page.notes.intersects(ProcessFlags::NO_COPIER));
        match held {
            [on] if both && !vain => {
                Some((on.uuid.clone(), on.bytes.min(process.carried.swappable_bytes)))
            }
            _ => None,
        }
    }

    /// Does the next thing for a container, if there is one.
    pub(super) fn advance(&mut self, key: &Key) {
        let Some(container) = self.containers.get(key) else {
            return;
        };
        if container.state == State::Unregistered {
            return;
        }
        let positions = self.positions(key);
        if positions.is_empty() {
            return;
        }
        match container.goal {
            Goal::OffloadRequested => {}
            Goal::Offloaded => self.advance_offload(key, &positions),
            Goal::Resident => self.advance_restore(key, &positions),
        }
    }
}

/// What takes a process off its device. Of one that parks, more may be left than a context
/// and small things: memory that cannot be copied goes with the driver's checkpoint then.
pub(super) fn method_of(process: &Process, engine: Engine) -> OffloadMethod {
    const CONTEXT_BYTES: u64 = 1 << 30;
    let carried = process.carried.swappable_bytes;
    let all = process
        .offloaded_vram
        .as_ref()
        .unwrap_or(&process.vram)
        .iter()
        .map(|d| d.bytes)
        .sum::<u64>();
    let left = all.saturating_sub(carried);
    match engine {
        _ if carried == 0 => OffloadMethod::DriverCheckpoint,
        // What cannot be copied stays with the context; `verdict` refuses what is left for a checkpoint.
        Engine::Copy | Engine::Full | Engine::Auto
            if process.keeps_context() && !process.copy_failed =>
        {
            OffloadMethod::Copy
        }
        Engine::Copy if !process.copy_failed && left <= carried.saturating_add(CONTEXT_BYTES) => {
            OffloadMethod::Copy
        }
        // Memory of a copier's making is copied, whatever else is to be: no restore follows a
        // checkpoint of it.
        _ if may_be_imported(process) => OffloadMethod::CopyAndCheckpoint,
        _ if process.copy_failed => OffloadMethod::DriverCheckpoint,
        Engine::Checkpoint => OffloadMethod::DriverCheckpoint,
        Engine::Copy | Engine::Full | Engine::Auto => OffloadMethod::CopyAndCheckpoint,
    }
}

/// Whether a process may have memory of a copier's making on its device. Its page says so; of one
/// whose page was not read yet, what is copied already is not.
fn may_be_imported(process: &Process) -> bool {
    match &process.counters {
        Some(page) => page.notes.intersects(ProcessFlags::IMPORTED),
        None => !process.phase.is_offloaded(),
    }
}
