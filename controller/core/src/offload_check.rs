//! Collects the facts by which [`super::eligibility`] decides about an offload.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Hazards, Phase},
};

use super::{
    Key,
    container::{Container, Goal},
    eligibility::{IdleFacts, OffloadFacts, ProcessFacts, Refusal},
    idle,
    node_state::NodeState,
    offload_level, overrides, oversubscription,
    plan::OffloadMethod,
    policy::Mode,
    process::Process,
};

/// Checks whether the container may be offloaded now. `Err`: the reason why not, and its detail.
/// `asked`: an operator or a waiting container requests the offload, so mode, idleness and minimum
/// residency do not matter.
pub(super) fn check_offload(node: &NodeState, key: &Key, asked: bool) -> Result<(), Refusal> {
    let Some(container) = node.registry.containers.get(key) else {
        return Err((Reason::NotRegistered, String::new()));
    };
    let moves = offload_level::moves(node, key);
    let processes = node.registry.processes.of(key);
    let facts = OffloadFacts {
        now: node.clock.now,
        container,
        processes: processes.map(|(_, p)| process_facts(node, p, moves(p))).collect(),
        nothing_to_copy: offload_level::has_nothing_to_copy(node, key),
        has_second_level: offload_level::has_second_level(node, key),
        permitted: overrides::permitted(node, key, asked),
        gpu_error: vram_error(node, key),
        idle: (!asked).then(|| idle_facts(node, key)),
    };
    facts.check()
}

/// Why the VRAM of a container is unknown: NVML, or a GPU of the container, could not be read.
/// `None`: its VRAM is known.
pub(super) fn vram_error<'n>(node: &'n NodeState, key: &Key) -> Option<&'n str> {
    let held = || node.registry.processes.of(key).flat_map(|(_, p)| &p.memory.vram);
    let of_gpu = || held().find_map(|on| node.gpus.error_of(&on.uuid));
    node.gpus.error.as_deref().or_else(of_gpu)
}

fn process_facts<'a>(
    node: &NodeState,
    process: &'a Process,
    method: OffloadMethod,
) -> ProcessFacts<'a> {
    let harmless = match method {
        OffloadMethod::Copy => process.copyable_hazards(),
        OffloadMethod::DriverCheckpoint | OffloadMethod::CopyAndCheckpoint => Hazards::default(),
    };
    ProcessFacts {
        pid: process.identity.pid,
        hazards: process.agent.hazards,
        unsafe_hazards: process.agent.hazards.without(harmless),
        keeps_context: process.keeps_context(),
        mig_gpu: cut_gpu_of(node, process),
        counter_error: process.activity.counter_error.as_deref(),
        connected: process.agent.connected,
        in_call: process.activity.counters.as_ref().is_some_and(|page| page.inflight > 0),
    }
}

fn idle_facts(node: &NodeState, key: &Key) -> IdleFacts {
    let window = node.registry.containers.get(key).map(|c| &c.policy.offload_window);
    IdleFacts {
        waiting_alloc_bytes: node.alloc_wait_of(key).map(|(_, wait)| wait.need.bytes),
        working: idle::working(node, key),
        is_too_small: is_too_small(node, key),
        is_window_open: window.is_some_and(|window| window.is_open(node.week_minute())),
        leaves_when_idle: oversubscription::leaves_when_idle(node, key),
    }
}

/// Whether the container must not be offloaded because it holds less VRAM than
/// `minimum_vram_bytes`.
pub(super) fn is_too_small(node: &NodeState, key: &Key) -> bool {
    let least = node.registry.containers.get(key).map_or(0, |c| c.policy.minimum_vram_bytes);
    let held = || -> u64 { node.registry.processes.of(key).map(|(_, p)| p.vram_bytes()).sum() };
    least > 0 && (1..least).contains(&held())
}

/// Finds a GPU in MIG mode on which the process holds memory, and returns its index.
pub(super) fn cut_gpu_of(node: &NodeState, process: &Process) -> Option<u32> {
    let cut = node.gpus.samples.iter().filter(|gpu| gpu.mig);
    let holds = |uuid: &str| process.memory.vram.iter().any(|held| held.uuid == uuid);
    cut.filter(|gpu| holds(&gpu.uuid)).map(|gpu| gpu.index).next()
}

/// Whether the CUDA contexts of a copied-out container may be evicted. This is also allowed while
/// the container waits for its restore, because its contexts would otherwise block other containers
/// during the wait. Processes without VRAM, which may have started meanwhile, are ignored.
pub(super) fn may_evict_context(node: &NodeState, key: &Key) -> bool {
    let waits = |c: &Container| match c.goal {
        Goal::Offloaded(_) => c.shown.state == State::Offloaded,
        Goal::Resident(_) => {
            c.shown.state == State::Queued && !node.admission.grants.contains_key(key)
        }
        Goal::OffloadRequested(_) => false,
    };
    let copied_out = |c: &Container| {
        waits(c)
            && c.policy.mode != Mode::Off
            && offload_level::has_second_level(node, key)
            && node.clock.now >= c.offload_failures.not_before()
            && node
                .registry
                .processes
                .of(key)
                .all(|(_, p)| p.agent.phase.is_offloaded() || p.vram_bytes() == 0)
            && node.registry.processes.of(key).any(|(_, p)| p.agent.phase == Phase::CopiedOut)
            && check_offload(node, key, true).is_ok()
    };
    node.registry.containers.get(key).is_some_and(copied_out)
}
