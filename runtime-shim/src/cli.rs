//! Parses the shim's command line, which containerd writes in the form of Go's `flag` package. A
//! flag has one dash or two. Its value follows in the next word or after `=`, and a switch has no
//! value. The first word that is neither a flag nor a flag's value is the action.

use std::ffi::OsString;

/// The action that the command line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShimAction {
    /// Start the shim of a container's group, or join it. Prints the shim's address.
    Start,
    /// Clean up after a shim that has ended. Prints a DeleteResponse.
    Delete,
    /// Describe the runtime. Prints a RuntimeInfo.
    Info,
    /// Print the version and exit.
    Version,
    /// Internal: run as the daemon of a group of containers.
    Serve,
}

/// The flags of the stock shim, and three internal flags of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShimFlags {
    /// containerd namespace that owns the container.
    pub namespace: String,
    /// Id of the container, unique in its namespace.
    pub id: String,
    /// Address of containerd's gRPC socket.
    pub address: String,
    /// Path of the containerd binary.
    pub publish_binary: String,
    /// Bundle folder, if it is not the working folder.
    pub bundle: String,
    /// Socket to serve. The shim does not use this flag, and passes it on to the stock shim.
    pub socket: String,
    /// Debug socket to serve. The shim does not use this flag, and passes it on to the stock shim.
    pub debug_socket: String,
    /// Log at debug level instead of info.
    pub debug: bool,
    /// Internal: the address that the daemon serves.
    pub listen: String,
    /// Internal: the stock shim's address.
    pub upstream: String,
    /// Internal: version of the task service that the stock shim supports.
    pub task_version: String,
}

/// A parsed command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimInvocation {
    /// First argument that is not a flag, or the action that `-info` or `-v` selects.
    pub action: ShimAction,
    /// Flags before the action.
    pub flags: ShimFlags,
}

/// Reason why the command line cannot have been written by containerd.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A flag that the stock shim does not have.
    #[error(
        "flag provided but not defined: -{0}; this program is a containerd shim, which only containerd starts"
    )]
    UnknownFlag(String),
    /// A flag without the value that it needs.
    #[error("flag needs an argument: -{0}")]
    MissingValue(String),
    /// A switch with a value that is neither true nor false.
    #[error("invalid boolean value {value:?} for -{flag}: expected true or false")]
    NotBoolean {
        /// Name of the switch, without dashes.
        flag: String,
        /// The rejected value as given.
        value: String,
    },
    /// The command line names no action.
    #[error(
        "no action: expected start or delete, or the flag -info or -v; this program is a containerd shim, which only containerd starts"
    )]
    NoAction,
    /// An action that the shim does not have.
    #[error("unknown action {0:?}: expected start or delete, or the flag -info or -v")]
    UnknownAction(String),
    /// An argument that is not UTF-8.
    #[error("argument {0:?} is not UTF-8")]
    NotUtf8(OsString),
    /// The namespace is empty. The stock shim rejects this too.
    #[error("shim namespace cannot be empty: pass -namespace")]
    NoNamespace,
}

impl ShimAction {
    /// Parses the action, which is the word after the flags.
    fn parse(word: Option<&str>) -> Result<ShimAction, CliError> {
        match word {
            Some("start") => Ok(ShimAction::Start),
            Some("delete") => Ok(ShimAction::Delete),
            Some("serve") => Ok(ShimAction::Serve),
            Some(other) => Err(CliError::UnknownAction(other.to_owned())),
            None => Err(CliError::NoAction),
        }
    }

    /// Whether the action concerns a container. The command line must then name the container's
    /// namespace.
    fn needs_namespace(self) -> bool {
        matches!(self, ShimAction::Start | ShimAction::Delete | ShimAction::Serve)
    }
}

impl ShimFlags {
    /// Returns the field that stores the value of the flag with this name. A switch has no such
    /// field, which is an error.
    fn field(&mut self, name: &str) -> Result<&mut String, CliError> {
        match name {
            "namespace" => Ok(&mut self.namespace),
            "id" => Ok(&mut self.id),
            "address" => Ok(&mut self.address),
            "publish-binary" => Ok(&mut self.publish_binary),
            "bundle" => Ok(&mut self.bundle),
            "socket" => Ok(&mut self.socket),
            "debug-socket" => Ok(&mut self.debug_socket),
            "listen" => Ok(&mut self.listen),
            "upstream" => Ok(&mut self.upstream),
            "task-version" => Ok(&mut self.task_version),
            _ => Err(CliError::UnknownFlag(name.to_owned())),
        }
    }
}

