//! Tests of the simulation, and of properties that hold for every simulated policy.

use affinode_core::{
    Settings,
    policy::{Engine, FileValue, Mode, NamespaceRule, Policies, Policy},
};
use proptest::prelude::*;

use super::{trace::TraceDefaults, *};

const GIB: u64 = 1 << 30;
const MARGIN: u64 = 512 << 20;

pub(crate) fn load(name: &str, gib: u64, arrivals_s: &[u32]) -> TraceLoad {
    TraceLoad {
        name: name.into(),
        vram_bytes: gib * GIB,
        service_ms: 1_000,
        arrivals_ms: arrivals_s.iter().map(|s| s * 1000).collect(),
        ..TraceLoad::default()
    }
}

fn machine(gib: u64) -> SimulatedMachine {
    SimulatedMachine {
        gpus: 1,
        vram_bytes: gib * GIB + MARGIN,
        calibration: Calibration::default(),
        host: HostLimits::default(),
        slo_ms: 1_000,
    }
}

fn contender(name: &str) -> Baseline {
    contender_with(name, Engine::Checkpoint)
}

fn contender_with(name: &str, engine: Engine) -> Baseline {
    let node = Policy { engine, ..Policy::default() };
    let policies = Policies { node, ..Policies::default() };
    let settings = Settings { policies, ..Settings::default() };
    baselines::all(&settings, 1).into_iter().find(|c| c.name == name).unwrap()
}

#[test]
fn a_long_pause_frees_vram() {
    let trace = WorkloadTrace { loads: vec![load("a", 16, &[0, 10, 1_010])] };
    let summary = engine::run(&trace, machine(16), &contender("fixed-60s")).unwrap();
    let costs = Calibration::default();
    // The memory is offloaded from the end of the offload, which begins after 60 s, until the last
    // call.
    let bytes = 16 * GIB - costs.context_bytes;
    let offloaded_ms = 999_000 - 60_000 - costs.checkpoint.offload_ms(bytes);
    let freed = summary.freed_of_all * 1_010_000.0;
    assert!(
        (freed - offloaded_ms as f64).abs() < 50.0,
        "freed for {freed} ms, expected {offloaded_ms} ms"
    );
    assert_eq!(summary.restores, 2);
    let restore_ms = costs.checkpoint.restore_ms(bytes);
    assert!((restore_ms..restore_ms + 10).contains(&summary.delay_p99_ms), "{summary:?}");
}

/// A process is called at different times around its copy out, which takes half a second. A call
/// that comes during the copy must cancel it. No call may wait for the end of the copy and then for
/// a restore.
#[test]
fn call_during_a_copy_out_hardly_waits() {
    let contender = contender_with("fixed-60s", Engine::Copy);
    let summaries: Vec<_> = (60_500..63_000)
        .step_by(100)
        .map(|at| {
            let mut called = load("a", 24, &[]);
            called.arrivals_ms = vec![0, at, 300_000];
            let trace = WorkloadTrace { loads: vec![called] };
            engine::run(&trace, machine(24), &contender).unwrap()
        })
        .collect();
    let longest_ms = summaries.iter().map(|summary| summary.delay_p99_ms).max();
    assert!(longest_ms < Some(520), "{longest_ms:?}");
    // All three calls waited, but the process was restored only for the first and the last one.
    let cancelled =
        summaries.iter().filter(|summary| summary.delayed_share > 0.9 && summary.restores == 2);
    assert!(cancelled.count() >= 3);
}

/// A call after a pause must wait as long as the engine's restore of the process (24 GiB) takes.
#[test]
fn engine_decides_what_a_wake_costs() {
    let trace = WorkloadTrace { loads: vec![load("a", 24, &[0, 1_000, 2_000])] };
    let run = |engine| {
        let contender = contender_with("fixed-60s", engine);
        engine::run(&trace, machine(24), &contender).unwrap()
    };
    let [checkpoint, copy, full] = [Engine::Checkpoint, Engine::Copy, Engine::Full].map(run);
    assert!((3_400..3_800).contains(&checkpoint.delay_p50_ms), "{checkpoint:?}");
    assert!((450..480).contains(&copy.delay_p50_ms), "{copy:?}");
    assert!((490..530).contains(&full.delay_p50_ms), "{full:?}");
    // The first restore is the start of the process.
    assert_eq!((copy.restores, copy.restores_copied), (3, 2));
    assert_eq!((full.restores, full.restores_copied), (3, 0));
    // With the engine `copy` the context stays on the GPU, so less VRAM is freed.
    assert!(copy.freed_of_all < full.freed_of_all, "{copy:?} {full:?}");
}

