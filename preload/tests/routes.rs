//! Tests that CUDA calls pass the gate, whichever way the program got the function's address.
//! Arguments and results must arrive unchanged.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::Action;
use support::controller::{BRING_BACK, CLOSE, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

const ROUTES: [&str; 6] = ["link", "dlopen", "proc1", "proc2", "next", "default"];

/// Checks that calls by this route are counted, held while the process is offloaded, and continue
/// afterwards. The stub driver ends the process at once if a call reaches it during the offload.
fn is_counted_and_held(build: Build, route: &str) {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(build, route, &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0, "{route}");
    let mut agent = controller.welcome();
    let before = agent.page();
    for _ in 0..10 {
        assert_eq!(client.ask("cuCtxSynchronize"), 0, "{route}");
    }
    assert_eq!(client.ask("cuStreamQuery"), 0, "{route}");
    assert_eq!(client.ask("cuMemAlloc"), 0, "{route}");
    let after = agent.page();
    assert_eq!(after.calls - before.calls, 11, "{route}");
    assert_eq!(after.polls - before.polls, 1, "{route}");
    assert_eq!(after.inflight, 0, "{route}");

    // These calls are polls while the process is offloaded: they return, because no work runs, and
    // send no Wake.
    for call in ["cuCtxSynchronize", "cuMemAlloc"] {
        agent.done(&OFFLOAD);
        let polls = agent.page().polls;
        assert_eq!(client.ask("cuStreamQuery"), 0, "{route}");
        assert_eq!(client.ask("cuEventQuery"), 0, "{route}");
        assert_eq!(agent.page().polls, polls + 2, "{route}");
        client.send(call);
        let (_, waiters, hook) = agent.wake();
        assert_eq!(waiters, 1, "{route} {call}");
        let name = affinode_cuda_sys::hook::name(hook).unwrap();
        assert!(name.starts_with(call), "{route}: {name} for {call}");
        agent.done(&BRING_BACK);
        assert_eq!(client.answer(), 0, "{route} {call}");
    }
    client.finish();
}

/// A poll is made before the driver has locked the process, when work may still run. The poll must
/// wait without requesting a restore, and then call the driver.
#[test]
fn poll_waits_while_work_may_run_without_wake() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "link", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&[CLOSE]);
    let before = agent.page();
    client.send("cuStreamQuery");
    // The poll returns once the process is locked, not earlier, and does not reach the driver.
    agent.done(&[LOCK]);
    assert_eq!(client.answer(), 0);
    let after = agent.page();
    assert_eq!((after.polls, after.waiters), (before.polls + 1, 0));
    agent.done(&[Action::Unlock, Action::Open]);
    client.finish();
}

#[test]
fn calls_by_every_route_are_counted_and_held() {
    for route in ROUTES {
        is_counted_and_held(Build::Glibc, route);
    }
}

#[test]
fn calls_by_every_route_are_held_under_musl() {
    for route in ["link", "dlopen", "proc1", "proc2", "next", "default"] {
        is_counted_and_held(Build::Musl, route);
    }
}

#[test]
fn stack_and_vector_arguments_arrive() {
    let controller = Controller::new();
    let path = controller.path();
    for build in [Build::Glibc, Build::Musl] {
        let mut client = Client::start(build, "dlopen", &[("AFFINODE_SOCKET", &path)]);
        // First on the slow path, then on the fast path, then after a wait at the gate.
        for call in ["cuLaunchKernel", "cuStubDoubles"] {
            assert_eq!(client.ask(call), 0, "{call}, first");
            assert_eq!(client.ask(call), 0, "{call}, second");
        }
        let mut agent = controller.welcome();
        for call in ["cuLaunchKernel", "cuStubDoubles"] {
            agent.done(&OFFLOAD);
            client.send(call);
            agent.wake();
            agent.done(&BRING_BACK);
            assert_eq!(client.answer(), 0, "{call}, held");
        }
        client.finish();
    }
}

#[test]
fn a_function_that_no_list_knows_is_held_too() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "proc2", &[("AFFINODE_SOCKET", &path)]);
    client.ask("cuInit");
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("cuFutureCall");
    let (_, _, hook) = agent.wake();
    assert_eq!(hook, affinode_cuda_sys::hook::UNLISTED);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn function_has_one_address() {
    let mut client = Client::start(Build::Glibc, "dlopen", &[]);
    assert_eq!(client.ask("same cuCtxSynchronize"), 1);
    assert_eq!(client.ask("cuNoSuchFunction"), -1);
}

#[test]
fn library_with_driver_names_loads_the_driver() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "forward", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("cuCtxSynchronize");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn profiler_gets_the_drivers_next_function() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "forward", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    let before = agent.page().calls;
    assert_eq!(client.ask("cuStreamSynchronize"), 0);
    assert_eq!(agent.page().calls, before + 1);
    agent.done(&OFFLOAD);
    client.send("cuStreamSynchronize");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn driver_with_own_references_is_held_once() {
    let controller = Controller::new();
    let path = controller.path();
    let folder = support::other_driver("interposable", &[]);
    let folder = folder.to_str().unwrap();
    for route in ["dlopen", "proc1", "proc2", "next", "default"] {
        let environment = [("AFFINODE_SOCKET", &*path), ("LD_LIBRARY_PATH", folder)];
        let mut client = Client::start(Build::Glibc, route, &environment);
        assert_eq!(client.ask("cuInit"), 0, "{route}");
        let mut agent = controller.welcome();
        let before = agent.page().calls;
        assert_eq!(client.ask("cuLaunchKernel"), 0, "{route}");
        assert_eq!(agent.page().calls, before + 1, "{route}");
        agent.done(&OFFLOAD);
        client.send("cuCtxSynchronize");
        agent.wake();
        agent.done(&BRING_BACK);
        assert_eq!(client.answer(), 0, "{route}");
    }
}

#[test]
fn the_first_call_may_come_from_a_small_stack() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("small cuCtxSynchronize"), 0);
    assert_eq!(controller.welcome().page().calls, 1);
}

#[test]
fn many_threads_small_stacks_and_signal_handlers() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    client.ask("cuInit");
    let mut agent = controller.welcome();
    let before = agent.page();
    assert_eq!(client.ask("threads 300 cuCtxSynchronize"), 0);
    assert_eq!(agent.page().calls - before.calls, 300);
    assert_eq!(client.ask("threads 300 cuCtxSynchronize"), 0);
    assert_eq!(agent.page().calls - before.calls, 600);
    assert_eq!(client.ask("small cuCtxSynchronize"), 0);
    assert_eq!(client.ask("signal cuCtxSynchronize"), 0);
    assert_eq!(agent.page().inflight, 0);
    // Threads with and without a slot are held alike.
    agent.done(&OFFLOAD);
    client.send("threads 300 cuCtxSynchronize");
    while agent.wake().1 < 300 {}
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    let page = agent.page();
    assert_eq!((page.inflight, page.waiters), (0, 0));
}

#[test]
fn a_forked_child_registers_by_itself() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    client.ask("cuInit");
    let mut parent = controller.welcome();
    let before = parent.page();
    client.send("forkwait cuCtxSynchronize");
    let child = controller.welcome();
    assert_ne!(format!("{:?}", child.hello), format!("{:?}", parent.hello));
    while child.page().calls == 0 {}
    client.send("");
    child.ended();
    assert_eq!(client.answer(), 0);
    assert_eq!(parent.page(), before);
    parent.done(&[CLOSE, Action::Open]);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}
