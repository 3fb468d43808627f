//! Reads the configuration of this node's containerd, and restarts containerd.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use affinode_controller::{error_chain, inventory::process, jobs};
use affinode_core::input::Identity;
use toml::{Table, Value};

use super::{
    edit::ConfigEdit,
    files,
    handler::{self, HandlerSpec},
    host_process::HostProcess,
    podman,
    record::AddedBlock,
    target::{self, InstallTarget, ManagedConfig},
};
use crate::doctor::{
    containerd::{self, ContainerdAbsent, ContainerdProcess},
    imports,
    programs::SHIM,
};

/// Part of the error message of systemctl if systemd is not process 1. In this case, systemctl has
/// stopped no unit.
const NOT_BOOTED: &str = "has not been booted with systemd";
/// Time limit for containerd to serve its socket again after a restart.
const BACK_WITHIN: Duration = Duration::from_secs(60);
/// Text by which the node agent recognizes that a further restart would have no effect.
const OVERWRITTEN: &str = "another program wrote";
/// Default name of containerd's systemd unit.
const UNIT: &str = "containerd";
/// Names of the systemd units of k3s, rke2 and k0s, which run a containerd. A dash and more text may
/// follow, because the installer of k3s can name its unit `k3s-NAME`.
const DISTRIBUTIONS: [&str; 5] = ["k3s", "rke2", "k0s", "k0scontroller", "k0sworker"];
/// Length of a clock tick in milliseconds. On this architecture, start times in /proc are counted
/// in such ticks.
const TICK_MS: u64 = 10;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How containerd is restarted after its configuration was changed. containerd reads its
/// configuration only at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestartRequest {
    /// systemd restarts containerd. It does not stop running shims.
    Systemd {
        /// Name of the unit. The default is the unit to which containerd belongs. If the unit is
        /// not known, it is `containerd`.
        unit: Option<String>,
    },
    /// The installer does not restart containerd. The operator restarts it.
    None,
}

