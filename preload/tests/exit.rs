//! Tests of an offloaded process that exits: which results the calls in its exit handlers have, and
//! which of these calls request a restore.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::Action;
use support::controller::{BRING_BACK, CLOSE, Connection, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

const BUILDS: [Build; 2] = [Build::Glibc, Build::Musl];

/// Starts a client and offloads it. The client will run the calls in `before` and `after` in exit
/// handlers, which are registered before and after the driver's own handler.
fn offloaded(build: Build, before: &str, after: &str) -> (Client, Connection) {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(build, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    for handler in [before, "cuInit", after] {
        match handler {
            "" => {}
            "cuInit" => assert_eq!(client.ask(handler), 0),
            handler => assert_eq!(client.ask(&format!("at exit {handler}")), 0),
        }
    }
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    (client, agent)
}

#[test]
fn releases_at_exit_need_no_return() {
    for build in BUILDS {
        let handler = "cuStreamDestroy_v2 cuCtxSynchronize cuMemFree_v2 cuCtxDestroy_v2 count";
        let (client, agent) = offloaded(build, "", handler);
        // Only cuInit has reached the driver, which would trap at a call while the process is
        // offloaded.
        assert_eq!(client.last_answers(), [0, 0, 0, 0, 1], "{build:?}");
        assert_eq!(agent.wakes_until_end(), 0, "{build:?}");
    }
}

#[test]
fn calls_after_the_drivers_end_need_no_return() {
    for build in BUILDS {
        let handler = "cuMemFree_v2 cuCtxSynchronize cuFutureCall cuMemAlloc";
        let (client, agent) = offloaded(build, handler, "");
        assert_eq!(client.last_answers(), [4, 4, 4, 4], "{build:?}");
        assert_eq!(agent.wakes_until_end(), 0, "{build:?}");
    }
}

/// The process must be restored for calls in exit handlers whose results the handler reads, and for
/// releases that the driver may refuse.
#[test]
fn other_calls_at_exit_come_home_and_catch_up() {
    for (handler, answers) in [
        // The driver counts three calls: cuInit, the recorded release, and cuFutureCall.
        ("cuMemFree_v2 cuFutureCall count", [0, 0, 3].as_slice()),
        // The second release of the same memory waits for the restore, so the driver counts three
        // calls: cuInit and both releases.
        ("cuMemFree_v2 cuMemFree_v2 count", &[0, 0, 3]),
        ("cuCtxDestroy_v2 cuMemFree_v2 count", &[0, 0, 3]),
    ] {
        for build in BUILDS {
            let (client, mut agent) = offloaded(build, "", handler);
            let ending = std::thread::spawn(|| client.last_answers());
            assert_eq!(agent.wake().1, 1);
            agent.done(&BRING_BACK[..2]);
            // The process may end before it reports this order.
            agent.start(BRING_BACK[2]);
            assert_eq!(ending.join().unwrap(), answers, "{build:?}: {handler}");
        }
    }
}

/// An exit handler waits for an event. If the process shares events, another process may have
/// recorded it, and that process's work may still run. Only the driver can wait for it.
#[test]
fn shared_event_at_exit_comes_home() {
    for (share, answers) in [("cuStreamQuery", [0, 2]), ("cuIpcOpenEventHandle", [0, 3])] {
        let controller = Controller::new();
        let path = controller.path();
        let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
        assert_eq!(client.ask("cuInit"), 0);
        assert_eq!(client.ask("at exit cuEventSynchronize count"), 0);
        let mut agent = controller.welcome();
        assert_eq!(client.ask(share), 0);
        // The agent refuses a checkpoint of a process that shares events.
        agent.done(&[CLOSE, LOCK]);
        let ending = std::thread::spawn(|| client.last_answers());
        let is_shared = share == "cuIpcOpenEventHandle";
        if is_shared {
            assert_eq!(agent.wake().1, 1);
            agent.done(&[Action::Unlock]);
            // The process may end before it reports this order.
            agent.start(Action::Open);
        }
        assert_eq!(ending.join().unwrap(), answers, "{share}");
        assert!(is_shared || agent.wakes_until_end() == 0, "{share}");
    }
}

/// An exiting process has recorded releases of GPU handles, and now makes them in the driver. A
/// signal handler interrupts it and makes a CUDA call. This call must first make the remaining
/// releases, and repeat none.
#[test]
fn interrupted_releases_are_made_once() {
    for build in BUILDS {
        let handler = "cuMemFree_v2 cuStreamDestroy_v2 cuFutureCall count";
        let (mut client, mut agent) = offloaded(build, "", handler);
        assert_eq!(client.ask("interrupt cuCtxSynchronize"), 0);
        let ending = std::thread::spawn(|| client.last_answers());
        agent.wake();
        agent.done(&BRING_BACK[..2]);
        agent.start(BRING_BACK[2]);
        // cuInit, two releases, the handler's call, and the call for which the process was
        // restored.
        assert_eq!(ending.join().unwrap(), [0, 0, 0, 5], "{build:?}");
    }
}

/// A process is offloaded, and has not begun to exit. A call that releases memory must wait until
/// the process is restored.
#[test]
fn releases_before_exit_come_home() {
    let (mut client, mut agent) = offloaded(Build::Glibc, "", "count");
    client.send("cuMemFree_v2");
    assert_eq!(agent.wake().1, 1);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    assert_eq!(client.last_answers(), [2]);
}
