//! `affinode simulate`: computes the effect of policies on a trace of GPU use.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use affinode_controller::{
    clock,
    config::{Config, ConfigError},
    history::StateSpan,
};
use affinode_core::host_memory::node_reserve_bytes;
use affinode_simulate::{
    Baseline, Calibration, GpuPlacement, GpuRule, HostLimits, HostMemoryLimits, SimulatedMachine,
    SimulationError, SimulationSummary, WorkloadTrace, baselines, compare, plot, synthetic,
    trace::TraceDefaults,
};
use clap::Args;

use super::{
    client::ControlClient,
    format,
    recorded_trace::{self, RecordedCall},
    table,
};

/// Compare policies: replay a trace of GPU use in virtual time, once for each policy, with the code
/// that the controller runs. The command needs no controller and no GPU.
#[derive(Debug, Args)]
#[command(after_help = "\
FREED: share of the VRAM that offloads freed, weighted by time, from the first to the last call of
each process. OF IDLE: the same share, but only of the time in which no call was in progress.
RESIDENT, PEAK: mean and maximum of the VRAM in use. WOKE: share of the requests that found their
process offloaded. DELAYED: share of the requests that waited for any reason, such as an offload, a
restore or the start of the process. P99 WAIT: 99th percentile of the waiting time. COPIED, GONE:
share of the requests that waited longer than --slo. COPIED counts those whose process had only its
memory off the GPU, GONE those whose process had its CUDA context off the GPU as well. REFUSED:
number of refused offloads plus number of requests that did not get enough VRAM. The policy
`configured` is that of --config. All policies use the engine of --config. The last two policies of
the table know all calls in advance. No real policy can, so they show what is possible at best.")]
pub struct SimulateArgs {
    /// Trace file: CSV, optionally compressed with gzip. Its header line determines the format:
    /// ServeGen windows, Azure LLM requests, telemetry (time,process,busy,vram_bytes) or requests
    /// (time,process). Default: a synthetic node whose load follows the time of day and has peaks
    /// that all processes share.
    trace: Option<PathBuf>,
    /// Replay the history that this node's controller recorded, and compare the result with the
    /// offloads that the controller made.
    #[arg(long, conflicts_with = "trace")]
    history: bool,
    /// Length of the history to replay, which ends now: for example 90m, 24h or 7d.
    #[arg(long, default_value = "24h", value_parser = humantime::parse_duration)]
    since: std::time::Duration,
    /// Number of processes of the synthetic node.
    #[arg(long, default_value_t = 100)]
    processes: usize,
    /// Number of days of the synthetic node.
    #[arg(long, default_value_t = 7)]
    days: u32,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// VRAM of each process, in GiB. It applies if the trace does not contain the VRAM.
    #[arg(long, default_value_t = 16.0, value_name = "GIB")]
    process_vram: f64,
    /// Number of GPUs over which the processes are distributed. Default: 1 with --fits, otherwise
    /// the number of GPUs that the trace names. If it names none, the default is the smallest
    /// number that --oversubscription permits.
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Maximum VRAM that the processes of one GPU need at the same time, as a multiple of the GPU's
    /// VRAM. The default of --gpus depends on this value: a value of 2 gives about half as many
    /// GPUs as a value of 1.
    #[arg(long, default_value_t = 1.0, value_name = "RATIO")]
    oversubscription: f64,
    /// VRAM of each GPU, in GiB. The default is the VRAM of an H200.
    #[arg(long, default_value_t = 140.4, value_name = "GIB", conflicts_with = "fits")]
    vram: f64,
    /// VRAM of each GPU, as a number of processes: it has space for this many processes of the
    /// largest size.
    #[arg(long, value_name = "N")]
    fits: Option<u64>,
    /// Host memory of the node, in GiB, without the memory that programs use on the CPU. Offloads are
    /// refused if too little is left. --config sets the reserve and the size of the host pool
    /// (`[memory]`). Default: host memory always suffices. Content moves to disk if --config has
    /// a memory.disk_folder.
    #[arg(long, value_name = "GIB")]
    host_memory: Option<f64>,
    /// Time for which a call keeps the GPU busy.
    #[arg(long, default_value = "1s", value_name = "TIME")]
    service: humantime::Duration,
    /// File (TOML or JSON) with the measured durations of offloads and restores of one engine. To
    /// measure them on a machine, pack the GPU kit with `cargo xtask gpu-kit` and run its part
    /// calibration. Default: values of an H200. Can be repeated, once for each engine.
    #[arg(long, value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Longest acceptable wait of a call. The columns COPIED and GONE show the share of calls that
    /// wait longer.
    #[arg(long, default_value = "1s", value_name = "TIME")]
    slo: humantime::Duration,
    /// Configuration file whose policy is simulated as `configured`. Default: the built-in values.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Simulate only policies whose names begin with this text. Can be repeated.
    #[arg(long, value_name = "NAME")]
    policy: Vec<String>,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: SimulateOutput,
    /// Do not print the lines above the figures.
    #[arg(long)]
    no_headers: bool,
    /// Write a plot of resident VRAM over time into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SimulateOutput {
    /// Aligned columns for a terminal.
    Table,
    /// Columns with further details.
    Wide,
    /// JSON with stable names.
    Json,
    /// YAML with the same names as in JSON.
    Yaml,
}

