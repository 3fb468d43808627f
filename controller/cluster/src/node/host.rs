//! The host on which the agent's container runs. This module runs `affinode` for the host, and
//! writes the part of the controller's configuration that the cluster sets.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use affinode_installer::install::NOT_RESTARTED;
use affinode_proto::paths;
use clap::{ArgAction, Args};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::process::Command;

/// Path of the file on the node that contains the cluster's part of the configuration. The path is
/// relative to the folder of the controller's configuration.
const DROP_IN: &str = "conf.d/50-cluster.toml";
/// Word by which `affinode status` says that a file has not changed since its installation.
const IN_PLACE: &str = "in-place";
/// Part of the error of an installation whose change of containerd's file was lost at the restart,
/// because another program wrote the file.
const OVERWRITTEN: &str = "another program wrote";
/// Beginning of the step in which an installation restarts the unit that runs containerd.
const RESTART: &str = "systemctl restart ";
/// Beginning of the step that leaves the restart of containerd to an operator.
const RESTART_BY_HAND: &str = "restart containerd by hand";
/// Time limit for a run of the program `affinode`. The limit is long, because an installation waits
/// for containerd for up to a minute.
const TIME: Duration = Duration::from_secs(180);
/// Time limit for reading the GPUs. It includes the start of the driver, which takes a few seconds
/// if the driver is not kept loaded.
pub(super) const GPUS_TIMEOUT: Duration = Duration::from_secs(60);

/// Paths on the node.
#[derive(Args, Clone, Debug)]
pub struct HostPaths {
    /// The node's root, as this container sees it.
    #[arg(long, value_name = "DIR", default_value = "/proc/1/root")]
    pub host_root: PathBuf,
    /// Folder into which Affinode is installed, in its subfolders bin and lib/affinode.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Folder in which the installer records what it installed.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// Run directory of the controller.
    #[arg(long, value_name = "DIR", default_value = "/run/affinode")]
    pub run_dir: PathBuf,
    /// The folder of the controller's config.toml.
    #[arg(long, value_name = "DIR", default_value = "/etc/affinode")]
    config_dir: PathBuf,
    /// Path of containerd's socket. If omitted: the usual path of the distribution.
    #[arg(long, value_name = "SOCKET")]
    containerd: Option<PathBuf>,
    /// Name of the handler, as in the RuntimeClass.
    #[arg(long, value_name = "NAME", default_value = "affinode")]
    runtime_name: String,
    /// How containerd is restarted after an installation: systemd or none.
    #[arg(long, value_name = "HOW", default_value = "systemd")]
    restart_mode: String,
    /// Name of the systemd unit that runs containerd. If omitted: the unit to which containerd
    /// belongs, such as k3s. If this unit is not known: containerd.
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// Whether systemd keeps a controller running, on nodes with systemd. The option has an effect
    /// only if the run directory and the configuration folder have their default paths.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    controller_unit: bool,
    /// Maximum time to wait for the end of running containers before Affinode is removed.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = humantime::parse_duration)]
    drain: Duration,
    /// File with the part of the controllers' configuration that the cluster sets.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Reason why a command on the node failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The program could not be started.
    #[error("cannot run affinode, which must be in the folder of this program")]
    Run(#[source] io::Error),
    /// The command exceeded its time limit.
    #[error("the command `affinode {0}` did not exit in time")]
    Late(&'static str),
    /// The command failed. Contains its message.
    #[error("{0}")]
    Refused(String),
    /// The output of the command is not the expected JSON.
    #[error(
        "the command `affinode {verb}` did not print JSON; check that the node agent and the installed programs come from the same image"
    )]
    Answer {
        /// Subcommand that was run.
        verb: &'static str,
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
    /// The configuration file could not be read or written.
    #[error("cannot read or write {}", path.display())]
    Config {
        /// Path of the configuration file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// State of the runtime handler in containerd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerState {
    /// containerd serves the handler, and all files are unchanged since the installation.
    Served,
    /// containerd serves the handler, but a new installation would change it.
    Outdated,
    /// containerd serves an earlier version of the handler until containerd's next start.
    RestartDue,
    /// The handler is installed, but containerd has not been restarted since then.
    RestartNeeded,
    /// Any other state. The handler must be installed.
    #[default]
    #[serde(other)]
    Missing,
}

impl HandlerState {
    /// Returns whether containerd serves Affinode's handler, in the present or an earlier version.
    #[must_use]
    pub fn serves(self) -> bool {
        matches!(self, Self::Served | Self::Outdated | Self::RestartDue)
    }
}

/// State of the installation on a node. The default is the state without an installation.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostState {
    /// State of the runtime handler.
    pub handler: HandlerState,
    /// Number of pods of the runtime, as running shims.
    pub running_shims: usize,
    /// Whether the systemd unit's controller fails at each start.
    pub controller_fails: bool,
}

#[derive(Deserialize)]
struct HostStatus {
    handler: Option<HandlerStatus>,
    files: Vec<FileStatus>,
    #[serde(default)]
    running_shims: usize,
    #[serde(default)]
    unit: Option<UnitStatus>,
}

#[derive(Deserialize)]
struct UnitStatus {
    state: UnitState,
}

/// State of the controller's systemd unit, as far as the agent must distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum UnitState {
    /// The unit's file is missing. This happens after a reboot if the node does not keep /etc.
    Missing,
    /// The unit is installed but was not started.
    Incomplete,
    /// The controller fails at each start.
    Failing,
    /// Any other state. The agent then leaves the unit as it is, because an operator may stop or
    /// disable it.
    #[serde(other)]
    Kept,
}

