//! Moves a container step by step between the goals of [`Goal`]: offload and restore.
//!
//! ```text
//! Resident ──idle, policy──> OffloadRequested ──survey: fits──> Offloaded: close, lock, survey, journal, copy out, checkpoint
//!   ^                       │ in use, no host memory   │ busy, error, wake
//!   └───────────────────────┴──────────────────────────┘ unlock, open; offloaded processes wait for a grant
//! ```
//!
//! `eligibility.rs` decides whether a container is offloaded. The steps are in `offload.rs` and
//! `restore.rs`. Reports on orders are handled in `completions.rs`.

use affinode_proto::{reason::Reason, state::State, wire::ProcessFlags};

use super::{
    Effect, JournalStep, Key, Node, Record, RecordedProcess,
    container::Goal,
    plan::{OffloadMethod, ProcessPosition},
    policy::Engine,
    process::Process,
};

impl Node {
    /// Writes a journal record with every process of the container that is offloaded or about to
    /// be. A process that an earlier controller offloaded and that has not registered yet stays in
    /// the record, because the next controller must know its needs as well.
    pub(super) fn journal(&mut self, key: &Key, step: JournalStep) {
        let known = self.processes.of(key).filter_map(|(_, p)| {
            let (pid, start_ticks) = (p.identity.pid, p.identity.start_ticks);
            let to = p.target_gpu.clone().filter(|_| step == JournalStep::Restore);
            p.offloaded_vram.clone().map(|offloaded| RecordedProcess {
                pid,
                start_ticks,
                offloaded,
                to,
            })
        });
        let processes = known.chain(self.recalled_of(key)).collect();
        let step = if self.is_restoring_unseen(key) { JournalStep::Restore } else { step };
        self.effects.push(Effect::Journal(key.clone(), Some(Record { step, processes })));
    }

    /// Removes the record if no registered process is offloaded. Keeps it while processes of the
    /// journal have not registered.
    pub(super) fn clear_journal(&mut self, key: &Key) {
        if self.recalled_of(key).next().is_some() {
            self.journal(key, JournalStep::Checkpoint);
        } else {
            self.effects.push(Effect::Journal(key.clone(), None));
        }
    }

    fn recalled_of<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = RecordedProcess> + 'a {
        let of_key = self.unclaimed_journal.iter().filter(move |((other, ..), _)| other == key);
        of_key.map(|((_, pid, start_ticks), recalled)| RecordedProcess {
            pid: *pid,
            start_ticks: *start_ticks,
            offloaded: recalled.offloaded.clone(),
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

    /// Returns the function that gives the offload method of a process of this container. It
    /// includes the choices for this offload: to evict the context, or to retain it.
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

    /// Whether no container waits for VRAM and no grant exists.
    pub(super) fn is_settled(&self) -> bool {
        self.grants.is_empty() && self.queue.in_order(self.now).is_empty()
    }

    /// Sends the next orders of a container, if there are any.
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

/// The offload method of a process. With the engine `copy`, a process that holds clearly more than
/// its swappable memory and a context is checkpointed as well, because only the checkpoint frees
/// the rest.
pub(super) fn method_of(process: &Process, engine: Engine) -> OffloadMethod {
    const CONTEXT_BYTES: u64 = 1 << 30;
    let swappable = process.swap.swappable_bytes;
    let all = process
        .offloaded_vram
        .as_ref()
        .unwrap_or(&process.vram)
        .iter()
        .map(|d| d.bytes)
        .sum::<u64>();
    let left = all.saturating_sub(swappable);
    match engine {
        _ if swappable == 0 => OffloadMethod::DriverCheckpoint,
        // Memory that cannot be copied stays with the context. `eligibility.rs` refuses a process
        // with too much of it.
        Engine::Copy | Engine::Full | Engine::Auto
            if process.keeps_context() && !process.copy_failed =>
        {
            OffloadMethod::Copy
        }
        Engine::Copy if !process.copy_failed && left <= swappable.saturating_add(CONTEXT_BYTES) => {
            OffloadMethod::Copy
        }
        // Memory imported from a copier is always copied out: a checkpoint with it could not be
        // restored.
        _ if may_be_imported(process) => OffloadMethod::CopyAndCheckpoint,
        _ if process.copy_failed => OffloadMethod::DriverCheckpoint,
        Engine::Checkpoint => OffloadMethod::DriverCheckpoint,
        Engine::Copy | Engine::Full | Engine::Auto => OffloadMethod::CopyAndCheckpoint,
    }
}

/// Whether a process may have memory imported from a copier, as its counters show. Before the first
/// reading, a process that is not offloaded is assumed to have some.
fn may_be_imported(process: &Process) -> bool {
    match &process.counters {
        Some(page) => page.notes.intersects(ProcessFlags::IMPORTED),
        None => !process.phase.is_offloaded(),
    }
}