/// Reason why a simulation has no result.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The trace or the calibration is invalid, or the run failed.
    #[error("cannot simulate the trace")]
    Simulation(#[from] SimulationError),
    /// The configuration to simulate is invalid.
    #[error("cannot simulate the configuration")]
    Config(#[from] ConfigError),
    /// An argument is invalid.
    #[error("{0}")]
    Argument(String),
    /// The results cannot be written to this file.
    #[error("cannot write {path}")]
    Write {
        /// Path of the output that cannot be written.
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot encode the output as JSON")]
    Json(#[from] serde_json::Error),
    #[error("cannot encode the output as YAML")]
    Yaml(#[from] serde_yaml_ng::Error),
}

/// Spans of the history that a controller recorded, and the start of their time range.
pub struct RecordedInput {
    since_ms: i64,
    spans: Vec<StateSpan>,
}

impl SimulateArgs {
    /// Reads the recorded history from the controller, or from disk if no controller can be
    /// reached. `None`: the command line does not request the history.
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

impl SimulateArgs {
    fn vram_bytes(&self, trace: &WorkloadTrace) -> Result<u64, SimulateError> {
        let Some(fits) = self.fits else { return gib(self.vram, "--vram") };
        let largest = trace.loads.iter().map(|load| load.vram_bytes).max().unwrap_or(0);
        // The ledger keeps 512 MiB of a GPU free, so the GPU gets this much in addition.
        Ok(largest.saturating_mul(fits.max(1)).saturating_add(512 << 20))
    }

    fn placement(
        &self,
        trace: &WorkloadTrace,
        vram_bytes: u64,
    ) -> Result<GpuPlacement, SimulateError> {
        let ratio = self.oversubscription;
        if !(0.1..=100.0).contains(&ratio) {
            return Err(SimulateError::Argument(
                "--oversubscription: expected a number from 0.1 to 100".into(),
            ));
        }
        let gpus = self.gpus.or(self.fits.map(|_| 1));
        Ok(GpuPlacement::choose(trace, gpus, vram_bytes, ratio)?)
    }

    /// Returns the node's host memory and disk, as the controller would limit them with `config`.
    fn host_limits(&self, config: &Config) -> Result<HostLimits, SimulateError> {
        let memory = &config.memory;
        let limits = |total_bytes: u64| {
            let reserve_bytes =
                memory.node_reserve_bytes().unwrap_or_else(|| node_reserve_bytes(total_bytes));
            HostMemoryLimits {
                node_bytes: total_bytes.saturating_sub(reserve_bytes),
                host_pool_bytes: memory.host_pool_bytes(total_bytes),
                overhead_bytes: memory.driver_overhead_mib << 20,
            }
        };
        let total_bytes = self.host_memory.map(|value| gib(value, "--host-memory")).transpose()?;
        Ok(HostLimits {
            memory: total_bytes.map(limits),
            disk_bytes: memory.disk().map_or(0, |disk| disk.max_bytes),
        })
    }

    fn slo_ms(&self) -> u64 {
        u64::try_from(self.slo.as_millis()).unwrap_or(u64::MAX)
    }
}

fn gib(value: f64, name: &str) -> Result<u64, SimulateError> {
    if value > 0.0 && value < 1e6 {
        Ok((value * f64::from(1 << 30)) as u64)
    } else {
        Err(SimulateError::Argument(format!(
            "{name}: expected a number of GiB, more than 0 and less than 1000000"
        )))
    }
}

/// Runs the simulation, and prints the result.
///
/// # Errors
/// [`SimulateError`]: an argument or a file is invalid, or the run failed.
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
    let mut trace = match (&args.trace, &recorded) {
        (_, Some(known)) => match recorded_trace::trace(&known.spans, known.since_ms, assumed) {
            Err(SimulationError::Empty) => {
                return Err(SimulateError::Argument(
                    "no process used a GPU in this time range of the history; choose a longer range with --since"
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
    let vram_bytes = args.vram_bytes(&trace)?;
    let placement = args.placement(&trace, vram_bytes)?;
    placement.apply(&mut trace);
    let calibration =
        args.calibration.iter().try_fold(Calibration::default(), |known, path| known.read(path))?;
    let config = match &args.config {
        Some(path) if !path.exists() => {
            return Err(SimulateError::Argument(format!(
                "the configuration file {} does not exist",
                path.display()
            )));
        }
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    let mut baselines = baselines::all(&config.settings(), args.seed);
    chosen(&mut baselines, &args.policy)?;
    let host = args.host_limits(&config)?;
    let (gpus, slo_ms) = (placement.gpus, args.slo_ms());
    let machine = SimulatedMachine { gpus, vram_bytes, calibration, host, slo_ms };
    let figures = compare(&trace, machine, &baselines)?;
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&figures, trace.end_ms()))?;
    }
    let happened = recorded.map(|known| recorded_trace::happened(&known.spans));
    let warning = step_warning(&trace, &baselines);
    let node = SimulatedHost { machine, placement, warning };
    print(args, out, &trace, &node, &figures, happened)
}

/// Keeps only the policies whose names begin with one of these words. Without words, keeps all.
fn chosen(baselines: &mut Vec<Baseline>, words: &[String]) -> Result<(), SimulateError> {
    let names: Vec<&str> = baselines.iter().map(|c| c.name.as_str()).collect();
    if let Some(word) = words.iter().find(|word| !names.iter().any(|n| n.starts_with(*word))) {
        let names = names.join(", ");
        return Err(SimulateError::Argument(format!(
            "no policy begins with {word:?}; accepted: {names}"
        )));
    }
    baselines.retain(|c| words.is_empty() || words.iter().any(|word| c.name.starts_with(word)));
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), SimulateError> {
    std::fs::write(path, text)
        .map_err(|source| SimulateError::Write { path: path.display().to_string(), source })
}

/// Returns the titles of the columns. `slo` is the longest acceptable wait of a call. Two of the
/// titles contain it.
fn titles(wide: bool, slo: humantime::Duration) -> Vec<String> {
    let slow = [format!("COPIED >{slo}"), format!("GONE >{slo}")];
    let (before, after): (&[&str], &[&str]) = if wide {
        (
            &[
                "POLICY",
                "FREED",
                "OF IDLE",
                "OF TRACE",
                "RESIDENT",
                "P95",
                "PEAK",
                "HOST MEAN",
                "HOST PEAK",
                "DISK PEAK",
                "WOKE",
                "DELAYED",
                "P50 ADDED",
                "P99 ADDED",
                "P50 WAIT",
                "P99 WAIT",
            ],
            &[
                "RESTORES/H",
                "COPIED",
                "FROM DISK",
                "THRASH",
                "QUEUE",
                "PREWAKES",
                "FAIRNESS",
                "REFUSED",
            ],
        )
    } else {
        (
            &["POLICY", "FREED", "OF IDLE", "RESIDENT", "PEAK", "WOKE", "DELAYED", "P99 WAIT"],
            &["RESTORES", "REFUSED"],
        )
    };
    let text = |titles: &[&str]| titles.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>();
    [text(before), slow.to_vec(), text(after)].concat()
}

/// The simulated machine, how its GPUs were chosen, and a warning if the results are not reliable.
struct SimulatedHost {
    machine: SimulatedMachine,
    placement: GpuPlacement,
    warning: Option<String>,
}

/// Returns a warning if the trace has a time step that is at least as long as an idle timeout of a
/// compared policy. The simulation then takes every pause of the trace for idle time.
fn step_warning(trace: &WorkloadTrace, baselines: &[Baseline]) -> Option<String> {
    let step_ms = trace.step_ms()?;
    let is_shorter = |b: &&Baseline| b.shortest_timeout_ms().is_some_and(|ms| ms <= step_ms);
    let names: Vec<&str> = baselines.iter().filter(is_shorter).map(|b| b.name.as_str()).collect();
    let step = humantime::format_duration(std::time::Duration::from_millis(step_ms));
    (!names.is_empty()).then(|| {
        format!(
            "warning: the time steps of the trace ({step}) are at least as long as the idle \
             timeouts of {}. Therefore every pause in the trace counts as idle, and the figures of \
             these policies are not reliable",
            names.join(", ")
        )
    })
}

impl SimulatedHost {
    fn gpu_rule(&self, ratio: f64) -> String {
        let (gpus, peak) = (self.placement.gpus, format::bytes(self.placement.peak_bytes));
        let peak = format!("the processes hold at most {peak} of VRAM at the same time");
        match self.placement.rule {
            GpuRule::Given => format!("GPUs: {gpus} (set by --gpus or --fits); {peak}"),
            GpuRule::Named => format!("GPUs: {gpus}, named in the trace; {peak}"),
            GpuRule::Peak => {
                format!(
                    "GPUs: {gpus}, the smallest number for which the processes of each GPU want at \
                     most {ratio} times its usable VRAM; {peak}"
                )
            }
        }
    }
}

fn print(
    args: &SimulateArgs,
    out: &mut dyn Write,
    trace: &WorkloadTrace,
    node: &SimulatedHost,
    figures: &[SimulationSummary],
    happened: Option<RecordedCall>,
) -> Result<(), SimulateError> {
    let SimulatedHost { machine, placement, warning } = node;
    let failed = |source| SimulateError::Write { path: "standard output".into(), source };
    let days = trace.end_ms() as f64 / 86_400_000.0;
    if matches!(args.output, SimulateOutput::Json | SimulateOutput::Yaml) {
        let all = serde_json::json!({
            "processes": trace.loads.len(),
            "requests": trace.requests(),
            "days": days,
            "seed": args.seed,
            "gpus": machine.gpus,
            "gpus_by": placement.rule,
            "peak_bytes": placement.peak_bytes,
            "vram_bytes": machine.vram_bytes,
            "wanted_bytes": trace.vram_bytes(),
            "calibration": machine.calibration,
            "host": machine.host,
            "slo_ms": machine.slo_ms,
            "warning": warning,
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
    let titles = titles(wide, args.slo);
    let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = figures.iter().map(|f| row(f, wide)).collect();
    if args.no_headers {
        return table::print(out, None, &rows).map_err(failed);
    }
    writeln!(
        out,
        "{} processes, {} requests, {days:.1} days; {} of VRAM on each of {} GPUs; all processes \
         together want {}\n{}\n",
        trace.loads.len(),
        trace.requests(),
        format::bytes(machine.vram_bytes),
        machine.gpus,
        format::bytes(trace.vram_bytes()),
        node.gpu_rule(args.oversubscription),
    )
    .map_err(failed)?;
    if let Some(warning) = warning {
        writeln!(out, "{warning}\n").map_err(failed)?;
    }
    if let Some(happened) = happened {
        let (freed, wakes) = (happened.freed * 100.0, happened.wakes);
        writeln!(
            out,
            "recorded in the history: {freed:.2}% of the VRAM freed, {wakes} wakes; simulated with \
             these policies:\n"
        )
        .map_err(failed)?;
    }
    table::print(out, Some(&titles), &rows).map_err(failed)
}

fn row(f: &SimulationSummary, wide: bool) -> Vec<String> {
    let percent = |share: f64| format!("{:.2}%", share * 100.0);
    let seconds = |ms: u64| format!("{:.1}s", ms as f64 / 1000.0);
    let woke = format!("{:.3}%", f.wake_share * 100.0);
    let delayed = format!("{:.3}%", f.delayed_share * 100.0);
    let slow_copied = format!("{:.3}%", f.slow_copied_share * 100.0);
    let slow_gone = format!("{:.3}%", f.slow_context_gone_share * 100.0);
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
            slow_copied,
            slow_gone,
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
        format::bytes(f.host_mean_bytes),
        format::bytes(f.host_peak_bytes),
        format::bytes(f.disk_peak_bytes),
        woke,
        delayed,
        seconds(f.latency_p50_ms),
        seconds(f.latency_p99_ms),
        seconds(f.delay_p50_ms),
        seconds(f.delay_p99_ms),
        slow_copied,
        slow_gone,
        format!("{:.3}", f.restores_per_process_hour),
        f.restores_copied.to_string(),
        f.restores_from_disk.to_string(),
        f.thrash.to_string(),
        format!("{} ({:.2})", f.queue_peak, f.queue_mean),
        format!("{}/{}", f.prewake_hits, f.prewakes),
        format!("{:.4} ({} worst)", f.fairness_jain, percent(f.worst_decile_delayed)),
        f.refused.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use affinode_core::Settings;

    use super::*;
    use affinode_simulate::TraceLoad;

    fn warned(step_s: u32) -> Option<String> {
        let arrivals_ms = (0..200).map(|n| n * step_s * 1_000).collect();
        let load = TraceLoad { arrivals_ms, ..TraceLoad::default() };
        let mut all = baselines::all(&Settings::default(), 1);
        chosen(&mut all, &["static".into(), "fixed-".into(), "lru".into()]).unwrap();
        step_warning(&WorkloadTrace { loads: vec![load] }, &all)
    }

    #[test]
    fn coarse_trace_names_the_doubtful_policies() {
        assert_eq!(warned(10), None);
        let text = warned(60).unwrap();
        assert!(text.contains("(1m)") && text.contains("fixed-30s, fixed-60s. "), "{text}");
    }
}