/// Reason why containerd's configuration was not changed, or was restored after a change.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No containerd was found.
    #[error(
        "cannot find containerd: start it, or pass its socket with --containerd. To install only for \
         Podman, pass --podman. To use only affinode run, which needs no containerd, {}",
        super::NO_HANDLER
    )]
    Absent(#[from] ContainerdAbsent),
    /// containerd cannot read its own configuration.
    #[error(
        "nothing was changed, because containerd cannot read its configuration and would not start \
         with it. Correct this error first: {0}"
    )]
    Config(String),
    /// The new configuration would differ from the present one in more than the handler.
    #[error(
        "nothing was changed, because the new configuration would differ in {0}, not only in Affinode's handler"
    )]
    Differs(String),
    /// containerd would not load the handler from the new configuration, because an imported file
    /// overrides it.
    #[error(
        "nothing was changed, because containerd would not load handler {name} from {}: another file, which containerd imports, replaces the section of handlers. Add the handler to that file by hand (see config/containerd)",
        path.display()
    )]
    Covered {
        /// Name of the handler.
        name: String,
        /// Path of the edited file.
        path: PathBuf,
    },
    /// containerd 1.x would not find the shim.
    #[error(
        "nothing was changed, because no pod of the handler would start: containerd 1.x finds a runtime only in its PATH, and the PATH of containerd (process {pid}) does not contain {}. Install with --prefix /usr/local, or add this folder to containerd's PATH (for example in its systemd unit), restart containerd and try again",
        bin.display()
    )]
    NotInPath {
        /// Pid of the containerd process.
        pid: u32,
        /// Folder of the installed shim.
        bin: PathBuf,
    },
    /// A distribution writes containerd's file anew at each start, so an edit would be lost.
    #[error(
        "nothing was changed, because {by} writes {} anew at each start of containerd. Add or remove the handler by hand in {} (see config/containerd), restart containerd through {by}, and run this command again",
        path.display(), place.display()
    )]
    Managed {
        /// Name of the distribution.
        by: &'static str,
        /// Path of containerd's file.
        path: PathBuf,
        /// Path into which an operator writes the handler.
        place: PathBuf,
    },
    /// Another program wrote the edited file anew when containerd was restarted.
    #[error(
        "containerd was restarted, but {OVERWRITTEN} {} at its restart, so containerd does not serve the handler. The file stays as that program wrote it. Add the handler by hand to the file from which it is written (see config/containerd), restart containerd, and run this command again",
        .0.display()
    )]
    Overwritten(PathBuf),
    /// A handler that was to be removed is containerd's default handler.
    #[error(
        "nothing was changed, because handler {name} is containerd's default handler (see `containerd config dump`), and CRI would not start without it: no pod of the node would start. Set another default_runtime_name in containerd's configuration, restart containerd, and try again"
    )]
    DefaultHandler {
        /// Name of the handler.
        name: String,
    },
    /// The new configuration would still contain a handler that was to be removed.
    #[error(
        "nothing was changed, because containerd's configuration would still contain handler {name} after the removal (see `containerd config dump`). Remove the handler by hand from the file that sets it, and try again"
    )]
    Remains {
        /// Name of the handler.
        name: String,
    },
    /// After the restart, the configuration that k3s or rke2 have rendered differs from the earlier
    /// configuration in more than the handler.
    #[error(
        "containerd's old configuration was restored, because after the restart the new one differed in {0}, not only in Affinode's handler"
    )]
    Rendered(String),
    /// systemctl cannot be run, or it failed.
    #[error(
        "systemctl restart {unit} failed (see journalctl --unit {unit}), and containerd's configuration was restored: {why}"
    )]
    Restart {
        /// Name of the unit.
        unit: String,
        /// Output or error text of systemctl.
        why: String,
    },
    /// systemd does not run on this machine, so containerd was not restarted.
    #[error(
        "systemd does not run on this machine, so it cannot restart {unit}. containerd's configuration was restored, and containerd still runs. Pass --restart-mode none, and restart containerd yourself after this command"
    )]
    NoSystemd {
        /// Name of the unit.
        unit: String,
    },
    /// containerd did not serve its socket in time after the restart.
    #[error(
        "containerd did not start within {} s, and its configuration was restored: {why}",
        BACK_WITHIN.as_secs()
    )]
    Gone {
        /// The last error before the timeout.
        why: String,
    },
    /// containerd's old configuration was restored, but containerd does not start with it either.
    #[error(
        "containerd's configuration was restored, but containerd does not start with it either: {after}; first error: {before}"
    )]
    Lost {
        /// The error that led to the restore.
        before: String,
        /// The error of the attempt to start containerd with the old configuration.
        after: String,
    },
}

/// A running containerd and its configuration files.
#[derive(Debug)]
pub struct ContainerdNode {
    daemon: ContainerdProcess,
}

impl ContainerdNode {
    /// Finds the containerd that serves this socket. `None`: tries the sockets that distributions
    /// use.
    pub fn find(socket: Option<&Path>) -> Result<ContainerdNode, NodeError> {
        Ok(ContainerdNode { daemon: containerd::find(socket)? })
    }

    /// Creates the node of a process that a test started in containerd's place.
    #[cfg(test)]
    pub(super) fn simulated(daemon: ContainerdProcess) -> ContainerdNode {
        ContainerdNode { daemon }
    }

    /// Finds the containerd that now serves the same socket, for example after a restart.
    pub fn again(&self) -> Result<ContainerdNode, NodeError> {
        ContainerdNode::find(Some(&self.daemon.socket))
    }

    /// Returns the path of containerd's socket.
    pub fn socket(&self) -> &Path {
        &self.daemon.socket
    }

    /// Returns the path of the configuration file that containerd reads first.
    pub fn config_file(&self) -> PathBuf {
        self.daemon.config_file.clone()
    }

    /// Returns the error for an edit of containerd's files, if a distribution writes them.
    pub fn managed(&self) -> Option<NodeError> {
        let path = self.config_file();
        let ManagedConfig { by, place } = ManagedConfig::of(&path, &self.root_text())?;
        Some(NodeError::Managed { by, path, place })
    }

    /// Chooses the file into which the handler is written. `dump` is containerd's whole
    /// configuration.
    pub fn target(&self, dump: &Table) -> InstallTarget {
        let merges = handler::version(dump) > 2;
        InstallTarget::of(&self.config_file(), &self.root(), &self.files(), merges)
    }

