//! Parses the command line of an OCI runtime. runc and crun accept different options. This module
//! knows the options that it needs, and all options whose value is a separate word. It passes on
//! all options unchanged.

use std::ffi::OsString;
use std::path::PathBuf;

/// Options before the command that take a value: first those of runc, then those of crun.
const GLOBAL_VALUES: [&str; 7] =
    ["log", "log-format", "root", "criu", "rootless", "log-level", "cgroup-manager"];
/// Options of `create` and `run` that take a value.
const CREATE_VALUES: [&str; 8] =
    ["bundle", "b", "console-socket", "pid-file", "preserve-fds", "pidfd-socket", "config", "f"];

/// The command that the command line names, with the parts of it that Affinode needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OciCommand {
    /// Creates a container. Its program does not run yet.
    Create(NewContainer),
    /// Creates a container and starts its program.
    Run(NewContainer),
    /// Starts the program of a container that was created.
    Start {
        /// Id of the container.
        id: String,
    },
    /// Any other command, or a command line that only the runtime can parse.
    #[default]
    Other,
}

/// A container that the command creates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewContainer {
    /// Id of the container.
    pub id: String,
    /// Bundle of the container. `None` if it is the working folder.
    pub bundle: Option<PathBuf>,
}

/// Destination of the runtime's messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogTarget {
    /// Path of the file. `None` if messages go to stderr.
    pub file: Option<PathBuf>,
    /// Whether each line of the log is a JSON object.
    pub json: bool,
}

/// A parsed command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OciInvocation {
    /// Where messages are written, as the command line requests.
    pub log: LogTarget,
    /// Folder in which the runtime stores the state of containers. `None` if it is the runtime's
    /// default.
    pub root: Option<PathBuf>,
    /// The command that the line names.
    pub command: OciCommand,
    /// Arguments of the command that are not options. One of them is the container's id.
    pub words: Vec<String>,
}

/// One argument of the command line.
enum OciArgument<'a> {
    Word(&'a str),
    Option(&'a str, Option<&'a str>),
}

impl OciInvocation {
    /// Parses the arguments after the program's name. This never fails: a command line that cannot
    /// be parsed is [`OciCommand::Other`], and the runtime reports the error.
    #[must_use]
    pub fn parse(argv: &[OsString]) -> OciInvocation {
        let mut invocation = OciInvocation::default();
        let Some(words) = argv.iter().map(|arg| arg.to_str()).collect::<Option<Vec<_>>>() else {
            return invocation;
        };
        let mut words = words.into_iter();
        let command = loop {
            let Some(word) = words.next() else { return invocation };
            match argument(word, &GLOBAL_VALUES) {
                OciArgument::Word(command) => break command,
                OciArgument::Option(name, inline) => {
                    let takes = GLOBAL_VALUES.contains(&name);
                    let value = inline.or_else(|| takes.then(|| words.next()).flatten());
                    invocation.set(name, value);
                }
            }
        };
        invocation.command(command, words);
        invocation
    }

    fn set(&mut self, name: &str, value: Option<&str>) {
        let Some(value) = value else { return };
        match name {
            "log" => self.log.file = log_file(value),
            "log-format" => self.log.json = value == "json",
            "root" if !value.is_empty() => self.root = Some(value.into()),
            _ => {}
        }
    }

    fn command<'a>(&mut self, command: &str, mut rest: impl Iterator<Item = &'a str>) {
        let (mut bundle, mut other_spec) = (None, false);
        while let Some(word) = rest.next() {
            match argument(word, &CREATE_VALUES) {
                OciArgument::Word(word) => self.words.push(word.to_owned()),
                OciArgument::Option(name, inline) => {
                    let takes = CREATE_VALUES.contains(&name);
                    let value = inline.or_else(|| takes.then(|| rest.next()).flatten());
                    match name {
                        "bundle" | "b" => bundle = value.map(PathBuf::from),
                        "config" | "f" => other_spec = true,
                        _ => {}
                    }
                }
            }
        }
        let Some(id) = self.words.first().cloned() else { return };
        self.command = match command {
            // The command names another file than the bundle's config.json as the spec, but the
            // edit would change config.json.
            "create" | "run" if other_spec => OciCommand::Other,
            "create" => OciCommand::Create(NewContainer { id, bundle }),
            "run" => OciCommand::Run(NewContainer { id, bundle }),
            "start" => OciCommand::Start { id },
            _ => OciCommand::Other,
        };
    }
}

/// Returns the file that the value of `--log` names, or `None` if it names no file. For crun the
/// value can also have the form `KIND:NAME`, where only the kind `file` names a file.
fn log_file(value: &str) -> Option<PathBuf> {
    let elsewhere = ["journald:", "syslog:"].iter().any(|kind| value.starts_with(kind));
    let path = value.strip_prefix("file:").unwrap_or(value);
    (!elsewhere && !path.is_empty()).then(|| path.into())
}

/// Splits an option from its value, in all forms that both runtimes accept: `--name value`,
/// `--name=value`, one dash in place of two, and a letter with its value, `-bPATH`.
fn argument<'a>(word: &'a str, values: &[&str]) -> OciArgument<'a> {
    let (dashes, text) = match (word.strip_prefix("--"), word.strip_prefix('-')) {
        (Some(text), _) => (2, text),
        (None, Some(text)) => (1, text),
        (None, None) => return OciArgument::Word(word),
    };
    if text.is_empty() {
        // "--" ends the options. A lone "-" is an option without a name.
        return OciArgument::Option("", None);
    }
    if let Some((name, value)) = text.split_once('=') {
        return OciArgument::Option(name, Some(value));
    }
    let letter = text.char_indices().nth(1).map(|(end, _)| text.split_at(end));
    match letter {
        Some((letter, value))
            if dashes == 1 && !values.contains(&text) && values.contains(&letter) =>
        {
            OciArgument::Option(letter, Some(value))
        }
        _ => OciArgument::Option(text, None),
    }
}

#[cfg(test)]
mod tests;
