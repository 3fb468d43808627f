//! Grants VRAM to the waiters in the queue, after NVML has shown that the VRAM is free.
//!
//! `grant.rs` has a diagram of the stages. `serve_queue` begins grants. `proven` completes them or
//! ends them. `check_grants` ends grants that take too long.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Phase, message::Action},
};

use super::{
    DeviceBytes, GpuSample, Key, Millis, ProcessId, early_release, eviction, grant::Stage, grants,
    holds, host_relief, immediate, ledger::margin_bytes, measurements, migration, needs,
    node_state::NodeState, oom_wait, passing, process::Process,
};

/// Time limit for the pause of other processes' allocations during a restore, in addition to the
/// expected time of the copy.
const HOLD_LIMIT_MS: Millis = 10_000;
/// Time after which an unfinished `CopyOut` is assumed to need no more VRAM. An agent that exports
/// memory to a copier needs VRAM only in the first part of its `CopyOut`.
const HANDS_OVER_MS: Millis = 10_000;
/// Time limit for the NVML sample of a grant, in addition to the time limit for pausing the
/// processes' allocations.
const PROOF_MS: Millis = 1_600;
/// Speed of the slowest expected restore, in bytes per millisecond (about 1 GB/s).
const SLOW_RESTORE_BYTES_PER_MS: u64 = 1 << 20;

/// GPUs whose VRAM cannot go to the waiter that is being served. Exists while the queue is served.
struct GpuClaims {
    /// GPUs with a grant, and GPUs on which a process exports memory to a copier.
    taken: BTreeSet<String>,
    /// GPUs that an earlier waiter without a grant needs, with the key of that waiter.
    kept: Vec<(BTreeSet<String>, Key)>,
    /// Whether a process is freeing VRAM by a copy out.
    is_vram_released: bool,
    /// VRAM of each GPU that no offload could free. `None`: it was not needed so far.
    unmovable: Option<BTreeMap<String, u64>>,
}

impl GpuClaims {
    fn has(&self, uuid: &str) -> bool {
        self.taken.contains(uuid) || self.kept.iter().any(|(theirs, _)| theirs.contains(uuid))
    }
}

/// Begins grants for waiters in the order of service. A waiter gets a grant if the last sample
/// shows enough free VRAM, its GPUs are not taken, and no earlier waiter needs them. `passing`
/// describes two exceptions. If a waiter gets no grant, later waiters for its GPUs wait behind it.
pub(super) fn serve_queue(node: &mut NodeState) {
    if node.admission.queue.is_empty() {
        return;
    }
    // A GPU has at most one grant: if all have one, no waiter can be served.
    let granted = |uuid: &String| node.admission.grants.values().any(|g| g.uuids.contains(uuid));
    if !node.gpus.samples.is_empty() && node.gpus.samples.iter().all(|gpu| granted(&gpu.uuid)) {
        return;
    }
    let mut claims = GpuClaims {
        taken: taken_gpus(node),
        kept: Vec::new(),
        is_vram_released: early_release::is_in_progress(node),
        unmovable: None,
    };
    let mut order = serving_order(node, &claims.taken);
    let gpus = node.gpus.samples.len();
    for key in order.drain(..) {
        if gpus > 0 && claims.taken.len() >= gpus {
            break;
        }
        // This waiter was evicted for an earlier waiter in this loop, so it no longer waits.
        if node.registry.containers.get(&key).is_some_and(|c| !c.goal.is_resident()) {
            node.admission.queue.leave(&key);
        } else if !node.admission.grants.contains_key(&key) {
            serve_waiter(node, key, &mut claims);
        }
    }
    node.admission.queue_scratch = order;
}

/// GPUs on which no grant may begin now.
fn taken_gpus(node: &NodeState) -> BTreeSet<String> {
    let mut taken: BTreeSet<String> =
        node.admission.grants.values().flat_map(|g| &g.uuids).cloned().collect();
    // A process that exports memory to a copier may need VRAM for parts of this memory. During
    // the export, the free VRAM of its GPU is therefore not granted.
    let handing = node.registry.processes.values().filter(|process| hands_over(node, process));
    taken.extend(
        handing
            .flat_map(|p| p.memory.offloaded_vram().into_iter().flatten())
            .map(|on| on.uuid.clone()),
    );
    taken
}

