//! Executes the actor's work at each tick: readings, decisions that depend on time, and the files
//! for containers.

use std::time::Duration;

use affinode_core::{Effect, Input, Key, ProcessId};

use super::{actor::NodeActor, containers, effects, hints, incoming};
use crate::{
    clock::unix_ms,
    inventory::{network, process},
};

/// Time between two readings of the GPUs while no container waits for VRAM or is being moved.
const GPU_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two readings of the GPUs while a container waits for VRAM or is being moved.
const HURRIED_GPU_INTERVAL: Duration = Duration::from_millis(100);

/// Runs one tick: checks whether NVML responds, reads counters, GPUs, hints and connections, lets
/// the core decide, and removes containers that have ended.
pub(super) fn tick(actor: &mut NodeActor) {
    let ids: Vec<ProcessId> = actor.node.connected().collect();
    for id in ids {
        incoming::read_page(actor, id);
    }
    let sample_interval = Duration::from_millis(actor.config.timing.sample_interval);
    // While a container waits or moves, decisions need fresh readings of VRAM.
    let hurry = actor.pause() < sample_interval;
    if let Some(error) = actor.inventory.stall() {
        tracing::error!("controller: no container is moved meanwhile: {error}");
        effects::feed(actor, Input::Gpus(Err(error)));
    }
    if actor.readings.is_due(if hurry { HURRIED_GPU_INTERVAL } else { GPU_INTERVAL }) {
        actor.ask_gpus();
    }
    if !actor.agents.is_empty() {
        actor.utilization.poll(sample_interval);
    }
    // Hints and connections are read before the tick, because the tick decides about idle
    // containers and wakes.
    hints::read_hints(actor);
    read_connections(actor);
    effects::feed(actor, Input::Clock(unix_ms()));
    effects::feed(actor, Input::Tick);
    hints::tell_pressure(actor);
    hints::write_states(actor);
    let useless = actor.unclaimed.useless(|key| actor.listeners.contains_key(key), process::lives);
    for key in useless {
        effects::execute(actor, Effect::Journal(key, None));
    }
    containers::withdraw_the_gone(actor);
}

/// Counts the TCP connections of the offloaded containers whose turn it is at this tick, and passes
/// the numbers to the core.
fn read_connections(actor: &mut NodeActor) {
    let all: Vec<(Key, u32)> =
        actor.node.listening().map(|(key, pid)| (key.clone(), pid)).collect();
    for (key, pid) in actor.connections.turn(all) {
        // If the process has ended, the read fails. The end itself is reported by the process's
        // pidfd.
        if let Ok(count) = network::connections(pid) {
            effects::feed(actor, Input::Connections(key, count));
        }
    }
}