#[derive(Deserialize)]
struct FileStatus {
    state: String,
}

#[derive(Deserialize)]
struct HandlerStatus {
    state: HandlerState,
}

impl HostPaths {
    /// Returns the path at which this container sees a path of the node.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        self.host_root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the steps that an installation would execute now.
    ///
    /// # Errors
    /// [`HostError`]: the command failed.
    pub async fn plan(&self) -> Result<Vec<String>, HostError> {
        let output = self.installer("install", &["--dry-run", "-o", "json"], TIME).await?;
        parse("install", &succeeded(output)?)
    }

    /// Installs the programs of this container's image.
    ///
    /// # Errors
    /// [`HostError`]: the command failed. containerd's configuration is then unchanged.
    pub async fn install(&self) -> Result<Vec<String>, HostError> {
        parse("install", &succeeded(self.installer("install", &["-o", "json"], TIME).await?)?)
    }

    /// Returns the state of the handler.
    ///
    /// # Errors
    /// [`HostError`]: the command failed.
    pub async fn status(&self) -> Result<HandlerState, HostError> {
        Ok(self.state().await?.handler)
    }

    /// Returns the state of the installation.
    ///
    /// # Errors
    /// [`HostError`]: the command failed.
    pub async fn state(&self) -> Result<HostState, HostError> {
        let Some(status) = self.installed().await? else { return Ok(HostState::default()) };
        let running_shims = status.running_shims;
        let unit = status.unit.as_ref().map(|unit| unit.state);
        let handler = status.handler.map_or(HandlerState::Missing, |handler| handler.state);
        let served = handler.serves();
        let in_place = status.files.iter().all(|file| file.state == IN_PLACE);
        let unit_lost = matches!(unit, Some(UnitState::Missing | UnitState::Incomplete));
        let handler = match served {
            true if !in_place => HandlerState::Missing,
            true if unit_lost && self.keeps_controller() => HandlerState::Outdated,
            _ => handler,
        };
        let controller_fails = unit == Some(UnitState::Failing);
        Ok(HostState { handler, running_shims, controller_fails })
    }

    /// Returns the status of the installation. `None`: nothing is installed.
    ///
    /// # Errors
    /// [`HostError`]: the command failed, so nothing is known about the installation.
    async fn installed(&self) -> Result<Option<HostStatus>, HostError> {
        let output = self.run("status", &["-o", "json"], TIME).await?;
        // The command also reports a failure if the installation is missing or was changed. Only
        // an actual failure has no output.
        let text = if output.stdout.is_empty() { succeeded(output)? } else { output.stdout };
        parse("status", &text)
    }

