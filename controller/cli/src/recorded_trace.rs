//! Builds a trace of GPU use from the history that a controller recorded, for a simulation.

use std::collections::BTreeMap;

use affinode_controller::history::StateSpan;
use affinode_simulate::{
    SimulationError,
    trace::{TraceDefaults, TraceLoad, WorkloadTrace},
};

/// Time that the trace assumes between two CUDA calls while a container is in use, in milliseconds.
const STEP_MS: u32 = 1_500;

/// What the controller achieved with its offloads in the recorded history. The values are compared
/// with those of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecordedCall {
    /// Share of the VRAM that offloads freed, from 0 to 1. It is the freed GPU seconds divided by
    /// the sum of freed and held GPU seconds.
    pub freed: f64,
    /// Number of restores for which CUDA calls waited.
    pub wakes: u64,
}

/// Builds a trace from the spans of a history. The times in the trace are counted from `since_ms`.
///
/// # Errors
/// No container was in use in the history.
pub fn trace(
    spans: &[StateSpan],
    since_ms: i64,
    assumed: TraceDefaults,
) -> Result<WorkloadTrace, SimulationError> {
    let mut loads: BTreeMap<&str, TraceLoad> = BTreeMap::new();
    for span in spans {
        let parts = [&span.namespace, &span.pod, &span.container];
        let name: Vec<&str> =
            parts.into_iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
        let load = loads.entry(&span.key).or_insert_with(|| TraceLoad {
            name: name.join("/"),
            namespace: span.namespace.clone(),
            service_ms: assumed.service_ms,
            ..TraceLoad::default()
        });
        load.vram_bytes = load.vram_bytes.max(span.vram_bytes.saturating_add(span.offloaded_bytes));
        for (begin, end) in &span.uses {
            let at = |offset: u32| u32::try_from(span.from_ms + i64::from(offset) - since_ms);
            // Uses that begin before the start, or more than 49 days after it, are left out.
            if let (Ok(begin), Ok(end)) = (at(*begin), at(*end)) {
                load.arrivals_ms.extend((begin..=end).step_by(STEP_MS as usize));
            }
        }
    }
    let held = loads.into_values().filter(|load| load.vram_bytes > 0);
    WorkloadTrace { loads: held.collect() }.checked()
}

/// Computes what the controller achieved with its offloads, from the spans of the recorded history.
#[must_use]
pub fn happened(spans: &[StateSpan]) -> RecordedCall {
    let sum = |part: fn(&StateSpan) -> f64| spans.iter().map(part).sum::<f64>();
    let (held, offloaded) =
        (sum(|span| span.held_gpu_seconds), sum(|span| span.offloaded_gpu_seconds));
    let freed = if held + offloaded > 0.0 { offloaded / (held + offloaded) } else { 0.0 };
    RecordedCall { freed, wakes: spans.iter().filter(|span| span.wake_ms > 0).count() as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_history_is_replayed() {
        let span =
            |key: &str, from_ms, uses: &[(u32, u32)], vram_bytes, offloaded_bytes| StateSpan {
                key: key.into(),
                namespace: "ml".into(),
                container: key.into(),
                from_ms,
                uses: uses.to_vec(),
                vram_bytes,
                offloaded_bytes,
                held_gpu_seconds: 1.0,
                offloaded_gpu_seconds: 3.0,
                wake_ms: 5,
                ..StateSpan::default()
            };
        let spans = [
            span("a", 10_000, &[(0, 3_000), (60_000, 60_000)], 7, 0),
            span("a", 900_000, &[(1_000, 1_000)], 0, 8),
            span("b", 10_000, &[], 7, 0),
        ];
        let assumed = TraceDefaults { vram_bytes: 1, service_ms: 1_000, seed: 1 };
        let trace = trace(&spans, 5_000, assumed).unwrap();
        assert_eq!(trace.loads.len(), 1, "b was never in use");
        let load = &trace.loads[0];
        assert_eq!((load.name.as_str(), load.vram_bytes), ("ml/a", 8));
        assert_eq!(load.arrivals_ms, [5_000, 6_500, 8_000, 65_000, 896_000]);
        assert_eq!(happened(&spans), RecordedCall { freed: 0.75, wakes: 3 });
    }
}
