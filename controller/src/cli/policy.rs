//! `affinode policy`: whether a configuration would be taken, and what it says.

use std::{io::Write, path::PathBuf};

use super::{CliError, format};
use crate::{config::Config, core::policy::Policy, report};

/// Looks at policies.
#[derive(Debug, clap::Subcommand)]
pub enum PolicyCommand {
    /// Say whether a configuration file is valid, and the policies that it makes. Needs no
    /// controller; drop-ins beside the file and the environment count as they do for it.
    Check {
        /// The file.
        file: PathBuf,
    },
}

/// Runs it.
pub fn run(command: &PolicyCommand, out: &mut dyn Write) -> Result<(), CliError> {
    let PolicyCommand::Check { file } = command;
    if !file.exists() {
        return Err(CliError::NotDone(format!("no such file: {}", file.display())));
    }
    let config = Config::load(file).map_err(|e| CliError::NotDone(report::chain(&e)))?;
    let policies = config.settings().policies;
    writeln!(out, "{}: valid", file.display())?;
    writeln!(out, "node: {}", line(&policies.node))?;
    for rule in &policies.rules {
        let (policy, _) = policies.resolve(&rule.namespace, &Default::default());
        writeln!(out, "namespace {}: {}", format::safe(&rule.namespace), line(&policy))?;
    }
    Ok(())
}

fn line(policy: &Policy) -> String {
    format!(
        "mode {}, keep alive {} up to {}, a wake is worth {}, minimum residency {}, priority {}, prewake {}",
        policy.mode.as_str(),
        policy.keep_alive.as_str(),
        format::duration(policy.idle_timeout_ms),
        format::duration(policy.wake_cost_ms),
        format::duration(policy.minimum_residency_ms),
        policy.priority,
        if policy.prewake { "on" } else { "off" },
    )
}
