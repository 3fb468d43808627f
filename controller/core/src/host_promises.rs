//! Promises host memory to offloads. This file decides when an offload gets a promise, when it
//! waits because the memory is promised to other offloads, and when a promise ends.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::{reason::Reason, state::State, wire::message::Action};

use super::{
    Effect, Key, Millis,
    container::Container,
    host_memory::{
        HostNeed, HostPoolAllowance, HostPoolPrefault, MemoryPlace, MemoryPool, MemoryShortage,
        SurveyedMemory,
    },
    host_pool, kept_memory,
    node_state::{JournalClaim, NodeState},
    offload_level,
    process::Process,
};

/// Decision whether an offload gets the host memory that it needs. It is based on a reading of the
/// free memory. `Waits` and `Refused` contain the reason and its detail.
pub(super) enum HostVerdict {
    /// The host memory is promised to the offload.
    Promised,
    /// Other offloads in progress have promises for this memory, or other containers are freeing
    /// memory. The offload waits until then.
    Waits(Reason, String),
    /// Host memory does not suffice: the container stays resident.
    Refused(Reason, String),
}

/// Promises host memory to a container for its offload, if the reading shows enough free memory.
/// The memory is either in the host pool or the container's own. `host_pool::is_preferred` decides
/// which of the two is tried first. If that one does not suffice, the other is tried. `asked_at`:
/// when the reading was requested.
pub(super) fn promise_host_memory(
    node: &mut NodeState,
    key: &Key,
    memory: SurveyedMemory,
    asked_at: Millis,
) -> HostVerdict {
    let mut short = Vec::new();
    // An offload whose gates are closed does not wait: the container's calls would wait too.
    let began = node.registry.containers.get(key).filter(|c| c.goal.is_requested());
    let began = began.and_then(|c| c.goal.offload().and_then(|offload| offload.began));
    let may_wait =
        began.is_some_and(|at| node.clock.now.saturating_sub(at) < kept_memory::MAX_WAIT_MS);
    match choose_memory(node, key, memory, asked_at, &mut short, may_wait) {
        HostVerdict::Refused(reason, detail)
            if may_wait && kept_memory::is_being_freed(node, key, &short) =>
        {
            HostVerdict::Waits(
                reason,
                format!("{detail}. Other containers free memory that they keep"),
            )
        }
        // The next survey is for the copy alone.
        HostVerdict::Refused(reason, detail) if offload_level::keep_context(node, key) => {
            HostVerdict::Waits(reason, detail)
        }
        verdict => {
            if let Some(container) = node.registry.containers.get_mut(key) {
                let is_refused = matches!(verdict, HostVerdict::Refused(..));
                container.short_of = if is_refused { short } else { Vec::new() };
            }
            verdict
        }
    }
}

/// Promises the host pool or the container's own memory. Appends each pool that is short of memory
/// to `short`. `may_wait`: whether the offload may wait until other containers have freed prefaulted
/// memory.
fn choose_memory(
    node: &mut NodeState,
    key: &Key,
    memory: SurveyedMemory,
    asked_at: Millis,
    short: &mut Vec<MemoryPool>,
    may_wait: bool,
) -> HostVerdict {
    let SurveyedMemory { container, host_pool, allowances } = memory;
    if host_pool.is_empty() {
        return judge(node, key, container, asked_at, &allowances, short);
    }
    let is_preferred = host_pool::is_preferred(node, key);
    let (first, second) =
        if is_preferred { (host_pool, container) } else { (container, host_pool) };
    match judge(node, key, first.clone(), asked_at, &allowances, short) {
        HostVerdict::Promised => HostVerdict::Promised,
        // Prefaulted memory must not drive the offload to the container's own memory.
        HostVerdict::Refused(reason, detail) | HostVerdict::Waits(reason, detail)
            if is_preferred
                && may_wait
                && kept_memory::prefaults_give_way(node, key, &first, asked_at) =>
        {
            HostVerdict::Waits(reason, detail)
        }
        first => match (judge(node, key, second, asked_at, &allowances, short), first) {
            // The offload can begin when other offloads have ended.
            (HostVerdict::Refused(..), HostVerdict::Waits(reason, detail)) => {
                HostVerdict::Waits(reason, detail)
            }
            // The message names the container's own memory.
            (HostVerdict::Refused(..), first) if !is_preferred => first,
            (second, _) => second,
        },
    }
}

