//! `affinode doctor`: prints the findings of [`affinode_installer::doctor`], and asks the controller for its
//! version.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use affinode_installer::doctor::{CheckVerdict, DoctorCheck, DoctorPaths, examine, files};
use affinode_proto::paths;
use serde::Serialize;

use super::{CliError, OutputFormat, client::ControlClient, format};

/// Check the driver, the kernel, containerd and the installation, and print how to correct each
/// problem. The command needs no controller.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Path of containerd's socket. Default: the paths that distributions use are tried.
    #[arg(long, value_name = "SOCKET", env = "CONTAINERD_ADDRESS")]
    containerd: Option<PathBuf>,
}

#[derive(Serialize)]
struct DoctorReport {
    /// Whether no check has failed. A check that ended with a warning has not failed.
    healthy: bool,
    checks: Vec<DoctorCheck>,
}

pub async fn run(run_dir: &Path, out: &mut dyn Write, asked: DoctorArgs) -> Result<(), CliError> {
    let DoctorArgs { output, containerd } = asked;
    let mut checks = examine(&DoctorPaths { run_dir: run_dir.to_owned(), containerd });
    checks.push(files::controller(&ask(run_dir).await));
    let failed = checks.iter().filter(|check| check.verdict == CheckVerdict::Bad).count();
    let findings = DoctorReport { healthy: failed == 0, checks };
    match output {
        OutputFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &findings)?;
            writeln!(out)?;
        }
        OutputFormat::Yaml => serde_yaml_ng::to_writer(&mut *out, &findings)?,
        OutputFormat::Table | OutputFormat::Wide => print(out, &findings.checks)?,
    }
    if failed == 0 {
        return Ok(());
    }
    let s = if failed == 1 { "" } else { "s" };
    Err(CliError::NotDone(format!("{failed} check{s} failed")))
}

/// Requests the pid and version of the controller. `None`: no controller runs.
async fn ask(run_dir: &Path) -> Result<Option<(u32, String)>, String> {
    let socket = run_dir.join(paths::CONTROL_SOCKET);
    match std::os::unix::net::UnixStream::connect(&socket) {
        Ok(_) => {}
        // No controller runs, or it has just ended. The next shim starts a controller.
        Err(e)
            if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(format!("{}: {error}", socket.display())),
    }
    let answer = async { ControlClient::connect(run_dir).await?.list().await };
    let node = answer.await.map_err(|error| affinode_controller::error_chain::chain(&error))?;
    Ok(Some((node.controller_pid, node.version)))
}

fn print(out: &mut dyn Write, checks: &[DoctorCheck]) -> io::Result<()> {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut group = "";
    for check in checks {
        if check.group != group {
            writeln!(out, "{}", check.group)?;
            group = check.group;
        }
        let found = format::safe(&check.found);
        writeln!(out, "  {} {:<width$}   {found}", check.verdict.sign(), check.name)?;
        if !check.hint.is_empty() {
            writeln!(out, "    {:<width$}   -> {}", "", format::safe(&check.hint))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_has_a_hint() {
        let check = |verdict, hint: &str| DoctorCheck {
            group: "GPU",
            name: "driver",
            verdict,
            found: "5".into(),
            hint: hint.into(),
        };
        let mut out = Vec::new();
        print(&mut out, &[check(CheckVerdict::Good, ""), check(CheckVerdict::Bad, "install it")])
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text, "GPU\n  √ driver   5\n  × driver   5\n             -> install it\n");
    }
}