/// Whether the VRAM in use on the GPUs is known.
fn knows_gpus(node: &NodeState) -> bool {
    node.gpus.error.is_none() && !node.gpus.samples.is_empty()
}

/// Returns the waiters that may be served, in the order of service. Waiters for GPUs that are taken
/// are removed before the expensive checks, because they are most of a long queue.
fn serving_order(node: &mut NodeState, taken: &BTreeSet<String>) -> Vec<Key> {
    let known = knows_gpus(node);
    let mut order = std::mem::take(&mut node.admission.queue_scratch);
    immediate::escalates_to_termination(node, &mut order);
    if !taken.is_empty() {
        order.retain(|key| {
            let waits = !node.admission.grants.contains_key(key) && needs_only(node, key, taken);
            if waits {
                show_waiting(node, key, known);
            }
            !waits
        });
    }
    // Partly restored containers are rare. If there is none, the waiters stay in the order of
    // the queue.
    let (all, queue) = (node.registry.processes.half_way(), &node.admission.queue);
    let half_way: BTreeSet<Key> = all.iter().filter(|key| queue.contains(key)).cloned().collect();
    if !half_way.is_empty() {
        order.sort_by_cached_key(|key| turn(node, key, half_way.contains(key)));
    }
    order
}

/// Promises VRAM to a waiter, or evicts containers for it, unless the claims of earlier waiters
/// prevent this.
fn serve_waiter(node: &mut NodeState, key: Key, claims: &mut GpuClaims) {
    let known = knows_gpus(node);
    let mut want = needs::alloc_wait_beside_restore(node, &key);
    let mut needs = needs::needs_with(node, &key, want);
    // A waiter for a GPU that was not read cannot be served, and delays no waiter for its other
    // GPUs.
    if known && let Some(why) = unread_gpu(node, &key, &needs) {
        return show_unknown(node, &key, why);
    }
    let margin = needs::margin_for(node, &key);
    let uuids: BTreeSet<String> = needs.iter().map(|n| n.uuid.clone()).collect();
    let released = claims.is_vram_released;
    let mut fits = known
        && (needs::fits(node, &key, &needs, margin)
            || (released && early_release::fits(node, &key, &needs, want, margin)));
    // If VRAM for both is free or being freed, the restore need not wait for that of the allocation.
    let covers = || early_release::covers(node, &key, &needs, margin);
    if known && !fits && released && want.is_some() && covers() {
        let restore = needs::container_needs(node, &key);
        if !restore.is_empty() && early_release::fits(node, &key, &restore, None, margin) {
            (needs, want, fits) = (restore, None, true);
        }
    }
    let mut before = claims.kept.iter().filter(|(theirs, _)| !theirs.is_disjoint(&uuids));
    let turn = uuids.is_disjoint(&claims.taken);
    let first = turn && before.clone().next().is_none();
    let outranks = |head: &Key| passing::outranks(node, &key, head);
    let passes = turn && before.clone().all(|(_, head)| outranks(head));
    let frees = |(theirs, head): &(BTreeSet<String>, Key)| {
        outranks(head) || passing::frees_host_memory(node, &key, head, theirs)
    };
    let frees_memory = fits && turn && !first && before.all(frees);
    if host_relief::is_relief(node, &key) && !frees_memory {
        return host_relief::withdraw(node, &key);
    }
    if fits && (first || passes || frees_memory) {
        // The VRAM fits, and each earlier waiter for these GPUs may be passed: promise the
        // VRAM and prove that it is free.
        claims.taken.extend(grants::promise(node, &key, needs, want));
        return;
    }
    // The container's own GPU is full: try a GPU of the same model that no earlier waiter
    // needs.
    if known
        && turn
        && !fits
        && migration::choose_other_gpu(node, &key, margin, |gpu| claims.has(gpu))
    {
        let needs = needs::needs_with(node, &key, want);
        claims.taken.extend(grants::promise(node, &key, needs, want));
        return;
    }
    // Other containers would be evicted in vain, and later waiters would wait for nothing.
    let unmovable = claims.unmovable.get_or_insert_with(|| needs::unmovable_for_waiters(node));
    let may_fit = || needs::may_ever_fit(node, &key, &needs, margin, unmovable);
    if known && !immediate::is_urgent(node, &key) && !may_fit() {
        return show_waiting(node, &key, known);
    }
    // A waiter that may be served before the earlier waiters also evicts: possibly no other
    // waiter can evict the containers that block those earlier waiters.
    if known && (first || passes) {
        eviction::evict_for(node, &key, &needs, margin);
    }
    if known && first && !fits {
        host_relief::relieve(node, &key, &needs);
    }
    show_waiting(node, &key, known);
    // Later waiters must not take these GPUs.
    claims.kept.push((uuids, key));
}

