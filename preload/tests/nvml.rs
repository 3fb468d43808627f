//! Tests of calls into NVML through the preload library. The stub NVML ends the process at once if
//! a call reaches it while the process is checkpointed. The real NVML would block until the process
//! is restored.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::{
    Action, AgentMessage, BUSY_NVML, ControllerMessage, GpuReading, Outcome,
};
use affinode_proto::wire::{Engine, Phase, vram_view::VramView};
use support::controller::{BRING_BACK, CHECKPOINT, CLOSE, Connection, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

const READING: GpuReading = GpuReading {
    uuid: [7; 16],
    total_bytes: 2_000,
    free_bytes: 1_500,
    reserved_bytes: 100,
    gpu_percent: 30,
    memory_percent: 5,
    temperature_c: 41,
    power_mw: 80_000,
};
const KNOWN: [(&str, i64); 7] = [
    ("count", 1),
    ("index 0", 1),
    ("uuid", 40),
    ("name", 1),
    ("mig", -3),
    ("capability", 95),
    ("clock 1", 101),
];

fn start(build: Build, route: &str, controller: &Controller) -> (Client, Connection) {
    let program = if route == "link" { "nvml-linked" } else { "nvml" };
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", path.as_str())];
    let mut client = Client::start_program(build, &[program, route], &environment);
    assert_eq!(client.ask("cuda"), 0);
    (client, controller.welcome())
}

fn initialised(controller: &Controller) -> (Client, Connection) {
    let (mut client, agent) = start(Build::Glibc, "dlopen", controller);
    assert_eq!(client.ask("init"), 0);
    KNOWN.iter().for_each(|(call, expected)| assert_eq!(client.ask(call), *expected, "{call}"));
    (client, agent)
}

fn asks(client: &mut Client, expected: &[(&str, i64)]) {
    for (call, expected) in expected {
        assert_eq!(client.ask(call), *expected, "{call}");
    }
}

fn is_answered_while_away(build: Build, route: &str) {
    let controller = Controller::new();
    let (mut client, mut agent) = start(build, route, &controller);
    assert_eq!(client.ask("count"), -1, "not initialised");
    assert_eq!(client.ask("init"), 0);
    asks(&mut client, &KNOWN);
    asks(&mut client, &[("total", 1_000), ("used2", 550), ("rates", 70_020)]);
    let reached = client.ask("calls");
    asks(&mut client, &KNOWN);
    assert!(
        client.ask("calls") >= reached + KNOWN.len() as i64,
        "{route}: calls pass while the process is resident"
    );
    let before = agent.page();
    agent.done(&OFFLOAD);
    let reached = client.ask("calls");
    asks(&mut client, &KNOWN);
    assert_eq!(client.ask("short"), -7);
    client.send("free");
    agent.ask();
    agent.send(ControllerMessage::Reading(READING));
    assert_eq!(client.answer(), 1_500, "{route}");
    asks(&mut client, &[("total", 2_000), ("used", 500), ("used2", 400), ("rates", 30_005)]);
    asks(&mut client, &[("temperature", 41), ("power", 80_000), ("processes", 0)]);
    assert_eq!(client.ask("calls"), reached, "{route}: no call has reached NVML");
    let after = agent.page();
    assert_eq!((after.calls, after.polls), (before.calls, before.polls), "{route}: no activity");
    assert_eq!(
        (after.phase, after.waiters),
        (Phase::Checkpointed, 0),
        "{route}: no call sends a wake"
    );
    // A call without a cached result restores the process.
    client.send("clock 2");
    assert_eq!(agent.wake().1, 1, "{route}");
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 102, "{route}");
    asks(&mut client, &[("used", 600), ("processes", 1)]);
    client.finish();
}

#[test]
fn calls_by_every_route_are_answered_while_away() {
    for route in ["link", "dlopen", "next", "default"] {
        is_answered_while_away(Build::Glibc, route);
    }
}

#[test]
fn calls_under_musl_are_answered_while_away() {
    for route in ["link", "dlopen", "default"] {
        is_answered_while_away(Build::Musl, route);
    }
}

#[test]
fn unlisted_call_wakes_and_keeps_its_arguments() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    assert_eq!(client.ask("future"), 0);
    agent.done(&OFFLOAD);
    client.send("future");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    client.finish();
}

#[test]
fn first_init_while_away_wakes() {
    let controller = Controller::new();
    let (mut client, mut agent) = start(Build::Glibc, "dlopen", &controller);
    agent.done(&OFFLOAD);
    client.send("init");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    assert_eq!(client.ask("count"), 1);
    client.finish();
}

