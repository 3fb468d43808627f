//! What a waiting call waits for beyond the driver's own restore and unlock.

use affinode_e2e::{suite, world::World};
use anyhow::Result;

use super::Figure;

/// Ten of each, on one GPU.
pub fn measure(world: &World) -> Result<Vec<Figure>> {
    let (without, with) = suite::wake_ms(world)?;
    Ok(vec![Figure {
        name: "wake of a small process",
        unit: "ms",
        without,
        with,
        goal: "at most 10 ms more",
        met: with - without <= 10.0,
        method: "restore and unlock called from outside on an unmanaged process, against the first call's own time \
                 in a managed one; medians of ten"
            .into(),
    }])
}