    /// Returns the configuration files that containerd reads. A file may override the files before
    /// it.
    pub fn files(&self) -> Vec<PathBuf> {
        imports::of(&self.config_file()).files
    }

    /// Checks that containerd finds the shim that is or will be installed below `prefix`. `dump` is
    /// containerd's whole configuration. Only containerd 1.x searches for the program of a handler:
    /// in its PATH, and in the folder of its own program.
    pub fn finds_shim(&self, prefix: &Path, dump: &Table) -> Result<(), NodeError> {
        // Without a PATH, nothing is known about the folders.
        let Some(path) = self.daemon.variable("PATH").filter(|_| handler::version(dump) <= 2)
        else {
            return Ok(());
        };
        let shims = files::places_of_program(prefix, SHIM);
        let is_found = |folder: PathBuf| {
            let resolved = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
            // The folder may contain a link to the shim, or another copy of it.
            [folder, resolved]
                .iter()
                .map(|folder| folder.join(SHIM))
                .any(|shim| shims.contains(&shim) || fs::symlink_metadata(&shim).is_ok())
        };
        let beside = self.daemon.program.parent().map(Path::to_owned);
        match std::env::split_paths(&path).chain(beside).any(is_found) {
            true => Ok(()),
            false => Err(NodeError::NotInPath { pid: self.daemon.pid, bin: prefix.join("bin") }),
        }
    }

    /// Returns the configuration files that contain a handler of this name.
    pub fn naming(&self, name: &str) -> Vec<PathBuf> {
        let names = |path: &PathBuf| {
            let own = fs::read_to_string(path).unwrap_or_default().parse::<Table>();
            own.is_ok_and(|own| handler::handler_of(&own, name).is_some())
        };
        self.files().into_iter().filter(names).collect()
    }

    /// Returns whether k3s or rke2 render containerd's file from a template that contains the added
    /// text.
    pub fn renders(&self, added: &AddedBlock) -> bool {
        let template = InstallTarget::renders(&added.path, &self.config_file(), &self.root());
        template && fs::read_to_string(&added.path).is_ok_and(|text| text.contains(&added.text))
    }

    /// Parses the configuration file that containerd reads first. An unreadable file counts as
    /// empty, because `containerd config dump` reports the error.
    pub fn root(&self) -> Table {
        self.root_text().parse().unwrap_or_default()
    }

    fn root_text(&self) -> String {
        fs::read_to_string(self.config_file()).unwrap_or_default()
    }

    /// Returns containerd's whole configuration as it will be after an edit. A template of k3s or
    /// rke2 takes effect only at the next restart. If the edit changes a template, the predicted
    /// file is therefore written to `scratch`. containerd prints its configuration from `scratch`,
    /// and `scratch` is removed.
    pub fn dump_after(&self, edit: &ConfigEdit, scratch: &Path) -> Result<Table, NodeError> {
        if !edit.paths().any(target::is_template) {
            return self.dump();
        }
        let written = fs::write(scratch, edit.preview(&self.root_text()));
        let dumped = match written {
            Ok(()) => self.daemon.dump_of(scratch),
            Err(error) => Err(format!("{}: {error}", scratch.display())),
        };
        let _ = fs::remove_file(scratch);
        let mut dumped = dumped.map_err(NodeError::Config)?;
        // containerd 1.x lists the dumped file itself among the imports, so `scratch` is replaced
        // by the real file.
        let file = self.config_file().display().to_string();
        for import in dumped.get_mut("imports").and_then(Value::as_array_mut).into_iter().flatten()
        {
            if import.as_str().is_some_and(|import| Path::new(import) == scratch) {
                *import = file.clone().into();
            }
        }
        Ok(dumped)
    }

    /// Returns the requested kind of restart. If systemd is requested without the name of a unit,
    /// the name of containerd's unit is added.
    pub fn way(&self, how: &RestartRequest) -> RestartRequest {
        match how {
            RestartRequest::Systemd { unit: None } => {
                let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", self.daemon.pid));
                let cgroups = cgroups.unwrap_or_default();
                RestartRequest::Systemd { unit: Some(unit_of(&cgroups).unwrap_or(UNIT).to_owned()) }
            }
            named => named.clone(),
        }
    }

