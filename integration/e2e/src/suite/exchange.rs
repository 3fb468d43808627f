//! Measures how long a call waits if another container must be copied out first: two containers take
//! turns, and VRAM suffices for one of them.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{engines::ENGINE, median, oversubscription, report::Rows};
use crate::{
    cli::EventRow,
    gpu::Gpu,
    testbed::{MIB, Testbed},
    worker::{USUAL, Worker},
};

const NAMES: [&str; 2] = ["exchange-a", "exchange-b"];
const TURNS: usize = 12;
/// Size of the pieces in which the program maps its memory, in MiB. Allocators of LLM servers map
/// pieces of 2 MiB to 1 GiB.
const PIECE_MIB: &str = "128";

/// Pause between two turns. It is longer than a library keeps the pages of its last copy out.
const PAUSE: Duration = Duration::from_secs(5);
/// Memory limit of the containers between whose turns there is a pause, in MiB.
const LIMIT_MIB: u64 = 4 << 10;

/// How the program allocates its memory, and when the containers are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In many pieces. Each can be released as soon as it is copied.
    Pieces,
    /// In many pieces. Between two turns there is a pause, and the memory of the containers is
    /// limited.
    PiecesAndPauses,
    /// In one allocation, which can only be released as a whole.
    OneAllocation,
}

/// Calls the two containers in turn, and adds rows with the waits.
///
/// # Errors
/// When a container does not start, or the controller does not reply.
pub fn in_turn(world: &Testbed, layout: Layout, rows: &mut Rows) -> Result<()> {
    // The room is for one container and the contexts of both.
    let (vram_mib, room_mib) = match world.gpu() {
        Gpu::Real => (24 << 10, 27 << 10),
        Gpu::Simulated { .. } => (320, 512),
    };
    let _ballast = oversubscription::ballast(world, room_mib)?;
    let mut workers = Vec::new();
    for id in NAMES {
        let spec = match layout {
            Layout::Pieces | Layout::PiecesAndPauses => {
                // The contents differ, so that equal content is not stored once.
                let seed = if id == NAMES[0] { "1" } else { "2" };
                let more = ["--piece-mib", PIECE_MIB, "--seed", seed];
                Worker::pieces(id, "auto", vram_mib, &more)
            }
            Layout::OneAllocation => Worker::spec(id, USUAL, vram_mib).annotation(ENGINE, "auto"),
        };
        let spec = spec
            .annotation("affinode.io/offload", "pressure")
            .annotation("affinode.io/idle-timeout", "100ms")
            .annotation("affinode.io/on-oom", "wait")
            .annotation("affinode.io/on-oom-timeout", "5m");
        let spec = match layout {
            Layout::PiecesAndPauses => {
                spec.flags(&["--memory-limit", &(LIMIT_MIB * MIB).to_string()])
            }
            _ => spec,
        };
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        worker.call("streamsync")?;
        workers.push(worker);
    }
    let (cli, mut waits_ms) = (world.cli(), Vec::new());
    let first = cli.events()?.last().map_or(0, |event| event.sequence);
    for turn in 0..TURNS {
        let (here, there) = (turn % 2, (turn + 1) % 2);
        let resident = NAMES.get(there).context("there are two containers")?;
        cli.wait_for_state(resident, "Idle")?;
        if layout == Layout::PiecesAndPauses && matches!(world.gpu(), Gpu::Real) {
            thread::sleep(PAUSE);
        }
        let worker = workers.get_mut(here).context("there are two containers")?;
        let asked = Instant::now();
        worker.call("streamsync")?;
        waits_ms.push(asked.elapsed().as_secs_f64() * 1_000.0);
    }
    for worker in &mut workers {
        ensure!(worker.verify()?, "memory of {} has changed", worker.running.id);
    }
    let events: Vec<_> = cli.events()?.into_iter().filter(|e| e.sequence > first).collect();
    // In the first two turns each container is offloaded for the first time.
    let waits_ms = waits_ms.split_off(2);
    let (out_ms, in_ms) =
        (between(&events, "Offloading", "Offloaded"), between(&events, "Restoring", "Active"));
    ensure!(out_ms.len() + 1 >= TURNS, "only {} offloads in {TURNS} turns", out_ms.len());
    let wait_ms = median(&waits_ms);
    let goal = match (world.gpu(), layout) {
        (Gpu::Real, Layout::Pieces | Layout::PiecesAndPauses) => "at most 750",
        _ => "",
    };
    let is_met = goal.is_empty() || wait_ms <= 750.0;
    rows.want("from the call to its return, median", wait_ms, "ms", goal, is_met);
    rows.tell(
        "from the call to its return, longest",
        waits_ms.iter().copied().fold(0.0, f64::max),
        "ms",
    );
    rows.tell("copy out, median", median(&out_ms), "ms");
    rows.tell("copy in, median", median(&in_ms), "ms");
    Ok(())
}

/// Durations from one state of a container to the next, in milliseconds, without the first of each
/// container.
fn between(events: &[EventRow], from: &str, to: &str) -> Vec<f64> {
    let mut found_ms = Vec::new();
    for name in NAMES {
        let own: Vec<_> =
            events.iter().filter(|e| e.kind == "state" && e.container.ends_with(name)).collect();
        let pairs = own.windows(2).filter_map(|pair| match pair {
            [begin, end] if begin.to == from && end.to == to => {
                Some((end.unix_ms - begin.unix_ms) as f64)
            }
            _ => None,
        });
        found_ms.extend(pairs.skip(1));
    }
    found_ms
}
