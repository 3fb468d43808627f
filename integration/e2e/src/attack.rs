//! Starts a hostile container that attacks the controller in several ways at the same time. The
//! attacks are in `attack.c`.

use affinode_proto::wire::{
    Capabilities, Hazards, Phase, WIRE_VERSION, counters::PAGE_BYTES, message::AgentMessage,
};
use anyhow::{Context, Result, ensure};

use crate::{
    container::{CLIENTS, Spec},
    processes::descriptors,
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Starts the hostile container. Returns when all attacks are running.
///
/// # Errors
/// When the container cannot be started, or the attacks cause no load on the controller.
pub fn start(world: &Testbed, id: &str) -> Result<Worker> {
    let controller = world.controller()?.context("no controller is running")?;
    let hello = AgentMessage::Hello {
        version: WIRE_VERSION,
        // The message names another process's pid. The controller must ignore this pid and use the
        // credentials of the socket's peer.
        pid_in_namespace: 1,
        phase: Phase::Checkpointed,
        generation: u64::MAX,
        driver_version: 0,
        hazards: Hazards(0),
        abilities: Capabilities::default(),
        swappable_bytes: 0,
        copied_out_bytes: 0,
        local_memory_bytes: 0,
    };
    let wake = AgentMessage::Wake { generation: 7, waiters: u32::MAX, hook: u32::MAX };
    let words = [
        format!("{CLIENTS}/attack"),
        hex(&hello.encode()),
        hex(&wake.encode()),
        PAGE_BYTES.to_string(),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut attacker = Worker::start_as(world, Spec::gpu(id, &words))?;
    let said = attacker.receive_line()?;
    ensure!(said == "ready", "expected `ready` from the attacker, got {said}");
    until("all attacks to run", || {
        let open = descriptors(controller.pid.as_raw())?.len();
        Ok((open > 100).then_some(()))
    })?;
    Ok(attacker)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
