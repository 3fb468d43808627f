//! Tests of the simulated host memory, host pool and disk.

use affinode_core::{
    Settings,
    policy::{Engine, Mode, Policies, Policy},
};
use proptest::prelude::*;

use crate::{
    Baseline, Calibration, HostLimits, HostMemoryLimits, SimulatedMachine, SimulationError,
    SimulationSummary, TraceLoad, WorkloadTrace, baselines, engine, tests::load,
};

const GIB: u64 = 1 << 30;
const HOUR_S: u32 = 3_600;

/// The configured policy, which offloads after a minute, and moves content to disk after an hour.
fn policy(engine: Engine) -> Baseline {
    let node = Policy {
        engine,
        mode: Mode::Eager,
        idle_timeout_ms: 60_000,
        disk_after_ms: 3_600_000,
        prewake: false,
        ..Policy::default()
    };
    let policies = Policies { node, ..Policies::default() };
    let settings = Settings { policies, disk: true, ..Settings::default() };
    baselines::all(&settings, 1).swap_remove(0)
}

fn simulate(
    loads: Vec<TraceLoad>,
    host: HostLimits,
    engine: Engine,
) -> Result<SimulationSummary, SimulationError> {
    let machine = SimulatedMachine {
        gpus: 1,
        vram_bytes: 140 * GIB,
        calibration: Calibration::default(),
        host,
        slo_ms: 1_000,
    };
    engine::run(&WorkloadTrace { loads }, machine, &policy(engine))
}

fn memory(node_gib: u64, host_pool_gib: u64) -> Option<HostMemoryLimits> {
    let (node_bytes, host_pool_bytes) = (node_gib * GIB, host_pool_gib * GIB);
    Some(HostMemoryLimits { node_bytes, host_pool_bytes, overhead_bytes: GIB })
}

/// Three processes of 16 GiB with a long pause. Only as many may be offloaded at the same time as
/// the host memory can hold.
#[test]
fn host_memory_limits_offloads() {
    let loads = || (0..3).map(|n| load(&format!("p{n}"), 16, &[0, 10 * HOUR_S])).collect();
    let run =
        |memory| simulate(loads(), HostLimits { memory, disk_bytes: 0 }, Engine::Copy).unwrap();
    let unlimited = run(None);
    assert!(unlimited.host_peak_bytes > 46 * GIB && unlimited.refused == 0, "{unlimited:?}");
    for (limits, processes) in [(memory(36, 36), 2), (memory(36, 0), 2), (memory(18, 9), 1)] {
        let summary = run(limits);
        let content_bytes = 16 * GIB - Calibration::default().context_bytes;
        assert_eq!(summary.host_peak_bytes, processes * content_bytes, "{limits:?}");
        assert!(summary.refused > 0, "{summary:?}");
        assert_eq!(summary.restores, 3 + processes);
    }
}

/// A process of 16 GiB pauses for ten hours. After the first of them its content moves to disk, so
/// the host memory is free for most of the time, and the next call waits for the disk.
#[test]
fn long_pause_moves_content_to_disk() {
    let run = |disk_gib| {
        let host = HostLimits { memory: None, disk_bytes: disk_gib * GIB };
        let loads = vec![load("a", 16, &[0, 10 * HOUR_S])];
        simulate(loads, host, Engine::Copy).unwrap()
    };
    let costs = Calibration::default();
    let content_bytes = 16 * GIB - costs.context_bytes;
    let stored = run(16);
    assert_eq!((stored.stored_on_disk, stored.restores_from_disk), (1, 1));
    let disk_ms = costs.disk_read_ms(content_bytes);
    let wake_ms = costs.copy.restore_ms(content_bytes) + disk_ms;
    assert!((wake_ms..wake_ms + 20).contains(&stored.delay_p99_ms), "{stored:?}");
    // One hour, and the time of the move, of ten hours.
    let share = stored.host_mean_bytes as f64 / content_bytes as f64;
    assert!((0.10..0.12).contains(&share), "{share}");
    assert_eq!(stored.disk_peak_bytes, content_bytes.next_multiple_of(128 << 20));

    // The disk is too small.
    let kept = run(15);
    assert_eq!((kept.stored_on_disk, kept.restores_from_disk, kept.disk_peak_bytes), (0, 0, 0));
    assert!(kept.delay_p99_ms < 1_000 && kept.host_mean_bytes > 15 * GIB, "{kept:?}");
}

