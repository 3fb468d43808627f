//! Holds are pauses of allocations. A waiter is a container that waits for VRAM. While VRAM of a
//! GPU is proven free for a waiter and then allocated by it, no other managed process may allocate
//! VRAM of that GPU.
//!
//! ```text
//! ordered to hold ──Done──────────────────────────> holds until the grant ends
//!                 ├─Busy, or no report in time ───> not waited for, the proof decides
//!                 └─connection lost ──────────────> not waited for
//! ```
//!
//! A process that does not hold delays a grant once for the full time limit. For the next grant the
//! controller waits for it only briefly, and later not at all. A process that reported Busy pauses
//! its new allocations nevertheless.

use std::collections::BTreeSet;

use affinode_proto::wire::{
    Phase, ProcessFlags,
    message::{Action, Outcome},
};

use super::{
    Key, Millis, ProcessId, copier_use,
    grant::{Grant, Stage},
    node_state::NodeState,
    process::Process,
};

/// Grace period after the deadline of an order to pause allocations, during which the controller
/// still waits for the process's report.
const REPORT_MS: Millis = 400;
/// Time limit for the report of a process that once did not follow an order to pause its
/// allocations. The limit is halved after each further refusal. Processes that can pause report
/// within a millisecond.
const SHORT_PATIENCE_MS: Millis = 100;
/// Maximum number of times that newly registered processes may delay the proof of one grant.
const MAX_RESTARTS: u32 = 4;
/// Time without a handled input after which the controller assumes that it was stopped or starved.
/// Reports may have arrived unread, so a late report then does not count as a refusal.
const STALL_MS: Millis = 200;

/// An order to pause allocations that has no report yet.
#[derive(Clone, Debug)]
pub(super) struct HoldOrder {
    /// The container whose grant needs the pause.
    pub(super) key: Key,
    /// The process that is ordered to pause its allocations.
    process: ProcessId,
    /// When the order was sent.
    since: Millis,
}

/// Counts how often a process, or the processes of a container, did not follow an order to pause
/// allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldRecord {
    refused: u32,
    last: Millis,
}

impl HoldRecord {
    /// Records that an order to pause allocations was refused. Refusals within a second count as
    /// one, because the orders may belong to several grants.
    fn refuse(&mut self, now: Millis) {
        const SAME_MS: Millis = 1_000;
        if self.refused == 0 || now.saturating_sub(self.last) >= SAME_MS {
            self.refused = self.refused.saturating_add(1);
            self.last = now;
        }
    }

    /// Records that a process paused its allocations as ordered. Decreases the number of refusals
    /// by one. The last refusal stays recorded.
    fn keep(&mut self) {
        self.refused = self.refused.saturating_sub(1).max(self.refused.min(1));
    }

    /// Shortened time limit for the process's report on an order to pause allocations, in
    /// milliseconds. `None`: the process never refused, so the full limit applies.
    fn patience_ms(self) -> Option<Millis> {
        let before = self.refused.checked_sub(1)?;
        Some(SHORT_PATIENCE_MS.checked_shr(before).unwrap_or(0))
    }
}

/// Periods in which the controller waits only briefly for the reports of all processes of a
/// container, because some of them did not follow orders to pause allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShortHolds {
    /// End of the period that began last.
    until: Millis,
    /// Number of periods so far. Each period is longer than the period before.
    periods: u32,
    /// The orders that the container's processes refused since the last period began.
    record: HoldRecord,
}

impl ShortHolds {
    /// Records that a process of the container did not follow an order to pause its allocations.
    /// From now on the controller waits only briefly for such processes: a new period begins, unless
    /// one is in progress.
    fn refuse(&mut self, now: Millis) {
        const FIRST_MS: Millis = 60_000;
        if now >= self.until {
            self.record = HoldRecord::default();
            self.until = now + (FIRST_MS << self.periods.min(6));
            self.periods = self.periods.saturating_add(1);
        }
        self.record.refuse(now);
    }

    /// Time limit for a report of any process of the container, in milliseconds. `None`: no period
    /// of short limits is in progress.
    fn patience_ms(self, now: Millis) -> Option<Millis> {
        if now < self.until { self.record.patience_ms() } else { None }
    }
}

