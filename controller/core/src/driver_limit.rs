//! The limit of a container's VRAM that the driver itself enforces (driver 615 or newer), in
//! addition to the library (`vram_limit.rs`).
//!
//! The driver counts only VRAM that is on the GPU. The content of an offloaded container is not.
//! Meanwhile, a new process of the container may take VRAM that the container needs for its
//! restore. The driver would then refuse the restore, and a process could be lost. Therefore the
//! driver's limit is lifted from the beginning of an offload, which can be undone, to the end of the
//! restore. It stays lifted between the two, because a process restores itself if the controller has
//! ended. The effect that lifts it comes before the last [`Effect::Survey`], and the offload does not
//! begin before the result of that effect.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::{state::State, wire::Phase};

use super::{DeviceBytes, Effect, Key, node_state::NodeState, vram_limit};

/// How a container's VRAM is limited by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimit {
    /// Refuse allocations beyond this number of bytes on each GPU.
    Set(u64),
    /// Refuse none for now, because VRAM of the container is off the GPU or is being moved.
    Lifted,
    /// Refuse none, because the container has no limit.
    Removed,
}

/// An order to set, lift or remove the driver's limit of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLimitOrder {
    /// Key of the container to limit.
    pub key: Key,
    /// The limit from now on.
    pub limit: DriverLimit,
    /// The GPUs, with their VRAM. NVML reports no VRAM of MIG instances, so GPUs in MIG mode are
    /// left out.
    pub gpus: Vec<DeviceBytes>,
    /// Pid and start time of a process of the container, whose cgroup is limited. `None`: the
    /// container was deleted.
    pub process: Option<(u32, u64)>,
    /// The container's `linux.cgroupsPath` in its OCI spec. It shows whether the cgroup belongs to
    /// the container.
    pub cgroups_path: String,
}

/// Result of a [`DriverLimitOrder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverLimitOutcome {
    /// The driver has followed the order.
    Done,
    /// The driver is too old and enforces no limits. The library alone enforces them.
    TooOld,
    /// The order has failed for the reason in this text.
    Failed(String),
}

/// The orders to the driver so far, and their results.
#[derive(Debug, Default)]
pub(super) struct DriverLimits {
    /// Whether an order has shown that the driver enforces no limits.
    is_too_old: bool,
    /// Whether the last reading of the GPUs has failed. The driver may be reloaded or replaced
    /// meanwhile, and then knows no limits.
    is_unread: bool,
    /// The GPUs to which the orders apply, with their VRAM.
    gpus: Vec<DeviceBytes>,
    /// Containers that may need another limit than before.
    pub(super) changed: BTreeSet<Key>,
    /// The last order for each container.
    ordered: BTreeMap<Key, DriverLimit>,
    /// Result of the last order for each container with a limit. `Err`: why it has failed.
    results: BTreeMap<Key, Result<(), String>>,
}

/// Handles a sample of all GPUs. All containers may need another limit then, because their policies
/// or the GPUs may have changed.
pub(super) fn gpus_read(node: &mut NodeState) {
    if node.gpus.error.is_some() {
        node.driver_limits.is_unread = true;
        return;
    }
    let whole = node.gpus.samples.iter().filter(|gpu| !gpu.mig);
    let gpus = whole.map(|gpu| DeviceBytes { uuid: gpu.uuid.clone(), bytes: gpu.total_bytes });
    let gpus: Vec<DeviceBytes> = gpus.collect();
    if gpus != node.driver_limits.gpus || node.driver_limits.is_unread {
        node.driver_limits = DriverLimits { gpus, ..DriverLimits::default() };
    }
    if !node.driver_limits.is_too_old {
        node.driver_limits.changed = node.registry.containers.keys().cloned().collect();
    }
}

/// Orders the driver's limit of each container that needs another one than before. Called before
/// each proof of free VRAM, and after each input that may change a limit.
pub(super) fn update(node: &mut NodeState) {
    let changed = std::mem::take(&mut node.driver_limits.changed);
    if node.driver_limits.is_too_old || node.driver_limits.gpus.is_empty() {
        return;
    }
    for key in changed {
        let Some(limit) = wanted(node, &key) else { continue };
        if node.driver_limits.ordered.insert(key.clone(), limit) != Some(limit) {
            order(node, key, limit);
        }
    }
}