    /// Returns containerd's whole configuration, as it was when this containerd was found.
    pub fn config(&self) -> Result<Table, NodeError> {
        self.imports_exist()?;
        self.daemon.config.clone().map_err(NodeError::Config)
    }

    /// Returns containerd's whole configuration, read from the present files.
    pub fn dump(&self) -> Result<Table, NodeError> {
        self.imports_exist()?;
        self.daemon.dump().map_err(NodeError::Config)
    }

    fn imports_exist(&self) -> Result<(), NodeError> {
        if let Some((import, by)) = imports::of(&self.config_file()).missing {
            let (import, by) = (import.display(), by.display());
            return Err(NodeError::Config(format!("{by} imports {import}, which does not exist")));
        }
        Ok(())
    }

    /// Returns whether containerd's process started after `moment`. If so, it has read the files
    /// that were written before `moment`.
    pub fn runs_since(&self, moment: SystemTime) -> bool {
        let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let up_ms = u64::try_from(up.tv_sec * 1_000 + up.tv_nsec / 1_000_000).unwrap_or(0);
        let Ok(daemon) = process::identity(self.daemon.pid) else { return false };
        let age_ms = up_ms.saturating_sub(daemon.start_ticks * TICK_MS);
        // A process that started less than one tick before `moment` counts too, because it cannot
        // have read its file within one tick.
        SystemTime::now() + Duration::from_millis(TICK_MS) >= moment + Duration::from_millis(age_ms)
    }

    /// Restarts containerd and waits until it serves its socket. If `handler` is given, also waits
    /// until containerd serves that handler.
    pub fn restart(
        &self,
        how: &RestartRequest,
        handler: Option<&HandlerSpec>,
    ) -> Result<(), NodeError> {
        let RestartRequest::Systemd { unit } = how else { return Ok(()) };
        let unit = unit.as_deref().unwrap_or(UNIT);
        let failed = |why: String| NodeError::Restart { unit: unit.to_owned(), why };
        let output =
            Command::new("systemctl").args(["restart", unit]).stdin(Stdio::null()).output();
        let output = output.map_err(|error| failed(error_chain::chain(&error)))?;
        if !output.status.success() {
            return Err(restart_error(unit, &String::from_utf8_lossy(&output.stderr)));
        }
        let began = Instant::now();
        loop {
            let why = match self.is_back(handler) {
                Ok(()) => return Ok(()),
                Err(why) => why,
            };
            if began.elapsed() > BACK_WITHIN {
                return Err(NodeError::Gone { why });
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn is_back(&self, handler: Option<&HandlerSpec>) -> Result<(), String> {
        let socket = self.daemon.socket.as_path();
        let daemon = containerd::find(Some(socket)).map_err(|error| error_chain::chain(&error))?;
        if daemon.pid == self.daemon.pid {
            return Err("the old containerd process still answers".into());
        }
        let config = daemon.config?;
        match handler {
            Some(spec) if handler::handler_of(&config, &spec.name).is_none() => {
                Err(format!("containerd does not serve handler {}", spec.name))
            }
            _ => Ok(()),
        }
    }

    /// Returns the error to report after a failed change. The files were already restored. If
    /// containerd was restarted with the changed files, it is first restarted with the restored
    /// files.
    pub fn recovered(&self, how: &RestartRequest, failed: NodeError) -> NodeError {
        let ran = matches!(
            failed,
            NodeError::Restart { .. } | NodeError::Gone { .. } | NodeError::Rendered(_)
        );
        if !ran {
            return failed;
        }
        match self.restart(how, None) {
            Ok(()) => failed,
            Err(after) => NodeError::Lost {
                before: error_chain::chain(&failed),
                after: error_chain::chain(&after),
            },
        }
    }
}

/// Converts the output of a failed `systemctl restart` to an error.
fn restart_error(unit: &str, printed: &str) -> NodeError {
    let unit = unit.to_owned();
    if printed.contains(NOT_BOOTED) {
        NodeError::NoSystemd { unit }
    } else {
        NodeError::Restart { unit, why: printed.trim().to_owned() }
    }
}

impl fmt::Display for RestartRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RestartRequest::Systemd { unit } => {
                write!(f, "systemctl restart {}", unit.as_deref().unwrap_or(UNIT))
            }
            RestartRequest::None => {
                write!(
                    f,
                    "restart containerd by hand: it loads its configuration only at its start"
                )
            }
        }
    }
}

