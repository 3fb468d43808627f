//! Computes the result for a node without offloads.

use super::{
    SimulatedMachine, SimulationSummary, WorkloadTrace, summary::SummaryMeter, trace::TraceLoad,
};
use crate::core::ledger::margin_bytes;

/// Nothing is offloaded: processes that do not fit are refused.
pub(super) fn run(
    trace: &WorkloadTrace,
    machine: SimulatedMachine,
    name: &str,
) -> SimulationSummary {
    let mut loads: Vec<&TraceLoad> = trace.loads.iter().collect();
    loads.sort_by_key(|load| load.arrivals_ms.first().copied());
    let mut meter = SummaryMeter::new(trace.end_ms(), machine.vram_bytes * machine.gpus as u64);
    let mut figures = SimulationSummary {
        policy: name.to_owned(),
        requests: trace.requests(),
        fairness_jain: 1.0,
        ..SimulationSummary::default()
    };
    let mut used = vec![0; machine.gpus];
    for load in loads {
        // A new process takes the GPU with the most free VRAM.
        let Some(gpu) = used.iter_mut().min() else { continue };
        if *gpu + load.vram_bytes + margin_bytes(machine.vram_bytes) > machine.vram_bytes {
            figures.refused += load.arrivals_ms.len() as u64;
            continue;
        }
        *gpu += load.vram_bytes;
        let at = load.arrivals_ms.first().copied().unwrap_or(0);
        meter.set(at.into(), used.iter().sum(), 0);
    }
    meter.finish(&mut figures);
    figures
}
