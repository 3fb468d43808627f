//! The command `affinode`: a client of the control API.
//!
//! Exit status: 0 done, 1 failed or refused, 2 wrong usage. What failed and what to do
//! goes to standard error, once.

mod act;
mod calls;
mod client;
mod completion;
mod doctor;
mod events;
mod format;
mod hint;
mod install;
mod policy;
mod progress;
mod ps;
mod report;
mod simulate;
mod table;
mod top;
mod wishes;

use std::{io::Write, process::ExitCode};

use clap::{Parser, Subcommand, ValueEnum};

use crate::report::chain;

/// Sees and moves the GPU state of containers on this node.
#[derive(Debug, Parser)]
#[command(name = "affinode", version, arg_required_else_help = true)]
struct Args {
    /// Run directory of the controller.
    #[arg(long, global = true, value_name = "DIR", env = affinode_proto::paths::RUN_DIR_ENV, default_value = affinode_proto::paths::RUN_DIR)]
    run_dir: std::path::PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List GPU containers: state, VRAM, and why each is where it is.
    Ps {
        /// How to print.
        #[arg(short, long, default_value = "table")]
        output: Output,
        /// Leave the header line out.
        #[arg(long)]
        no_headers: bool,
        /// Print again whenever something changes.
        #[arg(short, long)]
        watch: bool,
    },
    /// Move a container's VRAM to host memory now.
    Offload(Target),
    /// Bring a container back to the GPU now.
    Restore(Target),
    /// Keep a container on the GPU until it is unpinned; one that is away comes back first.
    Pin(Target),
    /// Let a pinned container be offloaded again.
    Unpin(Target),
    Hint(hint::Hint),
    AutoOffload(wishes::AutoOffload),
    /// Print what happened: the last events, one a line.
    Events {
        /// Wait for more.
        #[arg(short, long, short_alias = 'w', alias = "watch")]
        follow: bool,
        /// How to print; json is one object a line.
        #[arg(short, long, default_value = "table")]
        output: Output,
    },
    /// Show the node live, full screen; move containers with keys.
    Top,
    Calls(calls::Calls),
    Report(report::Report),
    Simulate(simulate::Simulate),
    Doctor(doctor::Doctor),
    Install(install::Install),
    Uninstall(install::Uninstall),
    Status(install::Show),
    Policy(policy::Policy),
    /// Print the completion script of a shell.
    Completion {
        /// Which one.
        shell: completion::For,
    },
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man {
        /// The folder.
        folder: std::path::PathBuf,
    },
    /// Make the controller read its configuration again.
    Reload,
}

/// A container, by name, id or a prefix that only one has.
#[derive(Debug, clap::Args)]
struct Target {
    /// namespace/pod/container, namespace/id, id, or the beginning of one.
    container: String,
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: Output,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Columns.
    Table,
    /// More columns.
    Wide,
    /// JSON, documented in openapi.yaml, stable.
    Json,
    /// YAML of the same names.
    Yaml,
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(
        "no controller answers on {socket}. One runs while a GPU container of runtime affinode does; is --run-dir right, and are you root?"
    )]
    NoController {
        socket: String,
        #[source]
        source: ttrpc::Error,
    },
    #[error("the controller refused")]
    Refused(#[source] ttrpc::Error),
    #[error("{0}")]
    NotDone(String),
    #[error(transparent)]
    Simulate(#[from] simulate::SimulateError),
    #[error("cannot print")]
    Print(#[from] std::io::Error),
    #[error("cannot write JSON")]
    Json(#[from] serde_json::Error),
    #[error("cannot write YAML")]
    Yaml(#[from] serde_yaml_ng::Error),
    #[error(transparent)]
    Install(#[from] crate::install::InstallError),
    #[error(transparent)]
    Source(#[from] crate::install::FileError),
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error(transparent)]
    History(#[from] crate::history::StoreError),
}

/// Parses the command line and runs it.
#[must_use]
pub fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe went away: that is its right.
        Err(CliError::Print(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "affinode: {}", chain(error));
    ExitCode::from(1)
}

async fn run(args: Args) -> Result<(), CliError> {
    let mut out = std::io::stdout();
    // What needs no controller.
    let command = match args.command {
        Command::Simulate(asked) => {
            let recorded = asked.recorded(&args.run_dir).await?;
            return Ok(simulate::run(&asked, recorded, &mut out)?);
        }
        Command::Policy(asked) => match policy::alone(asked, &mut out)? {
            Some(asked) => Command::Policy(asked),
            None => return Ok(()),
        },
        Command::Completion { shell } => return completion::completion(&mut out, shell),
        Command::Man { folder } => return completion::man(&folder),
        Command::Install(asked) => return install::install(&mut out, asked),
        Command::Uninstall(asked) => return install::uninstall(&mut out, asked),
        Command::Status(asked) => return install::status(&mut out, asked),
        Command::Doctor(asked) => return doctor::run(&args.run_dir, &mut out, asked).await,
        Command::Report(asked) => return report::run(&args.run_dir, &mut out, asked).await,
        other => other,
    };
    let client = client::Client::connect(&args.run_dir).await?;
    match command {
        Command::Ps { output, no_headers, watch } => {
            ps::run(&client, &mut out, output, !no_headers, watch).await
        }
        Command::Offload(target) => act::offload(&client, &mut out, target).await,
        Command::Restore(target) => act::restore(&client, &mut out, target).await,
        Command::Pin(target) => wishes::pin(&client, &mut out, target, true).await,
        Command::Unpin(target) => wishes::pin(&client, &mut out, target, false).await,
        Command::Hint(asked) => hint::run(&client, &mut out, asked).await,
        Command::AutoOffload(asked) => wishes::auto_offload(&client, &mut out, asked).await,
        Command::Events { follow, output } => events::run(&client, &mut out, output, follow).await,
        // Done before.
        Command::Simulate(_)
        | Command::Install(_)
        | Command::Uninstall(_)
        | Command::Status(_)
        | Command::Doctor(_)
        | Command::Completion { .. }
        | Command::Man { .. }
        | Command::Report(_) => Ok(()),
        Command::Policy(asked) => policy::run(&client, &mut out, asked).await,
        Command::Top => top::run(client).await,
        Command::Calls(asked) => calls::run(&client, &mut out, asked).await,
        Command::Reload => {
            let changed = client.reload().await?;
            Ok(writeln!(
                out,
                "{}",
                if changed { "configuration changed" } else { "nothing changed" }
            )?)
        }
    }
}
