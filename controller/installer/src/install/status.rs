//! Determines the status of an installation.

use std::{fs, path::PathBuf};

use serde::Serialize;

use super::{
    DockerRequest, DockerState, DockerStatus, InstallError, InstallOptions, containerd,
    containerd::ContainerdNode,
    docker, files,
    handler::{HandlerSpec, HandlerVerdict},
    plan, podman,
    record::{AddedBlock, InstallRecord},
    unit,
    unit::{UnitState, UnitStatus},
};

/// Status of an installation: what is installed, and whether it is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstallStatus {
    /// The status of each installed file.
    pub files: Vec<FileStatus>,
    /// Status of the handler in containerd's configuration.
    pub handler: Option<HandlerStatus>,
    /// Names of earlier handlers that were kept for running pods.
    pub former: Vec<String>,
    /// Status of the runtime in Docker's configuration.
    pub docker: Option<DockerStatus>,
    /// Status of the systemd unit that keeps a controller running.
    pub unit: Option<UnitStatus>,
    /// Pid of the controller. `None`: no controller runs.
    pub controller_pid: Option<u32>,
    /// Number of running shims of this installation.
    pub running_shims: usize,
    /// Number of running containers of Podman or CRI-O, and of commands in them, that need the
    /// installed runtime.
    pub running_podman: usize,
    /// Whether the installation is intact: all files are unchanged, containerd serves the handler,
    /// Docker serves the runtime, and the systemd unit is completely installed. Parts that the
    /// installation leaves out do not count.
    pub in_place: bool,
}

/// The status of one installed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileStatus {
    /// Path of the file.
    pub path: PathBuf,
    pub state: FileState,
}

/// State of an installed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileState {
    /// The file is unchanged.
    InPlace,
    /// The content was changed.
    Changed,
    /// The file does not exist.
    Missing,
}

/// Status of the handler in containerd's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HandlerStatus {
    /// Name of the handler.
    pub name: String,
    /// Path of the configuration file that contains the handler.
    pub config_file: PathBuf,
    pub state: HandlerState,
}

/// State of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerState {
    /// containerd serves the handler as the file contains it.
    Served,
    /// containerd serves the handler, but another run of the installation would change the
    /// configuration. Either the model handler has changed, or a handler with an earlier name is no
    /// longer in use.
    Outdated,
    /// A new form of the handler was written, but containerd still serves the previous form.
    RestartDue,
    /// containerd has not been restarted since the handler was written.
    RestartNeeded,
    /// The handler is in the file, but containerd no longer reads that file.
    NotRead,
    /// No configuration file contains the handler.
    Missing,
    /// A handler of this name runs another program.
    Foreign,
    /// containerd cannot read its configuration.
    Unreadable,
    /// No containerd serves the socket.
    NoContainerd,
}

/// Determines the status of the installation, by comparing the node with the installation's record.
/// `None`: nothing is installed.
///
/// # Errors
/// [`InstallError`]: the record or a file cannot be read.
pub fn status(options: &InstallOptions) -> Result<Option<InstallStatus>, InstallError> {
    let Some(record) = InstallRecord::read(&options.state_dir)? else { return Ok(None) };
    let mut seen = Vec::new();
    for (path, sha256) in record.listed() {
        let state = match path.exists() {
            false => FileState::Missing,
            true if files::digest(path)? == sha256 => FileState::InPlace,
            true => FileState::Changed,
        };
        seen.push(FileStatus { path: path.to_owned(), state });
    }
    let running_shims = containerd::running_shims(&options.prefix);
    let handler = record.block.as_ref().map(|added| {
        let node = ContainerdNode::find(options.socket(Some(&record)));
        let (state, file) = match &node {
            Ok(node) => {
                let file = node.naming(&added.runtime_name).last().cloned();
                (judge(options, &record, added, node, running_shims), file)
            }
            Err(_) => (HandlerState::NoContainerd, None),
        };
        let config_file = file.unwrap_or_else(|| added.path.clone());
        HandlerStatus { name: added.runtime_name.clone(), config_file, state }
    });
    let docker = match options.docker {
        DockerRequest::Never => None,
        _ => docker::status(&options.state_dir)?,
    };
    let in_docker = docker.as_ref().is_none_or(|d| d.state == DockerState::Served);
    // If only Docker or Podman runs containers, there is no handler.
    let alone = docker.is_some() || podman::is_recorded(&record);
    let served = handler.as_ref().map_or(alone, |h| h.state == HandlerState::Served);
    let running_podman = podman::running(&options.prefix);
    let former = record.former.iter().map(|added| added.runtime_name.clone()).collect();
    let unit = unit::status(&options.state_dir)?;
    // An operator may stop, disable or change the unit, so only a missing, incomplete or failing
    // unit counts as lost.
    let unit_lost = unit.as_ref().is_some_and(|unit| {
        matches!(unit.state, UnitState::Missing | UnitState::Incomplete | UnitState::Failing)
    });
    let unchanged = seen.iter().all(|file| file.state == FileState::InPlace);
    Ok(Some(InstallStatus {
        in_place: served && in_docker && unchanged && !unit_lost,
        files: seen,
        handler,
        former,
        docker,
        unit,
        controller_pid: containerd::running_controller(&options.prefix),
        running_shims,
        running_podman,
    }))
}

pub(super) fn judge(
    options: &InstallOptions,
    record: &InstallRecord,
    added: &AddedBlock,
    node: &ContainerdNode,
    running_shims: usize,
) -> HandlerState {
    let Ok(dump) = node.config() else { return HandlerState::Unreadable };
    let cdi = plan::uses_cdi(Some(record), node, &dump);
    let spec =
        HandlerSpec::new(&added.runtime_name, &options.prefix, Some(record), cdi).installed();
    let loaded = node.runs_since(added.written());
    match spec.judge(&dump) {
        HandlerVerdict::Foreign => HandlerState::Foreign,
        HandlerVerdict::Absent if node.renders(added) => HandlerState::RestartNeeded,
        HandlerVerdict::Absent => {
            let there = |text: &str| !added.text.is_empty() && text.contains(&added.text);
            match fs::read_to_string(&added.path).is_ok_and(|text| there(&text)) {
                true => HandlerState::NotRead,
                false => HandlerState::Missing,
            }
        }
        HandlerVerdict::Same | HandlerVerdict::Differs if !loaded => {
            match added.replaced().is_some_and(|time| node.runs_since(time)) {
                true => HandlerState::RestartDue,
                false => HandlerState::RestartNeeded,
            }
        }
        // An operator wrote the handler, and another installation would not change it.
        HandlerVerdict::Differs if node.managed().is_some() => HandlerState::Served,
        HandlerVerdict::Differs => HandlerState::Outdated,
        // No shim runs, so the handlers with earlier names can be removed now. An installation does
        // not remove them from a file that another program writes.
        HandlerVerdict::Same
            if !record.former.is_empty() && running_shims == 0 && node.managed().is_none() =>
        {
            HandlerState::Outdated
        }
        HandlerVerdict::Same => HandlerState::Served,
    }
}
