//! `kubectl affinode status`: prints the figures of each node, and their sum.

use std::{cmp::Reverse, io::Write};

use affinode_cli::{format, table};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{
    access::ClusterAccess,
    agents::{ClusterAgents, ManagedNode, NodeAnswer},
    error::{ExitStatus, PluginError},
    node_figures::{self, NodeFigures},
    node_row::{NodeHealth, NodeRow},
    output::{self, NodeOutcome, OutputFormat},
};
use crate::error_chain::chain;

const TABLE: [&str; 10] = [
    "NODE",
    "HEALTH",
    "GPUS",
    "VRAM",
    "USED",
    "RECLAIMABLE",
    "OFFLOADED",
    "WAITING",
    "LOST",
    "AUTO-OFFLOAD",
];
const WIDE: [&str; 5] = ["GPU", "FREE HOST RAM", "IDLE SINCE", "VERSION", "REASON"];

/// Show for each node, and for all nodes together: the GPUs, the VRAM in use, the VRAM of idle
/// containers, the offloaded memory, and the number of containers that wait for VRAM.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    /// Show only the node with this name.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Order of the nodes.
    #[arg(long, default_value = "name")]
    sort_by: SortKey,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    pub output: OutputFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
}

/// Order of a list of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SortKey {
    /// By the nodes' names.
    Name,
    /// The most VRAM in use first.
    Used,
    /// The most VRAM of idle containers first.
    Reclaimable,
    /// The most offloaded memory first.
    Offloaded,
    /// The most waiting containers first.
    Waiting,
}

#[derive(Serialize)]
struct ClusterStatus<'a> {
    nodes: &'a [NodeRow],
    all: &'a NodeFigures,
    outcomes: &'a [NodeOutcome],
}

/// Prints the nodes and their sum.
///
/// # Errors
/// [`PluginError`]: the nodes could not be listed.
pub async fn run(
    access: &ClusterAccess,
    asked: &StatusArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let agents = ClusterAgents::find(access, asked.node.as_deref()).await?;
    let mut rows = Vec::new();
    let mut outcomes = Vec::new();
    for (node, answer) in agents.get_each("/api/v1/node").await {
        let (row, outcome) = read(node, answer);
        rows.push(row);
        outcomes.push(outcome);
    }
    sort(&mut rows, asked.sort_by);
    let all = sum(&rows);
    match asked.output {
        OutputFormat::Json => {
            output::json(out, &ClusterStatus { nodes: &rows, all: &all, outcomes: &outcomes })?;
        }
        OutputFormat::Name => {
            for row in &rows {
                writeln!(out, "{}", row.name)?;
            }
        }
        OutputFormat::Table | OutputFormat::Wide => {
            let wide = asked.output == OutputFormat::Wide;
            show(out, &rows, &all, wide, !asked.no_headers)?;
        }
    }
    Ok(output::outcome(&outcomes))
}

/// Converts the reply of a node's agent. Returns the row to print, and the outcome of the request.
pub fn read(node: &ManagedNode, answer: NodeAnswer) -> (NodeRow, NodeOutcome) {
    let figures = answer.and_then(|body| {
        let read = |body: Vec<u8>| {
            node_figures::read(&body).map_err(|error| {
                PluginError::Reply(format!(
                    "the reply does not have the form of a node's state: {error}"
                ))
            })
        };
        body.map(read).transpose()
    });
    let outcome = NodeOutcome::new(&node.name, &figures);
    let mut row = NodeRow::new(&node.name, figures.map_err(|error| chain(&error)), &node.state);
    row.gpus_idle_since.clone_from(&node.gpus_idle_since);
    (row, outcome)
}