fn show_waiting(node: &mut NodeState, key: &Key, known: bool) {
    match node.gpus.error.clone() {
        error if !known => show_unknown(node, key, error.unwrap_or_default()),
        _ => show_reason(node, key, (Reason::WaitingForVram, String::new())),
    }
}

fn show_unknown(node: &mut NodeState, key: &Key, why: String) {
    show_reason(node, key, (Reason::VramUnknown, why));
}

fn show_reason(node: &mut NodeState, key: &Key, reason: (Reason, String)) {
    let waits = |c: &&mut super::container::Container| c.shown.state == State::Queued;
    if let Some(container) = node.registry.containers.get_mut(key).filter(waits) {
        container.shown.reason = reason;
    }
}

/// Why the VRAM of a GPU that the container needs is unknown although other GPUs were read. `None`:
/// the VRAM of all these GPUs is known.
fn unread_gpu(node: &NodeState, key: &Key, needs: &[DeviceBytes]) -> Option<String> {
    // Such a process may need any GPU of the node, and `needs` contains only those that were read. A
    // process that is only copied out loses nothing if its restore fails.
    let is_unknown =
        |p: &Process| p.agent.phase == Phase::Checkpointed && p.vram_to_restore().is_none();
    if let Some(gpu) = node.gpus.unreadable.first()
        && node.registry.processes.of(key).any(|(_, process)| is_unknown(process))
    {
        return Some(gpu.error.clone().unwrap_or_default());
    }
    let is_read = |uuid: &str| node.gpus.samples.iter().any(|gpu| gpu.uuid == uuid);
    let need = needs.iter().find(|need| !is_read(&need.uuid))?;
    let missing = || format!("NVML does not list the GPU {}", need.uuid);
    Some(node.gpus.error_of(&need.uuid).map_or_else(missing, str::to_owned))
}

/// Whether a container waits only for a restore, not for an allocation, and needs only GPUs in
/// `taken`. Such a container cannot be served now. It also blocks no other waiter, because these
/// GPUs are taken anyway.
fn needs_only(node: &NodeState, key: &Key, taken: &BTreeSet<String>) -> bool {
    let mut off = false;
    let mut needs = node
        .registry
        .processes
        .of(key)
        .filter(|(_, p)| p.agent.phase.is_offloaded() || p.alloc_wait.is_some());
    let only = needs.all(|(_, p)| {
        off = true;
        let offloaded = p.memory.offloaded_vram().unwrap_or_default();
        p.alloc_wait.is_none()
            && !offloaded.is_empty()
            && offloaded.iter().all(|d| taken.contains(&d.uuid))
    });
    off && only
}

/// Returns a sort key that puts partly restored containers first. After a controller crash or a
/// failed checkpoint such a container holds VRAM that it cannot free before its restore is
/// complete. If it waited behind a container that needs that VRAM, both would wait forever.
fn turn(node: &NodeState, key: &Key, half_way: bool) -> u8 {
    let fits = || needs::fits(node, key, &needs::container_needs(node, key), margin_bytes);
    match half_way {
        true if fits() => 0,
        true => 1,
        false => 2,
    }
}

