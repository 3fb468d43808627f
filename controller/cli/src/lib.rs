//! The command `affinode`, a client of the controller's control API.
//!
//! The exit status is 0 if the command is done, 1 if it failed or was refused, and 2 if its usage
//! is wrong. An error is printed once to standard error, together with what the user can do about
//! it.

mod calls;
mod client;
mod completion;
mod doctor;
mod events;
pub mod format;
mod gpus;
mod hint;
mod install;
mod local_node;
mod move_container;
mod pin;
mod policy;
mod progress;
mod ps;
mod recorded_trace;
pub mod reference;
mod reference_pages;
mod report;
pub mod report_table;
mod run;
mod simulate;
pub mod table;
mod top;

use std::{io::Write, path::PathBuf, process::ExitCode};

use affinode_controller::error_chain::chain;
use affinode_proto::installation::InstallationPaths;
use clap::{Parser, Subcommand, ValueEnum};

/// Shows and controls the GPU memory of containers on this node.
#[derive(Debug, Parser)]
#[command(
    name = "affinode",
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 success, 1 failure or refusal, 2 wrong usage. `affinode run` \
                  exits with the status of its program."
)]
struct Args {
    /// Run directory of the controller, which contains its socket. Default: the run directory of
    /// the installation, usually /run/affinode.
    #[arg(long, global = true, value_name = "DIR", env = affinode_proto::paths::RUN_DIR_ENV)]
    run_dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the GPU containers of this node with their state, their VRAM, and the reason for the
    /// state. If the node has no such container and no controller, only the GPUs are listed, and
    /// controller_pid is 0 in JSON.
    Ps {
        /// Format of the output.
        #[arg(short, long, default_value = "table")]
        output: OutputFormat,
        /// Do not print the header line.
        #[arg(long)]
        no_headers: bool,
        /// Print again after each change.
        #[arg(short, long)]
        watch: bool,
    },
    /// Offload a container now: move its GPU memory to host memory.
    Offload(ControllerAddress),
    /// Restore a container now: move its offloaded memory back to the GPU.
    Restore(ControllerAddress),
    /// Pin a container to the GPU: it is not offloaded until `affinode unpin`. An offloaded
    /// container is restored first.
    Pin(ControllerAddress),
    /// Remove the pin of a container, so that it can be offloaded again.
    Unpin(ControllerAddress),
    Hint(hint::HintArgs),
    AutoOffload(pin::AutoOffloadArgs),
    /// Print the latest events of this node's containers, one per line.
    Events {
        /// After the latest events, print further ones as they happen.
        #[arg(short, long, short_alias = 'w', alias = "watch")]
        follow: bool,
        /// Output format. wide adds the date, number and reason of each event and the key of its
        /// container. json is one object per line.
        #[arg(short, long, default_value = "table")]
        output: OutputFormat,
    },
    /// Show the GPUs and containers of this node on the whole terminal, updated live. Press a key
    /// to offload, restore or pin the selected container.
    Top,
    Calls(calls::CallsArgs),
    Report(report::ReportArgs),
    Run(run::RunArgs),
    Simulate(simulate::SimulateArgs),
    Doctor(doctor::DoctorArgs),
    Install(install::InstallArgs),
    Uninstall(install::UninstallArgs),
    Status(install::StatusArgs),
    Policy(policy::PolicyArgs),
    /// Print a script that completes `affinode` commands in a shell.
    Completion {
        /// The shell that will run the script.
        shell: completion::CompletionShell,
    },
    /// Write the manual pages into a folder, such as /usr/local/share/man/man1.
    Man {
        /// Target folder. It is created if it does not exist.
        folder: std::path::PathBuf,
    },
    /// Print the data of the documentation's reference pages as JSON.
    #[command(hide = true)]
    Reference,
    Gpus(gpus::GpusArgs),
    /// Make the controller read its configuration again. If the configuration is invalid, nothing
    /// changes.
    Reload {
        /// Format of the output.
        #[arg(short, long, default_value = "table")]
        output: OutputFormat,
    },
}

