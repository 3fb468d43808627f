//! A hostile container that does everything at once, see `attack.c`.

use affinode_proto::wire::{
    Abilities, Hazards, Phase, WIRE_VERSION, message::AgentMessage, page::PAGE_BYTES,
};
use anyhow::{Context, Result, ensure};

use crate::{
    container::{CLIENTS, Spec},
    processes::descriptors,
    until::until,
    worker::Worker,
    world::World,
};

/// Starts one, and returns when it is in full swing.
///
/// # Errors
/// When it cannot be started or the controller does not feel it.
pub fn start(world: &World, id: &str) -> Result<Worker> {
    let controller = world.controller()?.context("a controller runs")?;
    let hello = AgentMessage::Hello {
        version: WIRE_VERSION,
        // Somebody else's: the kernel knows better.
        pid_in_namespace: 1,
        phase: Phase::Away,
        generation: u64::MAX,
        driver_version: 0,
        hazards: Hazards(0),
        abilities: Abilities::default(),
        carried_bytes: 0,
        parked_bytes: 0,
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
    ensure!(said == "ready", "the attacker said {said}");
    until("it to be in full swing", || {
        let open = descriptors(controller.pid.as_raw())?.len();
        Ok((open > 100).then_some(()))
    })?;
    Ok(attacker)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
