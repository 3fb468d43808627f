//! `affinode ps`: lists GPUs and containers.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use affinode_controller::schema;

use super::{
    CliError, OutputFormat,
    client::ControlClient,
    events, format,
    local_node::{LocalNode, NOTHING_RUNS},
    table,
};

const TABLE: [&str; 7] = ["CONTAINER", "STATE", "FOR", "VRAM", "IN HOST RAM", "MODE", "REASON"];
const WIDE: [&str; 18] = [
    "CONTAINER",
    "ID",
    "STATE",
    "FOR",
    "IDLE",
    "VRAM",
    "IN HOST RAM",
    "STAYS ON GPU",
    "OFFLOADS",
    "LAST OFFLOAD",
    "LAST WAKE",
    "P99 WAKE",
    "MODE",
    "TIMEOUT",
    "ENGINE",
    "COPYABLE",
    "PIDS",
    "REASON",
];

/// Interval between two attempts to connect to a controller.
const AGAIN: Duration = Duration::from_secs(1);

pub async fn run(
    run_dir: &Path,
    out: &mut dyn Write,
    output: OutputFormat,
    headers: bool,
    watch: bool,
) -> Result<(), CliError> {
    let mut connected = ControlClient::connect(run_dir).await;
    if let Err(error) = connected {
        let Some(mut local) = LocalNode::of_empty(run_dir) else { return Err(error) };
        show(out, &local.read(), output, headers)?;
        if !watch {
            return Ok(());
        }
        writeln!(out)?;
        loop {
            tokio::time::sleep(AGAIN).await;
            connected = ControlClient::connect(run_dir).await;
            if connected.is_ok() || LocalNode::of_empty(run_dir).is_none() {
                break;
            }
        }
    }
    let client = &connected?;
    let mut last = None;
    loop {
        let node = schema::Node::from(client.list().await?);
        show(out, &node, output, headers)?;
        if !watch {
            return Ok(());
        }
        writeln!(out)?;
        last = Some(events::next(client, last).await?);
    }
}

fn show(
    out: &mut dyn Write,
    node: &schema::Node,
    output: OutputFormat,
    headers: bool,
) -> Result<(), CliError> {
    if output == OutputFormat::Json {
        serde_json::to_writer_pretty(&mut *out, node)?;
        return Ok(writeln!(out)?);
    }
    if output == OutputFormat::Yaml {
        return Ok(serde_yaml_ng::to_writer(out, node)?);
    }
    if headers {
        for gpu in &node.gpus {
            writeln!(out, "{}", gpu_line(gpu))?;
        }
        if node.host_used_bytes > 0 {
            let all = node.host_used_bytes.saturating_add(node.host_free_bytes);
            let (used, all) = (format::bytes(node.host_used_bytes), format::bytes(all));
            writeln!(out, "host RAM: {used} of {all} in use for offloaded memory")?;
        }
        if node.host_pool_used_bytes > 0 {
            let used = format::bytes(node.host_pool_used_bytes);
            let all = format::bytes(node.host_pool_bytes);
            writeln!(out, "host pool: {used} of {all} in use")?;
        }
        if let Some(error) = &node.gpu_error {
            writeln!(out, "GPUs cannot be read: {error}")?;
        }
        if !node.auto_offload {
            writeln!(out, "auto-offload is off: `affinode auto-offload on` turns it on")?;
        }
        writeln!(out)?;
    }
    if node.containers.is_empty() {
        // The sentence goes to standard error, so that a program that parses the rows does not read
        // it as a row.
        let without = node.controller_pid == 0;
        let nothing = if without { NOTHING_RUNS } else { "no GPU containers of runtime affinode" };
        let _ = writeln!(io::stderr(), "{nothing}");
        return Ok(());
    }
    let now_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let now_ms = i64::try_from(now_ms).unwrap_or(i64::MAX);
    let rows: Vec<Vec<String>> =
        node.containers.iter().map(|c| row(c, now_ms, output == OutputFormat::Wide)).collect();
    let titles: &[&str] = if output == OutputFormat::Wide { &WIDE } else { &TABLE };
    Ok(table::print(out, headers.then_some(titles), &rows)?)
}

fn gpu_line(gpu: &schema::Gpu) -> String {
    let free = gpu.vram_total_bytes.saturating_sub(gpu.vram_used_bytes);
    format!(
        "GPU {} {}{}: {} used, {} free of {}, {} offloaded, {}% busy, {}% over a minute",
        gpu.index,
        gpu.name,
        if gpu.simulated { " (simulated)" } else { "" },
        if gpu.vram_used_bytes == 0 { "0 MiB".into() } else { format::bytes(gpu.vram_used_bytes) },
        format::bytes(free),
        format::bytes(gpu.vram_total_bytes),
        format::bytes(gpu.vram_reclaimed_bytes),
        gpu.utilization_percent,
        gpu.utilization_minute_percent,
    )
}

/// Returns the mode to print. It is the mode of the policy, or `pinned` for a container with an
/// operator's pin, which overrides the mode.
fn mode(c: &schema::Container) -> String {
    if c.pinned { "pinned".into() } else { c.mode.clone() }
}

/// Formats the size of the VRAM that an offloaded container still holds, with the reasons why this
/// VRAM was not freed. `-`: the container holds no VRAM.
fn stays(c: &schema::Container) -> String {
    let reasons = match c.staying_reasons.as_slice() {
        [] => "context".into(),
        reasons => format::safe(&reasons.join(", ")),
    };
    if c.staying_bytes == 0 {
        return "-".into();
    }
    format!("{}: {reasons}", format::bytes(c.staying_bytes))
}

fn row(c: &schema::Container, now_ms: i64, wide: bool) -> Vec<String> {
    let since = u64::try_from(now_ms.saturating_sub(c.since_unix_ms)).unwrap_or(0);
    let moved = |ms: u64, times: u64| {
        if times == 0 { "-".into() } else { format!("{ms} ms") }
    };
    let name = format::safe(&c.name);
    let reason = format::safe(&c.reason_text);
    if !wide {
        return vec![
            name,
            c.state.clone(),
            format::duration(since),
            format::bytes(c.vram_bytes),
            format::offloaded(c.offloaded_bytes, c.disk_bytes),
            mode(c),
            reason,
        ];
    }
    let pids: Vec<String> = c.processes.iter().map(|p| p.pid.to_string()).collect();
    vec![
        name,
        c.id.chars().take(13).collect(),
        c.state.clone(),
        format::duration(since),
        format::duration(c.idle_ms),
        format::bytes(c.vram_bytes),
        format::offloaded(c.offloaded_bytes, c.disk_bytes),
        stays(c),
        c.offloads.to_string(),
        moved(c.last_offload_ms, c.offloads),
        moved(c.last_wake_ms, c.restores),
        moved(c.wake_p99_ms, c.restores),
        mode(c),
        format::duration(c.idle_timeout_ms),
        c.engine.clone(),
        c.copyable_share.map_or_else(|| "-".into(), |share| format!("{:.0}%", share * 100.0)),
        if pids.is_empty() { "-".into() } else { pids.join(",") },
        reason,
    ]
}

#[cfg(test)]
mod tests;