/// A call that comes while the content is being moved reads back what is on disk already.
#[test]
fn call_during_the_move_to_disk_waits_for_a_part() {
    let costs = Calibration::default();
    let write_s = (costs.disk_write_ms(16 * GIB) / 1_000) as u32;
    let waits: Vec<u64> = [0, write_s / 2, 2 * write_s]
        .map(|later| {
            let host = HostLimits { memory: None, disk_bytes: 100 * GIB };
            let loads = vec![load("a", 16, &[0, HOUR_S + 70 + later])];
            simulate(loads, host, Engine::Copy).unwrap().delay_p99_ms
        })
        .into();
    let half_ms = costs.disk_read_ms(8 * GIB);
    let more_ms = waits[1] - waits[0];
    assert!((half_ms * 9 / 10..half_ms * 11 / 10).contains(&more_ms), "{waits:?}");
    assert!(waits[1] < waits[2], "{waits:?}");
}

/// Two processes fill the host memory and are called. Two others fill the GPU, are idle, and cannot be
/// offloaded. Without a disk, the calls wait until the simulation ends with an error.
#[test]
fn content_of_waiters_moves_if_memory_is_full() {
    let run = |disk_gib| {
        let host = HostLimits { memory: memory(140, 130), disk_bytes: disk_gib * GIB };
        let calls: [&[u32]; 4] = [&[0, 3_000], &[600, 3_001], &[1_200], &[1_800]];
        let loads = (0..4).map(|n| load(&format!("p{n}"), 60, calls[n])).collect();
        simulate(loads, host, Engine::Copy)
    };
    let solved = run(200).unwrap();
    assert_eq!((solved.restores, solved.restores_from_disk), (6, 1), "{solved:?}");
    assert!(run(0).is_err());
}

/// Content of the driver's checkpoint, and content beside a full host pool, stays in memory.
#[test]
fn only_content_in_the_host_pool_moves_to_disk() {
    let run = |engine, memory| {
        let host = HostLimits { memory, disk_bytes: 100 * GIB };
        let loads = vec![load("a", 16, &[0, 10 * HOUR_S]), load("b", 16, &[0, 10 * HOUR_S])];
        simulate(loads, host, engine).unwrap().stored_on_disk
    };
    assert_eq!(run(Engine::Copy, None), 2);
    assert_eq!(run(Engine::Checkpoint, None), 0);
    // While one is in the host pool, the other one is in its own memory.
    assert_eq!(run(Engine::Copy, memory(200, 17)), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    /// For random calls and sizes, offloaded content must fit into the host memory and the disk.
    #[test]
    fn content_fits_into_memory_and_disk(
        processes in proptest::collection::vec(
            (1_u64..20, proptest::collection::vec(0_u32..30_000, 1..20)), 2..8),
        node_gib in 4_u64..64, pool_percent in 0_u64..100, disk_gib in 0_u64..64,
        engine in proptest::sample::select(vec![Engine::Copy, Engine::Full, Engine::Checkpoint]),
    ) {
        let loads: Vec<TraceLoad> = processes.iter().enumerate().map(|(n, (gib, calls))| {
            let mut calls = calls.clone();
            calls.sort_unstable();
            load(&format!("p{n}"), *gib, &calls)
        }).collect();
        let host = HostLimits {
            memory: memory(node_gib, node_gib * pool_percent / 100),
            disk_bytes: disk_gib * GIB,
        };
        // All processes fit on the GPU, so none waits for an offload.
        let summary = simulate(loads, host, engine).unwrap();
        prop_assert!(summary.host_peak_bytes <= node_gib * GIB, "{:?}", summary);
        prop_assert!(summary.disk_peak_bytes <= disk_gib * GIB, "{:?}", summary);
    }
}
