//! Tests of requests for the driver's private function tables: which requests are recorded, which
//! hazard they add, and when they wait.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::Hazards;
use affinode_proto::wire::Phase;
use affinode_proto::wire::message::{Action, CopyOptions, Outcome};
use support::controller::{BRING_BACK, CHECKPOINT, CLOSE, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

/// Command that makes the client request a table of no known library.
const OF_TOOL: &str = "table 00112233445566778899aabbccddeeff";

fn started(controller: &Controller, route: &str, more: &[(&str, &str)]) -> Client {
    let path = controller.path();
    let environment = [&[("AFFINODE_SOCKET", &*path)], more].concat();
    Client::start(Build::Glibc, route, &environment)
}

#[test]
fn tool_table_is_remembered_and_bars_checkpoint() {
    for route in ["link", "dlopen", "proc1", "proc2", "next", "default"] {
        let controller = Controller::new();
        let mut client = started(&controller, route, &[]);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        assert_eq!(client.ask(OF_TOOL), 0);
        assert_eq!(agent.page().hazards, Hazards::TOOLS, "{route}");
        assert_eq!(agent.notice(), Hazards::TOOLS);
        // The process may be locked, which is the first step of a copy out, but the driver must not
        // checkpoint it.
        agent.done(&[CLOSE, LOCK]);
        assert_eq!(agent.order(CHECKPOINT), (Outcome::Unsupported, Phase::Locked, 0), "{route}");
        agent.done(&[Action::Unlock, Action::Open]);
        client.finish();
    }
}

#[test]
fn runtime_table_is_no_call_and_no_tool() {
    // Two tables of libcudart, one of NVML, and no table.
    for id in [
        "6bd5fb6c5bf4e74a8987d93912fd9df9",
        "d4082055bde6704b8d34ba123c66e1f2",
        "69a28e9f24498b47b030c5da330ea4e9",
    ] {
        let controller = Controller::new();
        let mut client = started(&controller, "dlopen", &[]);
        let ask = format!("table {id}");
        assert_eq!(client.ask(&ask), 0);
        assert!(
            !client.threads().contains(&"affinode-agent".to_owned()),
            "the request alone must not start the agent"
        );
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        let before = agent.page();
        assert_eq!(client.ask(&ask), 0);
        let after = agent.page();
        assert_eq!((after.hazards, after.calls), (Hazards(0), before.calls));
        agent.done(&OFFLOAD);
        agent.done(&BRING_BACK);
        client.finish();
    }
}

#[test]
fn video_table_is_remembered_as_video() {
    let controller = Controller::new();
    let mut client = started(&controller, "proc2", &[]);
    assert_eq!(client.ask("cuInit"), 0);
    let agent = controller.welcome();
    assert_eq!(client.ask("table 9af0707b8e2dd84c8e4eb994c82ddc35"), 0);
    assert_eq!(agent.page().hazards, Hazards::VIDEO);
    client.finish();
}

#[test]
fn tool_table_request_while_away_waits_and_wakes() {
    let controller = Controller::new();
    let mut client = started(&controller, "dlopen", &[]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send(OF_TOOL);
    // While the process is offloaded, the stub driver ends it if a call reaches the driver.
    assert_eq!(agent.wake().1, 1);
    assert_eq!(agent.page().hazards, Hazards::TOOLS);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    client.finish();
}

/// The library must record a tool's request before the caller gets the table. The agent checks the
/// record after it has closed the gate. So it cannot miss a tool between the close and the
/// checkpoint.
#[test]
fn tool_request_after_close_bars_checkpoint() {
    let controller = Controller::new();
    let mut client = started(&controller, "dlopen", &[]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&[CLOSE, LOCK]);
    client.send(OF_TOOL);
    agent.wake();
    assert_eq!(agent.order(CHECKPOINT).0, Outcome::Unsupported);
    agent.done(&[Action::Unlock, Action::Open]);
    assert_eq!(client.answer(), 0);
    client.finish();
}

#[test]
fn injected_tool_is_known_from_the_start() {
    for variable in ["CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"] {
        let controller = Controller::new();
        let mut client = started(&controller, "dlopen", &[(variable, "/none.so")]);
        assert_eq!(client.ask("cuInit"), 0);
        assert_eq!(controller.welcome().page().hazards, Hazards::TOOLS, "{variable}");
        client.finish();
    }
}

/// The library copies no memory of a process with an injected tool, and does not see all of its
/// contexts. At a copy out, such a process must wait for its GPU work by the driver's lock. Without
/// the wait, `cuStreamSynchronize` would return at the closed gate while the work runs.
#[test]
fn copy_out_waits_for_work_beside_a_tool() {
    let copy_out = Action::CopyOut { vram_bytes: 0, how: CopyOptions::default() };
    let tool = ("NVTX_INJECTION64_PATH", "/none.so");
    // 600: the lock has found running work.
    let running = [tool, ("STUB_LOCK_FAILS", "600")];
    for (environment, expected) in [
        (&running[..], (Outcome::Busy, Phase::Closed, 600)),
        (&running[..1], (Outcome::Done, Phase::CopiedOut, 0)),
    ] {
        let controller = Controller::new();
        let mut client = started(&controller, "dlopen", environment);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        agent.done(&[CLOSE]);
        assert_eq!(agent.order(copy_out), expected);
        if expected.1 == Phase::CopiedOut {
            agent.done(&[Action::Restore]);
        }
        agent.done(&[Action::Open]);
        client.finish();
    }
}