/// Whether a process is exporting its memory to a copier. During the export, the process may need
/// additional VRAM on its GPU.
fn hands_over(node: &NodeState, process: &Process) -> bool {
    process.pending.is_some_and(|pending| {
        let hands = matches!(pending.action, Action::CopyOut { how, .. } if how.then_checkpoint);
        hands && node.clock.now.saturating_sub(pending.since) < HANDS_OVER_MS
    })
}

pub(super) fn proven(
    node: &mut NodeState,
    key: &Key,
    number: u64,
    gpus: Result<Vec<GpuSample>, String>,
) {
    let has_processes =
        gpus.as_ref().is_ok_and(|gpus| gpus.iter().any(|gpu| !gpu.processes.is_empty()));
    match gpus {
        Ok(gpus) => {
            node.gpus.error = None;
            measurements::take_memory(node, &gpus);
            if has_processes {
                early_release::take_vram(node, &gpus);
            }
        }
        Err(error) => node.gpus.error = Some(error),
    }
    // The grant may have ended, or may wait for a newer sample.
    if node.admission.grants.get(key).is_none_or(|grant| grant.stage != Stage::Proving(number)) {
        return;
    }
    // Processes that registered after the promise need VRAM too, on the same GPUs.
    let want = node.admission.grants.get(key).and_then(|grant| grant.want);
    let needs = needs::needs_with(node, key, want);
    let margin = needs::margin_for(node, key);
    // The proof covers only these processes: it does not include the VRAM of a process that
    // registers later.
    let covers = node.registry.processes.of(key).filter(|(_, p)| p.agent.phase.is_offloaded());
    let covers: BTreeSet<ProcessId> = covers.map(|(id, _)| id).collect();
    let known = node.gpus.error.is_none() && unread_gpu(node, key, &needs).is_none();
    let is_free = known && needs::fits(node, key, &needs, margin);
    // VRAM that is being freed counts only if the sample shows how much of it is freed already.
    let awaits_vram =
        has_processes && known && !is_free && early_release::fits(node, key, &needs, want, margin);
    let fits = is_free || awaits_vram;
    let resident = node.registry.processes.of(key).all(|(_, p)| p.agent.phase == Phase::Open);
    let Some(grant) = node.admission.grants.get_mut(key) else { return };
    // A process that registered meanwhile may need another GPU, on which allocations are not
    // paused.
    if fits && !grant.doubted && needs.iter().all(|need| grant.uuids.contains(&need.uuid)) {
        (grant.stage, grant.covers, grant.awaits_vram) = (Stage::Granted, covers, awaits_vram);
        node.admission.ledger.promise(key, needs);
        node.admission.queue.leave(key);
        if !resident {
            node.resume(key);
        } else if !oom_wait::serve_alloc_wait(node, key) {
            grants::close_grant(node, key);
        }
    } else {
        grants::abort_grant(node, key);
    }
}

/// Ends grants that take too long. If the restore has not begun, the grant ends together with
/// its promise of VRAM. If the restore has begun, only the pauses of the other processes end,
/// and the promise stays. The pauses also end as soon as a restore only waits for the disk.
pub(super) fn check_grants(node: &mut NodeState) {
    let now = node.clock.now;
    let keys: Vec<Key> = node.admission.grants.keys().cloned().collect();
    for key in keys {
        let copy_ms = node.admission.ledger.promised_to(&key) / SLOW_RESTORE_BYTES_PER_MS;
        let has_vram = only_reads_disk(node, &key);
        let Some(grant) = node.admission.grants.get(&key) else { continue };
        let age = now.saturating_sub(grant.since);
        let late = age
            > match grant.stage {
                Stage::Holding(_) => holds::full_patience_ms(node),
                Stage::AwaitingCopiers | Stage::Proving(_) => {
                    holds::full_patience_ms(node) + PROOF_MS
                }
                Stage::Granted => HOLD_LIMIT_MS + copy_ms,
            };
        if late && grant.recalled {
            // The process has not registered: it has exited, or its later registration will
            // report its phase.
            node.registry.unclaimed_journal.retain(|(other, ..), _| *other != key);
            grants::abort_grant(node, &key);
        } else if grant.stage != Stage::Granted {
            // The proof of a grant in doubt would be rejected, so the grant waits for no more
            // processes to pause their allocations.
            let holding = matches!(grant.stage, Stage::Holding(_)) && !grant.doubted;
            if holding {
                holds::settle_overdue(node, &key, late);
            } else if late {
                grants::abort_grant(node, &key);
            }
        } else if late && is_unused(node, &key) {
            if let Some(container) = node.registry.containers.get_mut(&key) {
                container.restore_failures.has_wasted_a_turn(now);
            }
            grants::abort_grant(node, &key);
        } else if late || has_vram {
            release_grant(node, &key, has_vram);
        }
    }
}

