//! Begins and ends grants of VRAM, and takes over the grants of an earlier controller.
//!
//! `grant.rs` draws the stages. `serve_queue.rs` chooses the waiters that get a grant.

use std::collections::BTreeSet;

use affinode_proto::{state::State, wire::Phase};

use super::{
    DeviceBytes, Key, Node, ProcessId,
    grant::{Grant, Stage},
    merge_needs,
    node::JournalClaim,
    process::on_gpu,
};

impl Node {
    /// Promises VRAM and begins the proof that it is free. Returns the UUIDs of the GPUs.
    pub(super) fn promise(
        &mut self,
        key: &Key,
        needs: Vec<DeviceBytes>,
        want: Option<(ProcessId, u64)>,
    ) -> BTreeSet<String> {
        let uuids: BTreeSet<String> = needs.iter().map(|n| n.uuid.clone()).collect();
        self.ledger.promise(key, needs);
        self.begin_grant(key, uuids.clone(), want);
        uuids
    }

    fn begin_grant(&mut self, key: &Key, uuids: BTreeSet<String>, want: Option<(ProcessId, u64)>) {
        let allocates = want.map(|(id, _)| id);
        let mut everyone = if self.settings.hold { self.processes.ids() } else { Vec::new() };
        // An order to pause allocations would also stop the allocation that this grant is for.
        everyone.retain(|id| Some(*id) != allocates);
        let mut grant = Grant::new(Stage::Holding(BTreeSet::new()), uuids, self.now);
        grant.want = want;
        self.grants.insert(key.clone(), grant);
        for id in everyone {
            self.hold(key, id);
        }
        self.prove_when_held(key);
    }

    /// Takes over a record from the journal of an earlier controller: a process was offloaded, and
    /// its restore may be running. If the restore may be running, the process's VRAM counts as
    /// promised until the process registers. All other processes then pause their allocations,
    /// because the driver may be taking this VRAM now.
    pub(super) fn recall(&mut self, key: Key, (pid, start): (u32, u64), recalled: JournalClaim) {
        let restoring = recalled.restoring;
        self.unclaimed_journal.insert((key.clone(), pid, start), recalled);
        if restoring {
            let needs = self.recalled_needs(&key);
            let uuids = needs.iter().map(|need| need.uuid.clone()).collect();
            self.ledger.promise(&key, needs);
            self.grants.insert(key, Grant::new(Stage::Granted, uuids, self.now));
        } else {
            self.promise_to_unseen(&key);
        }
    }

    /// Ends the grant of a restored container. Keeps the grant while a process that has not
    /// registered may still be taking VRAM.
    pub(super) fn close_grant(&mut self, key: &Key) {
        if !self.is_restoring_unseen(key) {
            self.abort_grant(key);
        }
    }

    fn recalled_needs(&self, key: &Key) -> Vec<DeviceBytes> {
        let of_key =
            self.unclaimed_journal.iter().filter(|((other, ..), r)| other == key && r.restoring);
        let needs: Vec<DeviceBytes> =
            of_key.flat_map(|(_, r)| on_gpu(&r.offloaded, r.to.as_deref())).collect();
        merge_needs(&needs)
    }

    /// Ends a grant taken over from the journal once its last process has registered or exited, so
    /// that the phase of each process is known. A restore that is not complete begins again under a
    /// new grant.
    pub(super) fn recall_settled(&mut self, key: &Key) {
        self.promise_to_unseen(key);
        let recalled_grant = self.grants.get(key).is_some_and(|grant| grant.recalled);
        if recalled_grant && self.recalled_needs(key).is_empty() {
            self.abort_grant(key);
        }
    }

    /// Puts all grants in doubt after a time in which the controller sent no messages. Other
    /// processes may have ended their holds and restored themselves, so VRAM that was proven free
    /// may be taken. Grants from the journal are excluded, because no restore is started under
    /// them.
    pub(super) fn doubt_grants(&mut self) {
        self.grants.values_mut().filter(|g| !g.recalled).for_each(|g| g.doubted = true);
    }

    /// Ends a grant and releases its promise. A container that still waits stays in the queue.
    pub(super) fn abort_grant(&mut self, key: &Key) {
        self.end_grant(key);
        self.ledger.release(key);
    }

    /// Ends a grant, with or without success. Other processes may allocate again.
    pub(super) fn end_grant(&mut self, key: &Key) {
        self.stays_where_it_was(key);
        let Some(mut grant) = self.grants.remove(key) else {
            return;
        };
        self.hold_orders.retain(|_, asked| asked.key != *key);
        self.release_holds(&mut grant);
        self.count_vain_return(key, &grant);
    }

    /// Counts a grant that led to no restore although other processes paused their allocations. The
    /// first such grant has no consequence. Each further such grant in a row delays the next
    /// attempt.
    fn count_vain_return(&mut self, key: &Key, grant: &Grant) {
        let resident = self.processes.of(key).all(|(_, p)| p.phase == Phase::Open);
        let Some(container) = self.containers.get_mut(key) else { return };
        if grant.is_granted() && !resident {
            container.restore_failures.has_wasted_a_turn(self.now);
        }
    }

    /// Clears the target GPU of those processes of the container whose migration is not in
    /// progress. During a migration a process may lose its connection, and only its next
    /// registration reports on which GPU it is.
    fn stays_where_it_was(&mut self, key: &Key) {
        for id in self.members(key) {
            if let Some(process) = self.processes.get_mut(&id)
                && process.connected
                && !process.is_migrating()
            {
                process.target_gpu = None;
            }
        }
    }

    pub(super) fn enqueue(&mut self, key: &Key) {
        let now = self.now;
        let Some(container) = self.containers.get(key) else {
            return;
        };
        let (priority, lost) = (container.policy.priority, container.shown.state == State::Lost);
        if now >= container.restore_failures.not_before {
            let since = self.alloc_wait_of(key).map_or(now, |(_, want)| want.since);
            self.queue.enter(key, priority, since);
        }
        if !lost {
            self.set_state(key, State::Queued, self.cause(key), "", 0, 0);
        }
    }

    /// Ends the container's grant if the grant is for an allocation. A grant that was taken over
    /// from the journal is never for an allocation.
    pub(super) fn end_alloc_grant(&mut self, key: &Key) {
        if self.grants.get(key).is_some_and(|grant| grant.want.is_some()) {
            self.close_grant(key);
        }
    }
}
