//! The five calls that kill an application whose GPU state is away.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    worker::Worker,
    world::Recipe,
};
use anyhow::Result;
use nix::sys::signal::Signal;

use crate::offload::{MANUAL, wait_gpu_empty};

const CALLS: [&str; 5] = ["ctx-sync", "stream-sync", "stream-query", "event-query", "event-sync"];
/// Thirty in all.
const ROUNDS: usize = 6;

fn crasher(call: &str) -> Spec {
    Spec::gpu(call, &[&format!("{CLIENTS}/crashers"), call])
}

#[test]
fn each_of_them_returns_thirty_of_thirty() -> Result<()> {
    let world = Recipe::default().config(MANUAL).world()?;
    for call in CALLS {
        let mut worker = Worker::start_as(&world, crasher(call))?;
        worker.expect("ready")?;
        for _ in 0..ROUNDS {
            world.cli().move_out(call)?;
            wait_gpu_empty(&world)?;
            let answer = worker.call("go")?;
            assert_eq!(answer.ok, Some(true), "{call}");
        }
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

/// The hazard is real: without the library, the same programs die of a segmentation fault.
#[test]
fn each_of_them_kills_without_the_library() -> Result<()> {
    let world = Recipe::default().config(MANUAL).world()?;
    for call in CALLS {
        let spec = crasher(call).annotation("affinode.io/inject", "false");
        let (spec, pipes) = spec.piped(&world)?;
        let mut container = spec.command(&world, &["--rm"])?.spawn()?;
        let mut worker = Worker::attach(&spec, &pipes)?;
        worker.expect("ready")?;
        let pid = worker.running.pid(&world)?.to_string();
        let tool = world.artifacts().clients_dir().join("checkpoint");
        let done = world.host_gpu_command(&tool).args([&pid, "lock", "checkpoint"]).output()?;
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        worker.send("go")?;
        assert_eq!(container.wait()?.code(), Some(128 + Signal::SIGSEGV as i32), "{call}");
    }
    Ok(())
}
