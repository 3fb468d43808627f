//! Output formats of results, and messages about nodes that did not reply.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use affinode_cli::format;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use super::error::{ExitStatus, PluginError};
use crate::error_chain::chain;

/// Maximum number of nodes that a message names.
const NAMED: usize = 5;

/// How a result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Aligned columns for a terminal.
    Table,
    /// Columns with further details.
    Wide,
    /// JSON with stable names. An error is a JSON object, too.
    Json,
    /// Names alone, one per line.
    Name,
}

/// Outcome of a request to one node. It shows whether the output of the command includes the data
/// of this node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeOutcome {
    /// Name of the node.
    pub node: String,
    /// Status of the request: `done`, `refused`, `unreachable` or `failed`.
    pub status: &'static str,
    /// Reason for the status, if it is not `done`.
    pub why: String,
    #[serde(skip)]
    exit: ExitStatus,
}

impl NodeOutcome {
    /// Converts the result of a request to a node into an outcome.
    pub fn new<T>(node: &str, result: &Result<T, PluginError>) -> NodeOutcome {
        let (exit, why) = match result {
            Ok(_) => (ExitStatus::Done, String::new()),
            Err(error) => (error.status(), format::safe(&chain(error))),
        };
        NodeOutcome { node: node.to_owned(), status: exit.as_str(), why, exit }
    }
}

impl NodeOutcome {
    /// Returns the exit status that follows from this node's outcome.
    pub fn exit(&self) -> ExitStatus {
        self.exit
    }
}

/// Prints on standard error which nodes did not reply, and why. Returns the exit status of the
/// whole command.
pub fn outcome(nodes: &[NodeOutcome]) -> ExitStatus {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in nodes.iter().filter(|node| node.exit != ExitStatus::Done) {
        reasons.entry(&node.why).or_default().push(&node.node);
    }
    for (why, names) in reasons {
        say(&format!("{}: {why}", named(&names)));
    }
    nodes.iter().map(|node| node.exit).max().unwrap_or_default()
}

fn named(names: &[&str]) -> String {
    let further = names.len().saturating_sub(NAMED);
    let listed = names.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    match (names.len(), further) {
        (1, _) => format!("node {listed}"),
        (_, 0) => format!("nodes {listed}"),
        _ => format!("nodes {listed} and {further} more"),
    }
}

/// Prints a line to standard error.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "kubectl affinode: {text}");
}

/// Reports the error with which a command ended. The error goes to standard error, and for JSON
/// output also to standard output. If the error is a closed pipe, nothing is printed.
pub fn failure(output: OutputFormat, error: &PluginError) {
    if matches!(error, PluginError::Print(error) if error.kind() == io::ErrorKind::BrokenPipe) {
        return;
    }
    let text = format::safe(&chain(error));
    if output == OutputFormat::Json {
        let object = json!({ "error": text, "status": error.status().as_str() });
        let _ = writeln!(io::stdout(), "{object}");
    }
    say(&text);
}

/// Prints an object as indented JSON.
///
/// # Errors
/// [`PluginError::Json`], [`PluginError::Print`].
pub fn json(out: &mut dyn Write, object: &impl Serialize) -> Result<(), PluginError> {
    let text = serde_json::to_string_pretty(object)?;
    Ok(writeln!(out, "{text}")?)
}
