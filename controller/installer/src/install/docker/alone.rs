//! Installs Affinode on a machine on which only Docker or Podman runs containers. No handler is
//! added to containerd, because no containerd serves pods. Either there is no containerd, or its
//! CRI is disabled, or it belongs to dockerd.

use toml::Table;

use super::DockerPlan;
use crate::doctor::handler::disables_cri;
use crate::install::{
    InstallError, InstallOptions, SourceFile, Steps,
    containerd::{ContainerdNode, NodeError},
    files::{self, FileChange},
    handler,
    lock::InstallLock,
    plan::HandlerPlan,
    record::InstallRecord,
    remove_first,
    replacement::ControllerReplacement,
    tidy,
};

/// Returns whether only Docker or Podman runs containers on this machine. In this case, there is no
/// containerd to which a handler could be added.
pub fn is_alone(
    docker: &DockerPlan,
    podman: bool,
    options: &InstallOptions,
    older: Option<&InstallRecord>,
    node: &Result<ContainerdNode, NodeError>,
) -> bool {
    let has_handler = older.is_some_and(|older| older.block.is_some());
    if matches!(docker, DockerPlan::LeftOut) && !podman || has_handler {
        return false;
    }
    match node {
        Ok(node) => node.dump().is_ok_and(|config| !serves_pods(&config)),
        // If the user named a socket, a failure to connect is an error.
        Err(_) => options.containerd.is_none(),
    }
}

/// Returns whether a containerd with this configuration has CRI enabled.
fn serves_pods(config: &Table) -> bool {
    handler::cri(config).is_some() && !disables_cri(config)
}

/// Installs the files, and registers the runtime in Docker.
///
/// # Errors
/// [`InstallError`]: a step failed. If this was a first installation, all its files are removed.
pub fn install(
    docker: &DockerPlan,
    options: &InstallOptions,
    source: &SourceFile,
    mut lock: Option<InstallLock>,
    older: Option<InstallRecord>,
) -> Result<Steps, InstallError> {
    if lock.is_some() {
        tidy(options, older.as_ref())?;
    }
    let changes = files::plan(source, &options.prefix);
    let controllers = ControllerReplacement::of(options, &changes)?;
    let mut steps: Steps = changes.iter().map(FileChange::to_string).collect();
    steps.extend(docker.steps());
    steps.extend(controllers.steps());
    let Some(lock) = lock.as_mut().filter(|_| !steps.is_empty()) else { return Ok(steps) };
    let fresh = older.is_none() && !changes.iter().any(FileChange::replaces);
    lock.note_missing_folders(changes.iter().map(FileChange::to));
    let mut record =
        InstallRecord::of(&options.prefix, source, older, &HandlerPlan::default(), &lock.made);
    record.settled = true;
    record.write(&options.state_dir)?;
    if let Err(error) = make(docker, &changes, options) {
        match fresh {
            true => remove_first(options, &changes, &record)?,
            false => controllers.make_after_failure(options, &changes),
        }
        return Err(error);
    }
    controllers.make(options)?;
    Ok(steps)
}

fn make(
    docker: &DockerPlan,
    changes: &[FileChange],
    options: &InstallOptions,
) -> Result<(), InstallError> {
    files::make(changes)?;
    Ok(docker.make(&options.state_dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disabled_cri_serves_no_pods() {
        let serves = |text: &str| serves_pods(&text.parse().unwrap());
        let section = "[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n";
        assert!(serves(&format!("version = 3\ndisabled_plugins = [\"aufs\"]\n{section}")));
        for name in ["cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"] {
            let disabled = format!("version = 3\ndisabled_plugins = [\"{name}\"]\n{section}");
            assert!(!serves(&disabled), "{name}");
        }
        assert!(!serves("version = 2\ndisabled_plugins = [\"cri\"]\n"));
    }
}
