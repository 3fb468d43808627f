//! `affinode install`, `uninstall`, `status`: run [`affinode_installer::install`] and print its steps and
//! findings.

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use affinode_installer::install::{
    self, DOCKER_SOCKET, DockerRequest, DockerState, FileState, HandlerState, InstallOptions,
    InstallStatus, PODMAN_FOLDER, PodmanRequest, RestartRequest, SourceFile, UNIT_FOLDER,
    UnitRequest, UnitState,
};
use affinode_proto::installation::PathsFile;
use clap::ValueEnum;

use super::{CliError, OutputFormat};

/// Install Affinode on this node. This installs the programs, the library, and a systemd unit that
/// keeps a controller running. It adds a handler to containerd's configuration, a runtime to
/// Docker's if Docker runs, and a runtime to Podman's if Podman is installed. The command restores
/// containerd's earlier configuration in two cases: the new configuration changes more than the
/// handler, or containerd does not start with it. It restores Docker's configuration file if
/// dockerd does not serve the runtime.
#[derive(Debug, clap::Args)]
pub struct InstallArgs {
    /// Folder that contains the files to install. Default: the folder of this program.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Output format. json is an array of the installation's steps.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Name of the handler in containerd's configuration. A RuntimeClass refers to this name.
    #[arg(long, value_name = "NAME", default_value = "affinode")]
    runtime_name: String,
    /// Register the runtime in Docker, and fail if dockerd does not answer. SOCKET is dockerd's
    /// socket. Without this option, the runtime is registered if dockerd answers on its usual
    /// socket and neither --containerd nor --host-root is given.
    #[arg(
        long,
        value_name = "SOCKET",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = DOCKER_SOCKET,
        conflicts_with = "no_docker"
    )]
    docker: Option<PathBuf>,
    /// Leave Docker's configuration as it is.
    #[arg(long)]
    no_docker: bool,
    /// Register the runtime in Podman. DIR is the folder into which its configuration file is
    /// written. Without this option, the runtime is registered if Podman is installed and neither
    /// --containerd nor --host-root is given.
    #[arg(
        long,
        value_name = "DIR",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = PODMAN_FOLDER,
        conflicts_with = "no_podman"
    )]
    podman: Option<PathBuf>,
    /// Leave Podman's configuration as it is.
    #[arg(long)]
    no_podman: bool,
    /// Install the systemd unit that keeps a controller running, and fail if it does not start. DIR
    /// is systemd's folder of units. Without this option the unit is installed if systemd runs, and
    /// if the state, run and configuration folders have their default paths.
    #[arg(
        long,
        value_name = "DIR",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = UNIT_FOLDER,
        conflicts_with = "no_controller_unit"
    )]
    controller_unit: Option<PathBuf>,
    /// Install no systemd unit. The controller then runs only when it is needed: a shim starts it
    /// with the first container, and it ends a minute after the last container.
    #[arg(long)]
    no_controller_unit: bool,
    /// Path of the controller's configuration file. Default: /etc/affinode/config.toml. The paths
    /// of this option and of --run-dir are written into share/affinode/paths.conf below the prefix,
    /// from which all programs of Affinode read them.
    #[arg(long, value_name = "FILE", env = affinode_proto::paths::CONFIG_ENV)]
    config: Option<PathBuf>,
    #[command(flatten)]
    places: InstallPaths,
}

impl InstallArgs {
    /// Returns whether the runtime is registered in Podman. `--podman` requires the registration.
    /// `--no-podman`, `--containerd` and `--host-root` each prevent it. Without these options, the
    /// runtime is registered if Podman is found.
    fn podman(&self) -> PodmanRequest {
        let elsewhere = self.places.containerd.is_some() || self.places.host_root.is_some();
        match &self.podman {
            Some(folder) => PodmanRequest::Required(folder.clone()),
            None if self.no_podman || elsewhere => PodmanRequest::Never,
            None => PodmanRequest::Detected,
        }
    }

    fn unit(&self) -> UnitRequest {
        match &self.controller_unit {
            Some(folder) => UnitRequest::Required(folder.clone()),
            None if self.no_controller_unit => UnitRequest::Never,
            None => UnitRequest::Detected,
        }
    }

