//! Tests of the limit of the container's VRAM.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::Phase;
use affinode_proto::wire::message::{AgentMessage, ControllerMessage};
use support::controller::{BRING_BACK, Connection, Controller, OFFLOAD};
use support::{Build, Client};

const LIMIT: u64 = 50_000;
const UUID: [u8; 16] = [0x43; 16];
const OUT_OF_MEMORY: i64 = 2;
/// Size of the client's allocations.
const BYTES: u64 = 4_096;

fn limited(controller: &Controller) -> (Client, Connection) {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    (client, controller.welcome_to_limit(LIMIT))
}

/// Waits for the request `ticket` for `wanted_bytes`, and replies with an allowance. `allowance`
/// has the bytes for the process and the bytes that are free for the container.
fn allow(
    agent: &mut Connection,
    ticket: u32,
    wanted_bytes: u64,
    allowance: (u64, u64),
    epoch: u64,
) {
    assert_eq!(agent.vram(), AgentMessage::AskVram { ticket, bytes: wanted_bytes, uuid: UUID });
    assert_eq!(agent.page().inflight, 0, "the caller has left the gate");
    let (bytes, free_bytes) = allowance;
    agent.recall_vram(epoch);
    assert_eq!(agent.pending_vram(), 0);
    agent.send(ControllerMessage::VramAllowance { ticket, uuid: UUID, bytes, free_bytes, epoch });
}

#[test]
fn allowance_is_used_up_before_the_next_request() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    allow(&mut agent, 1, BYTES, (2 * BYTES, 2 * BYTES), 5);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.vram(), AgentMessage::VramTaken);
    assert_eq!(client.ask("cuMemAlloc"), 0);
    client.send("cuMemAlloc");
    allow(&mut agent, 2, BYTES, (0, 0), 6);
    assert_eq!(client.answer(), OUT_OF_MEMORY);
    assert_eq!(agent.vram(), AgentMessage::VramTaken);
    assert_eq!(agent.pending_vram(), 0);
    assert_eq!(client.ask("cuCtxSynchronize"), 0, "other calls are not limited");
}

/// A process that no controller has accepted yet must obey the limit in the file that the shim wrote.
/// Without the file, its allocation would succeed at once.
#[test]
fn limit_holds_before_a_controller_accepts() {
    let controller = Controller::new();
    controller.write_beside("vram-limit", LIMIT.to_string().as_bytes());
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    // Without a connection, the process ends the pause of its allocations.
    drop(controller.accept());
    client.send("cuMemAlloc");
    let mut agent = controller.welcome_to_limit(LIMIT);
    allow(&mut agent, 1, BYTES, (BYTES, BYTES), 5);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.vram(), AgentMessage::VramTaken);
    client.send("cuMemAlloc");
    allow(&mut agent, 2, BYTES, (0, 0), 6);
    assert_eq!(client.answer(), OUT_OF_MEMORY);
}

#[test]
fn failed_allocation_uses_no_allowance() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.ask("short 1");
    client.send("cuMemAlloc");
    allow(&mut agent, 1, BYTES, (BYTES, BYTES), 5);
    assert_eq!(client.answer(), OUT_OF_MEMORY);
    assert_eq!(client.ask("cuMemAlloc"), 0);
}

#[test]
fn recalled_allowance_is_not_used() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    allow(&mut agent, 1, BYTES, (LIMIT, LIMIT), 5);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.vram(), AgentMessage::VramTaken);
    agent.recall_vram(6);
    client.send("cuMemAlloc");
    allow(&mut agent, 2, BYTES, (BYTES, BYTES), 7);
    assert_eq!(client.answer(), 0);
}

#[test]
fn process_is_offloaded_while_it_asks() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    let request = AgentMessage::AskVram { ticket: 1, bytes: BYTES, uuid: UUID };
    assert_eq!(agent.vram(), request);
    agent.done(&OFFLOAD);
    agent.recall_vram(5);
    let (bytes, free_bytes) = (LIMIT, LIMIT);
    let reply =
        ControllerMessage::VramAllowance { ticket: 1, uuid: UUID, bytes, free_bytes, epoch: 5 };
    agent.send(reply);
    agent.wake();
    assert_eq!(agent.page().phase, Phase::Checkpointed);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

/// A caller that waits for a reply must cause a restore like any other caller. Otherwise the process
/// would stay offloaded if the reply never came.
#[test]
fn caller_without_a_reply_wakes_the_process() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    let request = AgentMessage::AskVram { ticket: 1, bytes: BYTES, uuid: UUID };
    assert_eq!(agent.vram(), request);
    agent.done(&OFFLOAD);
    agent.wake();
    agent.done(&BRING_BACK);
    allow(&mut agent, 2, BYTES, (BYTES, BYTES), 9);
    assert_eq!(client.answer(), 0);
}

#[test]
fn next_controller_gets_the_request_too() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    let request = AgentMessage::AskVram { ticket: 1, bytes: BYTES, uuid: UUID };
    assert_eq!(agent.vram(), request);
    drop(agent);
    let mut next = controller.welcome_to_limit(LIMIT);
    allow(&mut next, 1, BYTES, (BYTES, BYTES), 9);
    assert_eq!(client.answer(), 0);
}

#[test]
fn controller_without_a_limit_frees_the_waiter() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    client.send("cuMemAlloc");
    assert!(matches!(agent.vram(), AgentMessage::AskVram { .. }));
    drop(agent);
    let _next = controller.welcome();
    assert_eq!(client.answer(), 0);
}

#[test]
fn memory_info_shows_the_limit() {
    let controller = Controller::new();
    let (mut client, mut agent) = limited(&controller);
    // The first allocation waits for the Welcome. A program has made one for its context before it
    // can call cuMemGetInfo.
    client.send("cuMemAlloc");
    allow(&mut agent, 1, BYTES, (BYTES, BYTES), 2);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.vram(), AgentMessage::VramTaken);
    for (question, ticket, free_bytes, shown) in
        [("free", 2, 30_000, 30_000), ("free", 3, 75_000, 50_000), ("total", 4, 9, 50_000)]
    {
        client.send(&format!("memory {question}"));
        allow(&mut agent, ticket, 0, (0, free_bytes), u64::from(ticket) + 1);
        assert_eq!(client.answer(), shown, "{question}, {free_bytes}");
    }
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let _agent = controller.welcome();
    assert_eq!((client.ask("memory free"), client.ask("memory total")), (70_000, 80_000));
}
