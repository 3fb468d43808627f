//! Runs other programs, and checks their exit status.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// Runs a command whose output goes to this terminal, and requires success.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", name(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", line(command));
    }
    Ok(())
}

/// Runs a command and returns its standard output.
pub fn read(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", name(command)))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed: {}: {}", line(command), output.status, error.trim());
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed bytes that are not UTF-8", name(command)))
}

/// Returns the path of a program in PATH or in the usual folders of root's programs.
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn line(command: &Command) -> String {
    let mut line = name(command);
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}
