//! Restore policy `immediate`: whoever is called does not wait for those that are in use.

use affinode_e2e::{
    gpu::Gpu,
    until::until,
    worker::{USUAL, Worker},
    world::{MIB, Recipe, World},
};
use anyhow::{Context, Result};

/// An hour without a call makes idle: whoever leaves was made to.
const CONFIG: &str = r#"
[policy]
mode = "pressure"
idle_timeout = "1h"
keep_alive = "fixed"
minimum_residency = "1ms"
restore = "by-annotation"
[timing]
sample_interval = "50ms"
"#;

/// VRAM for one, and one that is away and annotated.
fn asker(annotation: &str) -> Result<(World, Worker)> {
    let recipe = Recipe::default().gpu(Gpu::Simulated { vram_bytes: 160 * MIB });
    let world = recipe.config(CONFIG).world()?;
    let spec = Worker::spec("asker", USUAL, 80).annotation("affinode.io/restore", annotation);
    let mut asker = Worker::start_as(&world, spec)?;
    asker.wait_filled()?;
    world.cli().move_out("asker")?;
    Ok((world, asker))
}

/// It works every 20 ms, and says each time how that went.
fn busy(world: &World) -> Result<Worker> {
    let mut spec = Worker::spec("busy", USUAL, 80);
    spec.argv.extend(["--period-ms".into(), "20".into()]);
    let mut busy = Worker::start_as(world, spec)?;
    busy.wait_filled()?;
    Ok(busy)
}

#[test]
fn who_is_in_use_is_moved_for_an_immediate_return_and_goes_on_later() -> Result<()> {
    let (world, mut asker) = asker("immediate")?;
    let mut busy = busy(&world)?;
    assert!(asker.verify()?);
    let moved = world.cli().container("busy")?.context("it is known")?;
    assert_eq!((moved.offloads, moved.processes.len()), (1, 1), "{moved:?}");
    assert!(world.cli().events()?.iter().all(|event| event.kind != "ended"));
    // Its work waits, and goes on when the other has no use for the room any more.
    asker.running.kill(&world)?;
    until("the busy one to be back", || {
        let row = world.cli().container("busy")?;
        Ok(row.filter(|row| row.state == "Active" && row.restores == 1))
    })?;
    busy.expect("period").map(|_| ())
}

#[test]
fn in_the_queue_who_is_in_use_is_waited_for() -> Result<()> {
    let (world, mut asker) = asker("queue")?;
    let mut busy = busy(&world)?;
    asker.send("verify")?;
    until("the return to wait", || {
        let row = world.cli().container("asker")?;
        Ok(row.filter(|row| row.state == "Queued" && row.reason == "waiting-for-vram"))
    })?;
    // A hundred times it had its turn.
    (0..100).try_for_each(|_| busy.expect("period").map(|_| ()))?;
    assert!(!asker.has_answer()?);
    assert_eq!(world.cli().container("busy")?.map(|row| row.offloads), Some(0));
    busy.running.kill(&world)?;
    asker.expect("verify").map(|_| ())
}

/// The driver cannot checkpoint managed memory: only the end of the process gives its room.
#[test]
fn who_cannot_be_moved_is_ended_for_an_immediate_return_and_nobody_else() -> Result<()> {
    let (world, mut asker) = asker("immediate")?;
    let mut small = Worker::start(&world, "small", 8)?;
    let mut fixed = Worker::start(&world, "fixed", 80)?;
    fixed.call("managed")?;
    assert!(asker.verify()?);
    fixed.running.wait_stopped(&world)?;
    let events = world.cli().events()?;
    let ended: Vec<_> = events.iter().filter(|event| event.kind == "ended").collect();
    assert!(
        matches!(ended.as_slice(), [event] if event.container.contains("fixed")
            && event.reason == "ended-for-room"),
        "{ended:?}"
    );
    assert!(small.verify()? && asker.verify()?);
    Ok(())
}

/// Only an operator can let containers end others.
#[test]
fn an_annotation_alone_ends_nobody() -> Result<()> {
    let config = CONFIG.replace("by-annotation", "queue");
    let world = Recipe::default().config(&config).world()?;
    let spec = Worker::spec("asker", USUAL, 32).annotation("affinode.io/restore", "immediate");
    let mut asker = Worker::start_as(&world, spec)?;
    asker.wait_filled()?;
    let row = world.cli().container("asker")?.context("it is known")?;
    assert!(row.warnings.iter().any(|line| line.contains("by-annotation")), "{row:?}");
    let shown = world.cli().run(&["policy", "show", "asker", "--no-headers"])?;
    let value = shown.lines().find(|line| line.contains(" restore ")).context("it is shown")?;
    assert!(value.contains("queue") && value.contains("node"), "{value}");
    assert!(asker.verify()?);
    Ok(())
}
