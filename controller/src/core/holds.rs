//! Holds: no managed process takes VRAM of a device while room on it is proven and taken.
//!
//! ```text
//! told to hold ──Done──────────────────────────────> holds until the grant ends
//!              ├─Busy, or nothing in time: disbelieved ─> not waited for, the proof decides
//!              └─gone ─────────────────────────────────> not waited for
//! ```
//!
//! A process that does not hold delays others once: the next time it is waited for briefly, then
//! not at all. A process that said Busy holds its new allocations all the same.

use std::collections::BTreeSet;

use affinode_proto::wire::{
    Phase, ProcessFlags,
    message::{Action, Outcome},
};

use super::{
    Key, Millis, Node, ProcessId,
    grant::{Grant, Stage},
    process::Process,
};

/// A process that could not hold its allocations by its deadline has this time to say so.
const REPORT_MS: Millis = 400;
/// A process that did not hold once is waited for this long the next time, and half as long each
/// time after that. Others answer within a millisecond.
const SHORT_PATIENCE_MS: Millis = 100;
/// Processes that join put a proof off this many times.
const MAX_RESTARTS: u32 = 4;
/// A controller that handled nothing for longer than this was stopped or starved: answers may lie
/// unread, and the processes are not to blame.
const STALL_MS: Millis = 200;
/// An order to hold allocations that was not reported on.
#[derive(Clone, Debug)]
pub(super) struct HoldOrder {
    /// The container whose grant it is for.
    pub(super) key: Key,
    /// The process that is to hold.
    process: ProcessId,
    /// When it was told to.
    since: Millis,
}

/// How often a process, or a container's processes, did not hold their allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldRecord {
    refused: u32,
    last: Millis,
}

impl HoldRecord {
    /// Notes a hold that was refused. Several at about the same time, for several grants, count
    /// as one.
    fn refuse(&mut self, now: Millis) {
        const SAME_MS: Millis = 1_000;
        if self.refused == 0 || now.saturating_sub(self.last) >= SAME_MS {
            self.refused = self.refused.saturating_add(1);
            self.last = now;
        }
    }

    /// Notes that a hold was kept. The first refusal is never forgotten.
    fn keep(&mut self) {
        self.refused = self.refused.saturating_sub(1).max(self.refused.min(1));
    }

    /// How long the process is waited for; `None`: as long as any other.
    fn patience_ms(self) -> Option<Millis> {
        let before = self.refused.checked_sub(1)?;
        Some(SHORT_PATIENCE_MS.checked_shr(before).unwrap_or(0))
    }
}

impl Node {
    /// Tells a process to hold its allocations for a grant. One that cannot allocate
    /// now is not waited for: it has the order before it is let go.
    pub(super) fn hold(&mut self, key: &Key, id: ProcessId) {
        let deadline_ms = self.settings.hold_ms;
        let (Some(process), Some(grant)) = (self.processes.get(&id), self.grants.get(key)) else {
            return;
        };
        let own_waits = process.key == *key && process.phase != Phase::Open;
        if !process.connected || own_waits || !may_take_of(process, &grant.uuids) {
            return;
        }
        let opening = process.pending.is_some_and(|pending| pending.action == Action::Open);
        // A process that scribbled its page is not waited for: it counts as unmanaged.
        let believed = process.counter_error.is_none();
        // Processes that join one after the other do not put a proof off for ever.
        let in_time = self.now.saturating_sub(grant.since) < self.full_patience_ms();
        let can_allocate = process.phase == Phase::Open || opening;
        let mut awaited = believed && can_allocate && in_time && self.patience_ms(id) > 0;
        if awaited && grant.restarts >= MAX_RESTARTS && matches!(grant.stage, Stage::Proving(_)) {
            awaited = false;
            self.shorten_hold_timeout(id);
        }
        if let Some(process) = self.processes.get_mut(&id) {
            process.holds += 1;
        }
        let order = self.order(id, Action::HoldAllocations { deadline_ms });
        let asked = HoldOrder { key: key.clone(), process: id, since: self.now };
        self.hold_orders.insert(order, asked);
        if let Some(grant) = self.grants.get_mut(key) {
            grant.held.insert(id);
            match &mut grant.stage {
                Stage::Granted => {}
                Stage::Holding(waiting) if awaited => {
                    waiting.insert(id);
                }
                // What NVML is reading now may be older than this newcomer's allocations.
                stage @ Stage::Proving(_) if awaited => {
                    *stage = Stage::Holding(BTreeSet::from([id]));
                    grant.restarts += 1;
                }
                _ => {}
            }
        }
    }

