//! `kubectl affinode report`: use of the GPUs of all nodes over time.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use affinode_cli::{
    format,
    report_table::{CSV_COLUMNS, Price, ReportTable, csv_line, field},
};
use affinode_controller::schema::{self, ReportRow};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{
    access::ClusterAccess,
    agents::ClusterAgents,
    error::{ExitStatus, PluginError},
    output::{self, NodeOutcome, OutputFormat},
};

/// Print how the GPUs of all nodes were used: how much VRAM was requested, was in use, was held by
/// idle containers, and was freed by offloads, each in GPU hours. A GPU hour is the whole VRAM of a
/// GPU for one hour, or half of it for two hours. Requested is the VRAM limit of a container (the
/// amount of its resource claims), for as long as the container exists. A node on which no
/// controller runs is missing from the report, and standard error names it.
#[derive(Args, Clone, Debug)]
pub struct ReportArgs {
    /// Length of the time range, which ends now: for example 90m, 24h or 7d.
    #[arg(long, default_value = "24h", value_parser = humantime::parse_duration)]
    since: Duration,
    /// What each line is: a container, a pod, a namespace (a team), the resource claims of a
    /// container, or a node.
    #[arg(long, default_value = "container")]
    by: Grouping,
    /// Include pods of all namespaces, and containers without a pod.
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Only containers of this node. No request goes to other nodes.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: ReportFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
}

impl ReportArgs {
    /// Returns the format in which errors are printed. It is JSON if the report is in JSON, and
    /// text otherwise.
    pub fn errors(&self) -> OutputFormat {
        match self.output {
            ReportFormat::Json => OutputFormat::Json,
            _ => OutputFormat::Table,
        }
    }
}

/// What each line of a report stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Grouping {
    /// One line per container and node.
    Container,
    /// One line per pod and node.
    Pod,
    /// One line per namespace, over all nodes. The namespace is the team of a container.
    #[value(alias = "team")]
    Namespace,
    /// One line per resource claim, over all nodes. A container with several claims has one line
    /// for all of them.
    Claim,
    /// One line per node.
    Node,
}

/// Format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReportFormat {
    /// Aligned columns for a terminal.
    Table,
    /// Further columns: requested and resident VRAM, CUDA calls, the share of resident VRAM that
    /// was idle, and the prices of requested, used, idle and resident VRAM.
    Wide,
    /// Comma-separated values, in GPU seconds.
    Csv,
    /// JSON with the names of a node's report, and the node of each row.
    Json,
}

/// Report of the GPU use of all nodes of a cluster in a time range.
#[derive(Debug, Serialize)]
struct ClusterReport {
    /// Start of the range, in milliseconds since 1970.
    since_unix_ms: i64,
    /// End of the range, in milliseconds since 1970.
    until_unix_ms: i64,
    /// Price of a GPU hour. `None`: a node has no price, or the nodes have different prices.
    price_per_gpu_hour: Option<f64>,
    /// Currency of the price.
    currency: String,
    /// Time since which all nodes have history, in milliseconds since 1970. Each node has an oldest
    /// record in the range, and this is the latest of these records.
    oldest_unix_ms: Option<i64>,
    rows: Vec<NodeReportRow>,
    /// Outcome of the request to each node.
    nodes: Vec<NodeOutcome>,
}

/// A row of the cluster's report: the GPU use of one container, pod, namespace, claim or node.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct NodeReportRow {
    /// Name of the node. Empty if the row is a sum over several nodes.
    node: String,
    #[serde(flatten)]
    row: ReportRow,
}