/// A container, by name, id, or a unique prefix of either.
#[derive(Debug, clap::Args)]
struct ControllerAddress {
    /// Name of the container: namespace/pod/container, namespace/id or id. The beginning of one of
    /// these is enough if it is unique.
    container: String,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    /// Aligned columns for a terminal.
    Table,
    /// Columns with further details.
    Wide,
    /// JSON with stable names. openapi.yaml describes the objects that the HTTP API also returns.
    Json,
    /// YAML with the same names as in JSON.
    Yaml,
}

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(
        "cannot connect to the controller at {socket}; run as root or as a member of control.view_group, check --run-dir, and try `affinode status` and `affinode doctor`"
    )]
    NoController {
        socket: String,
        #[source]
        source: ttrpc::Error,
    },
    #[error(
        "the controller did not finish the request within {limit_s} s, and may still do so: see `affinode ps` and `affinode events`"
    )]
    TimedOut { limit_s: u64 },
    #[error("the controller refused the request: {0}")]
    Refused(String),
    #[error("{0}")]
    NotDone(String),
    #[error(transparent)]
    Simulate(#[from] simulate::SimulateError),
    #[error("cannot write to standard output")]
    Print(#[from] std::io::Error),
    #[error("cannot write manual pages into {folder}")]
    Manual {
        folder: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot create the list of the controller's metrics")]
    Metrics(#[from] std::fmt::Error),
    #[error("cannot encode the output as JSON")]
    Json(#[from] serde_json::Error),
    #[error("cannot encode the output as YAML")]
    Yaml(#[from] serde_yaml_ng::Error),
    #[error(transparent)]
    Install(#[from] affinode_installer::install::InstallError),
    #[error(transparent)]
    Source(#[from] affinode_installer::install::FileError),
    #[error(transparent)]
    Config(#[from] affinode_controller::config::ConfigError),
    #[error(transparent)]
    History(#[from] affinode_controller::history::StoreError),
    #[error(transparent)]
    Gpus(#[from] affinode_controller::inventory::gpu_facts::GpuFactsError),
    #[error("cannot run {program} on the node; check that Affinode is installed on the node")]
    NodeProgram {
        program: String,
        #[source]
        source: std::io::Error,
    },
}

/// Parses the command line and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    let args = match Args::parse() {
        // This command replaces the process by another program, so it must run before any thread is
        // started.
        Args { run_dir, command: Command::Run(asked) } => {
            return run::run(&directory(run_dir), asked);
        }
        args => args,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "affinode: {}", chain(error));
    ExitCode::from(1)
}

/// Standard output of a command. If the process that reads the output has closed the pipe, this
/// process exits with status 0.
struct Printer(std::io::Stdout);

impl Printer {
    fn unless_left<T>(outcome: std::io::Result<T>) -> std::io::Result<T> {
        match outcome {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
            outcome => outcome,
        }
    }
}

impl Write for Printer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Printer::unless_left(self.0.write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Printer::unless_left(self.0.flush())
    }
}

/// Prints the controller's response to a request. The table formats print the sentence `words`.
/// JSON and YAML print `object`.
fn say(
    out: &mut dyn Write,
    output: OutputFormat,
    words: &str,
    object: &impl serde::Serialize,
) -> Result<(), CliError> {
    match output {
        OutputFormat::Table | OutputFormat::Wide => Ok(writeln!(out, "{words}")?),
        OutputFormat::Json => Ok(writeln!(out, "{}", serde_json::to_string(object)?)?),
        OutputFormat::Yaml => Ok(write!(out, "{}", serde_yaml_ng::to_string(object)?)?),
    }
}

/// Returns the run directory that the command line names. If it names none, returns the run
/// directory of this program's installation.
fn directory(asked: Option<PathBuf>) -> PathBuf {
    asked.unwrap_or_else(|| InstallationPaths::own().run_dir)
}

async fn run(args: Args) -> Result<(), CliError> {
    let mut out = Printer(std::io::stdout());
    let run_dir = directory(args.run_dir.clone());
    // Commands that need no controller.
    let command = match args.command {
        Command::Simulate(asked) => {
            let recorded = asked.recorded(&run_dir).await?;
            return Ok(simulate::run(&asked, recorded, &mut out)?);
        }
        Command::Policy(asked) => match policy::alone(asked, &mut out)? {
            Some(asked) => Command::Policy(asked),
            None => return Ok(()),
        },
        Command::Completion { shell } => return completion::completion(&mut out, shell),
        Command::Man { folder } => return completion::man(&folder),
        Command::Reference => return reference::run(&mut out),
        Command::Gpus(asked) => return gpus::run(&mut out, &asked),
        Command::Install(asked) => return install::install(&mut out, asked, args.run_dir),
        Command::Uninstall(asked) => return install::uninstall(&mut out, asked, args.run_dir),
        Command::Status(asked) => return install::status(&mut out, asked),
        Command::Doctor(asked) => return doctor::run(&run_dir, &mut out, asked).await,
        Command::Report(asked) => return report::run(&run_dir, &mut out, asked).await,
        other => other,
    };
    // Commands that also show a node on which no controller runs.
    let command = match command {
        Command::Ps { output, no_headers, watch } => {
            return ps::run(&run_dir, &mut out, output, !no_headers, watch).await;
        }
        Command::Top => return top::run(run_dir).await,
        other => other,
    };
    let client = client::ControlClient::connect(&run_dir).await?;
    match command {
        Command::Offload(target) => move_container::offload(&client, &mut out, target).await,
        Command::Restore(target) => move_container::restore(&client, &mut out, target).await,
        Command::Pin(target) => pin::pin(&client, &mut out, target, true).await,
        Command::Unpin(target) => pin::pin(&client, &mut out, target, false).await,
        Command::Hint(asked) => hint::run(&client, &mut out, asked).await,
        Command::AutoOffload(asked) => pin::auto_offload(&client, &mut out, asked).await,
        Command::Events { follow, output } => events::run(&client, &mut out, output, follow).await,
        // The start of this function has handled these commands.
        Command::Ps { .. }
        | Command::Top
        | Command::Run(_)
        | Command::Simulate(_)
        | Command::Install(_)
        | Command::Uninstall(_)
        | Command::Status(_)
        | Command::Doctor(_)
        | Command::Completion { .. }
        | Command::Man { .. }
        | Command::Reference
        | Command::Gpus(_)
        | Command::Report(_) => Ok(()),
        Command::Policy(asked) => policy::run(&client, &mut out, asked).await,
        Command::Calls(asked) => calls::run(&client, &mut out, asked).await,
        Command::Reload { output } => reload(&client, &mut out, output).await,
    }
}

/// Runs `affinode reload`, which makes the controller read its configuration again.
async fn reload(
    client: &client::ControlClient,
    out: &mut dyn Write,
    output: OutputFormat,
) -> Result<(), CliError> {
    let said = client.reload().await?;
    let (changed, waits) = (said.changed, &said.waits);
    let mut words = if changed { "configuration changed" } else { "nothing changed" }.to_owned();
    if !waits.is_empty() {
        let waits = waits.join(", ");
        let how = "run systemctl restart affinode-controller, or end the controller's process";
        words += &format!("; changes to {waits} apply when the controller starts again ({how})");
    }
    say(out, output, &words, &serde_json::json!({ "changed": changed, "waits": waits }))
}

#[cfg(test)]
mod documents;

#[cfg(test)]
mod tests {
    use super::*;

    fn status(line: &str) -> Result<(), i32> {
        let words = std::iter::once("affinode").chain(line.split_whitespace());
        Args::try_parse_from(words).map(drop).map_err(|error| error.exit_code())
    }

    #[test]
    fn the_command_line_holds_together() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    /// Each command that prints must accept the output formats table, wide, json and yaml, and must
    /// reject any other format.
    #[test]
    fn every_command_that_prints_takes_every_format() {
        for command in [
            "ps",
            "events",
            "calls",
            "report",
            "doctor",
            "simulate",
            "policy",
            "policy show",
            "policy set a=1",
            "policy unset a",
            "policy validate f",
            "offload x",
            "restore x",
            "pin x",
            "unpin x",
            "hint x idle",
            "auto-offload",
            "reload",
        ] {
            for format in ["table", "wide", "json", "yaml"] {
                assert_eq!(status(&format!("{command} -o {format}")), Ok(()), "{command}");
            }
            assert_eq!(status(&format!("{command} -o colourful")), Err(2), "{command}");
        }
        for command in
            ["ps", "calls", "report", "policy", "policy show", "policy set a=1", "simulate"]
        {
            assert_eq!(status(&format!("{command} --no-headers")), Ok(()), "{command}");
        }
        for command in ["ps", "events", "report", "policy", "policy show"] {
            assert_eq!(status(&format!("{command} -w")), Ok(()), "{command}");
        }
    }

    #[test]
    fn wrong_usage_is_2_and_help_is_none() {
        for line in ["", "fly", "offload", "hint x asleep", "report --since soon", "policy set a"] {
            assert_eq!(status(line), Err(2), "{line:?}");
        }
        assert_eq!(status("--help"), Err(0));
        assert_eq!(status("--version"), Err(0));
    }
}
