//! Creates a synthetic trace of a node with three kinds of programs: interactive sessions (people),
//! periodic programs (clockwork) and servers. Sessions and servers follow the same daily curve with
//! the same peaks. Periodic programs call at the same rate day and night.
//!
//! ```text
//! load(t) = daily curve, three times as high during common peaks
//!   people    sessions of minutes, calls every few seconds in them
//!   clockwork every 10 to 60 minutes, plus or minus 2 %, day and night
//!   server    calls at random, each server at its own rate
//! ```

use super::{
    SimulationError,
    random::RandomSource,
    trace::{TraceDefaults, TraceLoad, WorkloadTrace},
};

/// The parameters of a synthetic trace.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticPlan {
    /// Number of processes in the trace.
    pub processes: usize,
    /// Length of the trace in days.
    pub days: u32,
    /// VRAM and service time of each process, and the seed.
    pub assumed: TraceDefaults,
}

const DAY_S: f64 = 86_400.0;
const SLOT_S: f64 = 600.0;

/// Creates a synthetic trace. The same plan gives the same trace.
///
/// # Errors
/// The trace has no call.
pub fn make(plan: SyntheticPlan) -> Result<WorkloadTrace, SimulationError> {
    let mut random = RandomSource::new(plan.assumed.seed);
    let end_s = f64::from(plan.days) * DAY_S;
    let curve = curve(end_s, &mut random);
    let load_at = |t: f64| curve[((t / SLOT_S) as usize).min(curve.len() - 1)];
    let loads = (0..plan.processes)
        .map(|n| {
            let mut arrivals = Vec::new();
            let kind = match n % 4 {
                0 | 1 => {
                    people(&mut random, end_s, load_at, &mut arrivals);
                    "people"
                }
                2 => {
                    clockwork(&mut random, end_s, &mut arrivals);
                    "clockwork"
                }
                _ => {
                    server(&mut random, end_s, load_at, &mut arrivals);
                    "server"
                }
            };
            TraceLoad {
                name: format!("{kind}-{n}"),
                vram_bytes: plan.assumed.vram_bytes,
                service_ms: plan.assumed.service_ms,
                arrivals_ms: arrivals,
                ..TraceLoad::default()
            }
        })
        .collect();
    WorkloadTrace { loads }.checked()
}

/// Returns the relative load of each time slot. The load is low at night and higher by day, with
/// 2.5 additional peaks a day on average.
fn curve(end_s: f64, random: &mut RandomSource) -> Vec<f64> {
    let slots = (end_s / SLOT_S).ceil() as usize;
    let day = |slot: usize| {
        let hour = slot as f64 * SLOT_S / 3600.0 % 24.0;
        0.1 + 0.9 * (std::f64::consts::PI * (hour - 6.0) / 16.0).sin().max(0.0)
    };
    let mut curve: Vec<f64> = (0..slots).map(day).collect();
    for _ in 0..(end_s / DAY_S * 2.5).ceil() as usize {
        let hour = random.between(9.0, 18.0);
        let begin = (random.unit() * end_s / DAY_S).floor() * DAY_S + hour * 3600.0;
        let slot = (begin / SLOT_S) as usize;
        curve.iter_mut().skip(slot).take(3).for_each(|load| *load *= 3.0);
    }
    curve
}

fn push(arrivals: &mut Vec<u32>, at_s: f64, end_s: f64) {
    if (0.0..end_s).contains(&at_s) {
        arrivals.push((at_s * 1000.0) as u32);
    }
}

fn people(
    random: &mut RandomSource,
    end_s: f64,
    load: impl Fn(f64) -> f64,
    arrivals: &mut Vec<u32>,
) {
    let between_s = random.between(1.0, 3.0) * 3600.0;
    let mut t = 0.0;
    while t < end_s {
        t += random.exponential(between_s / 3.0);
        // Thinning: sessions are proposed at three times the mean rate, and each is kept with the
        // probability load / 3.
        if random.unit() * 3.0 > load(t) {
            continue;
        }
        let until = t + random.exponential(1200.0);
        while t < until {
            push(arrivals, t, end_s);
            t += random.gamma(0.8, 12.0);
        }
    }
}

fn clockwork(random: &mut RandomSource, end_s: f64, arrivals: &mut Vec<u32>) {
    let period_s = random.between(600.0, 3600.0);
    let mut beat = random.unit() * period_s;
    while beat < end_s {
        let mut t = beat + random.between(-0.02, 0.02) * period_s;
        for _ in 0..8 {
            push(arrivals, t, end_s);
            t += random.exponential(3.0);
        }
        beat += period_s;
    }
}

fn server(
    random: &mut RandomSource,
    end_s: f64,
    load: impl Fn(f64) -> f64,
    arrivals: &mut Vec<u32>,
) {
    let mean_s = 10.0 * 60_f64.powf(random.unit());
    let mut t = 0.0;
    while t < end_s {
        t += random.exponential(mean_s / 3.0);
        if random.unit() * 3.0 < load(t) {
            push(arrivals, t, end_s);
        }
    }
}
