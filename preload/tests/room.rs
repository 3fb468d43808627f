//! Tests of allocations that fail for lack of VRAM, and then wait for free VRAM.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::{AgentMessage, ControllerMessage};
use affinode_proto::wire::{Phase, message::Action};
use support::controller::{BRING_BACK, Connection, Controller, OFFLOAD};
use support::{Build, Client};

const LONG_MS: u32 = 60_000;
const OUT_OF_MEMORY: i64 = 2;

fn registered(controller: &Controller, wait_ms: u32) -> (Client, Connection) {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    (client, controller.welcome_to_wait(wait_ms))
}

fn answer(agent: &mut Connection, ticket: u64, granted: bool) {
    agent.send(ControllerMessage::AllocGrant { ticket, granted });
}

fn want(ticket: u64, attempts: u32) -> AgentMessage {
    AgentMessage::AllocWait { ticket, bytes: 4096, uuid: [0x43; 16], attempts }
}

#[test]
fn allocation_repeats_until_vram_is_free() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 2");
    client.send("cuMemAlloc");
    for attempts in 0..2 {
        assert_eq!(agent.want(), want(1, attempts));
        // The allocation waits outside the driver.
        assert_eq!(agent.page().inflight, 0);
        answer(&mut agent, 1, true);
    }
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.want(), AgentMessage::AllocWaitDone { ticket: 1, served: true });
    assert_eq!(client.ask("cuMemAlloc"), 0);
}

#[test]
fn refused_or_late_allocation_fails() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 1");
    client.send("cuMemAlloc");
    assert_eq!(agent.want(), want(1, 0));
    answer(&mut agent, 1, false);
    assert_eq!(client.answer(), OUT_OF_MEMORY);
    assert_eq!(agent.want(), AgentMessage::AllocWaitDone { ticket: 1, served: false });

    let (mut client, _agent) = registered(&controller, 1);
    client.ask("short 1");
    assert_eq!(client.ask("cuMemAlloc"), OUT_OF_MEMORY);

    let (mut client, _agent) = registered(&controller, 0);
    client.ask("short 1");
    assert_eq!(client.ask("cuMemAlloc"), OUT_OF_MEMORY);
}

#[test]
fn process_is_offloaded_while_allocation_waits() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 1");
    client.send("cuMemAlloc");
    assert_eq!(agent.want(), want(1, 0));
    agent.done(&OFFLOAD);
    // The grant arrives while the process is offloaded. The repeated call must wait at the gate
    // like any other call.
    answer(&mut agent, 1, true);
    agent.wake();
    assert_eq!(agent.page().phase, Phase::Checkpointed);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.want(), AgentMessage::AllocWaitDone { ticket: 1, served: true });
}

#[test]
fn the_next_controller_is_told_as_well() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 1");
    client.send("cuMemAlloc");
    assert_eq!(agent.want(), want(1, 0));
    drop(agent);
    let mut next = controller.welcome_to_wait(LONG_MS);
    assert_eq!(next.want(), want(1, 0));
    answer(&mut next, 1, true);
    assert_eq!(client.answer(), 0);
}

#[test]
fn waiting_allocation_blocks_no_others() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 1");
    client.send("start cuMemAlloc");
    assert_eq!(agent.want(), want(1, 0));
    assert_eq!(client.answer(), 0);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    // The waiting allocation must not delay a pause of allocations, and after its grant it must
    // wait for the end of the pause.
    agent.done(&[Action::HoldAllocations { deadline_ms: LONG_MS }]);
    answer(&mut agent, 1, true);
    while agent.page().waiters == 0 {}
    agent.done(&[Action::ReleaseAllocations]);
    assert_eq!(client.ask("join"), 0);

    client.ask("short 1");
    client.send("cuMemAlloc");
    while agent.want() != want(2, 0) {}
    client.terminate();
    agent.ended();
}

#[test]
fn several_threads_take_turns() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 3");
    let before = agent.page().calls;
    client.send("threads 3 cuMemAlloc");
    // All three allocations have failed before the first one gets a grant.
    while agent.page().calls < before + 3 || agent.page().inflight > 0 {}
    let mut over = Vec::new();
    while over.len() < 3 {
        match agent.want() {
            AgentMessage::AllocWait { ticket, .. } => answer(&mut agent, ticket, true),
            AgentMessage::AllocWaitDone { ticket, .. } => over.push(ticket),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(client.answer(), 0);
    assert_eq!(over, [1, 2, 3]);
}

#[test]
fn a_child_of_a_waiting_process_starts_anew() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller, LONG_MS);
    client.ask("short 1");
    client.send("start cuMemAlloc");
    assert_eq!(agent.want(), want(1, 0));
    client.answer();
    client.send("fork cuMemAlloc");
    let _child = controller.welcome_to_wait(LONG_MS);
    assert_eq!(client.answer(), 0);
    answer(&mut agent, 1, true);
    assert_eq!(client.ask("join"), 0);
}
