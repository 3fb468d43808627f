//! Finds the OCI runtime (crun or runc) by which this process replaces itself.
//!
//! A container belongs to the runtime that created it. If an installed runtime knows the container
//! of a command, the command is passed to that runtime, even if the configuration now names another
//! runtime.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::cli::{OciCommand, OciInvocation};
use crate::runc_shim::{is_program, is_same_file};

/// The runtimes that Affinode knows, in the order in which Podman searches for them. The second
/// name is the file that the runtime keeps in the folder of each container.
const KNOWN: [(&str, &str); 2] = [("crun", "status"), ("runc", "state.json")];
/// Folders that are searched after those of PATH, because Podman runs some commands without PATH.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An OCI runtime: crun, runc, or another program with their command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciRuntime {
    /// Path of the program.
    pub path: PathBuf,
}

/// Reason why no OCI runtime can be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// Neither crun nor runc is in PATH.
    #[error(
        "no OCI runtime is installed: install crun or runc, or name one in oci.runtime of /etc/affinode/config.toml"
    )]
    Missing,
    /// The configured runtime is not a program.
    #[error(
        "oci.runtime is {0:?}, which is not an executable file; correct it in /etc/affinode/config.toml"
    )]
    NotAProgram(PathBuf),
    /// The configured runtime is this program.
    #[error(
        "oci.runtime is {0:?}, which is affinode-runtime itself; name crun or runc in /etc/affinode/config.toml"
    )]
    Ourselves(PathBuf),
}

/// The fields that Affinode uses in a runtime's reply to the command `state`.
#[derive(Deserialize)]
struct StateAnswer {
    #[serde(default)]
    pid: i32,
}

impl OciRuntime {
    /// Finds the runtime for a command. `configured` is a name or a path. It is empty if the
    /// configuration names no runtime.
    pub fn find(configured: &Path, invocation: &OciInvocation) -> Result<OciRuntime, RuntimeError> {
        let own = std::env::current_exe().ok();
        let folders = folders(std::env::var_os("PATH"));
        let others = installed(&folders, own.as_deref());
        let first = if configured.as_os_str().is_empty() {
            others.first().cloned().ok_or(RuntimeError::Missing)
        } else {
            named(configured, &folders, own.as_deref())
        };
        choose(first, &others, invocation)
    }

    /// Whether the runtime has created the container that the command names.
    #[must_use]
    pub fn has(&self, invocation: &OciInvocation) -> bool {
        let run_dirs =
            [Some(PathBuf::from("/run")), std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)];
        self.has_any(&invocation.words, invocation.root.as_deref(), run_dirs.iter().flatten())
    }

    /// Whether the runtime has created at least one of these containers.
    fn has_any<'a>(
        &self,
        ids: &[String],
        root: Option<&Path>,
        run_dirs: impl Iterator<Item = &'a PathBuf>,
    ) -> bool {
        let name = self.path.file_name().unwrap_or_default();
        let Some((_, file)) = KNOWN.iter().find(|(known, _)| *known == name) else { return false };
        let roots: Vec<PathBuf> = match root {
            Some(root) => vec![root.to_owned()],
            None => run_dirs.map(|run_dir| run_dir.join(name)).collect(),
        };
        let is_id = |id: &&String| !id.contains('/') && *id != "." && *id != "..";
        ids.iter()
            .filter(is_id)
            .any(|id| roots.iter().any(|root| root.join(id).join(file).exists()))
    }

    /// Replaces this process by the runtime with these arguments. Returns only the error.
    #[must_use]
    pub fn replace(&self, argv: &[OsString]) -> io::Error {
        Command::new(&self.path).args(argv).exec()
    }

    /// Returns the process id of the container's first process. Returns `None` if there is no such
    /// container, or its first process has ended.
    pub fn init_of(&self, id: &str, root: Option<&Path>) -> io::Result<Option<i32>> {
        let mut command = Command::new(&self.path);
        if let Some(root) = root {
            command.arg("--root").arg(root);
        }
        let answer = command.args(["state", id]).stdin(std::process::Stdio::null()).output()?;
        if !answer.status.success() {
            return Ok(None);
        }
        let state: StateAnswer =
            serde_json::from_slice(&answer.stdout).map_err(io::Error::other)?;
        Ok(Some(state.pid).filter(|pid| *pid > 1))
    }
}

/// Returns the runtime that has created the container of the command, if there is one, else
/// `first`. So an existing container can be ended even if the configured runtime is wrong.
fn choose(
    first: Result<OciRuntime, RuntimeError>,
    others: &[OciRuntime],
    invocation: &OciInvocation,
) -> Result<OciRuntime, RuntimeError> {
    if matches!(invocation.command, OciCommand::Create(_) | OciCommand::Run(_)) {
        return first;
    }
    let owner = first.iter().chain(others).find(|runtime| runtime.has(invocation)).cloned();
    owner.map_or(first, Ok)
}

fn folders(search: Option<OsString>) -> Vec<PathBuf> {
    let given = search.unwrap_or_default();
    let usual = OsStr::new(USUAL_PATH);
    std::env::split_paths(&given)
        .chain(std::env::split_paths(usual))
        .filter(|folder| folder.is_absolute())
        .collect()
}

/// Returns the known runtimes in these folders, each once. This program is skipped, even if its
/// file has the name of a runtime.
fn installed(folders: &[PathBuf], own: Option<&Path>) -> Vec<OciRuntime> {
    let find = |name: &str| {
        let paths = folders.iter().map(|folder| folder.join(name));
        paths
            .into_iter()
            .find(|path| is_program(path) && !own.is_some_and(|own| is_same_file(own, path)))
    };
    KNOWN.iter().filter_map(|(name, _)| find(name)).map(|path| OciRuntime { path }).collect()
}

fn named(
    configured: &Path,
    folders: &[PathBuf],
    own: Option<&Path>,
) -> Result<OciRuntime, RuntimeError> {
    let path = if configured.is_absolute() {
        configured.to_owned()
    } else {
        let found = folders.iter().map(|folder| folder.join(configured));
        found.into_iter().find(|path| is_program(path)).unwrap_or_else(|| configured.to_owned())
    };
    if !is_program(&path) {
        return Err(RuntimeError::NotAProgram(path));
    }
    if own.is_some_and(|own| is_same_file(own, &path)) {
        return Err(RuntimeError::Ourselves(path));
    }
    Ok(OciRuntime { path })
}

#[cfg(test)]
mod tests;
