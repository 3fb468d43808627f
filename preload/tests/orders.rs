//! Tests of the orders that the controller sends to a process, and of the reports that the
//! process's agent returns.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::{Action, AgentMessage, ControllerMessage, Outcome};
use affinode_proto::wire::{Capabilities, Engine, Hazards, Phase, WIRE_VERSION};
use support::controller::{BRING_BACK, CHECKPOINT, CLOSE, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

fn registered(controller: &Controller, route: &str) -> Client {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, route, &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    client
}

#[test]
fn the_hello_says_who_and_where() {
    let controller = Controller::new();
    let client = registered(&controller, "dlopen");
    let agent = controller.welcome();
    assert_eq!(
        agent.hello,
        AgentMessage::Hello {
            version: WIRE_VERSION,
            pid_in_namespace: client.pid(),
            phase: Phase::Open,
            generation: 0,
            driver_version: 12080,
            hazards: Hazards(0),
            abilities: Capabilities(
                Capabilities::RECORDS_CALLS.0
                    | Capabilities::USES_COPIER.0
                    | Capabilities::RETAINS_HOST_COPY.0
                    | Capabilities::PREFAULTS.0
                    | Capabilities::CHECKS.0
                    | Capabilities::DEDUPS.0
                    | Capabilities::AWAITS_WORK.0
                    | Capabilities::LEAVES_IN_PART.0
                    | Capabilities::LIMITS_VRAM.0
                    | Capabilities::USES_HOST_POOL.0
                    | Capabilities::FREES_HOST_MEMORY.0
                    | Capabilities::GIVES_UP_COPIES.0
                    | Capabilities::RELEASES_EARLY.0
                    | Capabilities::STORES_ON_DISK.0
                    | Capabilities::COPIES_UNDER_MPS.0
                    | Capabilities::PREFAULTS_HOST_POOL.0,
            ),
            swappable_bytes: 0,
            copied_out_bytes: 0,
            local_memory_bytes: 0,
        }
    );
    assert!(client.threads().contains(&"affinode-agent".to_owned()));
}

#[test]
fn phases_are_reported_and_stand_in_the_page() {
    let controller = Controller::new();
    let _client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    let steps = [
        (CLOSE, Phase::Closed),
        (LOCK, Phase::Locked),
        (CHECKPOINT, Phase::Checkpointed),
        (Action::Restore, Phase::Locked),
        (Action::Unlock, Phase::Closed),
        (Action::Open, Phase::Open),
    ];
    for round in 1..=3 {
        for (action, phase) in steps {
            assert_eq!(agent.order(action), (Outcome::Done, phase, 0));
            assert_eq!(agent.page().phase, phase);
            assert_eq!(agent.page().generation, round);
        }
    }
    assert_eq!(agent.order(LOCK).0, Outcome::WrongPhase);
}

/// The agent must refuse a restore order that was decided long ago, for example because the
/// container or the controller was stopped meanwhile. The VRAM may have been granted to another
/// process since then.
#[test]
fn restore_order_decided_long_ago_is_refused() {
    let controller = Controller::new();
    let _client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    agent.start_decided(Action::Restore, 1);
    assert_eq!(agent.report(), (Outcome::Late, Phase::Checkpointed, 0));
    agent.done(&BRING_BACK);
}

#[test]
fn a_call_in_progress_makes_a_close_busy() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    client.ask("start cuStubBlock");
    client.ask("inside 1");
    assert_eq!(agent.page().inflight, 1);
    let (outcome, phase, _) = agent.order(Action::Close { deadline_ms: 1 });
    assert_eq!((outcome, phase), (Outcome::Busy, Phase::Open));
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    client.ask("release");
    assert_eq!(client.ask("join"), 0);
    agent.done(&[CLOSE, Action::Open]);
}

#[test]
fn caller_during_close_reopens_the_gate() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    client.ask("start cuStubBlock");
    client.ask("inside 1");
    agent.start(CLOSE);
    while agent.page().phase != Phase::Closing {}
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    assert_eq!(agent.report().0, Outcome::Busy);
    client.ask("release");
    client.ask("join");
}

