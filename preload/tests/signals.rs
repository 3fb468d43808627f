//! Tests of CUDA calls in signal handlers, on many threads and during forks. No call may reach the
//! driver while the process is checkpointed. The stub driver of these tests traps if one does.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use std::time::{Duration, Instant};

use affinode_proto::wire::message::Outcome;
use support::controller::{BRING_BACK, CLOSE, Connection, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

/// Time limit of every wait, after which a test that hangs fails.
const GUARD: Duration = Duration::from_secs(120);

/// Number of offloads in each test.
const ROUNDS: u32 = 30;

/// Starts the program `signals` with three words: the call that its threads make, the call in its
/// signal handler, and the number of threads.
fn started(controller: &Controller, words: [&str; 3]) -> (Client, Connection) {
    let path = controller.path();
    let [call, in_handler, threads] = words;
    let words = ["signals", call, in_handler, threads];
    let client = Client::start_program(Build::Glibc, &words, &[("AFFINODE_SOCKET", &path)]);
    (client, controller.welcome())
}

/// Waits until the program's counter `what` has increased by `more`.
fn wait_for(client: &mut Client, what: &str, more: i64) {
    let (start, end) = (client.ask(what), Instant::now() + GUARD);
    while client.ask(what) < start + more {
        assert!(Instant::now() < end, "{what} has not increased by {more} in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Orders the close of the gate repeatedly, until it succeeds because no call is inside the driver.
fn close(agent: &mut Connection) {
    let end = Instant::now() + GUARD;
    while agent.order(CLOSE).0 != Outcome::Done {
        assert!(Instant::now() < end, "the gate never closes, because a call is always inside");
    }
}

#[test]
fn signals_without_calls_do_not_harm() {
    let controller = Controller::new();
    let (mut client, mut agent) = started(&controller, ["cuStreamQuery", "-", "0"]);
    wait_for(&mut client, "signals", 100);
    agent.done(&OFFLOAD);
    wait_for(&mut client, "signals", 1_000);
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("stop"), 0);
    client.finish();
}

#[test]
fn poll_in_handler_while_away_is_answered() {
    let controller = Controller::new();
    let (mut client, mut agent) = started(&controller, ["cuStreamQuery", "cuEventQuery", "0"]);
    wait_for(&mut client, "signals", 100);
    close(&mut agent);
    agent.done(&OFFLOAD[1..]);
    wait_for(&mut client, "signals", 1_000);
    wait_for(&mut client, "calls", 100);
    agent.done(&BRING_BACK);
    wait_for(&mut client, "calls", 100);
    assert_eq!(client.ask("stop"), 0);
    client.finish();
}

/// In an offloaded process, a signal handler interrupts the main thread and makes a CUDA call. The
/// main thread only polls, and its polls return. The handler's call must wait, and request the
/// restore of the process.
#[test]
fn call_in_handler_while_away_is_held() {
    let controller = Controller::new();
    for in_handler in ["cuCtxSynchronize", "cuMemAlloc_v2"] {
        let (mut client, mut agent) = started(&controller, ["cuStreamQuery", in_handler, "0"]);
        for _ in 0..ROUNDS {
            wait_for(&mut client, "signals", 1);
            close(&mut agent);
            agent.done(&[LOCK, OFFLOAD[2]]);
            agent.wake();
            agent.done(&BRING_BACK);
        }
        wait_for(&mut client, "calls", 100);
        assert_eq!(client.ask("stop"), 0);
        client.finish();
    }
}

#[test]
fn threads_forks_signals_stay_out_while_away() {
    let controller = Controller::new();
    let words = ["cuStreamQuery", "cuEventQuery", "6"];
    let (mut client, mut agent) = started(&controller, words);
    for _ in 0..ROUNDS {
        close(&mut agent);
        agent.done(&[LOCK, OFFLOAD[2]]);
        agent.wake();
        agent.done(&BRING_BACK);
    }
    // Further children end as they should, so none of the children that were forked during the
    // offloads hangs.
    wait_for(&mut client, "children", 2);
    wait_for(&mut client, "calls", 100);
    assert_eq!(client.ask("stop"), 0);
    client.finish();
}
