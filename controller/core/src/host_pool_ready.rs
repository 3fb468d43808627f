//! Decides how much memory of the host pool is kept ready: pages that are allocated before an offload
//! needs them. A copy out to such pages is as fast as a later one of the same process.
//!
//! ```text
//! resident processes that would copy to the host pool, least recently used first
//!     ──their sizes, up to host_pool_ready_percent of the node──> KeepReady
//! an offload to other memory needs the memory of the ready pages ──> KeepReady of nothing
//! ```

use std::collections::BTreeSet;

use affinode_proto::wire::Capabilities;

use super::{
    Effect, Key, Millis,
    effect::ReadySizes,
    host_memory::{MemoryPlace, MemoryPool},
    host_pool,
    node_state::NodeState,
    policy::Mode,
    process::Process,
};

/// How much memory the host pool keeps ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyLimits {
    /// Maximum size of all ready pages in bytes. 0: no pages are kept ready.
    pub max_bytes: u64,
    /// Minimum content of a process for which pages are kept ready, in bytes. For a smaller
    /// content, the allocation of its pages takes only a few milliseconds.
    pub min_bytes: u64,
    /// Sizes are multiples of this size in bytes, so that they change less often than the contents.
    pub unit_bytes: u64,
}

impl Default for ReadyLimits {
    fn default() -> ReadyLimits {
        ReadyLimits { max_bytes: 0, min_bytes: 256 << 20, unit_bytes: 512 << 20 }
    }
}

/// Minimum time between two changes after which more memory is kept ready, in milliseconds.
const GROW_AFTER_MS: Millis = 5_000;

/// What the core has ordered about ready memory.
#[derive(Debug, Default)]
pub(super) struct ReadyMemory {
    ordered: ReadySizes,
    ordered_at: Millis,
    /// Containers whose offload needs the memory of the ready pages for other memory.
    yields_to: BTreeSet<Key>,
}

/// Orders which sizes are kept ready, if they have changed.
pub(super) fn update(node: &mut NodeState) {
    let sizes = wanted_sizes(node);
    let ready = &mut node.host_ready;
    let (sum, ordered_sum) = (sizes.iter().sum::<u64>(), ready.ordered.iter().sum());
    let waits = node.clock.now.saturating_sub(ready.ordered_at) < GROW_AFTER_MS;
    if sizes == ready.ordered || waits && sum >= ordered_sum {
        return;
    }
    (ready.ordered, ready.ordered_at) = (sizes, node.clock.now);
    node.output.effects.push(Effect::KeepReady(sizes));
}

/// Updates the orders when a container's offload has got a promise. The pages that the offload takes
/// are not wanted any longer. If the offload was promised other memory that the ready pages use,
/// they are freed. `pools`: the promised memory. `ready_bytes`: size of the ready pages, which count
/// as free memory of the node.
pub(super) fn promised(node: &mut NodeState, key: &Key, pools: &[MemoryPool], ready_bytes: u64) {
    let in_pool = pools.iter().any(|pool| pool.place == MemoryPlace::HostPool);
    let promised_bytes = node.host_ledger.promised_node_bytes();
    let is_short = |pool: &MemoryPool| {
        pool.place == MemoryPlace::Node
            && pool.free_bytes.saturating_sub(ready_bytes) < promised_bytes
    };
    if !in_pool && ready_bytes > 0 && pools.iter().any(is_short) {
        node.host_ready.yields_to.insert(key.clone());
    }
    update(node);
}

/// Ends the effect of [`promised`] for containers whose offload has ended.
pub(super) fn settle(node: &mut NodeState) {
    let mut yields_to = std::mem::take(&mut node.host_ready.yields_to);
    yields_to.retain(|key| node.host_ledger.has_promise(key));
    node.host_ready.yields_to = yields_to;
}

/// Returns the sizes that are wanted now, in the order of the containers' last use.
fn wanted_sizes(node: &NodeState) -> ReadySizes {
    let mut sizes = ReadySizes::default();
    let limits = node.settings.ready;
    let mut rest_bytes = limits.max_bytes;
    if rest_bytes < limits.min_bytes || !node.host_ready.yields_to.is_empty() {
        return sizes;
    }
    let mut keys: Vec<(Millis, &Key)> = node
        .registry
        .containers
        .iter()
        .filter(|(_, c)| c.policy.mode != Mode::Off)
        .filter(|(key, _)| host_pool::may_use(node, key) && host_pool::is_preferred(node, key))
        .map(|(key, c)| (c.usage.last_use, key))
        .collect();
    keys.sort_unstable();
    let processes = keys.iter().flat_map(|(_, key)| node.registry.processes.of(key));
    let wanted = processes.filter_map(|(_, process)| wanted_bytes(process, limits));
    for (to, bytes) in sizes.iter_mut().zip(wanted) {
        *to = bytes.min(rest_bytes);
        rest_bytes -= *to;
    }
    sizes
}

/// Returns the memory that is kept ready for a process, in bytes. `None`: it needs none, because it
/// is offloaded, has little memory, or keeps pages of its own in the host pool.
fn wanted_bytes(process: &Process, limits: ReadyLimits) -> Option<u64> {
    let counters = process.activity.counters.as_ref()?;
    let has_pages = process.uses_host_pool() && counters.kept_bytes > 0;
    // While it is offloaded to the host pool, it takes the ready pages.
    let is_resident = process.agent.connected
        && process.host_pool_bytes == 0
        && process.can(Capabilities::USES_HOST_POOL)
        && !process.agent.phase.is_offloaded()
        && process.memory.swap.copied_out_bytes == 0;
    let bytes = host_pool::copied_bytes(process);
    let is_large = bytes >= limits.min_bytes;
    (is_resident && !has_pages && is_large).then(|| bytes.next_multiple_of(limits.unit_bytes))
}
