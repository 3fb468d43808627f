//! Tests of CUDA calls whose result is constant. Such calls must return without a restore while the
//! process is offloaded.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use support::controller::{BRING_BACK, Controller, OFFLOAD};
use support::{Build, Client};

/// Answer of the client to the command `devices` with the stub driver: 100 times three devices,
/// plus the four letters of the device's name.
const DEVICES: i64 = 304;

#[test]
fn device_count_and_name_while_away_wake_nothing() {
    for route in ["link", "dlopen", "proc2"] {
        let controller = Controller::new();
        let path = controller.path();
        let mut client = Client::start(Build::Glibc, route, &[("AFFINODE_SOCKET", &path)]);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        let before = agent.page();
        assert_eq!(client.ask("devices"), DEVICES);
        assert_eq!(agent.page().calls, before.calls, "no use of the GPU");
        let made = client.ask("count");
        agent.done(&OFFLOAD);
        // While the process is offloaded, the stub driver ends it if a call reaches the driver.
        assert_eq!(client.ask("devices"), DEVICES, "{route}");
        let offloaded = agent.page();
        assert_eq!((offloaded.waiters, offloaded.calls), (0, before.calls));
        assert_eq!(client.ask("count"), made, "the driver was not asked");
        agent.done(&BRING_BACK);
        assert_eq!(client.ask("devices"), DEVICES);
        client.finish();
    }
}

#[test]
fn device_count_never_asked_before_waits() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("devices");
    assert_eq!(agent.wake().1, 1);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), DEVICES);
    client.finish();
}

/// `cuGetProcAddress` returns the 64-bit function for the name `cuDeviceTotalMem`, `dlsym` the 32-bit
/// function. Each must get the bytes that it would write itself.
#[test]
fn memory_size_is_whole_while_offloaded() {
    const WHOLE: i64 = 0x23_0000_4000;
    const LOWER_HALF: i64 = 0x5a5a_5a5a_0000_4000;
    let of_address = [("total cuDeviceTotalMem", WHOLE)];
    let of_symbols = [("total cuDeviceTotalMem", LOWER_HALF), ("total cuDeviceTotalMem_v2", WHOLE)];
    for (route, cases) in [("proc2", &of_address[..]), ("dlopen", &of_symbols)] {
        let controller = Controller::new();
        let path = controller.path();
        let mut client = Client::start(Build::Glibc, route, &[("AFFINODE_SOCKET", &path)]);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        let ask = |client: &mut Client| {
            for (command, bytes) in cases {
                assert_eq!(client.ask(command), *bytes, "{route} {command}");
            }
        };
        ask(&mut client);
        agent.done(&OFFLOAD);
        ask(&mut client);
        agent.done(&BRING_BACK);
        client.finish();
    }
}