/// Returns the limit that the driver should enforce for a container. `None`: it has no process, so
/// its cgroup is unknown or unused. Also `None` for a job, which shares the cgroup of its user's
/// other programs.
fn wanted(node: &NodeState, key: &Key) -> Option<DriverLimit> {
    node.registry.processes.of(key).next()?;
    if node.registry.containers.get(key)?.spec.job_user.is_some() {
        return None;
    }
    Some(match vram_limit::limit_bytes(node, key) {
        0 => DriverLimit::Removed,
        _ if is_moving(node, key) || is_offloaded(node, key) => DriverLimit::Lifted,
        bytes => DriverLimit::Set(bytes),
    })
}

/// Whether VRAM of a container is being moved, or is about to be.
fn is_moving(node: &NodeState, key: &Key) -> bool {
    let state = node.registry.containers.get(key).map(|known| known.shown.state);
    let is_resident = || node.registry.processes.of(key).all(|(_, p)| p.agent.phase == Phase::Open);
    matches!(state, Some(State::Closing | State::Offloading | State::Restoring))
        || (node.admission.grants.contains_key(key) && !is_resident())
}

/// Whether a process of the container needs VRAM for its restore.
fn is_offloaded(node: &NodeState, key: &Key) -> bool {
    node.registry.processes.of(key).any(|(_, p)| p.agent.phase.is_offloaded())
}

fn order(node: &mut NodeState, key: Key, limit: DriverLimit) {
    let process = node.registry.processes.of(&key).next();
    let process = process.map(|(_, p)| (p.identity.pid, p.identity.start_ticks));
    let known = node.registry.containers.get(&key);
    let cgroups_path = known.map_or_else(String::new, |known| known.spec.cgroups_path.clone());
    let gpus = node.driver_limits.gpus.clone();
    let order = DriverLimitOrder { key, limit, gpus, process, cgroups_path };
    node.output.effects.push(Effect::LimitInDriver(order));
}

/// Records the result of an order.
pub(super) fn reported(node: &mut NodeState, key: Key, outcome: DriverLimitOutcome) {
    let limits = &mut node.driver_limits;
    if outcome == DriverLimitOutcome::TooOld {
        let gpus = std::mem::take(&mut limits.gpus);
        *limits = DriverLimits { is_too_old: true, gpus, ..DriverLimits::default() };
        return;
    }
    match (limits.ordered.get(&key), outcome) {
        (None | Some(DriverLimit::Removed), _) => drop(limits.results.remove(&key)),
        (_, DriverLimitOutcome::Failed(why)) => drop(limits.results.insert(key, Err(why))),
        (Some(DriverLimit::Set(_)), _) => drop(limits.results.insert(key, Ok(()))),
        // The limit was set before, or will be set.
        (Some(DriverLimit::Lifted), _) => {}
    }
}

/// Repeats the last order for a container if it has failed, because another process has registered.
/// The process whose cgroup was needed may have ended.
pub(super) fn retry(node: &mut NodeState, key: &Key) {
    let limits = &mut node.driver_limits;
    if limits.results.get(key).is_some_and(Result::is_err) {
        limits.ordered.remove(key);
        limits.changed.insert(key.clone());
    }
}

/// Returns the result of the last order for a container with a limit. `Err`: why it has failed.
/// `None`: there was no order, or its result is not known yet.
pub(super) fn result<'n>(node: &'n NodeState, key: &Key) -> Option<Result<(), &'n str>> {
    let result = node.driver_limits.results.get(key)?;
    Some(result.as_ref().copied().map_err(String::as_str))
}

/// Removes the driver's limit of a container that was deleted.
pub(super) fn forget_container(node: &mut NodeState, key: &Key) {
    node.driver_limits.results.remove(key);
    let last = node.driver_limits.ordered.remove(key);
    if last.is_some_and(|last| last != DriverLimit::Removed) {
        order(node, key.clone(), DriverLimit::Removed);
    }
}