/// A monitor in the process initialises and shuts down NVML for each query. While the process is
/// offloaded, this must not cause a restore.
#[test]
fn shutdown_and_init_are_counted_while_away() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    asks(&mut client, &[("init", 0), ("shutdown", 0), ("shutdown", 0)]);
    asks(&mut client, &[("count", -1), ("shutdown", -1), ("users", 1)]);
    agent.done(&OFFLOAD);
    for _ in 0..3 {
        asks(&mut client, &[("count", -1), ("shutdown", -1), ("init", 0), ("count", 1)]);
        asks(&mut client, &[("flags 1", 0), ("shutdown", 0), ("name", 1), ("shutdown", 0)]);
    }
    assert_eq!((agent.page().phase, agent.page().waiters), (Phase::Checkpointed, 0));
    client.finish();
}

/// A program closes and reopens the NVML library. The library must stay loaded and initialised
/// meanwhile.
#[test]
fn closed_library_is_initialised_when_reopened() {
    let controller = Controller::new();
    let (mut client, _agent) = initialised(&controller);
    for _ in 0..2 {
        asks(&mut client, &[("shutdown", 0), ("reopen", 0), ("init", 0), ("count", 1)]);
    }
    client.finish();
}

/// Two copies of NVML in one process must be initialised and shut down independently.
#[test]
fn second_copy_is_initialised_by_itself() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    let folder = tempfile::tempdir().unwrap();
    let first = Build::Glibc.programs().join("libnvidia-ml.so.1");
    let second = folder.path().join("libnvidia-ml.so.1");
    std::fs::copy(&first, &second).unwrap();
    let [first, second] = [first, second].map(|path| format!("open {}", path.display()));
    asks(&mut client, &[(&second, 0), ("users", 0), ("count", -1), ("init", 0), ("count", 1)]);
    asks(&mut client, &[("users", 1), ("shutdown", 0), ("users", 0), ("count", -1)]);
    // The first copy must still be initialised, and its calls must return results while the process
    // is offloaded.
    agent.done(&OFFLOAD);
    asks(&mut client, &[(&first, 0), ("count", 1), ("shutdown", 0), ("count", -1), ("init", 0)]);
    client.finish();
}

/// In a process that never uses CUDA, calls into NVML are not changed.
#[test]
fn process_without_cuda_shuts_nvml_down() {
    let mut client = Client::start_program(Build::Glibc, &["nvml", "dlopen"], &[]);
    asks(&mut client, &[("init", 0), ("init", 0), ("shutdown", 0), ("shutdown", 0)]);
    asks(&mut client, &[("users", 0), ("shutdown", -1), ("init", 0), ("users", 1)]);
    assert!(!client.threads().contains(&"affinode-agent".to_owned()));
    client.finish();
}

#[test]
fn call_inside_nvml_keeps_the_process() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    asks(&mut client, &[("start", 0), ("inside", 0)]);
    agent.done(&[CLOSE]);
    let report = agent.order(Action::Lock { timeout_ms: 1 });
    assert_eq!(report, (Outcome::Busy, Phase::Closed, BUSY_NVML));
    // Other calls into NVML must return, because the process is not locked.
    assert_eq!(client.ask("used"), 600);
    asks(&mut client, &[("release", 0), ("join", 0)]);
    agent.done(&[LOCK, CHECKPOINT]);
    agent.done(&BRING_BACK);
    client.finish();
}

/// Threads call NVML all the time while the process is offloaded again and again. No call may be
/// inside NVML when the driver locks the process.
#[test]
fn calls_in_a_storm_never_meet_the_lock() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    assert_eq!(client.ask("storm"), 0);
    for _ in 0..100 {
        agent.done(&OFFLOAD);
        agent.done(&BRING_BACK);
    }
    assert_eq!(client.ask("calm"), 0);
    client.finish();
}

/// A call into NVML while the driver has locked the process must return the same value as the call
/// before the lock. It must neither cancel the offload nor wait for its end.
#[test]
fn call_while_locked_is_answered_as_before() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    assert_eq!(client.ask("used"), 600);
    agent.done(&[CLOSE, LOCK]);
    assert_eq!(client.ask("used"), 600);
    assert_eq!((agent.page().waiters, agent.asks), (0, 0));
    agent.done(&[Action::Unlock, Action::Open]);
    client.finish();
}

