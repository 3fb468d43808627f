//! `affinode reference`: prints facts from the code as JSON, for `cargo xtask docs`.

use std::io::Write;

use affinode_controller::metrics::{MetricReference, metrics_reference};
use affinode_installer::doctor::remedies::{CHECKS, CheckHelp};
use affinode_proto::reason::Reason;
use clap::{Arg, ArgAction, Command, CommandFactory};
use serde::Serialize;

use super::{Args, CliError};
use crate::reference_pages::{
    annotations::{AnnotationReference, annotations},
    config::{KeyReference, keys},
};

#[derive(Serialize)]
struct Reference {
    configuration: Vec<KeyReference>,
    annotations: Vec<AnnotationReference>,
    reasons: Vec<ReasonReference>,
    checks: &'static [CheckHelp],
    metrics: Vec<MetricReference>,
    commands: Vec<CommandReference>,
}

#[derive(Serialize)]
struct ReasonReference {
    word: &'static str,
    meaning: &'static str,
    cause: &'static str,
    remedy: &'static str,
}

/// A command and its options, as the reference pages list it. Options that all commands have are
/// listed with the first command only.
#[derive(Debug, Serialize)]
pub struct CommandReference {
    /// The command as a user types it, such as `affinode policy set`.
    name: String,
    about: String,
    /// Text at the end of the help: exit status and examples. Empty: the help has neither.
    after: String,
    usage: String,
    arguments: Vec<ArgumentReference>,
}

#[derive(Debug, Serialize)]
struct ArgumentReference {
    /// The option as the help prints it, such as `-o, --output <OUTPUT>`.
    name: String,
    help: String,
    values: Vec<String>,
    default: String,
    environment: String,
}

/// Prints commands, reasons, settings and metrics as JSON.
pub(super) fn run(out: &mut dyn Write) -> Result<(), CliError> {
    let reference = Reference {
        configuration: keys(),
        annotations: annotations(),
        reasons: Reason::ALL.iter().map(|reason| reason_reference(*reason)).collect(),
        checks: CHECKS,
        metrics: metrics_reference()?,
        commands: commands(Args::command()),
    };
    serde_json::to_writer_pretty(&mut *out, &reference)?;
    Ok(writeln!(out)?)
}

fn reason_reference(reason: Reason) -> ReasonReference {
    let help = reason.help();
    ReasonReference {
        word: reason.as_str(),
        meaning: reason.sentence(),
        cause: help.cause,
        remedy: help.remedy,
    }
}

/// Returns a command and its subcommands, without hidden ones.
#[must_use]
pub fn commands(mut root: Command) -> Vec<CommandReference> {
    root.build();
    let mut found = Vec::new();
    collect(&root, "", &mut found);
    found
}

fn collect(command: &Command, parent: &str, found: &mut Vec<CommandReference>) {
    let name = format!("{parent} {}", command.get_name()).trim().to_owned();
    let arguments = command.get_arguments().filter(|argument| {
        let generated = matches!(argument.get_action(), ArgAction::Help | ArgAction::Version)
            || matches!(argument.get_action(), ArgAction::HelpLong | ArgAction::HelpShort);
        let inherited = argument.is_global_set() && !parent.is_empty();
        !argument.is_hide_set() && !generated && !inherited
    });
    let text = |styled: Option<&clap::builder::StyledStr>| {
        styled.map(ToString::to_string).unwrap_or_default()
    };
    let usage = command.clone().render_usage().to_string();
    found.push(CommandReference {
        about: text(command.get_long_about().or(command.get_about())),
        after: text(command.get_after_help()),
        usage: usage.trim_start_matches("Usage: ").trim().to_owned(),
        arguments: arguments.map(argument_reference).collect(),
        name: name.clone(),
    });
    let inner = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    for command in command.get_subcommands().filter(inner) {
        collect(command, &name, found);
    }
}

fn argument_reference(argument: &Arg) -> ArgumentReference {
    let takes_value = argument.get_action().takes_values();
    let values = argument.get_possible_values();
    let values = values.iter().filter(|value| !value.is_hide_set() && takes_value);
    let defaults = argument.get_default_values().iter();
    ArgumentReference {
        name: match (argument.get_short(), argument.get_long()) {
            (Some(short), Some(_)) => format!("-{short}, {argument}"),
            _ => argument.to_string(),
        },
        help: argument
            .get_long_help()
            .or(argument.get_help())
            .map(ToString::to_string)
            .unwrap_or_default(),
        values: values.map(|value| value.get_name().to_owned()).collect(),
        default: defaults
            .filter(|_| takes_value)
            .map(|value| value.to_string_lossy())
            .collect::<Vec<_>>()
            .join(", "),
        environment: argument
            .get_env()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_is_listed_with_its_help() {
        let commands = commands(Args::command());
        let names: Vec<&str> = commands.iter().map(|command| command.name.as_str()).collect();
        for name in ["affinode", "affinode ps", "affinode policy set", "affinode doctor"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(!names.contains(&"affinode reference"), "it is hidden");
        for command in &commands {
            assert!(!command.about.is_empty(), "{} has no help", command.name);
            for argument in &command.arguments {
                assert!(!argument.help.is_empty(), "{} {}", command.name, argument.name);
            }
        }
        assert!(commands[0].after.contains("Exit status"), "{}", commands[0].after);
    }

    #[test]
    fn the_whole_reference_is_json() {
        let mut out = Vec::new();
        run(&mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        for part in ["configuration", "annotations", "reasons", "checks", "metrics", "commands"] {
            assert!(value[part].as_array().is_some_and(|part| part.len() > 10), "{part}");
        }
    }
}
