//! `kubectl affinode ps`: lists GPU containers of all nodes.

use std::{cmp::Reverse, io::Write};

use affinode_cli::{format, table};
use affinode_controller::schema;
use clap::{Args, ValueEnum};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::{
    access::ClusterAccess,
    agents::ClusterAgents,
    error::{ExitStatus, PluginError},
    output::{self, NodeOutcome, OutputFormat},
    select::{ContainerFilter, NodeContainer},
};

const TABLE: [&str; 8] =
    ["NODE", "CONTAINER", "STATE", "FOR", "VRAM", "IN HOST RAM", "MODE", "REASON"];
const WIDE: [&str; 13] = [
    "NODE",
    "CONTAINER",
    "STATE",
    "FOR",
    "IDLE",
    "VRAM",
    "IN HOST RAM",
    "OFFLOADS",
    "LAST WAKE",
    "MODE",
    "PRIORITY",
    "ENGINE",
    "REASON",
];

/// List GPU containers with their node, their state, their VRAM, and the reason for the state.
#[derive(Args, Clone, Debug)]
pub struct PsArgs {
    #[command(flatten)]
    filter: ContainerFilter,
    /// Order of the list.
    #[arg(long, default_value = "name")]
    sort_by: SortKey,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    pub output: OutputFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
}

/// Order of a list of containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SortKey {
    /// By namespace, pod and container.
    Name,
    /// By node, then by name.
    Node,
    /// By state, then by name.
    State,
    /// The largest VRAM first.
    Vram,
    /// The largest memory in host RAM first.
    HostRam,
    /// The container with the longest idle time first.
    Idle,
}

/// The containers of a cluster, and the outcome of the request to each node.
#[derive(Debug, Serialize)]
pub struct ContainerList {
    /// Containers that match the filter.
    pub containers: Vec<NodeContainer>,
    /// Outcome of the request to each node.
    pub nodes: Vec<NodeOutcome>,
}

/// Prints the list of GPU containers.
///
/// # Errors
/// [`PluginError`]: no list could be made.
pub async fn run(
    access: &ClusterAccess,
    asked: &PsArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let agents = ClusterAgents::find(access, asked.filter.node.as_deref()).await?;
    let mut list = list(&agents, &asked.filter, &access.namespace).await;
    sort(&mut list.containers, asked.sort_by);
    match asked.output {
        OutputFormat::Json => output::json(out, &list)?,
        OutputFormat::Name => {
            for found in &list.containers {
                writeln!(out, "{}", format::safe(&found.container.name))?;
            }
        }
        OutputFormat::Table | OutputFormat::Wide => {
            let wide = asked.output == OutputFormat::Wide;
            show(out, &list.containers, wide, !asked.no_headers)?;
            if list.containers.is_empty() {
                output::say(&nothing(&asked.filter, &access.namespace));
            }
        }
    }
    Ok(output::outcome(&list.nodes))
}

/// Requests the containers of each node from the node's agent, and returns those that match the
/// filter.
pub async fn list(
    agents: &ClusterAgents<'_>,
    filter: &ContainerFilter,
    namespace: &str,
) -> ContainerList {
    let mut list = ContainerList { containers: Vec::new(), nodes: Vec::new() };
    for (node, answer) in agents.get_each("/api/v1/node").await {
        let read = answer.and_then(|body| match body {
            Some(body) => serde_json::from_slice::<schema::Node>(&body).map_err(|error| {
                PluginError::Reply(format!(
                    "the reply does not have the form of a node's state: {error}"
                ))
            }),
            None => Ok(schema::Node::default()),
        });
        list.nodes.push(NodeOutcome::new(&node.name, &read));
        if let Ok(read) = read {
            list.containers.extend(filter.of(&node.name, read, namespace));
        }
    }
    list
}

fn nothing(filter: &ContainerFilter, namespace: &str) -> String {
    match filter.all_namespaces {
        true => "no GPU container was found".to_owned(),
        false => {
            format!("no GPU container was found in namespace {namespace}; -A shows all namespaces")
        }
    }
}

fn sort(containers: &mut [NodeContainer], by: SortKey) {
    containers.sort_by(|a, b| a.container.name.cmp(&b.container.name));
    match by {
        SortKey::Name => {}
        SortKey::Node => containers.sort_by(|a, b| a.node.cmp(&b.node)),
        SortKey::State => containers.sort_by(|a, b| a.container.state.cmp(&b.container.state)),
        SortKey::Vram => containers.sort_by_key(|c| Reverse(c.container.vram_bytes)),
        SortKey::HostRam => containers.sort_by_key(|c| Reverse(c.container.offloaded_bytes)),
        SortKey::Idle => containers.sort_by_key(|c| Reverse(c.container.idle_ms)),
    }
}

fn show(
    out: &mut dyn Write,
    containers: &[NodeContainer],
    wide: bool,
    headers: bool,
) -> Result<(), PluginError> {
    if containers.is_empty() {
        return Ok(());
    }
    let now_ms = Timestamp::now().as_millisecond();
    let rows: Vec<Vec<String>> = containers.iter().map(|c| row(c, now_ms, wide)).collect();
    let titles: &[&str] = if wide { &WIDE } else { &TABLE };
    Ok(table::print(out, headers.then_some(titles), &rows)?)
}

fn row(found: &NodeContainer, now_ms: i64, wide: bool) -> Vec<String> {
    let c = &found.container;
    let since = u64::try_from(now_ms.saturating_sub(c.since_unix_ms)).unwrap_or(0);
    let mode = if c.pinned { "pinned".to_owned() } else { format::safe(&c.mode) };
    let mut cells = vec![
        found.node.clone(),
        format::safe(&c.name),
        format::safe(&c.state),
        format::duration(since),
    ];
    if wide {
        cells.push(format::duration(c.idle_ms));
    }
    cells.extend([format::bytes(c.vram_bytes), format::offloaded(c.offloaded_bytes, c.disk_bytes)]);
    if wide {
        let wake = if c.restores == 0 { "-".into() } else { format!("{} ms", c.last_wake_ms) };
        cells.extend([c.offloads.to_string(), wake]);
    }
    cells.push(mode);
    if wide {
        cells.extend([c.priority.to_string(), format::safe(&c.engine)]);
    }
    cells.push(format::safe(&c.reason_text));
    cells
}