    /// Returns whether the runtime is registered in Docker. `--docker` requires the registration.
    /// `--no-docker`, `--containerd` and `--host-root` each prevent it. Without these options, the
    /// runtime is registered if dockerd is found.
    fn docker(&self) -> DockerRequest {
        let elsewhere = self.places.containerd.is_some() || self.places.host_root.is_some();
        match &self.docker {
            Some(socket) => DockerRequest::Required(socket.clone()),
            None if self.no_docker || elsewhere => DockerRequest::Never,
            None => DockerRequest::Detected,
        }
    }
}

/// Remove from this node what the installation added. The command fails while containers or jobs of
/// Affinode run.
#[derive(Debug, clap::Args)]
pub struct UninstallArgs {
    /// Maximum time to wait for the end of running containers and jobs, such as 10m. Afterwards the
    /// command fails if one still runs. Default: no wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    drain: Option<Duration>,
    #[command(flatten)]
    places: InstallPaths,
}

/// Show what `affinode install` installed on this node, and whether it was changed since then. Exit
/// status 1: something was changed or is missing, or nothing is installed.
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// Format of the output. json is null if nothing is installed.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Path of containerd's socket. Default: the socket that the installation used. Without an
    /// earlier installation, the paths that distributions use are tried.
    #[arg(long, value_name = "SOCKET", env = "CONTAINERD_ADDRESS")]
    containerd: Option<PathBuf>,
    /// Folder that contains the record of the installation.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// Folder of the installation, which contains bin and lib/affinode.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// The node's root file system, if this command runs in a container.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct InstallPaths {
    /// The node's root file system, if this command runs in a container: /proc/1/root if the
    /// container shares the node's pid namespace. All other paths, except that of --from, are then
    /// paths of the node.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
    /// Path of containerd's socket. Default: the socket that the installation used. Without an
    /// earlier installation, the paths that distributions use are tried.
    #[arg(long, value_name = "SOCKET", env = "CONTAINERD_ADDRESS")]
    containerd: Option<PathBuf>,
    /// Folder of the installation, which contains bin, lib/affinode and share/affinode. For Docker,
    /// nerdctl and ctr, the folder bin must be in containerd's PATH. If the prefix is not
    /// /usr/local, add the folder bin to this PATH yourself.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Folder for the record of the installation, which `affinode status` and `affinode uninstall`
    /// read.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// How containerd loads its changed configuration. systemd: this command restarts containerd's
    /// unit. none: you restart containerd.
    #[arg(long, value_name = "HOW", default_value = "systemd")]
    restart_mode: RestartMode,
    /// Systemd unit that runs containerd. Default: the unit to which containerd belongs, such as
    /// k3s. If this unit is not known: containerd.
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// Print what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RestartMode {
    /// Restart containerd's unit with `systemctl restart`.
    Systemd,
    /// You restart containerd yourself.
    None,
}

impl InstallPaths {
    /// Returns the options of the installation. Changes the root directory of this process first if
    /// the command line names the node's root file system.
    fn options(self, runtime_name: String) -> Result<InstallOptions, CliError> {
        if let Some(root) = &self.host_root {
            install::enter(root)?;
        }
        let restart = match self.restart_mode {
            RestartMode::Systemd => RestartRequest::Systemd { unit: self.unit },
            RestartMode::None => RestartRequest::None,
        };
        Ok(InstallOptions {
            containerd: self.containerd,
            prefix: self.prefix,
            state_dir: self.state_dir,
            folders: PathsFile::default(),
            runtime_name,
            restart,
            docker: DockerRequest::Never,
            podman: PodmanRequest::Never,
            unit: UnitRequest::Never,
            drain: Duration::ZERO,
            dry_run: self.dry_run,
        })
    }
}

/// Installs Affinode. `run_dir`: the run directory, if --run-dir was given.
pub fn install(
    out: &mut dyn Write,
    asked: InstallArgs,
    run_dir: Option<PathBuf>,
) -> Result<(), CliError> {
    let source = match &asked.from {
        Some(folder) => SourceFile::of(folder)?,
        None => SourceFile::of(&own_folder()?)?,
    };
    let (docker, podman, unit) = (asked.docker(), asked.podman(), asked.unit());
    let folders = PathsFile { run_dir, config: asked.config };
    let places = asked.places.options(asked.runtime_name)?;
    let options = InstallOptions { docker, podman, unit, folders, ..places };
    let steps = install::install(&options, &source)?;
    match asked.output {
        // JSON on one line, for programs.
        OutputFormat::Json => {
            serde_json::to_writer(&mut *out, &steps)?;
            Ok(writeln!(out)?)
        }
        OutputFormat::Yaml => Ok(serde_yaml_ng::to_writer(&mut *out, &steps)?),
        OutputFormat::Table | OutputFormat::Wide => print(out, options.dry_run, &steps),
    }
}