/// Orders a process to pause its allocations for a grant. If the process cannot allocate now, for
/// example because its gate is closed, the controller does not wait for its report. The process
/// then receives the order before its gate opens.
pub(super) fn hold(node: &mut NodeState, key: &Key, id: ProcessId) {
    let deadline_ms = node.settings.hold_ms;
    let (Some(process), Some(grant)) =
        (node.registry.processes.get(&id), node.admission.grants.get(key))
    else {
        return;
    };
    // A process with a closed gate in the grant's own container cannot allocate: the grant is
    // for its restore.
    let own_waits = process.key == *key && process.agent.phase != Phase::Open;
    let is_concerned = !grant.is_released && may_take_of(process, &grant.uuids);
    if !process.agent.connected || own_waits || !is_concerned {
        return;
    }
    let opening = process.pending.is_some_and(|pending| pending.action == Action::Open);
    // A process that overwrote its counters counts as unmanaged, so its report is not awaited.
    let believed = process.activity.counter_error.is_none();
    // Processes that register one after the other must not delay a proof forever.
    let in_time = node.clock.now.saturating_sub(grant.since) < full_patience_ms(node);
    let can_allocate = process.agent.phase == Phase::Open || opening;
    let mut awaited = believed && can_allocate && in_time && patience_ms(node, id) > 0;
    if awaited && grant.restarts >= MAX_RESTARTS && grant.stage.is_held() {
        awaited = false;
        shorten_hold_timeout(node, id);
    }
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.holds.count += 1;
    }
    let order = node.order(id, Action::HoldAllocations { deadline_ms });
    let asked = HoldOrder { key: key.clone(), process: id, since: node.clock.now };
    node.admission.hold_orders.insert(order, asked);
    if let Some(grant) = node.admission.grants.get_mut(key) {
        grant.held.insert(id);
        match &mut grant.stage {
            Stage::Granted => {}
            Stage::Holding(waiting) if awaited => {
                waiting.insert(id);
            }
            // NVML's running sample may miss the last allocations of this process, so the grant
            // waits for its report and is then proven again.
            stage @ (Stage::AwaitingCopiers | Stage::Proving(_)) if awaited => {
                *stage = Stage::Holding(BTreeSet::from([id]));
                grant.restarts += 1;
            }
            _ => {}
        }
    }
}

/// Orders a newly registered process to pause its allocations for each grant in progress.
pub(super) fn hold_newcomer(node: &mut NodeState, id: ProcessId) {
    let keys: Vec<Key> = node.admission.grants.keys().cloned().collect();
    for key in keys {
        hold(node, &key, id);
    }
}

/// Orders a new process to pause its allocations if other processes of its container are offloaded
/// or being offloaded. Otherwise it could allocate the VRAM that they need for their restore.
/// [`release_siblings`] ends the pause.
pub(super) fn hold_for_siblings(node: &mut NodeState, id: ProcessId) {
    let Some(key) = node.registry.processes.get(&id).map(|p| p.key.clone()) else { return };
    let now = node.clock.now;
    let others_offloaded = node
        .registry
        .processes
        .of(&key)
        .any(|(_, p)| p.agent.phase.is_offloaded() || p.may_leave(now));
    let deadline_ms = node.settings.hold_ms;
    if let Some(process) = node.registry.processes.get_mut(&id)
        && process.agent.phase == Phase::Open
        && !process.holds.for_siblings
        && others_offloaded
    {
        process.holds.for_siblings = true;
        process.holds.count += 1;
        node.order(id, Action::HoldAllocations { deadline_ms });
    }
}

/// Ends the pauses of [`hold_for_siblings`] after the whole container is restored, or offloaded
/// again.
pub(super) fn release_siblings(node: &mut NodeState, key: &Key) {
    for id in node.members(key) {
        let Some(process) = node.registry.processes.get_mut(&id) else { continue };
        if std::mem::take(&mut process.holds.for_siblings) {
            release(node, id);
        }
    }
}

fn release(node: &mut NodeState, id: ProcessId) {
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    process.holds.count = process.holds.count.saturating_sub(1);
    if process.holds.count == 0 && process.agent.connected {
        node.order(id, Action::ReleaseAllocations);
    }
}

/// Handles the report on an order to pause allocations. Returns false if the report is about
/// another kind of order.
pub(super) fn hold_reported(
    node: &mut NodeState,
    id: ProcessId,
    order: u64,
    outcome: Outcome,
) -> bool {
    let Some(asked) = node.admission.hold_orders.get(&order) else {
        return false;
    };
    if asked.process != id {
        return true; // Not its order to report on.
    }
    let key = asked.key.clone();
    node.admission.hold_orders.remove(&order);
    if outcome == Outcome::Done {
        restore_hold_timeout(node, id);
    } else {
        shorten_hold_timeout(node, id);
    }
    // Whatever the outcome is, this grant does not wait for the process again. A process that
    // cannot hold pauses its new allocations until the release. NVML shows the VRAM that its
    // allocation in progress has taken.
    hold_settled(node, &key, id);
    true
}

/// Removes a process from the set of processes for which a grant still waits. If the set is then
/// empty, the proof of free VRAM can begin.
fn hold_settled(node: &mut NodeState, key: &Key, id: ProcessId) {
    if let Some(Stage::Holding(awaited)) =
        node.admission.grants.get_mut(key).map(|grant| &mut grant.stage)
    {
        awaited.remove(&id);
    }
    prove_when_held(node, key);
}

pub(super) fn release_holds(node: &mut NodeState, grant: &mut Grant) {
    std::mem::take(&mut grant.held).into_iter().for_each(|id| release(node, id));
}

