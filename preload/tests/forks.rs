//! Tests that a fork is safe at any time: this library's threads hold no lock of libc that would
//! stay locked in the child.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use affinode_proto::wire::Engine;
use affinode_proto::wire::message::{Action, ControllerMessage};
use support::controller::{BRING_BACK, Controller, OFFLOAD};
use support::{Build, Client};

/// The library's own threads must not walk the loader's list of objects. glibc holds a lock while a
/// thread walks the list, and does not reset the lock in a forked child.
#[test]
fn own_threads_never_walk_the_loaders_list() {
    for engine in [Engine::Checkpoint, Engine::Copy] {
        let controller = Controller::new();
        let path = controller.path();
        let environment = [("AFFINODE_SOCKET", &*path)];
        let mut client = Client::start_program(Build::Glibc, &["walks"], &environment);
        client.send("call");
        let mut agent = controller.accept();
        agent.send(ControllerMessage::Welcome {
            process: 1,
            wait_for_room_ms: 0,
            engine,
            vram_limit_bytes: 0,
        });
        assert_eq!(client.answer(), 0);
        agent.done(&[Action::HoldAllocations { deadline_ms: 1_000 }, Action::ReleaseAllocations]);
        for _ in 0..3 {
            agent.done(&OFFLOAD);
            client.send("call");
            agent.wake();
            agent.done(&BRING_BACK);
            assert_eq!(client.answer(), 0, "{engine:?}");
        }
        client.finish();
    }
}