/// Uninstalls Affinode. `run_dir`: the run directory, if --run-dir was given.
pub fn uninstall(
    out: &mut dyn Write,
    asked: UninstallArgs,
    run_dir: Option<PathBuf>,
) -> Result<(), CliError> {
    let options = InstallOptions {
        folders: PathsFile { run_dir, config: None },
        drain: asked.drain.unwrap_or_default(),
        ..asked.places.options(String::new())?
    };
    print(out, options.dry_run, &install::uninstall(&options)?)
}

pub fn status(out: &mut dyn Write, asked: StatusArgs) -> Result<(), CliError> {
    let StatusArgs { output, containerd, state_dir, prefix, host_root } = asked;
    if let Some(root) = &host_root {
        install::enter(root)?;
    }
    // With --host-root, the node agent of a cluster runs this command. The agent does not manage
    // Docker.
    let docker = host_root.map_or(DockerRequest::Detected, |_| DockerRequest::Never);
    let options = InstallOptions {
        containerd,
        prefix,
        state_dir,
        folders: PathsFile::default(),
        runtime_name: String::new(),
        restart: RestartRequest::None,
        docker,
        podman: PodmanRequest::Never,
        unit: UnitRequest::Never,
        drain: Duration::ZERO,
        dry_run: true,
    };
    let status = install::status(&options)?;
    match (output, &status) {
        // A program that reads the output distinguishes `null`, no installation, from a failure of
        // this command, which prints nothing.
        (OutputFormat::Json, status) => {
            serde_json::to_writer_pretty(&mut *out, status)?;
            writeln!(out)?;
        }
        (OutputFormat::Yaml, status) => serde_yaml_ng::to_writer(&mut *out, status)?,
        (OutputFormat::Table | OutputFormat::Wide, Some(status)) => print_status(out, status)?,
        (OutputFormat::Table | OutputFormat::Wide, None) => {}
    }
    match status {
        Some(InstallStatus { in_place: true, .. }) => Ok(()),
        Some(_) => Err(CliError::NotDone(
            "the installation is incomplete or was changed, or its controller does not start"
                .into(),
        )),
        None => {
            let folder = options.state_dir.display();
            Err(CliError::NotDone(format!("nothing is installed: no record in {folder}")))
        }
    }
}

fn print_status(out: &mut dyn Write, status: &InstallStatus) -> Result<(), CliError> {
    let mut rows: Vec<(String, &str)> = Vec::new();
    for file in &status.files {
        let state = match file.state {
            FileState::InPlace => "as installed",
            FileState::Changed => {
                "changed since the installation: affinode uninstall would keep the file, and \
                 affinode install replaces it"
            }
            FileState::Missing => "missing: run affinode install",
        };
        rows.push((file.path.display().to_string(), state));
    }
    if let Some(handler) = &status.handler {
        let file = handler.config_file.display();
        rows.push((format!("handler {} in {file}", handler.name), handler_state(handler.state)));
    }
    for name in &status.former {
        rows.push((
            format!("handler {name}"),
            "former name of the handler, kept for running shims: after they have ended, affinode \
             install removes it",
        ));
    }
    if let Some(docker) = &status.docker {
        let state = match docker.state {
            DockerState::Served => "served by dockerd",
            DockerState::ReloadNeeded => "dockerd has not loaded the runtime: run affinode install",
            DockerState::NoDocker => "dockerd does not answer",
            DockerState::Changed => "changed since the installation: run affinode install",
        };
        rows.push((format!("runtime {} in {}", docker.name, docker.config_file.display()), state));
    }
    if let Some(unit) = &status.unit {
        rows.push((unit.path.display().to_string(), unit_state(unit.state)));
    }
    let width = rows.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
    for (what, state) in rows {
        writeln!(out, "{what:width$}  {state}")?;
    }
    match status.controller_pid {
        Some(pid) => writeln!(out, "the controller runs: process {pid}")?,
        None => writeln!(
            out,
            "no controller runs: a shim starts a controller with the first container"
        )?,
    }
    match (status.running_shims, status.running_podman) {
        (0, 0) => writeln!(out, "no container uses Affinode")?,
        (0, _) => {}
        (1, _) => writeln!(out, "1 shim runs")?,
        (shims, _) => writeln!(out, "{shims} shims run")?,
    }
    match status.running_podman {
        0 => {}
        1 => writeln!(out, "1 container or command of Podman or CRI-O runs")?,
        running => writeln!(out, "{running} containers or commands of Podman or CRI-O run")?,
    }
    Ok(())
}

