//! `kubectl affinode check`: the user's rights, and whether each node serves the runtime.

use std::io::Write;

use affinode_cli::{format, table};
use clap::Args;
use serde::Serialize;

use super::{
    access::ClusterAccess,
    agents::ClusterAgents,
    error::{ExitStatus, PluginError},
    moves,
    node_row::{NodeHealth, NodeRow},
    output::{self, OutputFormat},
    status,
};

/// Check which rights the user has. Check also whether the agent of each node replies, whether the
/// node's containerd serves the runtime, and whether the agent can read the GPUs. The command
/// changes nothing.
#[derive(Args, Clone, Debug)]
pub struct CheckArgs {
    /// Check only the node with this name.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Format of the output. name prints only the names of failed checks.
    #[arg(short, long, default_value = "table")]
    pub output: OutputFormat,
}

/// Result of one check, as it is printed.
#[derive(Debug, Serialize)]
struct CheckResult {
    /// What was checked: a right, or a node.
    name: String,
    /// `ok`, `failed` or `note`. The word `note` means that the user lacks a right that only some
    /// users have.
    result: &'static str,
    /// The finding, as a sentence.
    text: String,
}

/// Runs the checks, and prints a line for each check.
///
/// # Errors
/// [`PluginError`]: the nodes could not be listed.
pub async fn run(
    access: &ClusterAccess,
    asked: &CheckArgs,
    out: &mut dyn Write,
) -> Result<ExitStatus, PluginError> {
    let agents = ClusterAgents::find(access, asked.node.as_deref()).await?;
    let mut results = Vec::new();
    for (name, verb, path, role) in [
        ("right to view", "get", "/affinode/v1/node", "affinode-viewer"),
        ("right to move", "post", "/affinode/v1/containers/offload", "affinode-operator"),
    ] {
        let (result, text) = match moves::has_right(access, verb, path).await? {
            true => ("ok", format!("the kubeconfig's user may {verb} {path}")),
            false => (
                "note",
                format!(
                    "the user may not {verb} {path}; a binding to ClusterRole {role} allows it"
                ),
            ),
        };
        results.push(CheckResult { name: name.to_owned(), result, text });
    }
    let mut exit = ExitStatus::Done;
    for (node, answer) in agents.get_each("/api/v1/node").await {
        let (row, outcome) = status::read(node, answer);
        let (result, status) = match row.health {
            // The runtime is served, but with a configuration other than the cluster's. The state
            // contains the reason.
            NodeHealth::Serving | NodeHealth::Resting if node.state != "served" => {
                ("failed", ExitStatus::Failed)
            }
            NodeHealth::Serving | NodeHealth::Resting => ("ok", ExitStatus::Done),
            NodeHealth::Unreachable => ("failed", outcome.exit()),
            _ => ("failed", ExitStatus::Failed),
        };
        exit = exit.max(status);
        let name = format!("node {}", row.name);
        results.push(CheckResult { name, result, text: format::safe(&text(&row, &node.state)) });
    }
    show(out, asked.output, &results)?;
    Ok(exit)
}

fn text(row: &NodeRow, state: &str) -> String {
    let is_reachable = matches!(row.health, NodeHealth::Serving | NodeHealth::Resting);
    match (&row.figures, row.why.as_str()) {
        _ if is_reachable && state != "served" => state.to_owned(),
        (Some(figures), "") => {
            let gpus = match figures.gpus {
                1 => "1 GPU".to_owned(),
                many => format!("{many} GPUs"),
            };
            format!("the runtime is served, {gpus}, version {}", figures.version)
        }
        (_, why) => why.to_owned(),
    }
}

fn show(
    out: &mut dyn Write,
    format: OutputFormat,
    results: &[CheckResult],
) -> Result<(), PluginError> {
    match format {
        OutputFormat::Json => output::json(out, &results),
        OutputFormat::Name => {
            for wrong in results.iter().filter(|result| result.result == "failed") {
                writeln!(out, "{}", wrong.name)?;
            }
            Ok(())
        }
        OutputFormat::Table | OutputFormat::Wide => {
            let row = |r: &CheckResult| vec![r.name.clone(), r.result.to_owned(), r.text.clone()];
            let rows: Vec<Vec<String>> = results.iter().map(row).collect();
            Ok(table::print(out, Some(&["CHECK", "RESULT", "WHAT WAS SEEN"]), &rows)?)
        }
    }
}
