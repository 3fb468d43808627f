//! `affinode calls`: shows the CUDA functions that processes call, with rate, bytes and duration.
//! Processes record their calls only while a client such as this command watches them.

use std::{collections::BTreeMap, io::Write, time::Duration};

use affinode_controller::call_trace::{CallTraceBatch, FunctionCalls, ProcessCalls};

use super::{CliError, OutputFormat, client::ControlClient, format, table};

/// Show which CUDA functions containers call, updated live.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Calls are recorded only while this command, the dashboard or another client watches them. If a
process makes many calls, only a sample of them is recorded. The number of calls per function is
then an estimate, and CALLS/S shows ~ before it. The total number of calls is always exact. Recorded
calls are dropped if the buffer between the process and the controller is full.")]
pub struct CallsArgs {
    /// Only this container: its name, its id, or a unique prefix of either. Default: all
    /// containers.
    container: Option<String>,
    /// Show only functions whose names contain this text.
    #[arg(short, long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show only the process with this pid.
    #[arg(short, long)]
    pid: Option<u32>,
    /// Print each recorded call instead of the sums for each function.
    #[arg(short, long)]
    each: bool,
    /// Watch for this many seconds, print once, then exit.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
    once: Option<u16>,
    /// Output format. json is one object per line, the same objects that GET /api/v1/calls sends.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
}

const TITLES: [&str; 8] =
    ["CONTAINER", "PID", "FUNCTION", "CALLS/S", "AVERAGE", "LONGEST", "BYTES/S", "FAILED"];
/// Interval at which the sums of calls are printed.
const SECOND: Duration = Duration::from_secs(1);

pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: CallsArgs,
) -> Result<(), CliError> {
    let mut last = 0;
    let mut sums = CallSums::default();
    let interval = asked.once.map_or(SECOND, |seconds| SECOND * u32::from(seconds.max(1)));
    let mut began = tokio::time::Instant::now();
    loop {
        let container = asked.container.clone().unwrap_or_default();
        for batch in client.calls(container, last).await? {
            last = batch.sequence;
            let batch = asked.narrow(batch);
            match asked.output {
                OutputFormat::Json => writeln!(out, "{}", serde_json::to_string(&batch)?)?,
                OutputFormat::Yaml => write!(out, "---\n{}", serde_yaml_ng::to_string(&batch)?)?,
                _ if asked.each => each(out, &batch)?,
                _ => sums.add(batch),
            }
        }
        out.flush()?;
        if began.elapsed() >= interval {
            let summed =
                !asked.each && matches!(asked.output, OutputFormat::Table | OutputFormat::Wide);
            if summed {
                std::mem::take(&mut sums).print(out, !asked.no_headers)?;
            }
            if asked.once.is_some() {
                return Ok(());
            }
            began = tokio::time::Instant::now();
        }
    }
}

impl CallsArgs {
    fn narrow(&self, mut batch: CallTraceBatch) -> CallTraceBatch {
        batch.processes.retain(|p| self.pid.is_none_or(|pid| p.pid == pid));
        for process in &mut batch.processes {
            process.functions.retain(|f| f.name.contains(&self.filter));
            process.recorded.retain(|call| call.name.contains(&self.filter));
        }
        batch
    }
}