    /// A process joins while grants are in progress: it holds for each of them.
    pub(super) fn hold_newcomer(&mut self, id: ProcessId) {
        let keys: Vec<Key> = self.grants.keys().cloned().collect();
        for key in keys {
            self.hold(&key, id);
        }
    }

    /// A process that starts in a container that is not back yet: it takes no VRAM before
    /// the others have theirs.
    pub(super) fn hold_for_siblings(&mut self, id: ProcessId) {
        let Some(key) = self.processes.get(&id).map(|p| p.key.clone()) else { return };
        let others_away = self.processes.of(&key).any(|(_, p)| p.phase.is_offloaded());
        let deadline_ms = self.settings.hold_ms;
        if let Some(process) = self.processes.get_mut(&id)
            && process.phase == Phase::Open
            && others_away
        {
            process.waits_for_siblings = true;
            process.holds += 1;
            self.order(id, Action::HoldAllocations { deadline_ms });
        }
    }

    /// The whole container is back.
    pub(super) fn siblings_are_back(&mut self, key: &Key) {
        for id in self.members(key) {
            let Some(process) = self.processes.get_mut(&id) else { continue };
            if std::mem::take(&mut process.waits_for_siblings) {
                self.release(id);
            }
        }
    }

    fn release(&mut self, id: ProcessId) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.holds = process.holds.saturating_sub(1);
        if process.holds == 0 && process.connected {
            self.order(id, Action::ReleaseAllocations);
        }
    }

    /// Takes the report of a hold; `false` when the order was not one.
    pub(super) fn hold_reported(&mut self, id: ProcessId, order: u64, outcome: Outcome) -> bool {
        let Some(asked) = self.hold_orders.get(&order) else {
            return false;
        };
        if asked.process != id {
            return true; // Not its order to report on.
        }
        let key = asked.key.clone();
        self.hold_orders.remove(&order);
        if outcome == Outcome::Done {
            self.restore_hold_timeout(id);
        } else {
            self.shorten_hold_timeout(id);
        }
        // A process that cannot hold is not waited for again in this grant. New allocations of it
        // are held until the release; what the one in progress has taken, NVML shows.
        self.hold_settled(&key, id);
        true
    }

    /// One process less to wait for; with the last, NVML is asked.
    fn hold_settled(&mut self, key: &Key, id: ProcessId) {
        if let Some(Stage::Holding(awaited)) =
            self.grants.get_mut(key).map(|grant| &mut grant.stage)
        {
            awaited.remove(&id);
        }
        self.prove_when_held(key);
    }

    pub(super) fn release_holds(&mut self, grant: &mut Grant) {
        std::mem::take(&mut grant.held).into_iter().for_each(|id| self.release(id));
    }

    /// A process is gone, or cannot be told anything: its hold is not waited for.
    pub(super) fn forget_holds(&mut self, id: ProcessId) {
        if let Some(process) = self.processes.get_mut(&id) {
            process.holds = 0;
        }
        let asked = self.hold_orders.values().filter(|asked| asked.process == id);
        let waiting: Vec<Key> = asked.map(|asked| asked.key.clone()).collect();
        self.hold_orders.retain(|_, asked| asked.process != id);
        for grant in self.grants.values_mut() {
            grant.held.remove(&id);
        }
        for key in waiting {
            self.hold_settled(&key, id);
        }
    }

    /// How long every process is waited for that has always held its allocations.
    pub(super) fn full_patience_ms(&self) -> Millis {
        Millis::from(self.settings.hold_ms) + REPORT_MS
    }

    /// How long a process is waited for when its allocations are to be held; 0: not at all.
    fn patience_ms(&self, id: ProcessId) -> Millis {
        let Some(process) = self.processes.get(&id) else { return 0 };
        let container = self.containers.get(&process.key);
        let of_container = container.filter(|c| self.now < c.short_hold_until);
        let of_container = of_container.and_then(|c| c.hold_record.patience_ms());
        let briefly = of_container.into_iter().chain(process.hold_record.patience_ms()).min();
        briefly.unwrap_or_else(|| self.full_patience_ms())
    }

    /// A process did not hold its allocations in time, or said that it cannot: it is waited for
    /// briefly from now on. So are, for a time that grows, others of its container: they might be
    /// made for nothing else.
    fn shorten_hold_timeout(&mut self, id: ProcessId) {
        const FIRST_MS: Millis = 60_000;
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.hold_record.refuse(self.now);
        let Some(container) = self.containers.get_mut(&process.key) else { return };
        if self.now >= container.short_hold_until {
            container.hold_record = HoldRecord::default();
            container.short_hold_until =
                self.now + (FIRST_MS << container.ignored_hold_periods.min(6));
            container.ignored_hold_periods = container.ignored_hold_periods.saturating_add(1);
        }
        container.hold_record.refuse(self.now);
    }

    /// A process that did not hold some time held this time. What it did once is not forgotten.
    fn restore_hold_timeout(&mut self, id: ProcessId) {
        if let Some(process) = self.processes.get_mut(&id) {
            process.hold_record.keep();
        }
    }

    /// This controller handled nothing for `silent_ms`: time in which no process was waited for.
    pub(super) fn excuse_stall(&mut self, silent_ms: Millis) {
        if silent_ms <= STALL_MS {
            return;
        }
        self.hold_orders.values_mut().for_each(|asked| asked.since += silent_ms);
        let unproven = self.grants.values_mut().filter(|grant| grant.stage != Stage::Granted);
        unproven.for_each(|grant| grant.since += silent_ms);
    }

    /// Goes on without processes that were waited for long enough.
    pub(super) fn settle_overdue(&mut self, key: &Key, grant_is_late: bool) {
        let Some(Stage::Holding(waiting)) = self.grants.get(key).map(|grant| grant.stage.clone())
        else {
            return;
        };
        for id in waiting {
            let asked = self.hold_orders.iter().find(|(_, a)| a.key == *key && a.process == id);
            let asked = asked.map(|(order, asked)| (*order, asked.since));
            let waited_ms = asked.map_or(Millis::MAX, |(_, since)| self.now.saturating_sub(since));
            let overdue = waited_ms >= self.patience_ms(id);
            if !overdue && !grant_is_late {
                continue;
            }
            if let Some((order, _)) = asked {
                self.hold_orders.remove(&order);
            }
            if overdue {
                self.shorten_hold_timeout(id);
            }
            self.hold_settled(key, id);
        }
    }
}

/// Whether a process may take VRAM of these devices. Where it has its memory, NVML and the journal
/// say; a process of which neither says anything may be about to make a context on any of them, and
/// so may a process that sees several GPUs.
fn may_take_of(process: &Process, uuids: &BTreeSet<String>) -> bool {
    let sees_one =
        process.counters.as_ref().is_some_and(|page| page.notes.intersects(ProcessFlags::ONE_GPU));
    let mut known = process.vram.iter().chain(process.offloaded_vram.iter().flatten());
    let on = known.clone().any(|device| uuids.contains(&device.uuid));
    let goes = process.target_gpu.as_ref().is_some_and(|to| uuids.contains(to));
    // Of a grant that an earlier controller began without a record no device is known.
    uuids.is_empty() || on || goes || !sees_one || known.next().is_none()
}