/// Prints the report.
///
/// # Errors
/// [`PluginError`]: no report could be made.
pub async fn run(
    access: &ClusterAccess,
    asked: &ReportArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let agents = ClusterAgents::find(access, asked.node.as_deref()).await?;
    let until_ms = now_ms();
    let back_ms = i64::try_from(asked.since.as_millis()).unwrap_or(i64::MAX);
    let since_ms = until_ms.saturating_sub(back_ms).max(0);
    let path = format!("/api/v1/report?since_ms={since_ms}&until_ms={until_ms}");
    let (mut rows, mut reports, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    for (node, answer) in agents.get_each(&path).await {
        let read = answer.and_then(|body| read(body.as_deref()));
        nodes.push(NodeOutcome::new(&node.name, &read));
        if let Ok(mut report) = read {
            let all = std::mem::take(&mut report.rows).into_iter();
            let kept = all.filter(|row| asked.all_namespaces || row.namespace == access.namespace);
            rows.extend(kept.map(|row| NodeReportRow { node: node.name.clone(), row }));
            reports.push(report);
        }
    }
    let price = one_price(&reports);
    let report = ClusterReport {
        since_unix_ms: since_ms,
        until_unix_ms: until_ms,
        price_per_gpu_hour: price.map(|price| price.per_gpu_hour),
        currency: price.map(|price| price.currency.to_owned()).unwrap_or_default(),
        oldest_unix_ms: reports.iter().filter_map(|report| report.oldest_unix_ms).max(),
        rows: merge(rows, asked.by),
        nodes,
    };
    match asked.output {
        ReportFormat::Json => output::json(out, &report)?,
        ReportFormat::Csv => csv(out, &report, price, !asked.no_headers)?,
        ReportFormat::Table | ReportFormat::Wide => {
            let table = ReportTable {
                names: names(asked.by),
                price,
                wide: asked.output == ReportFormat::Wide,
                headers: !asked.no_headers,
            };
            let rows: Vec<_> =
                report.rows.iter().map(|found| (cells(found, asked.by), &found.row)).collect();
            table.print(out, &rows)?;
        }
    }
    Ok(output::outcome(&report.nodes))
}

/// Parses the report in the body of a node's reply. A `body` of `None` means that no controller
/// runs on the node. This is an error, because the report of the node is then missing.
fn read(body: Option<&[u8]>) -> Result<schema::Report, PluginError> {
    let body = body.ok_or_else(|| {
        PluginError::Reply("no controller runs on the node, so its part is missing".to_owned())
    })?;
    serde_json::from_slice(body).map_err(|error| {
        PluginError::Reply(format!("the reply does not have the form of a report: {error}"))
    })
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the price of a GPU hour that all nodes have. `None`: a node has no price, or the nodes
/// have different prices, so a sum of their costs would have no meaning.
fn one_price(reports: &[schema::Report]) -> Option<Price<'_>> {
    let mut prices = reports.iter().map(Price::of);
    let first = prices.next()??;
    prices.all(|price| price == Some(first)).then_some(first)
}

/// Adds up the rows of each group, such as all rows of a namespace. The groups whose offloads freed
/// the most VRAM come first.
fn merge(rows: Vec<NodeReportRow>, by: Grouping) -> Vec<NodeReportRow> {
    let mut groups: BTreeMap<[String; 5], NodeReportRow> = BTreeMap::new();
    for mut found in rows {
        let ReportRow { namespace, pod, container, claim, .. } = &mut found.row;
        match by {
            Grouping::Container => {}
            Grouping::Pod => container.clear(),
            Grouping::Namespace => {
                [&mut found.node, pod, container, claim].into_iter().for_each(String::clear);
            }
            Grouping::Claim => {
                [&mut found.node, pod, container].into_iter().for_each(String::clear);
            }
            Grouping::Node => {
                [namespace, pod, container, claim].into_iter().for_each(String::clear);
            }
        }
        let row = &found.row;
        let of_claim = if by == Grouping::Claim { row.claim.as_str() } else { "" };
        let group = [&found.node, &row.namespace, &row.pod, &row.container, of_claim];
        let group = group.map(str::to_owned);
        match groups.entry(group) {
            Entry::Occupied(mut known) => known.get_mut().row.add(&found.row),
            Entry::Vacant(place) => drop(place.insert(found)),
        }
    }
    let mut merged: Vec<NodeReportRow> = groups.into_values().collect();
    merged.sort_by(|a, b| b.row.returned_gpu_seconds.total_cmp(&a.row.returned_gpu_seconds));
    merged
}

fn names(by: Grouping) -> &'static [&'static str] {
    match by {
        Grouping::Container => &["NODE", "CONTAINER"],
        Grouping::Pod => &["NODE", "POD"],
        Grouping::Namespace => &["NAMESPACE"],
        Grouping::Claim => &["CLAIM"],
        Grouping::Node => &["NODE"],
    }
}

fn cells(found: &NodeReportRow, by: Grouping) -> Vec<String> {
    let row = &found.row;
    let path = [&row.namespace, &row.pod, &row.container];
    let path: Vec<&str> = path.into_iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
    let name = match path.is_empty() {
        true => "(no pod)".to_owned(),
        false => format::safe(&path.join("/")),
    };
    match by {
        Grouping::Container | Grouping::Pod => vec![found.node.clone(), name],
        Grouping::Namespace => vec![name],
        Grouping::Claim if row.claim.is_empty() => vec![format!("{name} (no claim)")],
        Grouping::Claim => vec![format::safe(&row.claim)],
        Grouping::Node => vec![found.node.clone()],
    }
}

fn csv(
    out: &mut dyn Write,
    report: &ClusterReport,
    price: Option<Price<'_>>,
    headers: bool,
) -> Result<(), PluginError> {
    if headers {
        writeln!(out, "node,{CSV_COLUMNS}")?;
    }
    for NodeReportRow { node, row } in &report.rows {
        writeln!(out, "{},{}", field(node), csv_line(row, price))?;
    }
    Ok(())
}
