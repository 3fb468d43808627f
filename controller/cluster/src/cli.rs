//! The command line of the program `affinode-cluster`: its subcommands and its log output.

use std::{error::Error, io, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::{check, error_chain, node, webhook};

#[derive(Parser)]
#[command(
    name = "affinode-cluster",
    version,
    about = "Affinode's components in a Kubernetes cluster"
)]
struct ClusterArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Manage a GPU node: install Affinode, serve the API of the node's controller, and report on
    /// the node's pods. This command runs in a DaemonSet.
    Node(Box<node::NodeOptions>),
    /// Remove Affinode from all nodes, before the other objects of the installation are removed.
    /// This command runs in a Job.
    Retire(node::retire::RetireOptions),
    /// Run an admission webhook, which sets the runtime class of GPU pods while they are created.
    Webhook(Box<webhook::WebhookOptions>),
    /// Check whether the container in which this command runs is managed. This command runs in the
    /// pod of `helm test`.
    Check(check::CheckOptions),
}

/// Parses the command line and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = ClusterArgs::parse();
    log();
    match arguments.command {
        Command::Node(options) => exit(node::run(&options)),
        Command::Retire(options) => exit(node::retire::run(&options)),
        Command::Webhook(options) => exit(webhook::run(&options)),
        Command::Check(options) => exit(check::run(&options)),
    }
}

fn exit<E: Error>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", error_chain::chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Sends log lines to stderr, which the kubelet stores. `RUST_LOG` sets the level.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(false)
        .init();
}
