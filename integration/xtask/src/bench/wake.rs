//! What a waiting call waits for beyond the driver's own restore and unlock.

use affinode_e2e::{worker::Worker, world::{MIB, World}};
use anyhow::Result;

use super::{Figure, stats::median};

/// A small process: nothing hides behind the copy.
const BYTES: u64 = 64 * MIB;

/// Offloads and wakes a worker again and again.
pub fn measure(world: &World, rounds: usize) -> Result<Vec<Figure>> {
    let mut worker = Worker::start(world, "wake", BYTES / MIB)?;
    let (mut driver, mut felt) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        world.cli().run(&["offload", "wake"])?;
        let woken = worker.wake()?;
        felt.push(woken.call_ms);
        driver.push(woken.driver_ms);
    }
    let (without, with) = (median(&driver), median(&felt));
    Ok(vec![Figure {
        name: "wake of a small process",
        unit: "ms",
        without,
        with,
        goal: "at most 10 ms more",
        met: with - without <= 10.0,
        method: format!("{rounds} times: offload, then the first call's own time, against the driver's restore and unlock; median"),
    }])
}