/// Returns the systemd unit to which containerd belongs, from the content of /proc/PID/cgroup: the
/// last service in its path, if this service runs a containerd. `None`: containerd was started by
/// other means, for example in a user's session or by a test, which must not be restarted.
fn unit_of(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        let mut segments = line.rsplit('/');
        let unit = segments.find(|unit| unit.ends_with(".service") || unit.ends_with(".scope"))?;
        let unit = unit.strip_suffix(".service").filter(|unit| runs_containerd(unit))?;
        // The systemd of a user has other units than that of the machine.
        (!segments.any(|segment| segment.starts_with("user@"))).then_some(unit)
    })
}

/// Returns whether a service of this name runs a containerd.
fn runs_containerd(unit: &str) -> bool {
    let name = unit.split('-').next().unwrap_or_default();
    DISTRIBUTIONS.contains(&name) || unit.contains("containerd")
}

/// Waits for at most `within` until no shim of the installation, no job and no container of Podman
/// or CRI-O runs. Returns the numbers of shims, jobs and containers that still run.
pub fn drain(prefix: &Path, run_dir: &Path, within: Duration) -> (usize, usize, usize) {
    let began = Instant::now();
    loop {
        let jobs = jobs::running(run_dir);
        match (running_shims(prefix), jobs, podman::running(prefix)) {
            left if left == (0, 0, 0) || began.elapsed() >= within => return left,
            _ => thread::sleep(LOOK_EVERY),
        }
    }
}

/// Counts the running shims of the installation. Controllers, copiers and launchers run the same
/// program but are not counted, because they end by themselves when there are no shims.
pub fn running_shims(prefix: &Path) -> usize {
    programs(prefix).iter().filter(|program| program.role == ProgramRole::Shim).count()
}

/// Returns the pid of the installation's oldest controller. A younger controller waits until the
/// oldest has ended.
pub fn running_controller(prefix: &Path) -> Option<u32> {
    let controllers = programs(prefix);
    let controllers = controllers.iter().filter(|one| one.role == ProgramRole::Controller);
    let started = |pid| process::identity(pid).map_or(u64::MAX, |one| one.start_ticks);
    controllers.map(|one| one.pid).min_by_key(|pid| started(*pid))
}

/// Returns the running controllers whose program file was replaced after their start. If `replaced`
/// is true, returns all controllers, because an installation is about to replace the file.
pub fn old_controllers(prefix: &Path, replaced: bool) -> Vec<Identity> {
    let old = |program: &ContainerdProgram| {
        program.role == ProgramRole::Controller && (replaced || program.replaced)
    };
    let found = programs(prefix).into_iter().filter(old);
    found.filter_map(|program| process::identity(program.pid).ok()).collect()
}

/// A process that runs the installed shim, or an earlier shim whose file was replaced.
struct ContainerdProgram {
    pid: u32,
    role: ProgramRole,
    /// Whether the program's file was replaced after the start of the process. The kernel then
    /// appends ` (deleted)` to the file's name.
    replaced: bool,
}

/// Task of a process that runs the shim's program. The first argument of the command line
/// determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProgramRole {
    /// The process is a shim, which serves containers. containerd loses these containers if the
    /// shim ends.
    Shim,
    Controller,
    /// The process is a copier or the host pool, or it starts a controller.
    Helper,
}

impl ProgramRole {
    fn of(command_line: &[u8]) -> ProgramRole {
        match command_line.split(|byte| *byte == 0).nth(1) {
            Some(b"controller") => ProgramRole::Controller,
            Some(b"copier" | b"host-pool" | b"launch") => ProgramRole::Helper,
            _ => ProgramRole::Shim,
        }
    }
}