/// A waiting caller leaves the gate by a jump out of a signal handler, as an interpreter does at an
/// interrupt. The library must soon stop counting this caller as waiting.
#[test]
fn caller_that_jumps_out_waits_no_more() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    let pid = nix::unistd::Pid::from_raw(client.pid() as i32);
    let guard = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let until_no_waiters = |agent: &support::controller::Connection| {
        while agent.page().waiters > 0 {
            assert!(std::time::Instant::now() < guard, "a caller that has left counts as waiting");
            std::thread::yield_now();
        }
    };
    agent.done(&OFFLOAD);
    client.send("jump cuCtxSynchronize");
    agent.wake();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGUSR1).unwrap();
    assert_eq!(client.answer(), 99);
    // The number of waiters must become 0 while the process is offloaded. A call after the restore
    // must succeed.
    until_no_waiters(&agent);
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    // The caller that has left must not cancel a close while another call is inside the driver.
    client.ask("start cuStubBlock");
    client.ask("inside 1");
    agent.start(CLOSE);
    while agent.page().phase != Phase::Closing {}
    client.ask("release");
    assert_eq!(agent.report().0, Outcome::Done);
    agent.done(&[Action::Open]);
    // A caller that leaves while its allocation waits at the gate must no longer count as waiting
    // either.
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }]);
    client.ask("join");
    // Discard repeated wakes of the first wait. Otherwise `agent.wake` would return too early, and
    // the signal would interrupt the program while it writes its output.
    agent.forget_wakes();
    client.send("jump cuMemAlloc");
    agent.wake();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGUSR1).unwrap();
    assert_eq!(client.answer(), 99);
    agent.done(&[Action::ReleaseAllocations]);
    until_no_waiters(&agent);
}

#[test]
fn a_call_from_inside_a_call_is_not_held() {
    let controller = Controller::new();
    // First with a call on the thunk's slow path, then with a call on its fast path.
    for start in ["start cuStubCallback", "warm cuStreamWaitEvent"] {
        let mut client = registered(&controller, "dlopen");
        let mut agent = controller.welcome();
        client.ask(start);
        client.ask("inside 1");
        agent.start(CLOSE);
        while agent.page().phase != Phase::Closing {}
        client.ask("release");
        assert_eq!(agent.report().0, Outcome::Done);
        assert_eq!(client.ask("join"), 0);
        agent.done(&[Action::Open]);
    }
}

#[test]
fn held_allocations_wait_while_the_rest_runs() {
    let controller = Controller::new();
    let mut client = registered(&controller, "proc2");
    let mut agent = controller.welcome();
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }]);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    client.send("cuMemAlloc");
    // The process repeats the Wake, to find out whether the controller still runs.
    assert_eq!([agent.wake().1, agent.wake().1], [1, 1]);
    assert_eq!(agent.page().phase, Phase::Open);
    agent.done(&[Action::ReleaseAllocations]);
    assert_eq!(client.answer(), 0);
}

#[test]
fn no_allocation_before_welcome_or_under_hold() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.accept();
    client.send("cuMemAlloc");
    while agent.page().waiters == 0 {}
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }]);
    agent.send(ControllerMessage::Welcome {
        vram_limit_bytes: 0,
        process: 1,
        wait_for_room_ms: 0,
        engine: Engine::Checkpoint,
    });
    // The report of this order follows the handling of the Welcome. The caller must still wait.
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }]);
    assert_eq!(agent.page().waiters, 1);
    agent.done(&[Action::ReleaseAllocations]);
    assert_eq!(client.answer(), 0);

    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.accept();
    client.send("cuMemAlloc");
    while agent.page().waiters == 0 {}
    agent.send(ControllerMessage::Welcome {
        vram_limit_bytes: 0,
        process: 2,
        wait_for_room_ms: 0,
        engine: Engine::Checkpoint,
    });
    assert_eq!(client.answer(), 0, "a Welcome alone lets the allocation continue");
}

