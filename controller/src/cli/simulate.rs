//! `affinode simulate`: what policies would do to a trace.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use clap::Args;

use super::{client::ControlClient, format, table};
use crate::{
    clock,
    config::{Config, ConfigError},
    history::StateSpan,
    simulate::{
        Baseline, Calibration, SimulatedMachine, SimulationError, SimulationSummary, WorkloadTrace,
        baselines, compare, plot,
        recorded::{self, RecordedCall},
        synthetic,
        trace::TraceDefaults,
    },
};

/// Runs the policies over a trace in virtual time, by the code that runs live, beside
/// what other policies would have done. Needs no controller and no GPU.
#[derive(Debug, Args)]
#[command(after_help = "\
FREED is VRAM-time given back between the first and the last call of each process, OF IDLE the
same of the time without a call in progress, RESIDENT and PEAK what stayed on the GPU. WOKE is the
share of requests that found their process out, DELAYED with those that came while it was on its
way; P99 WAIT is how long they waited. REFUSED are offloads that were, or requests that found no
room. The policy `configured` is that of --config; the last two know the future.")]
pub struct SimulateArgs {
    /// Trace: CSV, gz or not. The header tells the format: ServeGen windows, Azure LLM
    /// requests, telemetry (time,process,busy,vram_bytes) or requests (time,process).
    /// Without one a node with a day curve and common peaks is made up.
    trace: Option<PathBuf>,
    /// Plays what the controller recorded again: what would have happened, beside what did.
    #[arg(long, conflicts_with = "trace")]
    history: bool,
    /// How far back the history is played: 90m, 24h, 7d.
    #[arg(long, default_value = "24h", value_parser = humantime::parse_duration)]
    since: std::time::Duration,
    /// Processes of the node that is made up.
    #[arg(long, default_value_t = 100)]
    processes: usize,
    /// Its days.
    #[arg(long, default_value_t = 7)]
    days: u32,
    /// Seed of all that is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// VRAM of a process whose trace does not tell, in GiB.
    #[arg(long, default_value_t = 16.0, value_name = "GIB")]
    process_vram: f64,
    /// GPUs of the node; processes are dealt out over them.
    #[arg(long, default_value_t = 1, value_name = "N")]
    gpus: usize,
    /// VRAM of each GPU, in GiB; room for all when it is not given.
    #[arg(long, value_name = "GIB", conflicts_with = "fits")]
    vram: Option<f64>,
    /// VRAM of each GPU, as the number of largest processes that fit.
    #[arg(long, value_name = "N")]
    fits: Option<u64>,
    /// How long a call keeps the GPU in use.
    #[arg(long, default_value = "1s", value_name = "TIME")]
    service: humantime::Duration,
    /// Costs of moves on this machine (TOML or JSON); those of an H200 when not given.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Configuration whose policy is tried; the defaults when not given.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only the policies whose names begin so; may be given again.
    #[arg(long, value_name = "NAME")]
    policy: Vec<String>,
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: SimulateOutput,
    /// Leave the lines above the figures out.
    #[arg(long)]
    no_headers: bool,
    /// Draw resident VRAM over time into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SimulateOutput {
    /// Columns.
    Table,
    /// More columns.
    Wide,
    /// JSON.
    Json,
    /// YAML of the same names.
    Yaml,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// Trace, calibration or run.
    #[error("cannot simulate")]
    Simulation(#[from] SimulationError),
    /// The configuration that is to be tried.
    #[error("cannot simulate")]
    Config(#[from] ConfigError),
    /// An argument makes no sense.
    #[error("{0}")]
    Argument(String),
    /// Results cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// Where.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// JSON cannot be written.
    #[error("cannot write JSON")]
    Json(#[from] serde_json::Error),
    /// YAML cannot be written.
    #[error("cannot write YAML")]
    Yaml(#[from] serde_yaml_ng::Error),
}

/// What a controller recorded.
pub struct RecordedInput {
    since_ms: i64,
    spans: Vec<StateSpan>,
}

impl SimulateArgs {
    /// Asks the controller for its history, where that is to be played.
    pub async fn recorded(&self, run_dir: &Path) -> Result<Option<RecordedInput>, super::CliError> {
        if !self.history {
            return Ok(None);
        }
        let until_ms = clock::unix_ms();
        let back = i64::try_from(self.since.as_millis()).unwrap_or(i64::MAX);
        let since_ms = until_ms.saturating_sub(back).max(0);
        let spans = match ControlClient::connect(run_dir).await {
            Ok(client) => client.history(since_ms, until_ms).await?,
            Err(_) => super::report::spans_on_disk(run_dir, since_ms, until_ms)?,
        };
        Ok(Some(RecordedInput { since_ms, spans }))
    }
}

fn gib(value: f64, name: &str) -> Result<u64, SimulateError> {
    if value > 0.0 && value < 1e6 {
        Ok((value * f64::from(1 << 30)) as u64)
    } else {
        Err(SimulateError::Argument(format!("{name}: GiB, more than 0 and less than a million")))
    }
}

/// Runs it.
///
/// # Errors
/// What failed, on which file, and why.
pub fn run(
    args: &SimulateArgs,
    recorded: Option<RecordedInput>,
    out: &mut dyn Write,
) -> Result<(), SimulateError> {
    let assumed = TraceDefaults {
        vram_bytes: gib(args.process_vram, "--process-vram")?,
        service_ms: u32::try_from(args.service.as_millis()).unwrap_or(u32::MAX).min(3_600_000),
        seed: args.seed,
    };
    let trace = match (&args.trace, &recorded) {
        (_, Some(known)) => match recorded::trace(&known.spans, known.since_ms, assumed) {
            Err(SimulationError::Empty) => {
                return Err(SimulateError::Argument(
                    "nobody used a GPU in that time, by what is recorded: --since looks further back"
                        .into(),
                ));
            }
            trace => trace?,
        },
        (Some(path), None) => WorkloadTrace::read(path, assumed)?,
        (None, None) => synthetic::make(synthetic::SyntheticPlan {
            processes: args.processes.min(100_000),
            days: args.days.min(49),
            assumed,
        })?,
    };
    let largest = trace.loads.iter().map(|load| load.vram_bytes).max().unwrap_or(0);
    let gpus = args.gpus.clamp(1, 1024);
    // The margin that the ledger keeps comes on top.
    let vram_bytes = match (args.vram, args.fits) {
        (Some(size), _) => gib(size, "--vram")?,
        (None, Some(fits)) => largest.saturating_mul(fits.max(1)) + (512 << 20),
        (None, None) => {
            largest.saturating_mul(trace.loads.len().div_ceil(gpus) as u64) + (512 << 20)
        }
    };
    let calibration = match &args.calibration {
        Some(path) => Calibration::read(path)?,
        None => Calibration::default(),
    };
    let config = match &args.config {
        Some(path) if !path.exists() => {
            return Err(SimulateError::Argument(format!("no such file: {}", path.display())));
        }
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    let mut baselines = baselines::all(&config.settings(), args.seed);
    chosen(&mut baselines, &args.policy)?;
    let machine = SimulatedMachine { gpus, vram_bytes, calibration };
    let figures = compare(&trace, machine, &baselines)?;
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&figures, trace.end_ms()))?;
    }
    let happened = recorded.map(|known| recorded::happened(&known.spans));
    print(args, out, &trace, machine, &figures, happened)
}

/// Those whose names begin with one of these words; all without a word.
fn chosen(baselines: &mut Vec<Baseline>, words: &[String]) -> Result<(), SimulateError> {
    let names: Vec<&str> = baselines.iter().map(|c| c.name.as_str()).collect();
    if let Some(word) = words.iter().find(|word| !names.iter().any(|n| n.starts_with(*word))) {
        let names = names.join(", ");
        return Err(SimulateError::Argument(format!(
            "no policy begins with {word:?}: there are {names}"
        )));
    }
    baselines.retain(|c| words.is_empty() || words.iter().any(|word| c.name.starts_with(word)));
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), SimulateError> {
    std::fs::write(path, text)
        .map_err(|source| SimulateError::Write { path: path.display().to_string(), source })
}

const TABLE: [&str; 10] = [
    "POLICY", "FREED", "OF IDLE", "RESIDENT", "PEAK", "WOKE", "DELAYED", "P99 WAIT", "RESTORES",
    "REFUSED",
];
const WIDE: [&str; 20] = [
    "POLICY",
    "FREED",
    "OF IDLE",
    "OF TRACE",
    "RESIDENT",
    "P95",
    "PEAK",
    "HOST PEAK",
    "WOKE",
    "DELAYED",
    "P50 ADDED",
    "P99 ADDED",
    "P50 WAIT",
    "P99 WAIT",
    "RESTORES/H",
    "THRASH",
    "QUEUE",
    "PREWAKES",
    "FAIRNESS",
    "REFUSED",
];

fn print(
    args: &SimulateArgs,
    out: &mut dyn Write,
    trace: &WorkloadTrace,
    machine: SimulatedMachine,
    figures: &[SimulationSummary],
    happened: Option<RecordedCall>,
) -> Result<(), SimulateError> {
    let failed = |source| SimulateError::Write { path: "standard output".into(), source };
    let days = trace.end_ms() as f64 / 86_400_000.0;
    if matches!(args.output, SimulateOutput::Json | SimulateOutput::Yaml) {
        let all = serde_json::json!({
            "processes": trace.loads.len(),
            "requests": trace.requests(),
            "days": days,
            "seed": args.seed,
            "gpus": machine.gpus,
            "vram_bytes": machine.vram_bytes,
            "wanted_bytes": trace.vram_bytes(),
            "calibration": machine.calibration,
            "recorded": happened.map(|h| serde_json::json!({"freed": h.freed, "wakes": h.wakes})),
            "policies": figures,
        });
        if args.output == SimulateOutput::Yaml {
            return Ok(serde_yaml_ng::to_writer(out, &all)?);
        }
        serde_json::to_writer_pretty(&mut *out, &all)?;
        return writeln!(out).map_err(failed);
    }
    let wide = args.output == SimulateOutput::Wide;
    let titles: &[&str] = if wide { &WIDE } else { &TABLE };
    let rows: Vec<Vec<String>> = figures.iter().map(|f| row(f, wide)).collect();
    if args.no_headers {
        return table::print(out, None, &rows).map_err(failed);
    }
    writeln!(
        out,
        "{} processes, {} requests, {days:.1} days; {} of VRAM on each of {} GPUs, {} wanted\n",
        trace.loads.len(),
        trace.requests(),
        format::bytes(machine.vram_bytes),
        machine.gpus,
        format::bytes(trace.vram_bytes()),
    )
    .map_err(failed)?;
    if let Some(happened) = happened {
        let (freed, wakes) = (happened.freed * 100.0, happened.wakes);
        writeln!(out, "recorded: {freed:.2}% freed, {wakes} wakes; with these policies:\n")
            .map_err(failed)?;
    }
    table::print(out, Some(titles), &rows).map_err(failed)
}

fn row(f: &SimulationSummary, wide: bool) -> Vec<String> {
    let percent = |share: f64| format!("{:.2}%", share * 100.0);
    let seconds = |ms: u64| format!("{:.1}s", ms as f64 / 1000.0);
    let woke = format!("{:.3}%", f.wake_share * 100.0);
    let delayed = format!("{:.3}%", f.delayed_share * 100.0);
    if !wide {
        return vec![
            f.policy.clone(),
            percent(f.freed_of_all),
            percent(f.freed_of_idle),
            format::bytes(f.resident_mean_bytes),
            format::bytes(f.resident_peak_bytes),
            woke,
            delayed,
            seconds(f.delay_p99_ms),
            f.restores.to_string(),
            f.refused.to_string(),
        ];
    }
    vec![
        f.policy.clone(),
        percent(f.freed_of_all),
        percent(f.freed_of_idle),
        percent(f.freed_of_trace),
        format::bytes(f.resident_mean_bytes),
        format::bytes(f.resident_p95_bytes),
        format::bytes(f.resident_peak_bytes),
        format::bytes(f.host_peak_bytes),
        woke,
        delayed,
        seconds(f.latency_p50_ms),
        seconds(f.latency_p99_ms),
        seconds(f.delay_p50_ms),
        seconds(f.delay_p99_ms),
        format!("{:.3}", f.restores_per_process_hour),
        f.thrash.to_string(),
        format!("{} ({:.2})", f.queue_peak, f.queue_mean),
        format!("{}/{}", f.prewake_hits, f.prewakes),
        format!("{:.4} ({} worst)", f.fairness_jain, percent(f.worst_decile_delayed)),
        f.refused.to_string(),
    ]
}