/// With the engine `copy` the context stays on the GPU, so calls must reach NVML even while the
/// process's memory is copied out.
#[test]
fn call_while_copied_out_reaches_nvml() {
    use affinode_proto::wire::message::CopyOptions;
    let controller = Controller::new();
    let program = ["nvml", "dlopen"];
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", path.as_str())];
    let mut client = Client::start_program(Build::Glibc, &program, &environment);
    assert_eq!(client.ask("cuda"), 0);
    let mut agent = controller.accept();
    agent.send(ControllerMessage::Welcome {
        vram_limit_bytes: 0,
        process: 1,
        wait_for_room_ms: 0,
        engine: Engine::Copy,
    });
    asks(&mut client, &[("init", 0), ("index 0", 1)]);
    agent.done(&[CLOSE, LOCK, Action::CopyOut { vram_bytes: 0, how: CopyOptions::default() }]);
    let reached = client.ask("calls");
    assert_eq!(client.ask("clock 3"), 103);
    assert_eq!((client.ask("calls"), agent.page().waiters), (reached + 1, 0));
    // Now the context is checkpointed too.
    agent.done(&[CHECKPOINT]);
    assert_eq!(client.ask("clock 3"), 103);
    assert_eq!(client.ask("calls"), reached + 1);
    agent.done(&BRING_BACK);
    client.finish();
}

#[test]
fn memory_shows_the_limit_of_vram() {
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", path.as_str())];
    let mut client = Client::start_program(Build::Glibc, &["nvml", "dlopen"], &environment);
    assert_eq!(client.ask("cuda"), 0);
    let mut agent = controller.welcome_to_limit(700);
    // The report shows that the Welcome was read.
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }, Action::ReleaseAllocations]);
    asks(&mut client, &[("init", 0), ("index 0", 1)]);
    let expected = [("total", 700), ("free", 300), ("used", 400), ("used2", 400)];
    for (ticket, (call, expected)) in (1..).zip(expected) {
        client.send(call);
        assert_eq!(agent.vram(), AgentMessage::AskVram { ticket, bytes: 0, uuid: READING.uuid });
        let (uuid, bytes, free_bytes, epoch) = (READING.uuid, 0, 300, 1);
        agent.send(ControllerMessage::VramAllowance { ticket, uuid, bytes, free_bytes, epoch });
        assert_eq!(client.answer(), expected, "{call}");
    }
    agent.done(&OFFLOAD);
    client.send("total");
    agent.ask();
    agent.send(ControllerMessage::Reading(READING));
    assert_eq!(client.answer(), 700, "the controller's reading is limited as well");
    agent.done(&BRING_BACK);
    client.finish();
}

/// `nvidia-smi` uses no CUDA, so it has no connection to the controller.
#[test]
fn program_without_cuda_reads_the_limit() {
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", path.as_str())];
    let mut client = Client::start_program(Build::Glibc, &["nvml", "dlopen"], &environment);
    asks(&mut client, &[("init", 0), ("index 0", 1), ("total", 1_000), ("free", 400)]);
    let view = VramView { uuid: READING.uuid, limit_bytes: 700, used_bytes: 450 };
    controller.write_beside("vram", &view.encode());
    asks(&mut client, &[("total", 700), ("free", 250), ("used", 450), ("used2", 450)]);
    controller.write_beside("vram", b"not a record");
    asks(&mut client, &[("total", 1_000), ("used2", 550)]);
    client.finish();
}

#[test]
fn thread_cancelled_in_a_wait_is_not_inside() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    for _ in 0..3 {
        asks(&mut client, &[("begin", 0), ("cancel", 0)]);
        agent.done(&OFFLOAD);
        agent.done(&BRING_BACK);
    }
    client.finish();
}

#[test]
fn wait_for_events_ends_in_time_while_away() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    assert!(client.ask("wait 150") >= 150);
    agent.done(&OFFLOAD);
    assert!(client.ask("wait 150") >= 150);
    // A wait for events that began before the offload must not delay the offload.
    agent.done(&BRING_BACK);
    client.send("wait 1500");
    agent.done(&OFFLOAD);
    assert!(client.answer() >= 1_500);
    assert_eq!((agent.page().phase, agent.page().waiters), (Phase::Checkpointed, 0));
    client.finish();
}

/// A child is forked while its parent is offloaded. NVML's locks are never released in the child,
/// so its calls into NVML must return an error.
#[test]
fn child_forked_while_away_gets_an_error() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    agent.done(&OFFLOAD);
    assert_eq!(client.ask("fork used"), (-999) & 0x7f);
    client.finish();
}

/// A child is forked while its parent is offloaded, and then registers. NVML's locks are never
/// released in the child, even if the child's own agent opens its gate. Calls must still return an
/// error.
#[test]
fn registered_child_of_away_gets_an_error() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    agent.done(&OFFLOAD);
    client.send("forkwait used");
    let mut child = controller.welcome();
    child.done(&[CLOSE, Action::Open]);
    client.send("");
    assert_eq!(client.answer(), (-999) & 0x7f);
    client.finish();
}

/// If the controller sends no figures of the GPU, the process must be restored, and the call must
/// reach NVML.
#[test]
fn figure_without_a_reading_wakes() {
    let controller = Controller::new();
    let (mut client, mut agent) = initialised(&controller);
    agent.done(&OFFLOAD);
    client.send("used");
    agent.ask();
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 600);
    client.finish();
}
