//! Host memory that is made ready before a container leaves (`policy.prepare`).
//!
//! ```text
//!                ┌──in use, policy off, it may not leave any more: told so──┐
//!                v                                                          │
//! not prepared ──idle for half its time, home, not on any way: told──> prepared ──leaves──> home again
//!      ^  ^                                                                 │                   │
//!      │  └─────────────an offload failed: told so; its connection broke────┘                   │
//!      └────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! It takes memory of the container and the node, so it happens once for each time that the
//! container is idle, whatever becomes of it. Nothing waits for it: an offload comes when it comes.

use affinode_proto::{reason::Reason, state::State, wire::Phase};

use super::{
    Effect, Key, Millis, Node, ProcessId,
    container::{Container, Goal},
    plan::OffloadMethod,
    policy::Engine,
    process::Process,
};

/// Who has not left by then is not about to, whatever it says.
const LEAVES_MS: Millis = 20_000;
/// What no copier has copied so often in a row is not handed over any more.
const MAX_UNCOPIED: u32 = 3;

impl Container {
    /// Since when it is idle, if it is: no two idlenesses have the same number.
    fn quiet_since(&self) -> Millis {
        self.last_use.max(self.restored_at.unwrap_or(0))
    }
}

impl Node {
    /// Tells processes of a container to make host memory ready, or that it is not needed.
    pub(super) fn update_prefault(&mut self, key: &Key) {
        let Some(c) = self.containers.get(key) else { return };
        let prepared = |(_, p): (ProcessId, &Process)| p.prefault_ordered;
        if !c.policy.prefault && !self.processes.of(key).any(prepared) {
            return;
        }
        // On its way everything stays as it is.
        if c.goal != Goal::Resident || !matches!(c.state, State::Active | State::Idle) {
            return;
        }
        let idleness = c.quiet_since();
        let waited = self.now.saturating_sub(idleness) >= c.idle_after_ms() / 2;
        let stays = self.stays_prefaulted(key, c);
        let begins = stays && waited && self.may_begin(key);
        let moves = self.moves(key);
        for id in self.members(key) {
            let begins = begins && self.may_prefault(id).is_some();
            let Some(process) = self.processes.get_mut_uncounted(&id) else { continue };
            let same = process.prefault_ordered_for_idle == Some(idleness);
            if process.prefault_ordered
                && !(stays && same && moves(process) == OffloadMethod::CopyAndCheckpoint)
            {
                self.end_prefault(id);
            } else if begins && !same {
                (process.prefault_ordered, process.prefault_ordered_for_idle) =
                    (true, Some(idleness));
                self.effects.push(Effect::Prepare { process: id, on: true });
            }
        }
    }

    /// Whether nothing speaks against it for good. What may be over in a moment (devices that
    /// cannot be read) takes nothing back.
    fn stays_prefaulted(&self, key: &Key, c: &Container) -> bool {
        let copies = matches!(c.policy.engine, Engine::Full | Engine::Auto);
        let verdict = self.check_offload(key, true);
        let passing = |reason| {
            matches!(reason, Reason::VramUnknown | Reason::AgentSilent | Reason::CallInProgress)
        };
        c.policy.prefault && copies && verdict.map_or_else(|(reason, _)| passing(reason), |()| true)
    }

    /// Whether it is home, quiet and worth a move. (Who waits for an allocation is not idle.)
    fn may_begin(&self, key: &Key) -> bool {
        let still = |p: &Process| p.connected && p.phase == Phase::Open && p.pending.is_none();
        self.check_offload(key, true).is_ok()
            && self.processes.of(key).all(|(_, p)| still(p))
            && !self.is_too_small(key)
    }

    /// It is over for a process that is home, and it is told so.
    pub(super) fn end_prefault(&mut self, id: ProcessId) {
        let process = self.processes.get_mut_uncounted(&id).filter(|p| p.prefault_ordered);
        if let Some(process) = process {
            process.prefault_ordered = false;
            self.effects.push(Effect::Prepare { process: id, on: false });
        }
    }

    /// An offload of the container came to nothing. Who has left already has used what was
    /// prepared, and is told nothing.
    pub(super) fn prefault_failed(&mut self, key: &Key) {
        let here = |(_, p): &(ProcessId, &Process)| p.offloaded_vram.is_none();
        let here: Vec<ProcessId> = self.processes.of(key).filter(here).map(|(id, _)| id).collect();
        here.into_iter().for_each(|id| self.end_prefault(id));
    }

    /// The GPU that a process is on whose memory a copier can copy out, and what it can carry, in
    /// bytes. `None`: it would leave another way, has memory on several GPUs, holds too little,
    /// has found at its last move that no copier can bring it home, or was not copied by any a few
    /// times in a row: it would come home each time, and never be away.
    #[must_use]
    pub fn may_prefault(&self, id: ProcessId) -> Option<(String, u64)> {
        let may = |p: &&Process| p.counters.is_some() && p.failed_copy_outs < MAX_UNCOPIED;
        let process = self.processes.get(&id).filter(may)?;
        let (uuid, _) = self.for_copier(process, &process.vram)?;
        // What NVML said last may be older than its last allocations.
        let total = self.gpus.iter().find(|gpu| gpu.uuid == uuid)?.total_bytes;
        let bytes = process.carried.swappable_bytes.min(total);
        (bytes >= self.settings.prefault_min_bytes).then_some((uuid, bytes))
    }

    /// Whether a process is about to make room, and has not made it yet.
    #[must_use]
    pub fn is_leaving(&self, id: ProcessId) -> bool {
        let leaves = |p: &Process| {
            let container = self.containers.get(&p.key).filter(|c| c.goal != Goal::Resident);
            let began = container.and_then(|c| c.offload_began);
            let soon = began.is_some_and(|began| self.now.saturating_sub(began) < LEAVES_MS);
            soon && p.phase != Phase::Checkpointed
        };
        self.processes.get(&id).is_some_and(leaves)
    }
}