fn programs(prefix: &Path) -> Vec<ContainerdProgram> {
    let shims = files::places_of_program(prefix, SHIM);
    let look = |process: HostProcess| {
        let replaced = process.runs(&shims)?;
        let role = ProgramRole::of(&process.command_line());
        Some(ContainerdProgram { pid: process.pid, role, replaced })
    };
    HostProcess::all().filter_map(look).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine without systemd, systemctl fails and containerd continues to run. The error
    /// must name the option `--restart-mode none`, and must state that containerd still runs.
    #[test]
    fn a_restart_without_systemd_names_the_option() {
        let printed = "System has not been booted with systemd as init system (PID 1). Can't \
                       operate.\nFailed to connect to bus: Host is down\n";
        let error = restart_error("containerd", printed).to_string();
        assert!(error.contains("--restart-mode none") && error.contains("still runs"), "{error}");
        let error = restart_error("containerd", "Unit x not found.\n").to_string();
        assert!(error.ends_with("Unit x not found."), "{error}");
    }

    #[test]
    fn only_serving_processes_are_shims() {
        let role = |arguments: &str| ProgramRole::of(arguments.replace(' ', "\0").as_bytes());
        assert_eq!(role("containerd-shim-affinode-v1 -namespace k8s.io -id a"), ProgramRole::Shim);
        assert_eq!(role("containerd-shim-affinode-v1"), ProgramRole::Shim);
        assert_eq!(role("containerd-shim-affinode-v1 controller"), ProgramRole::Controller);
        assert_eq!(role("affinode-copier copier GPU-1"), ProgramRole::Helper);
        assert_eq!(role("affinode-host-pool host-pool /sys"), ProgramRole::Helper);
        assert_eq!(role("containerd-shim-affinode-v1 launch"), ProgramRole::Helper);
    }

    /// On ostree systems, /usr/local is a link to /var/usrlocal, and the kernel shows the resolved
    /// path of a running program. An uninstallation must still see the shim.
    #[test]
    fn a_shim_below_a_linked_prefix_counts() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("usrlocal/bin");
        fs::create_dir_all(&bin).unwrap();
        let prefix = root.path().join("local");
        std::os::unix::fs::symlink("usrlocal", &prefix).unwrap();
        // Another process copies the program. If this process wrote the file, a child that another
        // test forks could hold it open, and the kernel would not execute it (ETXTBSY).
        let shim = bin.join(SHIM);
        assert!(Command::new("cp").arg("/bin/sleep").arg(&shim).status().unwrap().success());
        let mut child = Command::new(prefix.join("bin").join(SHIM)).arg("1000").spawn().unwrap();
        let found = running_shims(&prefix);
        fs::remove_file(&shim).unwrap();
        let replaced = programs(&prefix).iter().map(|one| one.replaced).collect::<Vec<_>>();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, 1);
        assert_eq!(replaced, [true], "the program's file is gone");
    }

    #[test]
    fn the_unit_of_k3s_and_rke2_is_found() {
        let v1 = "12:pids:/system.slice/k3s.service\n1:name=systemd:/system.slice/k3s.service\n";
        assert_eq!(unit_of(v1), Some("k3s"));
        assert_eq!(unit_of("0::/system.slice/rke2-agent.service/containerd\n"), Some("rke2-agent"));
        assert_eq!(unit_of("0::/system.slice/k3s-lab.service\n"), Some("k3s-lab"));
        assert_eq!(unit_of("0::/system.slice/containerd.service\n"), Some("containerd"));
        assert_eq!(unit_of("0::/system.slice/k0sworker.service\n"), Some("k0sworker"));
        let microk8s = "0::/system.slice/snap.microk8s.daemon-containerd.service\n";
        assert_eq!(unit_of(microk8s), Some("snap.microk8s.daemon-containerd"));
        // A node in a container of Docker, such as that of kind.
        let kind = "1:name=systemd:/system.slice/docker.service/x/system.slice/containerd.service";
        assert_eq!(unit_of(kind), Some("containerd"));
        // A user or another service started containerd. It must not be ended.
        for session in [
            "0::/user.slice/user-0.slice/session-3.scope\n",
            "0::/system.slice/ssh.service/session-3.scope\n",
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/k3s.service\n",
            "0::/user.slice/user-1000.slice/user@1000.service\n",
            "0::/system.slice/actions-runner.service\n",
            "0::/system.slice/k3sup.service\n",
            "0::/user.slice/my-k3s.service\n",
            "0::/\n",
            "",
        ] {
            assert_eq!(unit_of(session), None, "{session}");
        }
    }
}
