//! Tests of claims about the default policy, on traces that are small enough for a test. `affinode
//! simulate` runs whole traces, see `docs/operations.md`.

use affinode_core::Settings;

use super::{random::RandomSource, synthetic, trace::TraceDefaults, *};

const GIB: u64 = 1 << 30;
const ASSUMED: TraceDefaults = TraceDefaults { vram_bytes: 16 * GIB, service_ms: 1_000, seed: 7 };

fn run(trace: &WorkloadTrace, fits: u64, names: &[&str]) -> Vec<SimulationSummary> {
    let vram_bytes = fits * ASSUMED.vram_bytes + (512 << 20);
    let machine = SimulatedMachine {
        gpus: 1,
        vram_bytes,
        calibration: Calibration::default(),
        host: HostLimits::default(),
        slo_ms: 1_000,
    };
    let all = baselines::all(&Settings::default(), 1);
    let named = |name: &&str| all.iter().find(|c| c.name == **name).unwrap().clone();
    let chosen: Vec<Baseline> = names.iter().map(named).collect();
    compare(trace, machine, &chosen).unwrap()
}

/// Creates a trace of clients that call as rarely as the low-rate clients in ServeGen's trace. Such
/// a client makes few, irregular calls in some ten-minute windows, and then none for a long time.
fn low_rate_clients(clients: usize, days: u32) -> WorkloadTrace {
    let mut random = RandomSource::new(11);
    let mut text = String::from("client,ts,rate,cv,pat,p1,p2\n");
    for client in 0..clients {
        let usual = 0.01 * 40_f64.powf(random.unit());
        let mut window = (random.unit() * 72.0) as u32;
        while window < days * 144 {
            for _ in 0..(1.0 + random.exponential(6.0)) as u32 {
                let rate = usual * random.between(0.5, 2.0);
                let shape = random.between(0.3, 1.5);
                let scale = 1.0 / rate / shape;
                let start = window * 600;
                text += &format!("c{client},{start},{rate},1,Gamma,{shape},{scale}\n");
                window += 1;
            }
            window += 1 + random.exponential(20.0) as u32;
        }
    }
    WorkloadTrace::parse(text.as_bytes(), "made up", ASSUMED).unwrap()
}

/// Returns the cost of a run in seconds: the time for which processes held VRAM, plus the policy's
/// `wake_cost` for each wake.
fn cost_s(trace: &WorkloadTrace, summary: &SimulationSummary) -> f64 {
    let lives = trace.loads.iter().filter_map(|load| {
        Some(load.arrivals_ms.last()?.saturating_sub(*load.arrivals_ms.first()?))
    });
    let life_s: f64 = lives.map(|ms| f64::from(ms) / 1000.0).sum();
    let wakes = summary.wake_share * summary.requests as f64;
    let wake_s = Settings::default().policies.node.wake_cost_ms as f64 / 1000.0;
    (1.0 - summary.freed_of_all) * life_s + wakes * wake_s
}

#[test]
fn the_default_costs_less_than_fixed_timeouts() {
    let trace = low_rate_clients(40, 4);
    let fits = trace.loads.len() as u64;
    let all = run(&trace, fits, &["configured", "fixed-30s", "fixed-60s", "fixed-2m", "fixed-5m"]);
    let costs: Vec<f64> = all.iter().map(|summary| cost_s(&trace, summary)).collect();
    assert!(costs[1..].iter().all(|fixed| costs[0] < *fixed), "{costs:?}");
}

/// Over two weeks, the default policy must free more VRAM than a policy with a fixed timeout of one
/// minute. Its cost, which includes the cost of its wakes, must also be lower.
#[test]
fn the_default_frees_more_than_a_fixed_minute() {
    let trace = low_rate_clients(12, 14);
    let all = run(&trace, 12, &["configured", "fixed-60s"]);
    let [default, fixed] = all.as_slice() else { panic!("two ran") };
    assert!(default.freed_of_all > fixed.freed_of_all, "{default:?} {fixed:?}");
    assert!(cost_s(&trace, default) < cost_s(&trace, fixed), "{default:?} {fixed:?}");
}

#[test]
fn the_default_delays_fewer_calls_than_lru() {
    let plan = synthetic::SyntheticPlan { processes: 40, days: 3, assumed: ASSUMED };
    let trace = synthetic::make(plan).unwrap();
    let all = run(&trace, 24, &["configured", "lru", "clairvoyant"]);
    let [default, lru, clairvoyant] = all.as_slice() else { panic!("three ran") };
    assert!(default.delayed_share <= lru.delayed_share, "{default:?} {lru:?}");
    assert!(
        default.delayed_share <= 1.5 * clairvoyant.delayed_share,
        "{default:?} {clairvoyant:?}"
    );
}
