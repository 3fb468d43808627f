//! The steps of the demo: two containers fill VRAM, become idle, are offloaded and restored.

use affinode_e2e::{
    cli::{EventRow, GpuRow},
    gpu::Gpu,
    testbed::{MIB, Testbed},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};

use super::watch::Watch;
use crate::output;

/// Configuration with an idle timeout of two seconds, so that the demo is short.
pub const CONFIG: &str = r#"
[policy]
mode = "eager"
idle_timeout = "2s"
minimum_residency = "1ms"
[timing]
sample_interval = "100ms"
"#;

/// VRAM in bytes that each container fills, if the demo runs on the machine's own GPU. It is large
/// enough to be visible, and small enough to be moved quickly.
const REAL_BYTES: u64 = 2048 * MIB;

pub struct Seen {
    /// The GPU's row in the controller's report at the end of the demo.
    pub gpu: GpuRow,
    /// VRAM that each container fills.
    pub each_bytes: u64,
    /// Bytes by which the used VRAM of the GPU decreased when the first container was offloaded.
    pub freed_bytes: u64,
    /// Whether every byte in both containers was unchanged.
    pub verified: bool,
    /// Every change of state, oldest first.
    pub events: Vec<EventRow>,
}

pub fn play(world: &Testbed, quiet: bool) -> Result<Seen> {
    let each_bytes = match world.gpu() {
        // The size is a whole number of MiB, so that the offload frees exactly these bytes and the
        // context stays.
        Gpu::Simulated { vram_bytes } => vram_bytes / 10 * 6 / MIB * MIB,
        Gpu::Real => REAL_BYTES,
    };
    let mib = each_bytes / MIB;

    story(quiet, &format!("alpha fills {mib} MiB of VRAM, then makes no further call"));
    let mut alpha = Worker::start(world, "alpha", mib)?;
    let watch = Watch::start(world, quiet)?;
    let full = vram_used(world, |used| used >= each_bytes)?;
    world.cli().wait_for_state("alpha", "Offloaded")?;
    let freed_bytes = full - vram_used(world, |used| used + each_bytes <= full)?;

    story(quiet, "alpha makes a CUDA call: it waits until its VRAM is restored");
    let mut verified = alpha.verify()?;
    world.cli().wait_for_state("alpha", "Offloaded")?;

    story(quiet, &format!("beta fills {mib} MiB: together more than the GPU can hold"));
    let mut beta = Worker::start(world, "beta", mib)?;

    story(quiet, "alpha makes a CUDA call: it waits for VRAM, beta becomes idle and is evicted");
    verified &= alpha.verify()?;

    story(quiet, "beta makes a CUDA call");
    verified &= beta.verify()?;

    let events = watch.finish(world)?;
    Ok(Seen { gpu: gpu(world)?, each_bytes, freed_bytes, verified, events })
}

fn story(quiet: bool, text: &str) {
    if !quiet {
        output::out(&format!("\n  {text}"));
    }
}

/// Returns the row of the node's first GPU in the controller's report.
fn gpu(world: &Testbed) -> Result<GpuRow> {
    let node = world.cli().ps()?;
    let error = node.gpu_error.unwrap_or_else(|| "the controller sees no GPU".into());
    node.gpus.into_iter().next().context(error)
}

/// Waits until `wanted` returns true for the bytes of VRAM in use, as NVML reports them.
fn vram_used(world: &Testbed, wanted: impl Fn(u64) -> bool) -> Result<u64> {
    until("NVML to report the expected VRAM in use", || {
        Ok(Some(gpu(world)?.vram_used_bytes).filter(|used| wanted(*used)))
    })
}
