//! Starts a container that lies to the controller about the VRAM that it has and needs. The program
//! is in `lie.c`.

use std::fs;

use affinode_proto::{
    paths,
    wire::{
        Capabilities, Hazards, Phase, WIRE_VERSION,
        counters::{PAGE_BYTES, header},
        message::AgentMessage,
        vram_view::{RECORD_BYTES, VramView},
    },
};
use anyhow::{Context, Result, ensure};

use crate::{
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed},
    wait::until,
    worker::Worker,
};

/// Returns the program that lies, as the container sees it.
#[must_use]
pub fn program() -> String {
    format!("{CLIENTS}/lie")
}

/// Starts the lying container with a VRAM limit on this GPU. Returns when the controller has
/// replied to its lies.
///
/// # Errors
/// When the container cannot be started.
pub fn start(world: &Testbed, id: &str, limit: &str, uuid: [u8; 16]) -> Result<Worker> {
    let offsets = [PAGE_BYTES, header::VRAM_PENDING, header::VRAM_EPOCH].map(|n| n.to_string());
    let mut words = vec![program()];
    words.extend(offsets);
    words.extend(messages(uuid).iter().map(|message| hex(&message.encode())));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let spec = Spec::gpu(id, &words).annotation("affinode.io/vram-limit", limit);
    let mut liar = Worker::start_as(world, spec)?;
    let said = liar.receive_line()?;
    ensure!(said == "ready", "expected `ready` from the liar, got {said}");
    Ok(liar)
}

/// Returns the Hello, and the messages that the container sends after it in any order.
fn messages(uuid: [u8; 16]) -> Vec<AgentMessage> {
    let hello = AgentMessage::Hello {
        version: WIRE_VERSION,
        pid_in_namespace: 1,
        phase: Phase::Open,
        generation: 0,
        driver_version: 0,
        hazards: Hazards(0),
        abilities: Capabilities::LIMITS_VRAM,
        swappable_bytes: u64::MAX,
        copied_out_bytes: 0,
        local_memory_bytes: u64::MAX,
    };
    let sizes = [0, 1, MIB, 200 * MIB, 1 << 50, 1 << 63, u64::MAX];
    let asks = sizes.into_iter().zip(1..).flat_map(|(bytes, ticket)| {
        [uuid, [0xee; 16]].map(|uuid| AgentMessage::AskVram { ticket, bytes, uuid })
    });
    let others = [
        AgentMessage::VramTaken,
        AgentMessage::Releasing,
        AgentMessage::AllocWait { ticket: 1, bytes: u64::MAX, uuid, attempts: u32::MAX },
        AgentMessage::AllocWaitDone { ticket: u64::MAX, served: true },
        AgentMessage::AskReadings,
    ];
    [hello].into_iter().chain(asks).chain(others).collect()
}

/// Waits until the controller has written the file that shows a container its VRAM under its limit,
/// and returns the record of the first GPU.
///
/// # Errors
/// When the file does not appear, or has no whole record.
pub fn shown_vram(world: &Testbed, id: &str) -> Result<VramView> {
    let key = world.cli().known(id)?.key;
    let folder = world.cli().run_dir().join(paths::CONTAINERS_DIR).join(key);
    let file = folder.join(paths::MOUNT_DIR).join(paths::VRAM_FILE);
    let bytes = until("the file with the container's VRAM", || {
        Ok(fs::read(&file).ok().filter(|bytes| bytes.len() >= RECORD_BYTES))
    })?;
    let uuid = bytes.first_chunk::<16>().context("the file has no record")?;
    VramView::find(&bytes, uuid).context("the file has no whole record")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
