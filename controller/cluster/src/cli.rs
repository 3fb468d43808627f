//! The command `affinode-cluster`.

use std::{io, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::{report, webhook};

#[derive(Parser)]
#[command(name = "affinode-cluster", version, about = "Affinode's part in a Kubernetes cluster")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Give GPU pods the runtime class while they are created (an admission webhook).
    Webhook(Box<webhook::Options>),
}

/// Parses and runs.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    log();
    let result = match arguments.command {
        Command::Webhook(options) => webhook::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", report::chain(&error));
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
