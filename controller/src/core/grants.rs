//! Grants: from a place in the queue to VRAM that is proven free.

use std::collections::BTreeSet;

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Phase,
        message::{Action, Outcome},
    },
};

use super::{
    Effect, Key, Millis, Node, ProcessId,
    grant::{Grant, Stage},
    input::GpuSample,
    ledger::margin_bytes,
};

/// Allocations of others are held at most so long beyond what the copy should take.
const HOLD_LIMIT_MS: Millis = 10_000;
/// Slowest restore that is expected, in bytes per millisecond (about 1 GB/s).
const SLOW_RESTORE_BYTES_PER_MS: u64 = 1 << 20;

impl Node {
    /// Begins a grant for every waiter whose turn it is and whose VRAM seems free.
    /// A waiter that does not fit keeps later ones off its devices.
    pub(super) fn serve_queue(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let mut taken: BTreeSet<String> = self
            .grants
            .values()
            .flat_map(|g| g.uuids.iter().cloned())
            .collect();
        for key in self.queue.in_order(self.now) {
            if self.grants.contains_key(&key) {
                continue;
            }
            let needs = self.container_needs(&key);
            let uuids: BTreeSet<String> = needs.iter().map(|n| n.uuid.clone()).collect();
            let known = !needs.is_empty() && self.gpu_error.is_none();
            let fits = known && self.ledger.fits(&key, &needs, &self.gpus, margin_bytes);
            if fits && uuids.is_disjoint(&taken) {
                self.ledger.promise(&key, needs);
                self.begin_grant(&key, uuids.clone());
            } else if let Some(container) = self
                .containers
                .get_mut(&key)
                .filter(|c| c.state == State::Queued)
            {
                let reason = if known {
                    Reason::WaitingForVram
                } else {
                    Reason::VramUnknown
                };
                container.reason = (reason, self.gpu_error.clone().unwrap_or_default());
            }
            taken.extend(uuids);
        }
    }

    fn begin_grant(&mut self, key: &Key, uuids: BTreeSet<String>) {
        let hold: BTreeSet<ProcessId> = self
            .processes
            .iter()
            .filter(|(_, p)| p.connected && p.phase == Phase::Open && p.pending.is_none())
            .map(|(id, _)| *id)
            .collect();
        let mut grant = Grant {
            stage: Stage::Proving,
            held: hold.clone(),
            uuids,
            since: self.now,
        };
        let mut awaited = BTreeSet::new();
        for id in hold {
            let Some(process) = self.processes.get_mut(&id) else {
                continue;
            };
            process.holds += 1;
            if process.holds == 1 || self.hold_orders.values().any(|(_, held)| *held == id) {
                // Asked again even when another grant asked: the answer says when it holds.
                let deadline_ms = self.settings.hold_ms;
                let order = self.order(id, Action::HoldAllocations { deadline_ms });
                self.hold_orders.insert(order, (key.clone(), id));
                awaited.insert(id);
            }
        }
        if awaited.is_empty() {
            self.effects.push(Effect::Prove(key.clone()));
        } else {
            grant.stage = Stage::Holding(awaited);
        }
        self.grants.insert(key.clone(), grant);
    }

    /// Takes the report of a hold; `false` when the order was not one.
    pub(super) fn hold_reported(&mut self, id: ProcessId, order: u64, outcome: Outcome) -> bool {
        let Some((key, asked)) = self.hold_orders.get(&order).cloned() else {
            return false;
        };
        if asked != id {
            return true; // Not its order to report on.
        }
        self.hold_orders.remove(&order);
        if outcome == Outcome::Done {
            self.hold_settled(&key, id);
        } else {
            self.abort_grant(&key);
        }
        true
    }

    /// One process less to wait for; with the last, NVML is asked.
    fn hold_settled(&mut self, key: &Key, id: ProcessId) {
        if let Some(grant) = self.grants.get_mut(key) {
            if let Stage::Holding(awaited) = &mut grant.stage {
                awaited.remove(&id);
                if awaited.is_empty() {
                    grant.stage = Stage::Proving;
                    self.effects.push(Effect::Prove(key.clone()));
                }
            }
        }
    }

    pub(super) fn proven(&mut self, key: &Key, gpus: Result<Vec<GpuSample>, String>) {
        match gpus {
            Ok(gpus) => {
                self.gpu_error = None;
                self.take_gpus(gpus);
            }
            Err(error) => self.gpu_error = Some(error),
        }
        if self
            .grants
            .get(key)
            .is_none_or(|grant| grant.stage != Stage::Proving)
        {
            return;
        }
        let needs = self.container_needs(key);
        if self.gpu_error.is_none()
            && !needs.is_empty()
            && self.ledger.fits(key, &needs, &self.gpus, margin_bytes)
        {
            self.queue.leave(key);
            if let Some(grant) = self.grants.get_mut(key) {
                grant.stage = Stage::Granted;
            }
            self.advance(key);
        } else {
            self.abort_grant(key);
        }
    }

    /// Gives the promise back; the container still waits in the queue.
    fn abort_grant(&mut self, key: &Key) {
        self.end_grant(key);
        self.ledger.release(key);
    }

    /// Ends a grant, whatever became of it: others may allocate again.
    pub(super) fn end_grant(&mut self, key: &Key) {
        let Some(mut grant) = self.grants.remove(key) else {
            return;
        };
        self.hold_orders.retain(|_, (other, _)| other != key);
        self.release_holds(&mut grant);
    }

    fn release_holds(&mut self, grant: &mut Grant) {
        for id in std::mem::take(&mut grant.held) {
            let Some(process) = self.processes.get_mut(&id) else {
                continue;
            };
            process.holds = process.holds.saturating_sub(1);
            if process.holds == 0 && process.connected {
                self.order(id, Action::ReleaseAllocations);
            }
        }
    }

    /// A process is gone, or cannot be told anything: nobody waits for its hold.
    pub(super) fn forget_holds(&mut self, id: ProcessId) {
        if let Some(process) = self.processes.get_mut(&id) {
            process.holds = 0;
        }
        let waiting: Vec<Key> = self
            .hold_orders
            .values()
            .filter(|(_, held)| *held == id)
            .map(|(key, _)| key.clone())
            .collect();
        self.hold_orders.retain(|_, (_, held)| *held != id);
        for grant in self.grants.values_mut() {
            grant.held.remove(&id);
        }
        for key in waiting {
            self.hold_settled(&key, id);
        }
    }

    /// Grants that take too long: before the restore they are given up; during it
    /// the others go on, and only the promise stays.
    pub(super) fn check_grants(&mut self) {
        let now = self.now;
        let hold_limit = Millis::from(self.settings.hold_ms) + 2_000;
        let keys: Vec<Key> = self.grants.keys().cloned().collect();
        for key in keys {
            let bytes: u64 = self.container_needs(&key).iter().map(|n| n.bytes).sum();
            let Some(grant) = self.grants.get(&key) else {
                continue;
            };
            let age = now.saturating_sub(grant.since);
            if grant.is_granted() {
                if age > HOLD_LIMIT_MS + bytes / SLOW_RESTORE_BYTES_PER_MS && !grant.held.is_empty()
                {
                    if let Some(mut grant) = self.grants.remove(&key) {
                        self.release_holds(&mut grant);
                        grant.uuids.clear();
                        self.grants.insert(key, grant);
                    }
                }
            } else if age > hold_limit {
                self.abort_grant(&key);
            }
        }
    }
}