/// Removes the pauses of a process that has exited or lost its connection.
pub(super) fn forget_holds(node: &mut NodeState, id: ProcessId) {
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.holds.count = 0;
    }
    let asked = node.admission.hold_orders.values().filter(|asked| asked.process == id);
    let waiting: Vec<Key> = asked.map(|asked| asked.key.clone()).collect();
    node.admission.hold_orders.retain(|_, asked| asked.process != id);
    for grant in node.admission.grants.values_mut() {
        grant.held.remove(&id);
    }
    for key in waiting {
        hold_settled(node, &key, id);
    }
}

/// Time limit for the report on an order to pause allocations, for a process that has never refused
/// one, in milliseconds.
pub(super) fn full_patience_ms(node: &NodeState) -> Millis {
    Millis::from(node.settings.hold_ms) + REPORT_MS
}

/// Time limit for the process's report on an order to pause allocations, in milliseconds. 0: its
/// report is not awaited.
fn patience_ms(node: &NodeState, id: ProcessId) -> Millis {
    let Some(process) = node.registry.processes.get(&id) else { return 0 };
    let container = node.registry.containers.get(&process.key);
    let of_container = container.and_then(|c| c.short_holds.patience_ms(node.clock.now));
    let briefly = of_container.into_iter().chain(process.holds.record.patience_ms()).min();
    briefly.unwrap_or_else(|| full_patience_ms(node))
}

/// Records that a process did not pause its allocations in time, or reported that it cannot. The
/// controller then waits only briefly for the reports of this process. For a period that grows each
/// time, this also applies to all processes of its container, because a container could otherwise
/// cause delays with a new process each time.
fn shorten_hold_timeout(node: &mut NodeState, id: ProcessId) {
    let Some(process) = node.registry.processes.get_mut(&id) else { return };
    process.holds.record.refuse(node.clock.now);
    if let Some(container) = node.registry.containers.get_mut(&process.key) {
        container.short_holds.refuse(node.clock.now);
    }
}

/// Records that a process paused its allocations as ordered. If it refused before, at least one
/// refusal stays recorded.
fn restore_hold_timeout(node: &mut NodeState, id: ProcessId) {
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.holds.record.keep();
    }
}

/// Extends the deadlines of holds by `silent_ms`, the time during which the controller handled no
/// input and read no reports.
pub(super) fn excuse_stall(node: &mut NodeState, silent_ms: Millis) {
    if silent_ms <= STALL_MS {
        return;
    }
    node.admission.hold_orders.values_mut().for_each(|asked| asked.since += silent_ms);
    let unproven = node.admission.grants.values_mut().filter(|grant| grant.stage != Stage::Granted);
    unproven.for_each(|grant| grant.since += silent_ms);
}

/// Stops waiting for processes that have not reported on an order to pause allocations within their
/// time limit. `grant_is_late`: stops waiting for all processes.
pub(super) fn settle_overdue(node: &mut NodeState, key: &Key, grant_is_late: bool) {
    let Some(Stage::Holding(waiting)) =
        node.admission.grants.get(key).map(|grant| grant.stage.clone())
    else {
        return;
    };
    for id in waiting {
        let asked =
            node.admission.hold_orders.iter().find(|(_, a)| a.key == *key && a.process == id);
        let asked = asked.map(|(order, asked)| (*order, asked.since));
        let waited_ms =
            asked.map_or(Millis::MAX, |(_, since)| node.clock.now.saturating_sub(since));
        let overdue = waited_ms >= patience_ms(node, id);
        if !overdue && !grant_is_late {
            continue;
        }
        if let Some((order, _)) = asked {
            node.admission.hold_orders.remove(&order);
        }
        if overdue {
            shorten_hold_timeout(node, id);
        }
        hold_settled(node, key, id);
    }
}

/// Starts the proof of the grant's VRAM as soon as the grant waits for no process and no copier is
/// starting or ending.
pub(super) fn prove_when_held(node: &mut NodeState, key: &Key) {
    let Some(grant) = node.admission.grants.get_mut(key) else { return };
    if grant.stage == Stage::Holding(BTreeSet::new()) {
        grant.stage = Stage::AwaitingCopiers;
        copier_use::prove_when_copiers_rest(node);
    }
}

/// Whether a process is able to allocate VRAM on these GPUs. A process can allocate on a GPU where
/// it already has memory, as NVML and the journal show. A process without memory, or one that may
/// see several GPUs, can create a context on any GPU.
fn may_take_of(process: &Process, uuids: &BTreeSet<String>) -> bool {
    let sees_one = process
        .activity
        .counters
        .as_ref()
        .is_some_and(|page| page.notes.intersects(ProcessFlags::ONE_GPU));
    let mut known =
        process.memory.vram.iter().chain(process.memory.offloaded_vram().into_iter().flatten());
    let on = known.clone().any(|device| uuids.contains(&device.uuid));
    let goes = process.memory.target_gpu().is_some_and(|to| uuids.contains(to));
    // A grant that was taken over from the journal names no GPU if the journal records no VRAM.
    uuids.is_empty() || on || goes || !sees_one || known.next().is_none()
}