/// Lets the other processes allocate again although a restore has not ended. The restore continues. It
/// took its VRAM within its first 10 ms (40 GB, H200), or has stopped waiting for it. `has_vram`:
/// whether NVML shows its VRAM as used.
fn release_grant(node: &mut NodeState, key: &Key, has_vram: bool) {
    // Otherwise the promise of a restore that never ends would count in addition to its VRAM.
    if has_vram || has_all_its_vram(node, key) {
        node.admission.ledger.release(key);
    }
    let Some(mut grant) = node.admission.grants.remove(key) else { return };
    holds::release_holds(node, &mut grant);
    grant.uuids.clear();
    (grant.doubted, grant.is_released) = (true, true);
    node.admission.grants.insert(key.clone(), grant);
}

/// Whether NVML shows the VRAM of all processes that the container's grant covers.
fn has_all_its_vram(node: &NodeState, key: &Key) -> bool {
    let Some(grant) = node.admission.grants.get(key).filter(|grant| grant.want.is_none()) else {
        return false;
    };
    let mut covered = grant.covers.iter().filter_map(|id| node.registry.processes.get(id));
    covered.all(|process| !process.agent.phase.is_offloaded() || has_its_vram(process))
}

/// Whether the restore of a granted container has all its VRAM, and still reads content from disk.
/// This can take minutes, for which other containers of the GPU must not wait.
fn only_reads_disk(node: &NodeState, key: &Key) -> bool {
    let Some(grant) = node.admission.grants.get(key) else { return false };
    let covered = || grant.covers.iter().filter_map(|id| node.registry.processes.get(id));
    let reads_disk = |process: &Process| {
        process.pending.is_some_and(|order| order.action.is_restore()) && process.disk_bytes() > 0
    };
    grant.is_granted()
        && !grant.doubted
        && grant.want.is_none()
        && covered().any(reads_disk)
        && has_all_its_vram(node, key)
}

/// Whether NVML shows that an offloaded process has as much VRAM again as before its offload. The
/// context may have stayed on the GPU, so the size of the content alone shows nothing.
fn has_its_vram(process: &Process) -> bool {
    let held = |uuid: &str| -> u64 {
        process.memory.vram.iter().filter(|d| d.uuid == uuid).map(|d| d.bytes).sum()
    };
    // The driver may need slightly less than before, and allocates local memory only when it is used.
    let local_bytes = process.memory.swap.local_memory_bytes;
    let least = |bytes: u64| (bytes - bytes / 64).saturating_sub(local_bytes);
    let before = process.memory.offloaded_vram();
    before.is_some_and(|before| before.iter().all(|d| held(&d.uuid) >= least(d.bytes)))
}

/// Whether no process uses a completed grant. The grant covers no process that can be restored, and
/// the waiting allocation was not ordered to try again. This happens if another process of the
/// container is neither resident nor offloaded, for example because its agent sends no report.
fn is_unused(node: &NodeState, key: &Key) -> bool {
    let covers = node.admission.grants.get(key).is_some_and(|grant| !grant.covers.is_empty());
    let mut waits = node.registry.processes.of(key).filter_map(|(_, p)| p.alloc_wait.as_ref());
    let resumed = waits.any(|want| want.resumed_at.is_some());
    !covers && !resumed
}