#[test]
fn hold_outlives_connection_until_welcome() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }]);
    drop(agent);
    let mut agent = controller.accept();
    client.send("cuMemAlloc");
    while agent.page().waiters == 0 {}
    agent.send(ControllerMessage::Welcome {
        vram_limit_bytes: 0,
        process: 1,
        wait_for_room_ms: 0,
        engine: Engine::Checkpoint,
    });
    assert_eq!(client.answer(), 0);
}

#[test]
fn hazards_are_reported_and_forbid_a_lock() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    assert_eq!(client.ask("cuCtxEnablePeerAccess"), 0);
    assert_eq!(
        agent.page().hazards,
        Hazards::PEER_ACCESS,
        "the hazard is set when the call returns"
    );
    assert_eq!(agent.notice(), Hazards::PEER_ACCESS);
    agent.done(&[CLOSE]);
    assert_eq!(agent.order(LOCK).0, Outcome::Unsupported);
    agent.done(&[Action::Open]);
}

/// Managed memory must prevent the checkpoint of the process, but not the driver's lock. The
/// library needs the lock to copy the other memory.
#[test]
fn hazard_of_allocations_forbids_a_checkpoint() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    assert_eq!(client.ask("cuMemAllocManaged"), 0);
    assert_eq!(
        agent.page().hazards,
        Hazards::MANAGED_MEMORY,
        "the hazard is set when the call returns"
    );
    assert_eq!(agent.notice(), Hazards::MANAGED_MEMORY);
    agent.done(&[CLOSE, LOCK]);
    assert_eq!(agent.order(CHECKPOINT).0, Outcome::Unsupported);
    agent.done(&[Action::Unlock, Action::Open]);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

#[test]
fn mps_is_noticed() {
    let controller = Controller::new();
    let (path, pipes) = (controller.path(), tempfile::tempdir().unwrap());
    std::fs::write(pipes.path().join("control"), "").unwrap();
    let pipes = pipes.path().to_str().unwrap();
    let environment = [("AFFINODE_SOCKET", &*path), ("CUDA_MPS_PIPE_DIRECTORY", pipes)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    client.ask("cuInit");
    assert_eq!(controller.welcome().page().hazards, Hazards::MPS);
}

/// The calls of an MPS server must not wait: it may work for clients in other containers.
#[test]
fn calls_of_an_mps_server_are_not_held() {
    let controller = Controller::new();
    let folder = tempfile::tempdir().unwrap();
    let server = folder.path().join("nvidia-cuda-mps-server");
    std::os::unix::fs::symlink(Build::Glibc.programs().join("client"), &server).unwrap();
    let words = [server.to_str().unwrap(), "dlopen"];
    let environment = [("AFFINODE_SOCKET", &*controller.path())];
    let mut client = Client::start_program(Build::Glibc, &words, &environment);
    client.ask("cuInit");
    let mut agent = controller.welcome();
    assert_eq!(agent.page().hazards, Hazards::MPS);
    agent.done(&[CLOSE]);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    agent.done(&[Action::Open]);
}

#[test]
fn refused_process_runs_without_another_hello() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.accept();
    let refusal = ControllerMessage::Refuse { version: 99, retry: false };
    agent.send(refusal);
    agent.ended();
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    // The next connection must be that of another process.
    let other = registered(&controller, "dlopen");
    let next = controller.welcome();
    assert!(format!("{:?}", next.hello).contains(&format!("{}", other.pid())));
}

#[test]
fn a_process_that_may_retry_comes_back() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    controller.accept().send(ControllerMessage::Refuse { version: 1, retry: true });
    controller.welcome().done(&OFFLOAD);
    controller.welcome().done(&BRING_BACK);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    use std::io::Write;
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    for garbage in [[0xff_u8; 128], [0; 128]] {
        let mut agent = controller.accept();
        agent.stream.write_all(&garbage).unwrap();
        agent.ended();
        assert_eq!(client.ask("cuCtxSynchronize"), 0);
    }
    // An order that arrives before the Welcome must end the connection.
    let mut agent = controller.accept();
    agent.start(CLOSE);
    agent.ended();
    let mut agent = controller.welcome();
    assert_eq!(agent.page().phase, Phase::Open);
    agent.done(&OFFLOAD);
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

