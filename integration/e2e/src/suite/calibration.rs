//! Measures how long offloads and restores take on this machine, and writes the file for `affinode
//! simulate --calibration`.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::{BY_ORDER, engines::ENGINE, median};
use crate::{
    gpu::Gpu,
    testbed::{MIB, Testbed},
    worker::{USUAL, Worker},
};

const ROUNDS: usize = 3;

/// Measured costs of an offload and a restore: each takes a fixed time plus a time for its bytes.
/// The cost of a cold start is not measured, because it depends on the program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Fixed time of an offload, in milliseconds.
    pub offload_fixed_ms: u64,
    /// Speed of the copy in an offload, in bytes per second.
    pub offload_bytes_per_second: f64,
    /// Fixed time of a restore, in milliseconds.
    pub restore_fixed_ms: u64,
    /// Speed of the copy in a restore, in bytes per second.
    pub restore_bytes_per_second: f64,
}

/// Size of an offload or restore in bytes, and its duration in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Took {
    bytes: u64,
    ms: f64,
}

/// Offloads and restores a small and a large process repeatedly with one engine, and returns the
/// costs.
///
/// # Errors
/// When a process does not start or move.
pub fn measure(world: &Testbed, engine: &str) -> Result<Calibration> {
    let sizes_mib = match world.gpu() {
        Gpu::Real => [1024, 8192],
        Gpu::Simulated { .. } => [64, 1024],
    };
    let [(small_out, small_back), (large_out, large_back)] = [
        moves(world, engine, "small", sizes_mib[0])?,
        moves(world, engine, "large", sizes_mib[1])?,
    ];
    let (offload_fixed_ms, offload_bytes_per_second) = fit(small_out, large_out);
    let (restore_fixed_ms, restore_bytes_per_second) = fit(small_back, large_back);
    Ok(Calibration {
        offload_fixed_ms,
        offload_bytes_per_second,
        restore_fixed_ms,
        restore_bytes_per_second,
    })
}

impl Calibration {
    /// Writes the calibration to a TOML file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, file: &Path, engine: &str, gpu: &str) -> Result<()> {
        let text = format!(
            "# What moves cost, engine {engine}, {gpu}. For `affinode simulate --calibration`.\n\
             engine = \"{engine}\"\noffload_fixed_ms = {}\noffload_bytes_per_second = {:e}\n\
             restore_fixed_ms = {}\nrestore_bytes_per_second = {:e}\n",
            self.offload_fixed_ms,
            self.offload_bytes_per_second,
            self.restore_fixed_ms,
            self.restore_bytes_per_second,
        );
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// Offloads and restores a process with `mib` MiB of VRAM repeatedly. Returns the median durations
/// of the offload and of the restore. The first cycle is a warm-up and does not count.
fn moves(world: &Testbed, engine: &str, name: &str, mib: u64) -> Result<(Took, Took)> {
    let id = format!("calibration-{engine}-{name}");
    let spec =
        Worker::spec(&id, USUAL, mib).annotation(BY_ORDER.0, BY_ORDER.1).annotation(ENGINE, engine);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        world.cli().move_out(&id)?;
        let row = world.cli().known(&id)?;
        let wake_ms = worker.call("streamsync")?.elapsed_us as f64 / 1000.0;
        if round > 0 {
            out.push(row.last_offload_ms as f64);
            back.push(wake_ms);
        }
    }
    worker.running.kill(world)?;
    worker.running.delete(world)?;
    let took = |ms: &[f64]| Took { bytes: mib * MIB, ms: median(ms) };
    Ok((took(&out), took(&back)))
}

/// Fits a straight line through the durations of a small and a large offload or restore. Returns
/// the milliseconds at 0 bytes, and the bytes per second. Noise can make the large move as fast as
/// the small move. The speed is then computed from the whole duration of the large move.
fn fit(small: Took, large: Took) -> (u64, f64) {
    let (bytes, ms) = ((large.bytes - small.bytes) as f64, large.ms - small.ms);
    let per_ms = if ms > 0.0 { bytes / ms } else { large.bytes as f64 / large.ms.max(0.001) };
    let fixed_ms = (small.ms - small.bytes as f64 / per_ms).max(0.0);
    (fixed_ms.round() as u64, (per_ms * 1000.0).max(1e6).round())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sizes_tell_the_fixed_part_from_the_speed() {
        let took = |mib: u64, ms| Took { bytes: mib << 20, ms };
        let (fixed_ms, speed) = fit(took(1024, 600.0), took(8192, 4200.0));
        assert_eq!(fixed_ms, 86);
        assert!((speed / (1 << 20) as f64 - 1991.1).abs() < 0.1, "{speed}");
        // Two kinds of noise: the large move is faster than the small move, or its time grows by a
        // larger factor than its size.
        let (fixed_ms, speed) = fit(took(64, 10.0), took(128, 9.0));
        assert!(fixed_ms < 10 && speed > 1e6);
        assert_eq!(fit(took(64, 10.0), took(128, 100.0)).0, 0);
    }
}