fn judge(
    node: &mut NodeState,
    key: &Key,
    pools: Vec<MemoryPool>,
    asked_at: Millis,
    allowances: &[HostPoolAllowance],
    short: &mut Vec<MemoryPool>,
) -> HostVerdict {
    match node.host_ledger.judge(key, &pools, asked_at, node.clock.now) {
        Ok(()) => {
            node.host_ledger.promise(key, pools, node.clock.now);
            if node.host_ledger.uses_host_pool(key) {
                host_pool::allow(node, key, allowances);
            }
            HostVerdict::Promised
        }
        Err(MemoryShortage::Short { pool }) => {
            let (free, need) = (mib(pool.free_bytes), mib(pool.need_bytes));
            let detail = format!(
                "{} has {free} of free host memory, but the offload needs {need}",
                pool.name()
            );
            let reason = reason_of(&pool);
            short.push(pool);
            HostVerdict::Refused(reason, detail)
        }
        Err(MemoryShortage::Promised { pool, promised_bytes }) => {
            kept_memory::end_prefaults_in_progress(node, key);
            let (free, need) = (mib(pool.free_bytes), mib(pool.need_bytes));
            let detail = format!(
                "{} has {free} of free host memory. {} of it are promised to other offloads in \
                 progress, and this offload needs {need}",
                pool.name(),
                mib(promised_bytes),
            );
            HostVerdict::Waits(reason_of(&pool), detail)
        }
    }
}

/// Returns the reason and detail for a copy out that failed for lack of host memory. The detail
/// names the pool in which the controller found too little memory. If the controller found none,
/// the library itself ended the copy: the detail then names the host pool, or another process that
/// took the memory.
pub(super) fn host_shortage(node: &NodeState, key: &Key, pid: u32) -> (Reason, String) {
    match node.host_ledger.short_pool(key) {
        Some(pool) => {
            let (free, need) = (mib(pool.free_bytes), mib(pool.need_bytes));
            let detail = format!(
                "while process {pid} was copied out, {} had only {free} free, but the copy still \
                 needed {need}",
                pool.name()
            );
            (reason_of(pool), detail)
        }
        None if node.host_ledger.uses_host_pool(key) => {
            let detail = format!("the host pool had no memory for the copy of process {pid}");
            (Reason::HostMemory, detail)
        }
        None => {
            let detail =
                format!("another process allocated host memory while process {pid} was copied out");
            (Reason::HostMemory, detail)
        }
    }
}

/// Requests another reading of host memory for an offload that waits because the memory is promised
/// to other offloads. Does nothing if the offload has changed processes already: the memory is then
/// read again when the next step is planned.
pub(super) fn survey_again(node: &mut NodeState, key: &Key) {
    if node.registry.containers.get(key).is_some_and(|c| c.goal.is_requested()) {
        survey(node, key);
    }
}

/// Releases the promises of host memory whose offloads have ended.
pub(super) fn settle_host_memory(node: &mut NodeState) {
    if node.host_ledger.is_empty() {
        return;
    }
    let oldest_survey = || node.registry.containers.values().filter_map(|c| c.survey_asked).min();
    let mut ledger = std::mem::take(&mut node.host_ledger);
    ledger.settle(node.clock.now, oldest_survey, |key| may_touch_host_memory(node, key));
    node.host_ledger = ledger;
    host_pool::end_permissions(node);
}

/// Records promises of host memory for offloads that an earlier controller ordered and that may
/// still be running. A process cannot register during its offload. Its memory counts as promised
/// until the process registers, or until NVML shows that it holds no VRAM.
pub(super) fn promise_to_unseen(node: &mut NodeState, key: &Key) {
    let mut pools: BTreeMap<MemoryPlace, MemoryPool> = BTreeMap::new();
    let claims = node.registry.unclaimed_journal.iter().filter(|((other, ..), _)| other == key);
    for claimed in claims.flat_map(|(_, claim)| host_need(claim)) {
        let pool = pools
            .entry(claimed.place.clone())
            .or_insert_with(|| MemoryPool { need_bytes: 0, ..claimed.clone() });
        pool.need_bytes = pool.need_bytes.saturating_add(claimed.need_bytes);
    }
    node.host_ledger.recall(key, pools.into_values().collect(), node.clock.now);
}

