//! `kubectl affinode`: shows and moves GPU containers of a cluster, with the user's own rights.
//!
//! ```text
//!  kubeconfig ──> API server: nodes, pods of the agents, their certificates
//!                   │ port-forward to the agent's pod
//!                   v
//!                 TLS, pinned to the node's certificate ──user's token──> agent ──review──> API server
//!                                                                           │ allowed
//!                                                                           v
//!                                                                   the node's controller
//! ```
//!
//! A port-forward carries the user's token to the agent, which asks the API server for the user's
//! rights. The plugin does not use the API server's proxy, because that proxy removes the token.
//! The user needs no network route to a node and no root rights. The plugin uses no part of
//! Affinode in the cluster except the agents.

mod access;
mod agent_client;
mod agents;
mod cert_pin;
mod check;
mod error;
mod moves;
mod node;
mod node_figures;
mod node_row;
mod output;
mod ps;
mod report;
mod select;
mod status;

use std::{io, process::ExitCode};

use affinode_cli::reference;
use clap::{CommandFactory, Parser, Subcommand};
use serde_json::json;
use tokio_rustls::rustls::crypto;

use self::{
    access::{ClusterAccess, ConnectionArgs},
    error::{ExitStatus, PluginError},
    moves::MoveVerb,
    output::OutputFormat,
};

/// Shows and moves the GPU memory of containers in a cluster.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-affinode",
    bin_name = "kubectl affinode",
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 success, 1 failure, 2 wrong usage, 3 a right is missing or the request was refused, 4 a node or the API server cannot be reached. A list with exit status 3 or 4 lacks the nodes that standard error names."
)]
struct PluginArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ps(ps::PsArgs),
    Status(status::StatusArgs),
    Check(check::CheckArgs),
    /// Offload containers now: move their GPU memory to host memory.
    Offload(moves::MoveArgs),
    /// Restore containers now: move their offloaded memory back to the GPU.
    Restore(moves::MoveArgs),
    Report(report::ReportArgs),
    Node(node::NodeArgs),
    /// Print the data of the documentation's reference pages as JSON.
    #[command(hide = true)]
    Reference,
}

impl Command {
    fn output(&self) -> OutputFormat {
        match self {
            Command::Ps(asked) => asked.output,
            Command::Status(asked) => asked.output,
            Command::Offload(asked) | Command::Restore(asked) => asked.output,
            Command::Check(asked) => asked.output,
            Command::Report(asked) => asked.errors(),
            Command::Node(_) => OutputFormat::Table,
            Command::Reference => OutputFormat::Json,
        }
    }
}

/// Parses the command line and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = PluginArgs::parse();
    let output = arguments.command.output();
    // Fails only if the same provider is installed already.
    let _ = crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(run(arguments)),
        Err(error) => Err(PluginError::Start(error)),
    };
    let status = done.unwrap_or_else(|error| {
        output::failure(output, &error);
        error.status()
    });
    ExitCode::from(status as u8)
}

async fn run(arguments: PluginArgs) -> Result<ExitStatus, PluginError> {
    if matches!(arguments.command, Command::Reference) {
        let commands = reference::commands(PluginArgs::command());
        output::json(&mut io::stdout(), &json!({ "commands": commands }))?;
        return Ok(ExitStatus::Done);
    }
    let access = ClusterAccess::open(arguments.connection).await?;
    let mut out = io::stdout();
    match arguments.command {
        Command::Ps(asked) => ps::run(&access, &asked, &mut out).await,
        Command::Status(asked) => status::run(&access, &asked, &mut out).await,
        Command::Offload(asked) => moves::run(&access, MoveVerb::Offload, &asked, &mut out).await,
        Command::Restore(asked) => moves::run(&access, MoveVerb::Restore, &asked, &mut out).await,
        Command::Check(asked) => check::run(&access, &asked, &mut out).await,
        Command::Report(asked) => report::run(&access, &asked, &mut out).await,
        Command::Node(asked) => node::run(&access, &asked, &mut out).await,
        // The start of this function has handled this command.
        Command::Reference => Ok(ExitStatus::Done),
    }
}