/// While the gate is only closed, work may still run, so a poll (a query whether work has ended)
/// must wait. After the driver's lock, the poll must return without a call into the driver.
#[test]
fn poll_while_closing_waits_for_lock() {
    let controller = Controller::new();
    let mut client = registered(&controller, "dlopen");
    let mut agent = controller.welcome();
    client.ask("start cuStubBlock");
    client.ask("inside 1");
    agent.start(CLOSE);
    while agent.page().phase != Phase::Closing {}
    let (polls, made) = (agent.page().polls, client.ask("count"));
    client.ask("start cuStreamQuery");
    client.ask("release");
    assert_eq!(agent.report(), (Outcome::Done, Phase::Closed, 0), "a poll does not cancel a close");
    assert_eq!((agent.page().polls, agent.page().waiters), (polls, 0));
    agent.done(&[LOCK]);
    assert_eq!(client.ask("join"), 0);
    assert_eq!((agent.page().polls, client.ask("count")), (polls + 1, made));
    agent.done(&[Action::Unlock, Action::Open]);
}

/// Another process may have recorded an event that it shares with this process. A poll of an event
/// must then reach the driver. A poll of a stream concerns only work of this process.
#[test]
fn poll_of_shared_event_restores() {
    for share in ["cuIpcGetEventHandle", "cuIpcOpenEventHandle"] {
        let controller = Controller::new();
        let mut client = registered(&controller, "dlopen");
        let mut agent = controller.welcome();
        assert_eq!(client.ask(share), 0);
        // The agent refuses a checkpoint of such a process.
        agent.done(&[CLOSE, LOCK]);
        assert_eq!((client.ask("cuStreamQuery"), agent.page().waiters), (0, 0));
        let made = client.ask("count");
        client.send("cuEventQuery");
        assert_eq!(agent.wake().1, 1, "{share}");
        agent.done(&[Action::Unlock, Action::Open]);
        assert_eq!((client.answer(), client.ask("count")), (0, made + 1));
        client.finish();
    }
}

/// The driver has failed to restore the process. Calls must return an error on each path through
/// the library. None may reach the driver, which would end the process. The process must send one
/// notice, and must not be moved again.
#[test]
fn calls_after_lost_restore_fail_outside_driver() {
    const ECC: i64 = 214;
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path), ("STUB_RESTORE_FAILS", "214")];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    assert_eq!(client.ask("threads 3 cuCtxSynchronize"), 0);
    let made = client.ask("count");
    agent.done(&OFFLOAD);
    client.send("cuCtxSynchronize");
    agent.wake();
    for phase in [Phase::Checkpointed, Phase::Checkpointed, Phase::Open] {
        assert_eq!(agent.order(Action::Restore), (Outcome::DriverError, phase, 214));
    }
    assert_eq!(client.answer(), ECC);
    assert_eq!(agent.notice(), Hazards::DAMAGED_MEMORY);
    for _ in 0..2 {
        for call in ["cuCtxSynchronize", "cuStreamQuery", "cuMemAlloc", "cuLaunchKernel"] {
            assert_eq!(client.ask(call), ECC, "{call}");
        }
        assert_eq!(client.ask("threads 5 cuCtxSynchronize"), 5 * ECC);
        assert_eq!(client.ask("signal cuEventQuery"), ECC);
        assert_eq!(agent.page().hazards, Hazards::DAMAGED_MEMORY);
        agent.done(&[CLOSE]);
        assert_eq!(agent.order(LOCK).0, Outcome::Unsupported);
        agent.done(&[Action::Open]);
    }
    assert_eq!((client.ask("count"), agent.page().inflight), (made, 0));
}