    /// Returns the command that reads the node's GPUs with the installed program.
    pub(super) fn gpus_command(&self) -> Result<Command, HostError> {
        let mut command = affinode()?;
        command.arg("gpus").arg("--host-root").arg(&self.host_root);
        command.arg("--prefix").arg(&self.prefix).stdin(Stdio::null());
        Ok(command)
    }

    /// Waits until Affinode can be removed, for at most the drain time. Changes nothing on the
    /// node.
    ///
    /// # Errors
    /// [`HostError`]: Affinode cannot be removed, usually because containers of the runtime still
    /// run.
    pub async fn may_go(&self) -> Result<(), HostError> {
        self.take_off(&["--dry-run"]).await
    }

    /// Removes Affinode from the node. Missing parts are not an error.
    ///
    /// # Errors
    /// [`HostError`]: Affinode was not removed, usually because containers of the runtime still
    /// run.
    pub async fn uninstall(&self) -> Result<(), HostError> {
        self.take_off(&[]).await?;
        let file = self.on_host(&self.config_dir.join(DROP_IN));
        match fs::remove_file(&file) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(HostError::Config { path: file, source })
            }
            _ => {
                // The folders of the cluster's file are removed if they are empty.
                let folders = file.ancestors().skip(1).take(2);
                folders.for_each(|folder| drop(fs::remove_dir(folder)));
                Ok(())
            }
        }
    }

    /// Runs the uninstaller with the arguments in `more`, in addition to its usual arguments. The
    /// uninstaller waits for running containers, for at most the drain time. Does nothing on a node
    /// without an installation.
    async fn take_off(&self, more: &[&str]) -> Result<(), HostError> {
        if self.installed().await?.is_none() {
            return Ok(());
        }
        let drain = humantime::format_duration(self.drain).to_string().replace(' ', "");
        let arguments = [&["--drain", &drain], more].concat();
        succeeded(self.installer("uninstall", &arguments, TIME + self.drain).await?).map(drop)
    }

    /// Writes the cluster's part of the controller's configuration to the node. Returns whether it
    /// has changed. An invalid configuration is not written, because no controller would start with
    /// it.
    ///
    /// # Errors
    /// [`HostError`]: the new configuration is invalid or cannot be written. The earlier file stays
    /// in use.
    pub async fn configure(&self) -> Result<bool, HostError> {
        let Some(config) = &self.config else { return Ok(false) };
        let file = self.on_host(&self.config_dir.join(DROP_IN));
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| HostError::Config { path, source }
        };
        let wanted = fs::read(config).map_err(fail(config))?;
        if fs::read(&file).is_ok_and(|there| there == wanted) {
            return Ok(false);
        }
        let mut validate = affinode()?;
        validate.args(["policy", "validate"]).arg(config);
        succeeded(finish("policy validate", &mut validate, TIME).await?)?;
        let put = || {
            fs::create_dir_all(file.parent().unwrap_or(&file))?;
            let fresh = file.with_extension("toml.new");
            fs::write(&fresh, wanted)?;
            fs::rename(&fresh, &file)
        };
        put().map(|()| true).map_err(fail(&file))
    }

    /// Returns whether systemd is to keep a controller running. This needs the default run
    /// directory and configuration folder, because the systemd unit knows no other folders. Only
    /// shims learn other folders, from containerd's environment.
    fn keeps_controller(&self) -> bool {
        let usual = Path::new(paths::CONFIG_FILE).parent();
        self.controller_unit
            && self.run_dir == Path::new(paths::RUN_DIR)
            && Some(self.config_dir.as_path()) == usual
    }

    async fn installer(
        &self,
        verb: &'static str,
        more: &[&str],
        time: Duration,
    ) -> Result<Output, HostError> {
        let mut arguments = vec!["--restart-mode", &self.restart_mode];
        if let Some(unit) = &self.unit {
            arguments.extend(["--unit", unit]);
        }
        let config = self.config_dir.join("config.toml").display().to_string();
        if verb == "install" {
            arguments.extend(["--runtime-name", &self.runtime_name, "--config", &config]);
            if !self.keeps_controller() {
                arguments.push("--no-controller-unit");
            }
        }
        arguments.extend(more);
        self.run(verb, &arguments, time).await
    }

    async fn run(
        &self,
        verb: &'static str,
        more: &[&str],
        time: Duration,
    ) -> Result<Output, HostError> {
        let mut command = affinode()?;
        command.arg(verb).arg("--host-root").arg(&self.host_root);
        command.arg("--prefix").arg(&self.prefix).arg("--state-dir").arg(&self.state_dir);
        command.arg("--run-dir").arg(&self.run_dir);
        if let Some(socket) = &self.containerd {
            command.arg("--containerd").arg(socket);
        }
        finish(verb, command.args(more), time).await
    }
}