fn sort(rows: &mut [NodeRow], by: SortKey) {
    let figure = |row: &NodeRow| {
        let figures = row.figures.as_ref()?;
        Some(match by {
            SortKey::Name => 0,
            SortKey::Used => figures.vram_used_bytes,
            SortKey::Reclaimable => figures.vram_reclaimable_bytes,
            SortKey::Offloaded => figures.offloaded_bytes,
            SortKey::Waiting => u64::try_from(figures.waiting).unwrap_or(u64::MAX),
        })
    };
    if by != SortKey::Name {
        rows.sort_by_key(|row| Reverse(figure(row)));
    }
}

/// Adds up the figures of the nodes that replied.
fn sum(rows: &[NodeRow]) -> NodeFigures {
    let mut all = NodeFigures { auto_offload: true, ..NodeFigures::default() };
    for figures in rows.iter().filter_map(|row| row.figures.as_ref()) {
        all.auto_offload &= figures.auto_offload;
        all.simulated |= figures.simulated;
        all.gpus += figures.gpus;
        all.resident += figures.resident;
        all.offloaded += figures.offloaded;
        all.waiting += figures.waiting;
        all.lost += figures.lost;
        for (sum, part) in [
            (&mut all.vram_total_bytes, figures.vram_total_bytes),
            (&mut all.vram_used_bytes, figures.vram_used_bytes),
            (&mut all.vram_reclaimable_bytes, figures.vram_reclaimable_bytes),
            (&mut all.resident_bytes, figures.resident_bytes),
            (&mut all.offloaded_bytes, figures.offloaded_bytes),
            (&mut all.host_free_bytes, figures.host_free_bytes),
        ] {
            *sum = sum.saturating_add(part);
        }
    }
    all
}

fn show(
    out: &mut dyn Write,
    rows: &[NodeRow],
    all: &NodeFigures,
    wide: bool,
    headers: bool,
) -> Result<(), PluginError> {
    let mut lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let mut cells = vec![row.name.clone(), health(row.health).to_owned()];
            cells.extend(figures(row.figures.as_ref()));
            if wide {
                cells.extend(details(row));
            }
            cells
        })
        .collect();
    let serving = rows.iter().filter(|row| row.health == NodeHealth::Serving).count();
    let mut last = vec!["all".to_owned(), format!("{serving} of {} serving", rows.len())];
    last.extend(figures(Some(all)));
    if wide {
        let free = format::bytes(all.host_free_bytes);
        last.extend(["".into(), free, "".into(), "".into(), "".into()]);
    }
    lines.push(last);
    let titles = if wide { [&TABLE[..], &WIDE[..]].concat() } else { TABLE.to_vec() };
    Ok(table::print(out, headers.then_some(&titles), &lines)?)
}

fn health(health: NodeHealth) -> &'static str {
    match health {
        NodeHealth::Serving => "Serving",
        NodeHealth::Resting => "Resting",
        NodeHealth::Troubled => "Troubled",
        NodeHealth::NotServed => "NotServed",
        NodeHealth::Unreachable => "Unreachable",
    }
}

fn figures(figures: Option<&NodeFigures>) -> [String; 8] {
    let Some(f) = figures else { return std::array::from_fn(|_| "-".to_owned()) };
    [
        f.gpus.to_string(),
        format::bytes(f.vram_total_bytes),
        format::bytes(f.vram_used_bytes),
        format::bytes(f.vram_reclaimable_bytes),
        format::bytes(f.offloaded_bytes),
        f.waiting.to_string(),
        f.lost.to_string(),
        if f.auto_offload { "on" } else { "off" }.to_owned(),
    ]
}

fn details(row: &NodeRow) -> [String; 5] {
    let figures = row.figures.clone().unwrap_or_default();
    let gpu =
        if figures.gpu_name.is_empty() { "-".into() } else { format::safe(&figures.gpu_name) };
    let version =
        if figures.version.is_empty() { "-".into() } else { format::safe(&figures.version) };
    let idle = row.gpus_idle_since.as_deref().map_or_else(|| "-".into(), format::safe);
    [gpu, format::bytes(figures.host_free_bytes), idle, version, format::safe(&row.why)]
}
