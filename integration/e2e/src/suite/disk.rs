//! Measures content that moves from the host pool to disk and back, beside the speed of the disk
//! itself, and a restore from host memory while content of another container moves to disk.

use std::{
    fs::File,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::fcntl::OFlag;

use super::{
    BY_ORDER,
    engines::{ENGINE, SCRUBBED_AFTER},
    median,
    report::Rows,
};
use crate::{
    gpu::Gpu,
    testbed::{MIB, Testbed},
    wait::until_within,
    worker::{USUAL, Worker},
};

const NAME: &str = "on-disk";
const BESIDE: &str = "in-memory";
const ROUNDS: usize = 3;
/// Time limit for a move to disk. The slowest disks of cloud machines write 100 MB/s.
const STORED_WITHIN: Duration = Duration::from_secs(180);

/// Settings of a node whose content moves to this folder as soon as a container is offloaded.
#[must_use]
pub fn config(folder: &Path) -> String {
    format!(
        "[memory]\ndisk_folder = \"{}\"\ndisk_max_mib = 32768\n[[policy.namespace]]\nname = \
         \"default\"\ndisk_after = \"1ms\"\n",
        folder.display()
    )
}

fn vram_mib(world: &Testbed) -> u64 {
    if matches!(world.gpu(), Gpu::Real) { 8192 } else { 256 }
}

/// Measures the moves of one container, and those of a second one beside it.
///
/// # Errors
/// When a container does not start, or its content does not move.
pub fn moves(world: &Testbed, folder: &Path, rows: &mut Rows) -> Result<()> {
    let bytes = vram_mib(world) * MIB;
    let speed = |ms: f64| bytes as f64 / ms / 1e6;
    let (write_ms, read_ms) = disk_itself(folder, vram_mib(world))?;
    let mut worker = start(world, NAME, "1ms")?;
    let (mut out, mut back, mut good) = (Vec::new(), Vec::new(), 0);
    for _ in 0..ROUNDS {
        let before = stored(world)?.len();
        offload(world, NAME)?;
        until_within(STORED_WITHIN, "the content to be on disk", || {
            Ok((stored(world)?.len() > before).then_some(()))
        })?;
        out.push(stored(world)?.last().copied().unwrap_or_default() * 1e3);
        back.push(worker.call("streamsync")?.elapsed_us as f64 / 1e3);
        good += usize::from(worker.check(bytes)?);
    }
    rows.tell("the disk itself: write", speed(write_ms), "GB/s");
    rows.tell("the disk itself: read", speed(read_ms), "GB/s");
    rows.tell("to disk, written and read back", speed(median(&out)), "GB/s");
    rows.tell("wake from disk", speed(median(&back)), "GB/s");
    rows.tell("wake from disk, duration", median(&back), "ms");
    rows.count("contents as before", good, ROUNDS);
    beside(world, rows, &mut worker)
}

/// What the first container does while the second one is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    /// It is resident and makes no call.
    Nothing,
    /// Its content moves to disk.
    Stores,
    /// It is restored from disk.
    Returns,
}

/// Measures the wake of a container from host memory, alone and beside the other one.
fn beside(world: &Testbed, rows: &mut Rows, first: &mut Worker) -> Result<()> {
    let mut second = start(world, BESIDE, "0")?;
    let bytes = vram_mib(world) * MIB;
    for (name, meanwhile) in [
        ("alone", Meanwhile::Nothing),
        ("while another moves to disk", Meanwhile::Stores),
        ("while another is restored from disk", Meanwhile::Returns),
    ] {
        let (mut back, mut before) = (Vec::new(), 0);
        for _ in 0..ROUNDS {
            first.call("streamsync")?;
            offload(world, BESIDE)?;
            if meanwhile != Meanwhile::Nothing {
                offload(world, NAME)?;
                until_within(STORED_WITHIN, "a part of the content to be on disk", || {
                    Ok((world.cli().known(NAME)?.disk_bytes > 0).then_some(()))
                })?;
            }
            if meanwhile == Meanwhile::Returns {
                wait_stored(world, bytes)?;
                first.send("streamsync")?;
                world.cli().wait_for(NAME, "to be restored", |row| row.state != "Offloaded")?;
            }
            back.push(second.call("streamsync")?.elapsed_us as f64 / 1e3);
            if meanwhile == Meanwhile::Returns {
                before += usize::from(!first.has_answer()?);
                first.receive()?;
            }
            ensure!(second.check(bytes)?, "the content has changed");
            if meanwhile == Meanwhile::Stores {
                wait_stored(world, bytes)?;
            }
        }
        rows.tell(&format!("wake from memory, {name}"), median(&back), "ms");
        if meanwhile == Meanwhile::Returns && matches!(world.gpu(), Gpu::Real) {
            rows.count("woken before the other one, which was called first", before, ROUNDS);
        }
    }
    Ok(())
}

fn start(world: &Testbed, id: &str, disk_after: &str) -> Result<Worker> {
    let spec = Worker::spec(id, USUAL, vram_mib(world))
        .annotation(BY_ORDER.0, BY_ORDER.1)
        .annotation(ENGINE, "auto")
        .annotation("affinode.io/disk-after", disk_after);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn offload(world: &Testbed, id: &str) -> Result<()> {
    world.cli().move_out(id)?;
    if matches!(world.gpu(), Gpu::Real) {
        std::thread::sleep(SCRUBBED_AFTER);
    }
    Ok(())
}

/// Returns the durations of all moves to disk so far, in seconds, as their events say them.
fn stored(world: &Testbed) -> Result<Vec<f64>> {
    let events = world.cli().events()?;
    let moves = events.iter().filter(|event| event.kind == "stored-on-disk");
    let seconds =
        moves.filter_map(|event| event.text.strip_suffix(" s")?.rsplit_once(' ')?.1.parse().ok());
    Ok(seconds.collect())
}

fn wait_stored(world: &Testbed, bytes: u64) -> Result<()> {
    until_within(STORED_WITHIN, "the content to be on disk", || {
        Ok((world.cli().known(NAME)?.disk_bytes >= bytes).then_some(()))
    })
}

/// Writes and reads a file of this size in the folder with direct I/O, one piece after the other.
/// Returns both durations in milliseconds.
fn disk_itself(folder: &Path, mib: u64) -> Result<(f64, f64)> {
    const PIECE_BYTES: usize = 4 << 20;
    const ALIGNMENT: usize = 4096;
    let mut memory = vec![0; PIECE_BYTES + ALIGNMENT];
    let skipped = memory.as_ptr().align_offset(ALIGNMENT);
    let piece = &mut memory[skipped..][..PIECE_BYTES];
    // Content that the storage below the disk cannot compress.
    fastrand::Rng::with_seed(7).fill(piece);
    let path = folder.join("speed");
    let mut options = File::options();
    options.read(true).write(true).create_new(true).custom_flags(OFlag::O_DIRECT.bits());
    let file = options.open(&path).context("cannot measure the disk")?;
    std::fs::remove_file(&path)?;
    let offsets = || (0..mib * MIB).step_by(PIECE_BYTES);
    let begin = Instant::now();
    offsets().try_for_each(|offset| file.write_all_at(piece, offset))?;
    let write_ms = begin.elapsed().as_secs_f64() * 1e3;
    let begin = Instant::now();
    offsets().try_for_each(|offset| file.read_exact_at(piece, offset))?;
    Ok((write_ms, begin.elapsed().as_secs_f64() * 1e3))
}
