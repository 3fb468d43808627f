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

use affinode_proto::{reason::Reason, state::State, wire::Capabilities};

use super::{
    Effect, JournalStep, Key, Node, Record, RecordedProcess,
    container::Goal,
    plan::{OffloadMethod, ProcessPosition},
};

impl Node {
    /// Writes a journal record with each process of the container that is offloaded or about to be.
    /// A process that an earlier controller offloaded, and that has not registered yet, stays in
    /// the record: the next controller must know how much VRAM that process needs.
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

    /// Removes the container's record after a restore or its last exit. Processes of the journal
    /// that have not registered stay in the record.
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
        let out = container.is_some_and(|c| c.goal.is_offloaded());
        let moves = self.moves(key);
        self.processes
            .of(key)
            .map(|(id, p)| ProcessPosition {
                process: id,
                phase: p.phase,
                occupied: !p.connected || p.pending.is_some() || (out && p.holds > 0),
                may_leave: p.may_leave(self.now),
                moves: moves(p),
                awaits_work: p.can(Capabilities::AWAITS_WORK),
                is_prefaulted: p.prefault_ordered && moves(p) == OffloadMethod::CopyAndCheckpoint,
            })
            .collect()
    }

    /// Whether no container waits for VRAM and no grant exists.
    pub(super) fn is_settled(&self) -> bool {
        self.grants.is_empty() && self.queue.in_order(self.now).is_empty()
    }

    /// Sends the orders that a container needs next, if there are any.
    pub(super) fn advance(&mut self, key: &Key) {
        let Some(container) = self.containers.get(key) else {
            return;
        };
        if container.shown.state == State::Unregistered {
            return;
        }
        self.end_incomplete_restore(key);
        let positions = self.positions(key);
        if positions.is_empty() {
            return;
        }
        let Some(container) = self.containers.get(key) else { return };
        match container.goal {
            Goal::OffloadRequested(_) => {}
            Goal::Offloaded(_) => self.advance_offload(key, &positions),
            Goal::Resident(_) => self.advance_restore(key, &positions),
        }
    }
}