fn each(out: &mut dyn Write, batch: &CallTraceBatch) -> Result<(), CliError> {
    for process in &batch.processes {
        for call in &process.recorded {
            let mut line = format!(
                "{}  {}  {}/{}  {}  {}",
                format::clock(batch.unix_ms),
                format::safe(&process.container),
                process.pid,
                call.thread,
                call.name,
                nanoseconds(call.duration_ns)
            );
            if call.bytes > 0 {
                line.push_str(&format!("  {}", format::amount(call.bytes)));
            }
            if call.result != 0 {
                line.push_str(&format!("  returned {}", call.result));
            }
            if call.stands_for > 1 {
                line.push_str(&format!("  (sample, 1 of {})", call.stands_for));
            }
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}

/// Sums of the CUDA calls that were recorded since the last print.
#[derive(Default)]
struct CallSums {
    elapsed_ms: u64,
    left_out: u64,
    processes: BTreeMap<(String, u32), ProcessCalls>,
}

impl CallSums {
    fn add(&mut self, batch: CallTraceBatch) {
        self.elapsed_ms += batch.elapsed_ms;
        self.left_out = self.left_out.max(batch.left_out);
        for process in batch.processes {
            let known = self.processes.entry((process.container.clone(), process.pid)).or_default();
            known.calls += process.calls;
            known.one_in = process.one_in;
            known.dropped += process.dropped;
            for function in process.functions {
                match known.functions.iter_mut().find(|f| f.name == function.name) {
                    Some(f) => merge(f, &function),
                    None => known.functions.push(function),
                }
            }
        }
    }

    fn print(self, out: &mut dyn Write, headers: bool) -> Result<(), CliError> {
        let seconds = self.elapsed_ms.max(1) as f64 / 1000.0;
        let rate = |n: u64| n as f64 / seconds;
        let mut rows = Vec::new();
        for ((container, pid), process) in &self.processes {
            let mut functions: Vec<&FunctionCalls> = process.functions.iter().collect();
            functions.sort_by_key(|f| std::cmp::Reverse(f.calls));
            rows.extend(functions.iter().map(|f| {
                let sample = if f.recorded < f.calls { "~" } else { "" };
                vec![
                    format::safe(container),
                    pid.to_string(),
                    f.name.clone(),
                    format!("{sample}{}", format::rate(rate(f.calls))),
                    nanoseconds(f.total_ns.checked_div(f.recorded).unwrap_or(0)),
                    nanoseconds(f.longest_ns),
                    if f.bytes == 0 { "-".into() } else { format::amount(rate(f.bytes) as u64) },
                    f.failed.to_string(),
                ]
            }));
        }
        table::print(out, headers.then_some(&TITLES), &rows)?;
        let all: u64 = self.processes.values().map(|p| p.calls).sum();
        let dropped: u64 = self.processes.values().map(|p| p.dropped).sum();
        let mut line = format!(
            "{} calls per second in {} processes, {dropped} dropped",
            format::rate(rate(all)),
            self.processes.len()
        );
        let mute = self.processes.values().filter(|p| p.one_in == 0).count();
        if mute > 0 {
            line.push_str(&format!(
                "; in {mute} of these processes, the library is too old to record calls: restart \
                 them to see their calls"
            ));
        }
        if self.left_out > 0 {
            line.push_str(&format!(", {} processes not shown", self.left_out));
        }
        Ok(writeln!(out, "{line}\n")?)
    }
}

fn merge(to: &mut FunctionCalls, from: &FunctionCalls) {
    to.calls += from.calls;
    to.recorded += from.recorded;
    to.bytes = to.bytes.saturating_add(from.bytes);
    to.failed += from.failed;
    to.total_ns = to.total_ns.saturating_add(from.total_ns);
    to.longest_ns = to.longest_ns.max(from.longest_ns);
}

/// Formats a duration in nanoseconds, such as `812 ns`, `3.0 us`, `14.2 ms`, `2.50 s`.
fn nanoseconds(ns: u64) -> String {
    let n = ns as f64;
    match ns {
        0..=999 => format!("{ns} ns"),
        1_000..=999_999 => format!("{:.1} us", n / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} ms", n / 1e6),
        _ => format!("{:.2} s", n / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, calls: u64, recorded: u64) -> FunctionCalls {
        FunctionCalls {
            name: name.into(),
            calls,
            recorded,
            total_ns: recorded * 3_000,
            longest_ns: 14_200_000,
            ..FunctionCalls::default()
        }
    }

    fn batch(functions: Vec<FunctionCalls>) -> CallTraceBatch {
        let process = ProcessCalls {
            container: "ml/a".into(),
            pid: 7,
            calls: 1_000,
            one_in: 1,
            dropped: 3,
            functions,
            ..ProcessCalls::default()
        };
        CallTraceBatch { elapsed_ms: 500, processes: vec![process], ..CallTraceBatch::default() }
    }

    #[test]
    fn sums_of_batches_mark_estimates() {
        let mut sums = CallSums::default();
        sums.add(batch(vec![
            function("cuStreamQuery", 10, 10),
            function("cuLaunchKernel", 900, 9),
        ]));
        sums.add(batch(vec![function("cuLaunchKernel", 1_100, 11)]));
        let mut out = Vec::new();
        sums.print(&mut out, true).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][2..6], ["cuLaunchKernel", "~2000", "3.0", "us"], "{text}");
        assert_eq!(lines[2][2..4], ["cuStreamQuery", "10.0"], "{text}");
        assert!(text.contains("2000 calls per second in 1 processes, 6 dropped"), "{text}");
    }

    #[test]
    fn durations_are_short() {
        let shown = [812, 3_000, 14_200_000, 2_500_000_000].map(nanoseconds);
        assert_eq!(shown, ["812 ns", "3.0 us", "14.2 ms", "2.50 s"]);
    }
}
