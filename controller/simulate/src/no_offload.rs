//! Computes the results for a node without offloads. A process frees its VRAM only when it ends.

use std::{cmp::Reverse, collections::BinaryHeap};

use affinode_core::ledger::margin_bytes;

use super::{
    SimulatedMachine, SimulationSummary, WorkloadTrace, summary::SummaryMeter, trace::TraceLoad,
};

/// Simulates the trace without offloads. A process that does not fit on its GPU is refused.
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
    let mut ends: BinaryHeap<Reverse<(u64, usize, u64)>> = BinaryHeap::new();
    for load in loads {
        let at = load.arrivals_ms.first().copied().unwrap_or(0);
        while ends.peek().is_some_and(|Reverse((end, ..))| *end < u64::from(at))
            && let Some(Reverse((end, gpu, bytes))) = ends.pop()
        {
            used[gpu] -= bytes;
            meter.set(end, used.iter().sum(), 0);
        }
        let number = load.gpu_number.min(machine.gpus - 1);
        let gpu = &mut used[number];
        if *gpu + load.vram_bytes + margin_bytes(machine.vram_bytes) > machine.vram_bytes {
            figures.refused += load.arrivals_ms.len() as u64;
            continue;
        }
        *gpu += load.vram_bytes;
        let end = load.exit_ms(trace.end_ms());
        ends.extend(end.map(|end| Reverse((end, number, load.vram_bytes))));
        meter.set(at.into(), used.iter().sum(), 0);
    }
    while let Some(Reverse((end, gpu, bytes))) = ends.pop() {
        used[gpu] -= bytes;
        meter.set(end, used.iter().sum(), 0);
    }
    meter.finish(&mut figures);
    figures
}