fn handler_state(state: HandlerState) -> &'static str {
    match state {
        HandlerState::Served => "served by containerd",
        HandlerState::RestartNeeded => "restart containerd: it has not loaded the handler yet",
        HandlerState::RestartDue => {
            "containerd still serves the former version of the handler: restart containerd to \
             apply the change"
        }
        HandlerState::Outdated => {
            "served by containerd, but the handler's settings differ from the settings that \
             affinode install would write now: run affinode install"
        }
        HandlerState::NotRead => "containerd does not read this file: run affinode install",
        HandlerState::Missing => {
            "not in any configuration file of containerd: run affinode install"
        }
        HandlerState::Foreign => {
            "this handler runs another program than Affinode: remove it, or choose another name \
             with --runtime-name"
        }
        HandlerState::Unreadable => {
            "containerd cannot read its configuration: correct the configuration first"
        }
        HandlerState::NoContainerd => "containerd does not run",
    }
}

fn unit_state(state: UnitState) -> &'static str {
    match state {
        UnitState::Running => "keeps a controller running",
        UnitState::Disabled => {
            "keeps a controller running now, but does not start after a reboot: run systemctl \
             enable affinode-controller"
        }
        UnitState::Stopped => {
            "stopped, so shims start the controller: run systemctl start affinode-controller"
        }
        UnitState::Failing => {
            "no controller runs, because it fails at each start: see journalctl --unit \
             affinode-controller"
        }
        UnitState::Changed => {
            "changed since the installation: affinode install and uninstall leave the file as it is"
        }
        UnitState::Missing | UnitState::Incomplete => {
            "missing or not started, so shims start the controller: run affinode install"
        }
        UnitState::Unknown => "unknown: systemctl does not answer",
    }
}

/// Returns the default folder of the files to install. If this program is in a folder `bin`, the
/// function returns the folder that contains `bin`. Otherwise it returns the folder of this
/// program.
fn own_folder() -> Result<PathBuf, CliError> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().filter(|_| folder.ends_with("bin"));
    Ok(above.unwrap_or(folder).to_owned())
}

fn print(out: &mut dyn Write, dry_run: bool, steps: &[String]) -> Result<(), CliError> {
    match (dry_run, steps.is_empty()) {
        (_, true) => writeln!(out, "everything is in place: nothing to do")?,
        (true, false) => writeln!(out, "would do:")?,
        (false, false) => {}
    }
    for step in steps {
        writeln!(out, "{step}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that reads the output must distinguish a missing installation from a record that
    /// cannot be read.
    #[test]
    fn status_without_an_installation_is_null() {
        let folder = tempfile::tempdir().unwrap();
        let run = || {
            let mut out = Vec::new();
            let done = status(
                &mut out,
                StatusArgs {
                    output: OutputFormat::Json,
                    containerd: Some(folder.path().join("containerd.sock")),
                    state_dir: folder.path().to_owned(),
                    prefix: folder.path().to_owned(),
                    host_root: None,
                },
            );
            (String::from_utf8(out).unwrap(), done)
        };
        let (printed, done) = run();
        assert_eq!(printed, "null\n");
        assert!(matches!(done, Err(CliError::NotDone(_))), "{done:?}");
        std::fs::write(folder.path().join("install.json"), "{").unwrap();
        let (printed, done) = run();
        assert_eq!(printed, "");
        assert!(matches!(done, Err(CliError::Install(_))), "{done:?}");
    }
}