#[test]
fn namespace_rule_decides_the_engine() {
    let mut loads = vec![load("a", 8, &[0, 1_000]), load("b", 8, &[0, 1_000])];
    loads[1].namespace = "ml".into();
    let trace = WorkloadTrace { loads };
    let rule = NamespaceRule {
        name: "ml".into(),
        engine: Some(FileValue(Engine::Copy)),
        ..NamespaceRule::default()
    };
    let node = Policy { engine: Engine::Full, ..Policy::default() };
    let policies = Policies { node, rules: vec![rule], ..Policies::default() };
    let settings = Settings { policies, ..Settings::default() };
    for contender in baselines::all(&settings, 1) {
        let summary = engine::run(&trace, machine(16), &contender).unwrap();
        let expected = u64::from(["configured", "fixed-60s"].contains(&contender.name.as_str()));
        if expected > 0 || contender.reloads {
            assert_eq!(summary.restores_copied, expected, "{}", contender.name);
        }
    }
}

/// Two processes of 16 GiB are called in turn. With the engine `copy` and 17 GiB of VRAM, the
/// contexts stay on the GPU, and restores must copy memory only. With the engine `auto` and 16 GiB,
/// every restore must follow a checkpoint of the context.
#[test]
fn contexts_leave_when_a_waiter_needs_room() {
    let calls: Vec<u32> = (0..40).map(|n| n * 60).collect();
    let trace = WorkloadTrace { loads: vec![load("a", 16, &calls), load("b", 16, &calls)] };
    let run = |engine, gib| {
        let contender = contender_with("lru", engine);
        engine::run(&trace, machine(gib), &contender).unwrap()
    };
    let [tight, roomy] = [run(Engine::Auto, 16), run(Engine::Copy, 17)];
    assert!(tight.restores > 20 && tight.restores_copied == 0, "{tight:?}");
    assert!(roomy.restores_copied > 20, "{roomy:?}");
}

#[test]
fn slow_calls_count_by_level() {
    let trace = WorkloadTrace { loads: vec![load("a", 24, &[0, 1_000, 2_000])] };
    let slow = |engine, slo_ms| {
        let machine = SimulatedMachine { slo_ms, ..machine(24) };
        let contender = contender_with("fixed-60s", engine);
        let summary = engine::run(&trace, machine, &contender).unwrap();
        let shares =
            [summary.slow_share, summary.slow_copied_share, summary.slow_context_gone_share];
        shares.map(|share| (share * 3.0).round() as u64)
    };
    assert_eq!(slow(Engine::Checkpoint, 1_000), [3, 0, 3]);
    assert_eq!(slow(Engine::Copy, 1_000), [0, 0, 0]);
    assert_eq!(
        slow(Engine::Copy, 400),
        [3, 2, 1],
        "the first call starts the process, which creates the context"
    );
    assert_eq!(slow(Engine::Full, 400), [3, 0, 3]);
}

/// Without evictions, the second process must get VRAM only when the first process ends.
#[test]
fn vram_of_an_ended_process_is_free() {
    let trace =
        WorkloadTrace { loads: vec![load("a", 16, &[0, 60]), load("b", 16, &[100_000, 200_000])] };
    let node = Policy { mode: Mode::Manual, ..Policy::default() };
    let policies = Policies { node, ..Policies::default() };
    let settings = Settings { policies, ..Settings::default() };
    let summaries = compare(&trace, machine(16), &baselines::all(&settings, 1)[..2]).unwrap();
    let [configured, without] = summaries.as_slice() else { panic!("two ran") };
    assert_eq!(configured.restores, 2);
    assert_eq!(without.refused, 0, "{without:?}");
}

/// A process that starts late must need no VRAM before its start. Until then the GPU is not
/// oversubscribed, so the mode `auto` must offload idle containers.
#[test]
fn late_process_wants_no_vram_before_its_start() {
    let early = load("a", 16, &[0, 100_000, 150_000, 300_000]);
    let late = load("b", 16, &[250_000, 300_000]);
    let trace = WorkloadTrace { loads: vec![early, late] };
    let summary = engine::run(&trace, machine(16), &contender("configured")).unwrap();
    assert!(summary.freed_of_all > 0.5, "{}", summary.freed_of_all);
}

#[test]
fn two_containers_evict_each_other() {
    let calls: Vec<u32> = (0..100).map(|n| n * 30).collect();
    let trace = WorkloadTrace { loads: vec![load("a", 16, &calls), load("b", 16, &calls)] };
    let summary = engine::run(&trace, machine(16), &contender("lru")).unwrap();
    assert!(summary.restores > 20, "{summary:?}");
    assert!(summary.delay_p99_ms < 60_000, "{summary:?}");
}

#[test]
fn a_process_that_never_fits_is_an_error() {
    let trace = WorkloadTrace { loads: vec![load("a", 16, &[0])] };
    let result = engine::run(&trace, machine(8), &contender("lru"));
    assert!(matches!(result, Err(SimulationError::TooLarge { .. })));
}

#[test]
fn a_clockwork_is_back_before_its_call() {
    let calls: Vec<u32> = (0..40).map(|n| n * 1_800).collect();
    let trace = WorkloadTrace { loads: vec![load("a", 16, &calls)] };
    let summary = engine::run(&trace, machine(16), &contender("learned")).unwrap();
    assert!(summary.prewake_hits >= 30, "{summary:?}");
    assert!(summary.wake_share < 0.25, "{summary:?}");
}

