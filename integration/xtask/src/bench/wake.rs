//! Measures how much longer a waiting CUDA call takes than the driver's own restore and unlock.

use affinode_e2e::{suite, testbed::Testbed};
use anyhow::Result;

use super::{
    Figure,
    stats::{median, noise},
};

/// Number of rounds. In each round, two durations are measured ten times each: the driver's restore
/// of an unmanaged process, and the CUDA call that wakes a managed process.
const GOES: usize = 4;

/// Measures the duration of the driver's own restore and unlock, and the duration of a CUDA call
/// that waits until its process is restored.
pub fn measure(world: &Testbed) -> Result<Vec<Figure>> {
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..GOES {
        let (driver, felt) = suite::wake_ms(world)?;
        without.push(driver);
        with.push(felt);
    }
    let noise = noise(&without);
    let (without, with) = (median(&without), median(&with));
    Ok(vec![Figure {
        name: "wake of a small process",
        unit: "ms",
        without,
        with,
        noise,
        goal: "at most 10 ms more",
        met: with - without <= 10.0,
        method: "restore and unlock called from outside on an unmanaged process, against the first call's own time \
                 in a managed one; medians of ten, four times in turn"
            .into(),
    }])
}
