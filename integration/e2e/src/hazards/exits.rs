//! Hazards in which an offloaded container's program ends while another container holds all VRAM.

use anyhow::{Result, ensure};

use super::{
    Case, Found,
    manual_ops::{Held, ballast},
};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    worker::Answer,
};

const ENGINES: [&str; 3] = ["checkpoint", "full", "copy"];

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("exit-while-offloaded, releases before the driver's end", |world| {
            without_room(world, "release")
        }),
        Case::new("exit-while-offloaded, releases after the driver's end", |world| {
            without_room(world, "ended")
        }),
        Case::new("exit-while-offloaded, results read in an exit handler", results),
    ]
}

fn spec(id: &str, kind: &str) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/exits"), kind])
}

/// Runs a program without Affinode. Returns what the program's exit handler printed, and the
/// program's exit status.
fn bare(world: &Testbed, kind: &str) -> Result<(Answer, Option<i32>)> {
    let mut bare = Held::bare(world, spec("bare", kind))?;
    bare.worker.expect("ready")?;
    bare.worker.send("go")?;
    let said = bare.worker.receive()?;
    Ok((said, bare.end()?.0))
}

fn check(held: Held, said: &Answer, as_bare: &(Answer, Option<i32>)) -> Result<()> {
    let (bare, status) = as_bare;
    ensure!(
        (&said.checksum, said.result, said.ok) == (&bare.checksum, bare.result, bare.ok),
        "the exit handler printed {said:?}, but {bare:?} without Affinode"
    );
    let (ended, word) = held.end()?;
    ensure!(
        ended == *status,
        "the program {word}, but without Affinode it ended with status {status:?}"
    );
    Ok(())
}

/// Returns the sequence number of the controller's newest event.
fn newest(world: &Testbed) -> Result<u64> {
    Ok(world.cli().events()?.iter().map(|event| event.sequence).max().unwrap_or(0))
}

/// Requires that the container has no unexpected event after the sequence number `since`. Every
/// refusal is unexpected. A change to the state Queued, Restoring or Lost is unexpected unless
/// `allowed` contains the state.
fn no_trouble(world: &Testbed, id: &str, since: u64, allowed: &[&str]) -> Result<()> {
    let name = format!("default/{id}");
    let trouble = |event: &crate::cli::EventRow| {
        let asked = ["Queued", "Restoring", "Lost"].contains(&event.to.as_str())
            && !allowed.contains(&event.to.as_str());
        event.sequence > since && event.container == name && (asked || event.kind == "refused")
    };
    let events = world.cli().events()?;
    let found = events.iter().find(|event| trouble(event));
    ensure!(found.is_none(), "expected no event about the container, got {found:?}");
    Ok(())
}

fn without_room(world: &Testbed, kind: &str) -> Result<Found> {
    let as_bare = bare(world, kind)?;
    for engine in ENGINES {
        let id = format!("exits-{kind}-{engine}");
        let spec = spec(&id, kind).annotation("affinode.io/engine", engine);
        let mut held = Held::start(world, spec)?;
        held.worker.expect("ready")?;
        world.cli().move_out(&id)?;
        let since = newest(world)?;
        // This program holds all VRAM until it is killed, which happens after the other program has
        // ended.
        let taker = ballast(world, 0)?;
        held.worker.send("go")?;
        let said = held.worker.receive()?;
        check(held, &said, &as_bare)?;
        no_trouble(world, &id, since, &[])?;
        taker.running.kill(world)?;
        taker.running.delete(world)?;
    }
    let with = "ends as without, without a return; no refusal".into();
    Ok(Found::Row { without: "-".into(), with })
}

/// Runs programs whose exit handler reads results from the GPU. With each engine, the results must
/// be the same as without Affinode.
fn results(world: &Testbed) -> Result<Found> {
    let as_bare = bare(world, "results")?;
    ensure!(
        as_bare.0.ok == Some(true),
        "expected correct results without Affinode, got {as_bare:?}"
    );
    for engine in ENGINES {
        let id = format!("exits-results-{engine}");
        let spec = spec(&id, "results").annotation("affinode.io/engine", engine);
        let mut held = Held::start(world, spec)?;
        held.worker.expect("ready")?;
        world.cli().move_out(&id)?;
        let since = newest(world)?;
        let taker = ballast(world, 0)?;
        held.worker.send("go")?;
        world.cli().wait_for_state(&id, "Queued")?;
        ensure!(!held.worker.has_answer()?, "the exit handler continued without free VRAM");
        taker.running.kill(world)?;
        taker.running.delete(world)?;
        let said = held.worker.receive()?;
        check(held, &said, &as_bare)?;
        no_trouble(world, &id, since, &["Queued", "Restoring"])?;
    }
    let with = "is restored, its handler reads what it would; no refusal".into();
    Ok(Found::Row { without: "-".into(), with })
}