/// Records the VRAM that NVML reports for processes that the journal names and that have not
/// registered, and updates their promises of host memory.
pub(super) fn take_gpus_of_unseen(node: &mut NodeState) {
    if node.registry.unclaimed_journal.is_empty() {
        return;
    }
    let gpus = &node.gpus;
    let on_devices = gpus.samples.iter().flat_map(|gpu| &gpu.processes);
    for ((_, pid, _), claim) in &mut node.registry.unclaimed_journal {
        // NVML does not show what the process holds on a GPU that could not be read.
        if claim.offloaded.iter().any(|on| gpus.error_of(&on.uuid).is_some()) {
            continue;
        }
        let held = on_devices.clone().filter(|(other, _)| other == pid);
        claim.held_bytes = Some(held.map(|(_, bytes)| bytes).sum());
    }
    let keys: BTreeSet<Key> =
        node.registry.unclaimed_journal.keys().map(|(key, ..)| key.clone()).collect();
    keys.iter().for_each(|key| promise_to_unseen(node, key));
}

/// Whether an offload of this container may still allocate host memory. This is possible after the
/// offload was given up, until the order in progress is reported. It is also possible if an agent
/// lost its connection, because the controller does not know whether an order is in progress.
fn may_touch_host_memory(node: &NodeState, key: &Key) -> bool {
    let leaves = node
        .registry
        .containers
        .get(key)
        .is_some_and(|c| !c.goal.is_resident() && c.shown.state != State::Offloaded);
    let prefaults =
        |c: &Container| matches!(c.host_pool_prefault, HostPoolPrefault::Filling { .. });
    leaves
        || node.registry.containers.get(key).is_some_and(prefaults)
        || node.registry.processes.of(key).any(|(_, process)| {
            let moves =
                |action| matches!(action, Action::CopyOut { .. } | Action::Checkpoint { .. });
            !process.agent.connected || process.pending.is_some_and(|order| moves(order.action))
        })
}

pub(super) fn survey(node: &mut NodeState, key: &Key) {
    let moves = offload_level::moves(node, key);
    let need = |p: &Process| host_pool::need_of(p, moves(p));
    let processes: Vec<HostNeed> = node.registry.processes.of(key).map(|(_, p)| need(p)).collect();
    let host_pool =
        processes.iter().any(|need| need.copied_bytes > 0) && host_pool::may_use(node, key);
    let now = node.clock.now;
    if let Some(container) =
        node.registry.containers.get_mut(key).filter(|c| c.survey_asked.is_none())
    {
        container.survey_asked = Some(now);
        node.output.effects.push(Effect::Survey { key: key.clone(), processes, host_pool });
    }
}

/// Host memory that the offload of an unregistered process may still allocate. VRAM that the
/// process has released is not counted, because its content is in host memory already. A process
/// that is being restored allocates no host memory.
fn host_need(claim: &JournalClaim) -> impl Iterator<Item = MemoryPool> {
    let offloaded_bytes =
        claim.offloaded.iter().fold(0_u64, |sum, on| sum.saturating_add(on.bytes));
    let held_bytes = claim.held_bytes.unwrap_or(offloaded_bytes);
    let moved_bytes = offloaded_bytes.saturating_sub(held_bytes);
    let may_leave = !claim.restoring && held_bytes > 0;
    claim.host.iter().filter(move |_| may_leave).map(move |pool| MemoryPool {
        need_bytes: pool.need_bytes.saturating_sub(moved_bytes),
        ..pool.clone()
    })
}

fn reason_of(pool: &MemoryPool) -> Reason {
    match pool.place {
        MemoryPlace::Cgroup(_) => Reason::CgroupMemory,
        MemoryPlace::Node | MemoryPlace::HostPool => Reason::HostMemory,
    }
}

/// Promises memory of the host pool for a prefault, and permits it. `spare_bytes`: memory that must
/// be left in the host pool and on the node for others. False: not enough memory is free.
pub(super) fn promise_prefault(
    node: &mut NodeState,
    key: &Key,
    memory: SurveyedMemory,
    asked_at: Millis,
    spare_bytes: u64,
) -> bool {
    let with_spare = |pool: &MemoryPool| MemoryPool {
        need_bytes: match pool.place {
            MemoryPlace::Cgroup(_) => pool.need_bytes,
            _ => pool.need_bytes.saturating_add(spare_bytes),
        },
        ..pool.clone()
    };
    let with_spare: Vec<MemoryPool> = memory.host_pool.iter().map(with_spare).collect();
    let fits = !with_spare.is_empty()
        && node.host_ledger.judge(key, &with_spare, asked_at, node.clock.now).is_ok();
    if fits {
        node.host_ledger.promise(key, memory.host_pool, node.clock.now);
        host_pool::allow(node, key, &memory.allowances);
    }
    fits
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}
