//! The command `affinode-cluster`.

use std::{error::Error, io, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::{error_chain, fleet, node, webhook};

#[derive(Parser)]
#[command(name = "affinode-cluster", version, about = "Affinode's part in a Kubernetes cluster")]
struct ClusterArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Look after a GPU node: install Affinode, show its controller, tell its pods (a DaemonSet).
    Node(Box<node::NodeOptions>),
    /// Take Affinode off all nodes, before the rest of an installation goes (a Job).
    Retire(node::retire::RetireOptions),
    /// Show all nodes on one page, and the way to each (a Deployment).
    Fleet(Box<fleet::FleetOptions>),
    /// Give GPU pods the runtime class while they are created (an admission webhook).
    Webhook(Box<webhook::WebhookOptions>),
}

/// Parses and runs.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = ClusterArgs::parse();
    log();
    match arguments.command {
        Command::Node(options) => exit(node::run(&options)),
        Command::Retire(options) => exit(node::retire::run(&options)),
        Command::Fleet(options) => exit(fleet::run(&options)),
        Command::Webhook(options) => exit(webhook::run(&options)),
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

/// To stderr, which the kubelet keeps; `RUST_LOG` says how much.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(false)
        .init();
}
