//! Computes the results of a simulation at its end.

use affinode_core::Millis;

use super::{SimulatedNode, process::SimulatedProcess};
use crate::summary::{self, ContainerTotals, SimulationSummary};

/// Computes the results of a simulation. `reloads`: in this baseline, processes are ended and load
/// their data from disk again.
pub(super) fn finish(mut world: SimulatedNode<'_>, reloads: bool) -> SimulationSummary {
    let mut summary = std::mem::take(&mut world.figures);
    let end = meter_end(&world);
    let (mut freed, mut life, mut used, mut span) = (0_u128, 0_u128, 0_u128, 0_u128);
    for p in &mut world.processes {
        p.count_freed(p.last());
        let bytes = u128::from(p.load.vram_bytes);
        freed += p.freed_byte_ms;
        life += bytes * u128::from(p.last() - p.first());
        used += bytes * u128::from(p.used_ms.min(p.last() - p.first()));
        span += bytes * u128::from(end);
    }
    let share = |of: u128| if of > 0 { freed as f64 / of as f64 } else { 0.0 };
    summary.freed_of_all = share(life);
    summary.freed_of_idle = share(life.saturating_sub(used));
    summary.freed_of_trace = share(span);
    summary.restores_per_process_hour =
        summary.restores as f64 / (world.processes.len() as f64 * end.max(1) as f64 / 3_600_000.0);
    summary.wake_share = world.wakes as f64 / summary.requests.max(1) as f64;
    (summary.prewakes, summary.prewake_hits) = world.node.prewakes();
    let host = world.host.figures(end);
    if !reloads {
        summary.host_mean_bytes = host.memory_mean_bytes;
        summary.host_peak_bytes = host.memory_peak_bytes;
        summary.disk_peak_bytes = host.disk_peak_bytes;
    }
    let lived: Vec<ContainerTotals> = world.processes.iter().map(|p| p.lived).collect();
    summary::latency(&mut summary, world.delays, &lived, world.machine.slo_ms);
    world.meter.finish(&mut summary);
    summary
}

fn meter_end(world: &SimulatedNode<'_>) -> Millis {
    world.processes.iter().map(SimulatedProcess::last).max().unwrap_or(0).max(1)
}
