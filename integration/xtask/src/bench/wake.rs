//! Measures how much longer a waiting CUDA call takes than the driver's own restore and unlock.

use affinode_e2e::{suite, testbed::Testbed};
use anyhow::Result;

use super::{
    Figure,
    stats::{median, noise},
};

/// Number of rounds. In each round, ten processes of each kind run on one GPU.
const GOES: usize = 4;

/// Measures the time that the driver needs for restore and unlock, and the time that a waiting call
/// needs to wake its process.
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
