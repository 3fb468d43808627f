//! Decides which offloads use the node's host pool, and how much of it each process may use.
//!
//! Without the host pool, the content of an offloaded process is charged to the process's own
//! container. A container whose memory limit is below its VRAM could then never leave the GPU.
//!
//! ```text
//! promised ──Allow──> the library copies to the pool ──offload over──> Allow 0
//!                          │ no memory, or no connection
//!                          └──> the container prefers its own memory for a while
//! ```

use affinode_proto::wire::{Capabilities, ProcessFlags};

use super::{
    Effect, Key, Millis, ProcessId,
    container::Container,
    host_memory::{HostNeed, HostPoolAllowance, HostPoolPermission},
    node_state::NodeState,
    offload_level,
    plan::OffloadMethod,
    process::Process,
};

/// Time in milliseconds during which a container prefers its own memory after a copy out to the
/// host pool failed. It is longer than the usual delay before the next offload.
const PAUSE_MS: Millis = 30 * 60_000;

/// Whether the container's content may be copied to the host pool. The settings `prefault` and
/// `dedup` need memory files that a copier can read, and the host pool has none.
pub(super) fn may_use(node: &NodeState, key: &Key) -> bool {
    let Some(container) = node.registry.containers.get(key) else { return false };
    let moves = offload_level::moves(node, key);
    let can_copy = |process: &Process| {
        process.can(Capabilities::USES_HOST_POOL)
            && (process.agent.phase.is_offloaded()
                || moves(process) != OffloadMethod::DriverCheckpoint)
    };
    !container.policy.prefault
        && !container.policy.dedup
        && node.registry.processes.of(key).all(|(_, process)| can_copy(process))
}

/// Whether the host pool is preferred to the container's own memory. It is preferred only if all
/// CUDA contexts stay on the GPU. If contexts leave it too, a copier makes the restore faster, and
/// a copier cannot read the host pool. On a node with a folder for disk files the host pool is
/// preferred in any case, because content in own memory cannot move to disk. After a failed copy out
/// to the host pool, the container's own memory is preferred for some time.
pub(super) fn is_preferred(node: &NodeState, key: &Key) -> bool {
    let moves = offload_level::moves(node, key);
    let not_before = |c: &Container| c.offload_failures.host_pool_not_before;
    let Some(container) = node.registry.containers.get(key) else { return false };
    let moves_on_to_disk = node.settings.disk && container.policy.disk_after_ms > 0;
    let stays_on_gpu = |process: &Process| moves(process) == OffloadMethod::Copy;
    node.clock.now >= not_before(container)
        && (moves_on_to_disk
            || node.registry.processes.of(key).all(|(_, process)| stays_on_gpu(process)))
}

/// Returns the host memory that the offload of a process needs.
pub(super) fn need_of(process: &Process, method: OffloadMethod) -> HostNeed {
    let copies = method != OffloadMethod::DriverCheckpoint;
    HostNeed {
        pid: process.identity.pid,
        vram_bytes: process.vram_bytes(),
        bytes: process.host_need_bytes(method),
        copied_bytes: if copies { claimed_bytes(process) } else { 0 },
        kept_bytes: if copies { kept_bytes(process) } else { 0 },
        driver_moves: method != OffloadMethod::Copy,
    }
}

/// Memory of the host pool that the process has from its last offload or from a prefault, in bytes, as
/// the process reports it. 0 after the loss of its connection: the file of the next connection is
/// empty.
fn kept_bytes(process: &Process) -> u64 {
    let counters = process.activity.counters.as_ref();
    let shows = |flags| counters.is_some_and(|page| page.notes.intersects(flags));
    // A prefault is always in the file of the present connection.
    let is_present = process.host_pool.was_used || shows(ProcessFlags::PREFAULTED_HOST_POOL);
    let may_use_again = process.uses_host_pool()
        && is_present
        && !process.agent.phase.is_offloaded()
        && !shows(ProcessFlags::HOST_POOL_LOST);
    counters.filter(|_| may_use_again).map_or(0, |page| page.kept_bytes)
}

/// Memory that the library will copy to the host pool, in bytes, as the process reports it. It is
/// not trusted, so the survey limits it to the VRAM that NVML reports.
fn claimed_bytes(process: &Process) -> u64 {
    match process.agent.phase.is_offloaded() {
        true => 0,
        false => process.memory.swap.swappable_bytes,
    }
}

/// Permits the processes of a container to use the host pool for an offload: exactly what was
/// promised to the offload now. Sizes that a process reports after the promise do not change its
/// permission.
pub(super) fn allow(node: &mut NodeState, key: &Key, allowances: &[HostPoolAllowance]) {
    let ids: Vec<ProcessId> = node.registry.processes.of(key).map(|(id, _)| id).collect();
    for id in ids {
        let Some(process) = node.registry.processes.get_mut(&id) else { continue };
        let own = allowances.iter().find(|own| own.pid == process.identity.pid);
        let HostPoolAllowance { bytes, kept_bytes, .. } = own.copied().unwrap_or_default();
        // A library ends its connection if a reply is late, for example during a cancellation.
        let counters = process.activity.counters.as_ref();
        if counters.is_some_and(|page| page.notes.intersects(ProcessFlags::HOST_POOL_LOST)) {
            process.host_pool = HostPoolPermission::default();
            node.output.effects.push(Effect::LeaveHostPool(id));
        }
        let before = process.host_pool;
        // The permission is exactly what was promised last. The process may have freed a part of
        // its memory since the last permission.
        if (before.bytes, before.kept_bytes) != (bytes, kept_bytes) {
            process.host_pool = HostPoolPermission { bytes, kept_bytes, ..before };
            node.host_pool_users.insert(id);
            node.output.effects.push(Effect::AllowHostPool { process: id, bytes, kept_bytes });
        }
    }
}

/// Ends the permissions of containers whose offload is over.
pub(super) fn end_permissions(node: &mut NodeState) {
    let users = std::mem::take(&mut node.host_pool_users);
    for id in users {
        let Some(process) = node.registry.processes.get(&id) else { continue };
        if process.host_pool.bytes == 0 {
            continue;
        }
        if node.host_ledger.uses_host_pool(&process.key) {
            node.host_pool_users.insert(id);
            continue;
        }
        if let Some(process) = node.registry.processes.get_mut(&id) {
            (process.host_pool.bytes, process.host_pool.kept_bytes) = (0, 0);
        }
        let (bytes, kept_bytes) = (0, 0);
        node.output.effects.push(Effect::AllowHostPool { process: id, bytes, kept_bytes });
    }
}

/// Records that a process got a new connection to the host pool. Its file is empty.
pub(super) fn connected(node: &mut NodeState, id: ProcessId) {
    if let Some(process) = node.registry.processes.get_mut(&id) {
        process.host_pool.was_used = false;
    }
}

/// Records that a copy out to the host pool failed. The container prefers its own memory for a
/// while. The connections of its processes may have failed too, so they are made anew for their
/// next use.
pub(super) fn has_failed(node: &mut NodeState, key: &Key) {
    let now = node.clock.now;
    let ids: Vec<ProcessId> = node.registry.processes.ids_of(key).collect();
    for id in ids {
        if let Some(process) = node.registry.processes.get_mut(&id) {
            process.host_pool = HostPoolPermission::default();
        }
        node.output.effects.push(Effect::LeaveHostPool(id));
    }
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.offload_failures.host_pool_not_before = now + PAUSE_MS;
    }
}
