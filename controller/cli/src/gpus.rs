//! `affinode gpus`: prints the GPUs of a node as JSON, for the node agent of a cluster.

use std::{
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_controller::{config::Config, inventory::gpu_facts};
use affinode_installer::install;

use super::CliError;

/// Print the node's GPUs and the host memory for offloads as JSON, for the node agent of a cluster.
/// The command needs no controller.
#[derive(Debug, clap::Args)]
#[command(hide = true)]
pub struct GpusArgs {
    /// The node's root file system, if this command runs in a container.
    #[arg(long, value_name = "DIR", requires = "prefix")]
    host_root: Option<PathBuf>,
    /// Folder of the installation on the node.
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
}

pub fn run(out: &mut dyn Write, asked: &GpusArgs) -> Result<(), CliError> {
    if let (Some(root), Some(prefix)) = (&asked.host_root, &asked.prefix) {
        return Err(run_on_node(root, prefix)?);
    }
    let config = Config::load(&Config::path())?;
    serde_json::to_writer(&mut *out, &gpu_facts::read(&config)?)?;
    Ok(writeln!(out)?)
}

/// Enters the node's root file system, and then replaces this process by the program that is
/// installed there. The program in the container must not load the node's driver library itself,
/// because that library needs the C library of the node.
fn run_on_node(root: &Path, prefix: &Path) -> Result<CliError, CliError> {
    install::enter(root)?;
    let program = prefix.join("bin/affinode");
    // `exec` returns only if it fails.
    let source = Command::new(&program).arg("gpus").exec();
    Ok(CliError::NodeProgram { program: program.display().to_string(), source })
}