/// Returns whether an installation with these steps may restart the kubelet: whether it restarts a
/// systemd unit other than one of containerd alone. The units of k3s, RKE2 and k0s run both.
#[must_use]
pub fn may_restart_kubelet(steps: &[String]) -> bool {
    let units = steps.iter().filter_map(|step| step.strip_prefix(RESTART));
    units.into_iter().any(|unit| !unit.contains("containerd"))
}

/// Returns whether an installation with these steps changes what containerd loads at a restart, as a
/// first installation does. Other installations only write lost files or a lost unit again.
#[must_use]
pub fn has_restart(steps: &[String]) -> bool {
    steps.iter().any(|step| step.starts_with(RESTART) || step.starts_with(RESTART_BY_HAND))
}

/// Returns whether an installation failed because another program wrote containerd's file anew. The
/// same installation would restart containerd again, to no effect.
#[must_use]
pub fn is_overwritten(error: &HostError) -> bool {
    matches!(error, HostError::Refused(why) if why.contains(OVERWRITTEN))
}

/// Returns whether it is certain that a failed installation has not restarted containerd's unit.
#[must_use]
pub fn has_restarted_nothing(error: &HostError) -> bool {
    matches!(error, HostError::Refused(why) if why.contains(NOT_RESTARTED))
}

/// Returns a command that runs the program `affinode`, which is in the same folder as this program.
fn affinode() -> Result<Command, HostError> {
    let own = std::env::current_exe().map_err(HostError::Run)?;
    Ok(Command::new(own.with_file_name("affinode")))
}

/// Runs a command of `affinode` and returns its output. The command continues even if this process
/// ends, so that an installation is always completed.
async fn finish(
    verb: &'static str,
    command: &mut Command,
    time: Duration,
) -> Result<Output, HostError> {
    let output = tokio::time::timeout(time, command.stdin(Stdio::null()).output()).await;
    output.map_err(|_| HostError::Late(verb))?.map_err(HostError::Run)
}

pub(super) fn succeeded(output: Output) -> Result<Vec<u8>, HostError> {
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(HostError::Refused(if said.is_empty() { output.status.to_string() } else { said }))
}

pub(super) fn parse<T: DeserializeOwned>(verb: &'static str, text: &[u8]) -> Result<T, HostError> {
    serde_json::from_slice(text).map_err(|source| HostError::Answer { verb, source })
}

#[cfg(test)]
mod tests {
    use affinode_installer::install::RestartRequest;

    use super::*;

    #[test]
    fn units_with_a_kubelet_are_recognized() {
        let restarts = |step: &str| may_restart_kubelet(&["write a file".into(), step.into()]);
        for unit in ["k3s", "k3s-agent", "rke2-server", "k0sworker", "k0scontroller", "own-unit"] {
            assert!(restarts(&format!("systemctl restart {unit}")), "{unit}");
        }
        for unit in ["containerd", "snap.microk8s.daemon-containerd"] {
            assert!(!restarts(&format!("systemctl restart {unit}")), "{unit}");
        }
        assert!(!restarts("restart containerd by hand: it loads its configuration at its start"));
        assert!(!may_restart_kubelet(&[]));
    }

    #[test]
    fn restarts_are_recognized() {
        let unit = RestartRequest::Systemd { unit: Some("k3s".into()) };
        for restart in [unit, RestartRequest::None] {
            assert!(has_restart(&["write a file".into(), restart.to_string()]), "{restart}");
        }
        assert!(!has_restart(&["write a file".into()]));
    }
}
