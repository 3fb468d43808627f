//! Determines the number of GPUs of a simulated node, and the GPU of each process.
//!
//! ```text
//!  number given        ──> that many GPUs, each process on the GPU with the least VRAM in use
//!  trace names GPUs    ──> those GPUs, each process on the GPU of its name
//!  otherwise           ──> the fewest GPUs for all processes that exist at the same time
//! ```
//!
//! In the last case, the processes on a GPU may together want the GPU's VRAM times the
//! oversubscription.
//!
//! A process exists from its first call to the end of the trace. If its last call is more than a
//! day before the end of the trace, it exists until that call.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
};

use affinode_core::ledger::margin_bytes;

use super::{SimulationError, TraceLoad, WorkloadTrace};

/// Maximum number of GPUs that the simulation supports.
pub const MAX_GPUS: usize = 1024;

/// The rule by which the number of GPUs was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuRule {
    /// The user gave the number of GPUs.
    Given,
    /// The trace names the GPU of each process.
    Named,
    /// The number follows from the VRAM of the processes that exist at the same time.
    Peak,
}

/// The number of GPUs of a simulated node, and the GPU of each process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPlacement {
    /// The rule that determined the number of GPUs.
    pub rule: GpuRule,
    /// Number of GPUs of the simulated node.
    pub gpus: usize,
    /// Number of each process's GPU, in the order of the processes in the trace.
    pub of_process: Vec<usize>,
    /// Maximum VRAM of all processes that exist at the same time, in bytes.
    pub peak_bytes: u64,
}

impl GpuPlacement {
    /// Places the processes of a trace on GPUs. `gpus` is the number of GPUs that the user stated.
    /// `vram_bytes` is the VRAM of one GPU. `oversubscription` is the maximum VRAM that the
    /// processes of a GPU may want at the same time, divided by the VRAM that containers can use on
    /// it.
    ///
    /// # Errors
    /// The trace needs more than [`MAX_GPUS`].
    pub fn choose(
        trace: &WorkloadTrace,
        gpus: Option<usize>,
        vram_bytes: u64,
        oversubscription: f64,
    ) -> Result<GpuPlacement, SimulationError> {
        let peak_bytes = spread(trace, 1).1;
        if let Some(gpus) = gpus {
            let gpus = gpus.clamp(1, MAX_GPUS);
            let of_process = spread(trace, gpus).0;
            return Ok(GpuPlacement { rule: GpuRule::Given, gpus, of_process, peak_bytes });
        }
        if let Some((gpus, of_process)) = named(&trace.loads) {
            return Ok(GpuPlacement { rule: GpuRule::Named, gpus, of_process, peak_bytes });
        }
        let usable_bytes = vram_bytes.saturating_sub(margin_bytes(vram_bytes)) as f64;
        let most_bytes = (usable_bytes * oversubscription) as u64;
        let fewest = peak_bytes.div_ceil(most_bytes.max(1)).max(1);
        for gpus in usize::try_from(fewest).unwrap_or(usize::MAX)..=MAX_GPUS {
            // The processes may need more GPUs than the sum of their VRAM suggests, because their
            // sizes and lifetimes may leave gaps.
            let (of_process, held_bytes) = spread(trace, gpus);
            if held_bytes <= most_bytes || gpus >= trace.loads.len() {
                return Ok(GpuPlacement { rule: GpuRule::Peak, gpus, of_process, peak_bytes });
            }
        }
        Err(SimulationError::TooManyGpus { peak_bytes, limit: MAX_GPUS })
    }

    /// Writes the GPU of each process into the trace.
    pub fn apply(&self, trace: &mut WorkloadTrace) {
        for (load, gpu) in trace.loads.iter_mut().zip(&self.of_process) {
            load.gpu_number = *gpu;
        }
    }
}

/// Returns the indexes of the processes in the order in which the processes start.
fn by_start(loads: &[TraceLoad]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|n| loads[*n].arrivals_ms.first().copied());
    order
}

/// Puts each process, when it starts, on the GPU with the least VRAM held. Returns the GPU of each
/// process, and the maximum VRAM that is held on one GPU at a time.
fn spread(trace: &WorkloadTrace, gpus: usize) -> (Vec<usize>, u64) {
    let (loads, end_ms) = (&trace.loads, trace.end_ms());
    let mut by_held: BTreeSet<(u64, usize)> = (0..gpus).map(|gpu| (0, gpu)).collect();
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut of_process, mut held) = (vec![0; loads.len()], vec![0_u64; gpus]);
    let mut peak = 0;
    for n in by_start(loads) {
        let start = loads[n].arrivals_ms.first().map_or(0, |at| u64::from(*at));
        while ends.peek().is_some_and(|Reverse((at, _))| *at < start)
            && let Some(Reverse((_, ended))) = ends.pop()
        {
            let gpu: usize = of_process[ended];
            by_held.remove(&(held[gpu], gpu));
            held[gpu] -= loads[ended].vram_bytes;
            by_held.insert((held[gpu], gpu));
        }
        let Some((before, gpu)) = by_held.pop_first() else { break };
        of_process[n] = gpu;
        held[gpu] = before + loads[n].vram_bytes;
        peak = peak.max(held[gpu]);
        by_held.insert((held[gpu], gpu));
        ends.extend(loads[n].exit_ms(end_ms).map(|at| Reverse((at, n))));
    }
    (of_process, peak)
}

/// Returns the number of GPUs that the trace names, and the GPU of each process. GPUs are numbered
/// by name. `None`: the trace does not name a GPU for each process.
fn named(loads: &[TraceLoad]) -> Option<(usize, Vec<usize>)> {
    let names: BTreeSet<&str> = loads.iter().map(|load| load.gpu.as_str()).collect();
    let numbers: BTreeMap<&str, usize> = names.into_iter().zip(0..).collect();
    let is_named = !numbers.contains_key("") && numbers.len() <= MAX_GPUS;
    is_named.then(|| (numbers.len(), loads.iter().map(|load| numbers[load.gpu.as_str()]).collect()))
}

#[cfg(test)]
mod tests;
