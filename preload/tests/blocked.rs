//! Tests of a process in which a thread blocks inside the driver, in a call that is not hooked.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::message::Outcome;
use affinode_proto::wire::{Hazards, Phase};
use support::controller::{BRING_BACK, CHECKPOINT, CLOSE, Connection, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

fn registered(controller: &Controller) -> (Client, Connection) {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    (client, controller.welcome())
}

/// Waits until every thread of the process sleeps in the kernel. A thread that has not yet blocked
/// in the driver counts as running, so the agent could not know its position before the driver's
/// lock.
fn wait_until_all_sleep(pid: u32) {
    let sleeps = |task: std::io::Result<std::fs::DirEntry>| {
        let text =
            std::fs::read_to_string(task.unwrap().path().join("syscall")).unwrap_or_default();
        !text.starts_with("running")
    };
    while !std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(sleeps) {
        std::thread::yield_now();
    }
}

#[test]
fn hidden_call_while_away_brings_it_home_once() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller);
    agent.done(&OFFLOAD);
    client.ask("hidden");
    client.ask("inside 1");
    // The hook is 0, because the client waits in a call without a hook.
    assert_eq!(agent.wake(), (1, 1, 0));
    assert_eq!(agent.page().phase, Phase::Checkpointed);
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("join"), 0);
    assert_eq!(agent.notice(), Hazards::HIDDEN_WAY);
    assert_eq!(agent.page().hazards, Hazards::HIDDEN_WAY);
    // From now on the driver must not checkpoint the process.
    agent.done(&[CLOSE, LOCK]);
    assert_eq!(agent.order(CHECKPOINT), (Outcome::Unsupported, Phase::Locked, 0));
}

#[test]
fn drivers_own_thread_is_no_alarm() {
    let controller = Controller::new();
    let (mut client, mut agent) = registered(&controller);
    client.ask("hidden");
    client.ask("inside 1");
    wait_until_all_sleep(client.pid());
    agent.done(&OFFLOAD);
    // More samples than the agent needs to find a thread that blocks.
    assert!(agent.is_silent_for(std::time::Duration::from_secs(5)));
    client.ask("hidden");
    client.ask("inside 2");
    assert_eq!(agent.wake().1, 1, "the second blocked thread is found");
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("join"), 0);
}

#[test]
fn without_controller_it_comes_home_by_itself() {
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    std::fs::write(folder.path().join("free"), "1, 0\n").unwrap();
    let (path, tools) = (controller.path(), support::nvidia_smi(folder.path()));
    let environment = [("AFFINODE_SOCKET", &*path), ("PATH", &*tools)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.ask("hidden");
    assert_eq!(client.ask("join"), 0);
    // The thread continues before the gate opens.
    while agent.page().phase != Phase::Open {
        std::thread::yield_now();
    }
}
