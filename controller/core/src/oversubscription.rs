//! Decides in the mode `auto` whether containers are offloaded as soon as they are idle, although
//! no other container waits for their VRAM.
//!
//! ```text
//! wanted(GPU) = VRAM of its containers + VRAM that its offloaded containers need again
//! wanted fits, or a container has just started ──> as mode eager: frees VRAM for new containers
//! wanted does not fit                          ──> as mode pressure: an early offload saves nothing
//! ```
//!
//! On an oversubscribed GPU, an early offload saves no VRAM. It moves data, and each move makes
//! calls wait. Idle containers are evicted anyway when a waiter needs their VRAM.

use std::collections::BTreeSet;

use super::{
    Key, Millis, ledger::margin_bytes, node_state::NodeState, policy::Mode, processes::wants,
};

/// Interval between two updates of the oversubscribed GPUs.
const LOOK_MS: Millis = 10_000;
/// Time after a container's announcement during which it may still allocate most of its VRAM.
/// During this time no GPU counts as oversubscribed.
const NEWCOMER_MS: Millis = 300_000;

/// The GPUs whose containers want more VRAM than the GPU has.
#[derive(Debug, Default)]
pub struct Oversubscription {
    looked: Option<Millis>,
    uuids: BTreeSet<String>,
}

/// Whether a container is offloaded as soon as it is idle, even if no waiter needs its VRAM.
pub(super) fn leaves_when_idle(node: &NodeState, key: &Key) -> bool {
    let Some(c) = node.registry.containers.get(key) else { return false };
    if !c.policy.offload_window.is_open(node.week_minute()) {
        return false;
    }
    match c.policy.mode {
        Mode::Eager => true,
        Mode::Auto => !is_oversubscribed(node, key),
        Mode::Pressure | Mode::Manual | Mode::Off => false,
    }
}

fn is_oversubscribed(node: &NodeState, key: &Key) -> bool {
    let oversubscribed = &node.gpus.oversubscription.uuids;
    !oversubscribed.is_empty()
        && node
            .registry
            .processes
            .of(key)
            .any(|(_, p)| wants(p).iter().any(|w| oversubscribed.contains(&w.uuid)))
}

/// Updates the set of oversubscribed GPUs if the last update is at least `LOOK_MS` ago.
pub(super) fn update_oversubscription(node: &mut NodeState) {
    if node.gpus.oversubscription.looked.is_some_and(|t| node.clock.now.saturating_sub(t) < LOOK_MS)
    {
        return;
    }
    node.gpus.oversubscription.looked = Some(node.clock.now);
    let newcomer = || {
        node.registry
            .containers
            .values()
            .any(|c| node.clock.now - c.figures.announced_at < NEWCOMER_MS)
    };
    let processes = &mut node.registry.processes;
    let mut oversubscribed = |gpu: &&super::GpuSample| {
        let fits_bytes = gpu.total_bytes.saturating_sub(margin_bytes(gpu.total_bytes));
        processes.wanted_bytes(&gpu.uuid) > u128::from(fits_bytes)
    };
    let uuids: BTreeSet<String> = node
        .gpus
        .samples
        .iter()
        .filter(|gpu| oversubscribed(gpu))
        .map(|gpu| gpu.uuid.clone())
        .collect();
    node.gpus.oversubscription.uuids =
        if uuids.is_empty() || newcomer() { BTreeSet::new() } else { uuids };
}