#[test]
fn the_same_seed_gives_the_same_node() {
    let plan = |seed| synthetic::SyntheticPlan {
        processes: 8,
        days: 1,
        assumed: TraceDefaults { vram_bytes: GIB, service_ms: 500, seed },
    };
    let make = |seed| synthetic::make(plan(seed)).unwrap();
    let arrivals = |trace: &WorkloadTrace| {
        trace.loads.iter().map(|l| l.arrivals_ms.clone()).collect::<Vec<_>>()
    };
    assert_eq!(arrivals(&make(3)), arrivals(&make(3)));
    assert_ne!(arrivals(&make(3)), arrivals(&make(4)));
    let all = baselines::all(&Settings::default(), 1);
    let run = || compare(&make(3), machine(5), &all).unwrap();
    assert_eq!(run(), run());
}

/// The simulation must read every GPU. Otherwise the waiter of this test would wait without end.
#[test]
fn a_waiter_on_the_second_gpu_is_served() {
    let assumed = TraceDefaults { vram_bytes: 16 * GIB, service_ms: 1_000, seed: 1 };
    let mut trace =
        synthetic::make(synthetic::SyntheticPlan { processes: 8, days: 1, assumed }).unwrap();
    GpuPlacement::choose(&trace, Some(2), 0, 1.0).unwrap().apply(&mut trace);
    let two = SimulatedMachine { gpus: 2, vram_bytes: 2 * 16 * GIB + (512 << 20), ..machine(0) };
    let summary = engine::run(&trace, two, &contender("lru")).unwrap();
    assert!(summary.restores >= 8 && summary.delay_p99_ms < 300_000, "{summary:?}");
}

#[test]
fn files_are_read_and_bad_lines_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let assumed = TraceDefaults { vram_bytes: GIB, service_ms: 1, seed: 1 };
    let read = |text: &str| {
        let path = folder.path().join("trace.csv");
        std::fs::write(&path, text).unwrap();
        WorkloadTrace::read(&path, assumed)
    };
    let windows = "client,ts,rate,cv,pat,p1,p2\na,0,0.1,1,Gamma,1,10\na,600,0.05,1,Weibull,1,10\n";
    assert_eq!(read(windows).unwrap().requests(), 60 + 30);
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,1,1\n2023-11-16 18:17:05.5,1,1\n";
    assert_eq!(read(azure).unwrap().loads[0].arrivals_ms, [0, 2_000]);
    let telemetry = "time,process,busy,vram_bytes\n10,a,0.5,7\n20,a,0,9\n30,b,1,5\n";
    let loads = read(telemetry).unwrap().loads;
    assert_eq!((loads[0].vram_bytes, loads[0].arrivals_ms.as_slice()), (9, [0].as_slice()));
    let names = |text: &str| {
        read(text).unwrap().loads.iter().map(|load| load.gpu.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("time,process,gpu\n1,a,x/0\n2,b,x/1\n3,a,x/1\n"), ["x/0", "x/1"]);
    assert_eq!(names("time,process,busy,vram_bytes,gpu\n1,a,1,7,x/0\n"), ["x/0"]);
    assert_eq!(names(telemetry), ["", ""]);
    let error = read("time,process\n1,a\nsoon,b\n").unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("soon"), "{error}");
    assert!(matches!(read("time,process\n"), Err(SimulationError::Empty)));
}

/// Sets a lower number of cases than usual, because a case is slow. The variable PROPTEST_CASES
/// overrides it.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(64);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// For random calls and sizes, the simulation must end without an error, and waits must be
    /// short (99th percentile below 300 s). A restore without enough free VRAM is an error.
    #[test]
    fn every_call_is_served(
        processes in proptest::collection::vec((1_u64..8, proptest::collection::vec(0_u32..3_000, 1..60)), 2..8),
        eager in any::<bool>(), vram in 8_u64..16,
    ) {
        let loads: Vec<TraceLoad> = processes.iter().enumerate().map(|(n, (gib, calls))| {
            let mut calls = calls.clone();
            calls.sort_unstable();
            load(&format!("p{n}"), *gib, &calls)
        }).collect();
        let trace = WorkloadTrace { loads };
        let node = Policy { mode: if eager { Mode::Eager } else { Mode::Pressure }, ..Policy::default() };
        let settings = Settings { policies: Policies { node, ..Policies::default() }, ..Settings::default() };
        let summary = engine::run(&trace, machine(vram), &baselines::all(&settings, 1)[0]).unwrap();
        let answered = (summary.delayed_share * summary.requests as f64).round() as u64;
        prop_assert!(answered >= trace.loads.len() as u64, "the first call of each process waits");
        prop_assert!(summary.delay_p99_ms < 300_000, "{:?}", summary);
    }
}
