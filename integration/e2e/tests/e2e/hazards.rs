//! The five calls that kill an application whose GPU state is away.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    worker::Worker,
    world::{Recipe, World},
};
use anyhow::{Context, Result};

use crate::offload::{MANUAL, move_out, wait_gpu_empty};

const CALLS: [&str; 5] = ["ctx-sync", "stream-sync", "stream-query", "event-query", "event-sync"];
/// Thirty in all.
const ROUNDS: usize = 6;

fn crasher(world: &World, call: &str, preload: bool) -> Result<Worker> {
    let spec = Spec::gpu(call, &[&format!("{CLIENTS}/crashers"), call]);
    let spec = if preload { spec } else { spec.annotation("affinode.io/inject", "false") };
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    Ok(worker)
}

#[test]
fn each_of_them_returns_thirty_of_thirty() -> Result<()> {
    let world = Recipe::default().config(MANUAL).world()?;
    for call in CALLS {
        let mut worker = crasher(&world, call, true)?;
        for _ in 0..ROUNDS {
            move_out(&world, call)?;
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
        let mut worker = crasher(&world, call, false)?;
        let pid = worker.running.pid(&world)?.to_string();
        let tool = world.artifacts().clients_dir().join("checkpoint");
        let done = world.host_gpu_command(&tool).args([&pid, "lock", "checkpoint"]).output()?;
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        worker.send("go")?;
        worker.running.wait_stopped(&world)?;
        let status = worker.running.exit_status(&world)?.context("it has ended")?;
        assert_eq!(status, 128 + nix::sys::signal::Signal::SIGSEGV as i32, "{call}");
        worker.running.delete(&world)?;
    }
    Ok(())
}
