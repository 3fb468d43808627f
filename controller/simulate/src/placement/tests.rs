use super::*;

const GIB: u64 = 1 << 30;
const VRAM: u64 = 140 * GIB;

fn load(gib: u64, calls_s: &[u32]) -> TraceLoad {
    TraceLoad {
        vram_bytes: gib * GIB,
        service_ms: 1_000,
        arrivals_ms: calls_s.iter().map(|s| s * 1_000).collect(),
        ..TraceLoad::default()
    }
}

fn choose(loads: &[TraceLoad], oversubscription: f64) -> GpuPlacement {
    let trace = WorkloadTrace { loads: loads.to_vec() };
    GpuPlacement::choose(&trace, None, VRAM, oversubscription).unwrap()
}

#[test]
fn simultaneous_processes_decide_gpu_count() {
    let together: Vec<TraceLoad> = (0..143).map(|n| load(16, &[n, 10_000 + n])).collect();
    // Eight of these processes fit on a GPU.
    assert_eq!(choose(&together, 1.0).gpus, 18);
    assert_eq!(choose(&together, 2.0).gpus, 9);
    // Each process ends days before the next one starts.
    let in_turn: Vec<TraceLoad> =
        (0..20).map(|n| load(16, &[n * 200_000, n * 200_000 + 5])).collect();
    let placed = choose(&in_turn, 1.0);
    assert_eq!((placed.gpus, placed.rule, placed.peak_bytes), (1, GpuRule::Peak, 16 * GIB));
}

#[test]
fn sizes_that_leave_gaps_need_more_gpus() {
    let loads: Vec<TraceLoad> = (0..3).map(|_| load(80, &[0, 100])).collect();
    let placed = choose(&loads, 1.0);
    assert_eq!((placed.gpus, placed.of_process), (3, vec![0, 1, 2]));
}

#[test]
fn gpus_of_the_trace_are_used() {
    let mut loads: Vec<TraceLoad> = (0..4).map(|_| load(16, &[0, 100])).collect();
    for (load, gpu) in loads.iter_mut().zip(["b", "a", "b", "c"]) {
        load.gpu = gpu.into();
    }
    let placed = choose(&loads, 1.0);
    let expected = (GpuRule::Named, 3, vec![1, 0, 1, 2]);
    assert_eq!((placed.rule, placed.gpus, placed.of_process), expected);
    loads[3].gpu.clear();
    assert_eq!(choose(&loads, 1.0).rule, GpuRule::Peak, "one process names no GPU");
}

#[test]
fn stated_number_of_gpus_is_kept() {
    let loads: Vec<TraceLoad> = (0..4).map(|_| load(16, &[0, 100])).collect();
    let trace = WorkloadTrace { loads };
    let placed = GpuPlacement::choose(&trace, Some(2), VRAM, 1.0).unwrap();
    assert_eq!((placed.rule, placed.of_process), (GpuRule::Given, vec![0, 1, 0, 1]));
}

#[test]
fn too_many_gpus_are_an_error() {
    let loads: Vec<TraceLoad> = (0..2_000).map(|_| load(130, &[0, 100])).collect();
    let trace = WorkloadTrace { loads };
    let result = GpuPlacement::choose(&trace, None, VRAM, 1.0);
    assert!(matches!(result, Err(SimulationError::TooManyGpus { .. })));
}