impl ShimInvocation {
    /// Parses the arguments after the program's name.
    pub fn parse(argv: &[OsString]) -> Result<ShimInvocation, CliError> {
        let mut flags = ShimFlags::default();
        let (mut info, mut version) = (false, false);
        let mut words =
            argv.iter().map(|arg| arg.to_str().ok_or_else(|| CliError::NotUtf8(arg.to_owned())));
        let mut action = None;
        while let Some(word) = words.next().transpose()? {
            let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
                action = Some(word.to_owned());
                break;
            };
            if flag.is_empty() {
                // "--" and a lone "-" end the flags; the next word is the action.
                action = words.next().transpose()?.map(str::to_owned);
                break;
            }
            let (name, inline) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (flag, None),
            };
            let switch = match name {
                "debug" => Some(&mut flags.debug),
                "info" => Some(&mut info),
                "v" | "version" => Some(&mut version),
                _ => None,
            };
            if let Some(switch) = switch {
                *switch = boolean(name, inline)?;
                continue;
            }
            let field = flags.field(name)?;
            *field = match inline {
                Some(value) => value.to_owned(),
                None => words
                    .next()
                    .transpose()?
                    .ok_or_else(|| CliError::MissingValue(name.to_owned()))?
                    .to_owned(),
            };
        }
        let action = match (version, info) {
            (true, _) => ShimAction::Version,
            (_, true) => ShimAction::Info,
            _ => ShimAction::parse(action.as_deref())?,
        };
        if action.needs_namespace() && flags.namespace.is_empty() {
            return Err(CliError::NoNamespace);
        }
        Ok(ShimInvocation { action, flags })
    }
}

fn boolean(flag: &str, inline: Option<&str>) -> Result<bool, CliError> {
    match inline {
        None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some(value) => Err(CliError::NotBoolean { flag: flag.to_owned(), value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<ShimInvocation, CliError> {
        let argv: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        ShimInvocation::parse(&argv)
    }

    #[test]
    fn start_of_every_version() {
        for line in [
            "-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id abc start",
            "--namespace k8s.io --address=/run/c.sock --publish-binary=/usr/bin/containerd --id=abc start",
            "-namespace=k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id abc -debug=false start",
        ] {
            let got = parse(line).unwrap();
            assert_eq!(got.action, ShimAction::Start);
            assert_eq!(got.flags.namespace, "k8s.io");
            assert_eq!(got.flags.address, "/run/c.sock");
            assert_eq!(got.flags.publish_binary, "/usr/bin/containerd");
            assert_eq!(got.flags.id, "abc");
            assert!(!got.flags.debug);
        }
    }

    #[test]
    fn delete_names_its_bundle() {
        let got = parse("-namespace n -id i -bundle /b -debug delete").unwrap();
        assert_eq!(got.action, ShimAction::Delete);
        assert_eq!(got.flags.bundle, "/b");
        assert!(got.flags.debug);
    }

    #[test]
    fn info_and_version_need_no_namespace() {
        assert_eq!(parse("-info").unwrap().action, ShimAction::Info);
        assert_eq!(parse("-v").unwrap().action, ShimAction::Version);
        assert_eq!(parse("--version").unwrap().action, ShimAction::Version);
    }

    #[test]
    fn flags_after_the_action_are_not_flags() {
        assert_eq!(parse("-namespace n start -nonsense").unwrap().action, ShimAction::Start);
    }

    #[test]
    fn wrong_lines_say_what_is_wrong() {
        for (line, wanted) in [
            ("-namespace n -wrong x start", "not defined: -wrong"),
            ("-namespace", "needs an argument: -namespace"),
            ("-debug=maybe -namespace n start", "invalid boolean"),
            ("-namespace n", "no action"),
            ("-namespace n stop", "unknown action \"stop\""),
            ("-id i start", "namespace cannot be empty"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(wanted), "{line}: {error}");
        }
    }
}
