//! Test of the restore policy `immediate`. A container with this policy is restored as soon as it
//! makes a call, even if the containers in use have to leave the GPU for it.

use anyhow::Result;

use super::report::Rows;
use crate::{
    gpu::Gpu,
    hazards,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

/// Affinode's configuration for this test. A container counts as idle only after an hour, so a
/// command or another container must force each offload.
pub const CONFIG: &str = r#"
[policy]
mode = "pressure"
idle_timeout = "1h"
keep_alive = "fixed"
minimum_residency = "1ms"
restore = "by-annotation"
[timing]
sample_interval = "50ms"
"#;

/// Returns two sizes in MiB. The first is the VRAM that the scenario uses. The second is the VRAM
/// that each of its two containers allocates. With its context, a container needs more than half of
/// the first size, so the containers do not fit together.
fn sizes(world: &Testbed) -> (u64, u64) {
    match world.gpu() {
        Gpu::Real => (8192, 4096),
        Gpu::Simulated { .. } => (160, 80),
    }
}

/// Wakes an offloaded container while another container uses the VRAM. The container in use must be
/// offloaded, and must continue later. A container in use that cannot be offloaded must be ended.
pub fn takes_room(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (room_mib, each_mib) = sizes(world);
    let _ballast = hazards::ballast(world, room_mib * MIB)?;
    let spec =
        Worker::spec("asker", USUAL, each_mib).annotation("affinode.io/restore", "immediate");
    let mut asker = Worker::start_as(world, spec)?;
    asker.wait_filled()?;

    let offloaded = |world: &Testbed| world.cli().move_out("asker");
    offloaded(world)?;
    let mut spec = Worker::spec("busy", USUAL, each_mib);
    spec.argv.extend(["--period-ms".into(), "20".into()]);
    let mut busy = Worker::start_as(world, spec)?;
    busy.wait_filled()?;
    busy.expect("period")?;
    rows.count(
        "the calling container is restored, contents unchanged",
        usize::from(asker.verify()?),
        1,
    );
    let row = world.cli().known("busy")?;
    rows.count("the container in use was offloaded, not ended", usize::from(row.offloads == 1), 1);
    let asked = world.cli().known("asker")?;
    rows.tell("the wake took", asked.last_wake_ms as f64, "ms");
    offloaded(world)?;
    until("the busy container to be restored", || {
        let row = world.cli().container("busy")?;
        Ok(row.filter(|row| row.state == "Active" && row.restores == 1))
    })?;
    // The pipe still contains output from the time when the container was resident.
    while busy.has_answer()? {
        busy.expect("period")?;
    }
    busy.expect("period")?;
    rows.count("it goes on when there is room again", 1, 1);
    busy.running.kill(world)?;
    busy.running.delete(world)?;

    let mut fixed = Worker::start(world, "fixed", each_mib)?;
    // The driver cannot checkpoint managed memory, so only the end of this container frees its
    // VRAM.
    fixed.call("managed")?;
    rows.count(
        "the calling container is restored, contents unchanged",
        usize::from(asker.verify()?),
        1,
    );
    fixed.running.wait_stopped(world)?;
    let events = world.cli().events()?;
    let ended: Vec<_> = events.iter().filter(|event| event.kind == "ended").collect();
    let right = matches!(ended.as_slice(), [event] if event.container.contains("fixed"));
    rows.count("only the immovable container was ended", usize::from(right), 1);
    asker.running.kill(world)?;
    asker.running.delete(world)
}
