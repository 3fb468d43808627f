//! Installs Affinode on a node and uninstalls it.
//!
//! ```text
//! install:    plan ──> record ──> files ──> Docker ──> handler in containerd's file ──> dump again ──> restart ──> Done
//!              │                              ^                              │ more than the   │ does not
//!              │ nothing to do                └─── the original file <──────┴ handler differs ┘ start
//!             then the controller: its unit is started, a controller of an earlier version is ended
//! uninstall:  shims or jobs? ──> remove handler from every file ──> dump again ──> restart
//!             ──> shims or jobs? ──> unit ──> files ──> record
//! ```
//!
//! The installer looks for the handler in containerd's whole configuration, not in one file. The
//! reason is that NVIDIA's toolkit rewrites containerd's files and copies handlers between them.
//!
//! Nothing is changed before everything has been examined. The record lists every file before it is
//! written, so that a killed installation can be uninstalled. A first installation that fails
//! leaves no files.

mod block;
mod containerd;
mod docker;
mod edit;
mod files;
mod folders;
mod handler;
mod host_process;
mod lock;
mod plan;
mod podman;
mod record;
mod removal;
mod replacement;
mod status;
mod target;
mod unit;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

pub use block::BlockError;
/// Text by which the node agent recognizes that a failed installation restarted nothing.
pub const NOT_RESTARTED: &str = "containerd was not restarted";

pub use containerd::{NodeError, RestartRequest};
pub use docker::{DockerError, DockerRequest, DockerState, DockerStatus, SOCKET as DOCKER_SOCKET};
pub use edit::EditError;
pub use files::{FileError, SourceFile};
pub use podman::{FOLDER as PODMAN_FOLDER, PodmanRequest};
pub use record::RecordError;
pub use status::{FileState, HandlerState, InstallStatus, status};
pub use unit::{FOLDER as UNIT_FOLDER, UnitError, UnitRequest, UnitState};

use affinode_controller::{
    config::{Config, ConfigError},
    host_pool,
};
use affinode_proto::installation::PathsFile;

use self::{
    containerd::ContainerdNode,
    docker::DockerPlan,
    edit::ConfigEdit,
    files::FileChange,
    handler::HandlerVerdict,
    lock::InstallLock,
    plan::HandlerPlan,
    record::{AddedBlock, InstallRecord},
    replacement::ControllerReplacement,
    unit::UnitPlan,
};

/// Name of the temporary file that `containerd config dump` reads. The file is in the folder of the
/// record and contains the planned content of containerd's file.
const SCRATCH: &str = "containerd-check.toml";

/// Options of an installation: what is installed, and where.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// Path of containerd's socket. `None`: the socket of the present installation. Without an
    /// installation, the default paths of distributions are searched.
    pub containerd: Option<PathBuf>,
    /// Folder whose subfolders `bin` and `lib/affinode` contain Affinode's files.
    pub prefix: PathBuf,
    /// Folder that contains the record of the installation.
    pub state_dir: PathBuf,
    /// The run directory and the configuration file. They are written into `paths.conf`, which the
    /// programs read. A field without a value keeps the path of the present installation. Without
    /// an installation, it gets the default.
    pub folders: PathsFile,
    /// Name of the handler.
    pub runtime_name: String,
    /// How containerd is restarted, so that it loads its new configuration.
    pub restart: RestartRequest,
    /// Whether the runtime is to be registered in Docker.
    pub docker: DockerRequest,
    /// Whether the runtime is to be registered in Podman.
    pub podman: PodmanRequest,
    /// Whether the systemd unit that keeps a controller running is to be installed.
    pub unit: UnitRequest,
    /// Maximum time for which an uninstallation waits for running containers and jobs.
    pub drain: Duration,
    /// Whether to report the steps without executing them.
    pub dry_run: bool,
}

impl InstallOptions {
    /// Returns the given socket, or the socket of the containerd in the record. If the recorded
    /// containerd does not run, no other containerd of the machine is used in its place.
    fn socket<'a>(&'a self, record: Option<&'a InstallRecord>) -> Option<&'a Path> {
        self.containerd.as_deref().or_else(|| record?.containerd.as_deref())
    }
}

/// Returns advice for the operator about a file that cannot be written. A message shows the advice
/// after the file's name. `elsewhere` describes an alternative to this file.
fn advice(error: &std::io::Error, elsewhere: &str) -> String {
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            format!(" (free space there, or {elsewhere})")
        }
        std::io::ErrorKind::ReadOnlyFilesystem => {
            format!(" (mount its file system writable, or {elsewhere})")
        }
        _ => String::new(),
    }
}

/// Advice for one of Affinode's own files that cannot be written.
const ANOTHER_PLACE: &str = "choose another folder with --prefix or --state-dir";
/// Advice for one of containerd's files that cannot be written.
const BY_HAND: &str = "add the handler by hand, as in config/containerd";

/// Advice how to install the programs without a handler.
const NO_HANDLER: &str = "copy affinode and containerd-shim-affinode-v1 to /usr/local/bin, libaffinode_preload.so to /usr/local/lib/affinode";

/// Reason why nothing was installed or uninstalled. Unless the error states otherwise, nothing has
/// changed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The name of the handler is not a plain TOML key.
    #[error("invalid runtime name {0:?}: accepted: letters, digits, - and _")]
    Name(String),
    /// The path of a folder cannot be written into `paths.conf`.
    #[error("--run-dir and --config must be absolute paths without line breaks")]
    Folder,
    /// The controller of this release would not start with the node's configuration.
    #[error(
        "nothing was changed, because the controller of this release would not start with the \
         node's configuration: correct it first (see affinode policy validate)"
    )]
    Config(#[source] ConfigError),
    /// Containers or jobs use the present run directory.
    #[error(
        "cannot change the run directory from {} to {} while {count} shims, jobs or containers of Podman or CRI-O run: two controllers would promise the same VRAM. End these containers and jobs first (see `affinode ps`), or keep --run-dir {}",
        from.display(), to.display(), from.display()
    )]
    RunDirInUse {
        /// The present run directory.
        from: PathBuf,
        /// The requested run directory.
        to: PathBuf,
        /// Number of running shims, jobs, and containers of Podman and CRI-O.
        count: usize,
    },
    /// Another installer holds the lock.
    #[error("another affinode install or uninstall is running: try again when it has ended")]
    Busy,
    /// An operation on one of Affinode's files failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A program or file of Affinode could not be written. The node agent recognizes the text.
    #[error("{NOT_RESTARTED}, because an installed file cannot be written")]
    NotRestarted(#[source] FileError),
    /// containerd is missing or rejected the change.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Docker is missing or rejected the change.
    #[error(transparent)]
    Docker(#[from] DockerError),
    /// The controller's unit cannot be installed or removed.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// The text block for containerd's file cannot be created.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// containerd's file cannot be edited.
    #[error(transparent)]
    Edit(#[from] EditError),
    /// The record cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The root file system of the node cannot be entered.
    #[error(
        "cannot enter {}, the node's root file system: run as root with CAP_SYS_CHROOT. The path /proc/1/root also requires the node's pid namespace and CAP_SYS_PTRACE",
        root.display()
    )]
    HostRoot {
        /// Path of the root that was given.
        root: PathBuf,
        /// System error of the failed call.
        #[source]
        source: std::io::Error,
    },
    /// Shims of the installation still run. containerd would lose their containers.
    #[error(
        "cannot uninstall while {}, because containerd would lose their containers: end the \
         containers first (see `affinode ps` and `crictl pods`), or pass --drain 10m to wait at \
         most 10 minutes for their end",
        if *.0 == 1 { "1 shim runs".to_owned() } else { format!("{} shims run", .0) }
    )]
    InUse(usize),
    /// Jobs still run. They would lose their controller.
    #[error(
        "cannot uninstall, because {} still running, and an offloaded job might not be restored \
         without Affinode: end the jobs first, or pass --drain 10m to wait at most 10 minutes for \
         their end",
        if *.0 == 1 { "1 job of `affinode run` is".to_owned() } else { format!("{} jobs of `affinode run` are", .0) }
    )]
    Jobs(usize),
    /// Containers of Podman or CRI-O still run. They could not be ended without the installed
    /// runtime.
    #[error(
        "cannot uninstall, because {} running with affinode-runtime, and Podman and CRI-O could \
         not end them without this program: end the containers first (see `podman ps` or `crictl \
         ps`), or pass --drain 10m to wait at most 10 minutes for their end",
        if *.0 == 1 { "1 container or command of Podman or CRI-O is".to_owned() } else { format!("{} containers or commands of Podman or CRI-O are", .0) }
    )]
    Podman(usize),
    /// A container or job started after the uninstallation had begun.
    #[error(
        "the handler was removed from containerd and the runtime from Docker, but a container or \
         job started meanwhile, so the programs and the record stay. Run the same command again \
         when it has ended"
    )]
    Late(#[source] Box<InstallError>),
    /// The folder contains no record of an installation.
    #[error(
        "no record of an installation in {}: nothing is installed, or it was installed with \
         another --state-dir",
        .0.display()
    )]
    NotInstalled(PathBuf),
}

/// Descriptions of the steps that were executed, or that a dry run would execute. Empty: everything
/// is in place already.
pub type Steps = Vec<String>;

/// Makes the root file system of the node the root of this process, which runs in a container. All
/// paths that this process uses and all programs that it runs are then the node's.
///
/// [`InstallError::HostRoot`]: this process lacks a required right.
pub fn enter(root: &Path) -> Result<(), InstallError> {
    let failed = |source| InstallError::HostRoot { root: root.to_owned(), source };
    std::os::unix::fs::chroot(root).map_err(failed)?;
    std::env::set_current_dir("/").map_err(failed)
}

/// Installs Affinode on this node. Returns the steps.
///
/// [`InstallError`]: containerd's configuration is as before, unless the error states otherwise.
pub fn install(options: &InstallOptions, source: &SourceFile) -> Result<Steps, InstallError> {
    check_name(&options.runtime_name)?;
    let lock = lock(options)?;
    let older = InstallRecord::read(&options.state_dir)?;
    let docker = DockerPlan::of(options, older.as_ref())?;
    let required = matches!(options.podman, PodmanRequest::Required(_));
    let folders = folders::of(options)?;
    folders::may_change(options, &folders)?;
    let text = folders::text(&folders, &options.prefix)?;
    let podman = podman::PodmanPlan::of(options, older.as_ref())?;
    let source = &source.with_podman(podman, required)?.with_folders(text);
    if !files::plan(source, &options.prefix).is_empty() {
        folders::accepts_config(&folders)?;
    }
    let node = ContainerdNode::find(options.socket(older.as_ref()));
    let known = older.as_ref().is_some_and(podman::is_recorded);
    // If containerd is installed but does not run, the installation continues without containerd
    // only if Podman was asked for or is recorded. Otherwise it fails.
    let lone = required || known || !podman::has_containerd();
    let podman = source.has_podman() && (node.is_ok() || lone);
    if docker::is_alone(&docker, podman, options, older.as_ref(), &node) {
        return docker::install_alone(&docker, options, source, lock, older);
    }
    install_on(&node?, &docker, options, source, lock, older)
}

/// Installs Affinode on a node on which containerd runs pods. `older` is the record of the present
/// installation.
fn install_on(
    node: &ContainerdNode,
    docker: &DockerPlan,
    options: &InstallOptions,
    source: &SourceFile,
    mut lock: Option<InstallLock>,
    older: Option<InstallRecord>,
) -> Result<Steps, InstallError> {
    let name = &options.runtime_name;
    if lock.is_some() {
        heal(options, older.as_ref(), node)?;
    }
    let before = node.dump()?;
    let restart = node.way(&options.restart);
    let plan = plan::install(options, older.as_ref(), node, &before)?;
    no_default(&plan, &before)?;
    let changes = files::plan(source, &options.prefix);
    let controllers = ControllerReplacement::of(options, &changes)?;
    let mut steps: Steps = changes.iter().map(FileChange::to_string).collect();
    steps.extend(docker.steps());
    steps.extend(plan.edit.iter().map(ConfigEdit::to_string));
    steps.extend(
        plan.adopted.iter().map(|file| format!("use handler {name} in {}", file.display())),
    );
    if plan.restarts {
        steps.push(restart.to_string());
    }
    steps.extend(controllers.steps());
    let Some(lock) = lock.as_mut().filter(|_| !steps.is_empty()) else { return Ok(steps) };
    let fresh = older.is_none() && !changes.iter().any(FileChange::replaces);
    let targets = plan.edit.iter().flat_map(ConfigEdit::paths);
    lock.note_missing_folders(changes.iter().map(FileChange::to).chain(targets));
    let mut record = InstallRecord::of(&options.prefix, source, older.clone(), &plan, &lock.made);
    record.containerd = Some(node.socket().to_owned());
    record.write(&options.state_dir)?;
    let change = InstallEffect { node, before: &before, restart: &restart, options };
    if let Err(error) = put(&change, docker, &changes, &plan) {
        if fresh {
            remove_first(options, &changes, &record)?;
            return Err(error);
        }
        if let Some(older) = older.filter(|_| plan.is_undone()) {
            record.revert(&older);
            // If the record cannot be written, the next installation still keeps the handlers that
            // containerd has loaded.
            let _ = record.write(&options.state_dir);
        }
        controllers.make_after_failure(options, &changes);
        return Err(error);
    }
    record.settle(&plan);
    record.write(&options.state_dir)?;
    controllers.make(options)?;
    Ok(steps)
}

/// Checks that the name of the handler is a plain TOML key.
fn check_name(name: &str) -> Result<(), InstallError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_plain) {
        return Err(InstallError::Name(name.to_owned()));
    }
    Ok(())
}

/// Removes all files of a first installation that failed.
fn remove_first(
    options: &InstallOptions,
    changes: &[FileChange],
    record: &InstallRecord,
) -> Result<(), InstallError> {
    for change in changes {
        files::remove(change.to())?;
    }
    files::remove_folders(&record.folders);
    Ok(record.remove(&options.state_dir)?)
}

/// Removes the remains of a killed installer. These are partly written files, and handlers that
/// were not verified yet and that containerd may not have loaded.
fn heal(
    options: &InstallOptions,
    older: Option<&InstallRecord>,
    node: &ContainerdNode,
) -> Result<(), InstallError> {
    tidy(options, older)?;
    node.files().iter().try_for_each(|file| files::tidy(file))?;
    let texts = || older.into_iter().flat_map(InstallRecord::unverified);
    let mut edit = ConfigEdit::of(texts().map(|added| added.path))?;
    texts().for_each(|added| edit.remove_text(&added));
    Ok(edit.make()?)
}

fn tidy(options: &InstallOptions, record: Option<&InstallRecord>) -> Result<(), FileError> {
    let listed =
        record.into_iter().flat_map(InstallRecord::listed).map(|(path, _)| path.to_owned());
    let blocks = record.into_iter().flat_map(InstallRecord::blocks);
    let added = blocks.flat_map(AddedBlock::texts).map(|added| added.path);
    files::remove_left(&options.state_dir.join(SCRATCH))?;
    let own = InstallRecord::file(&options.state_dir);
    docker::remove_left(&options.state_dir)?;
    unit::remove_left(&options.state_dir)?;
    listed.chain(added).chain([own]).try_for_each(|path| files::tidy(&path))
}

/// Context of a change of containerd's configuration: containerd, its configuration before the
/// change, and the options.
struct InstallEffect<'a> {
    node: &'a ContainerdNode,
    before: &'a toml::Table,
    restart: &'a RestartRequest,
    options: &'a InstallOptions,
}

fn put(
    effect: &InstallEffect<'_>,
    docker: &DockerPlan,
    changes: &[FileChange],
    plan: &HandlerPlan,
) -> Result<(), InstallError> {
    files::make(changes).map_err(InstallError::NotRestarted)?;
    docker.make(&effect.options.state_dir)?;
    let made = match &plan.edit {
        Some(edit) => effect.edit(edit, plan),
        None if plan.restarts => {
            effect.node.restart(effect.restart, plan.wanted.as_ref()).map_err(Into::into)
        }
        None => Ok(()),
    };
    if made.is_err() {
        docker.undo(&effect.options.state_dir)?;
    }
    made
}

impl InstallEffect<'_> {
    /// Edits the files and restarts containerd. Restores the files if an error occurs.
    fn edit(&self, edit: &ConfigEdit, plan: &HandlerPlan) -> Result<(), InstallError> {
        edit.make()?;
        if let Err(error) = self.settle(edit, plan) {
            if let NodeError::Overwritten(_) = error {
                edit.undo_own()?;
                return Err(error.into());
            }
            edit.undo()?;
            return Err(self.node.recovered(self.restart, error).into());
        }
        Ok(())
    }

    /// Checks that containerd's configuration after the edit is as planned, and restarts
    /// containerd.
    fn settle(&self, edit: &ConfigEdit, plan: &HandlerPlan) -> Result<(), NodeError> {
        let names = plan.names();
        let differing = |after| handler::only_handlers_differ(self.before, after, &names);
        let after = self.node.dump_after(edit, &self.options.state_dir.join(SCRATCH))?;
        differing(&after).map_err(NodeError::Differs)?;
        gone(plan, &after)?;
        if let Some(spec) = &plan.wanted {
            let reaches = match spec.judge(&after) {
                HandlerVerdict::Same => true,
                // After a replacement, the handler must equal the wanted one. Otherwise each run of
                // the installer would replace it again and restart containerd.
                HandlerVerdict::Differs => !plan.replaces,
                HandlerVerdict::Absent | HandlerVerdict::Foreign => false,
            };
            if !reaches {
                let path = edit.paths().next().unwrap_or(Path::new("")).to_owned();
                return Err(NodeError::Covered { name: spec.name.clone(), path });
            }
        }
        self.node
            .restart(self.restart, plan.wanted.as_ref())
            .map_err(|error| overwritten(edit, error))?;
        // k3s and rke2 render the file at the restart, so only its predicted content was checked
        // before.
        match self.restart {
            RestartRequest::Systemd { .. } => {
                let now = self.node.again()?.dump()?;
                // Another program may have written a file with the handler anew.
                gone(plan, &now).map_err(|left| NodeError::Rendered(left.to_string()))?;
                differing(&now).map_err(NodeError::Rendered)
            }
            RestartRequest::None => Ok(()),
        }
    }
}

/// Returns the error of a restart after an edit. A containerd without the handler is no failure of
/// containerd if another program has changed the edited file meanwhile.
fn overwritten(edit: &ConfigEdit, error: NodeError) -> NodeError {
    match (&error, edit.overwritten()) {
        (NodeError::Gone { .. }, Some(path)) => NodeError::Overwritten(path.to_owned()),
        _ => error,
    }
}

/// Checks that containerd's configuration no longer contains a handler that was to be removed.
fn gone(plan: &HandlerPlan, dump: &toml::Table) -> Result<(), NodeError> {
    let ours = |verdict| matches!(verdict, HandlerVerdict::Same | HandlerVerdict::Differs);
    match plan.gone.iter().find(|spec| ours(spec.judge(dump))) {
        Some(spec) => Err(NodeError::Remains { name: spec.name.clone() }),
        None => Ok(()),
    }
}

/// Checks that no handler that is to be removed is the default handler of containerd.
fn no_default(plan: &HandlerPlan, dump: &toml::Table) -> Result<(), NodeError> {
    match plan.gone.iter().find(|spec| handler::is_default_handler(dump, &spec.name)) {
        Some(spec) => Err(NodeError::DefaultHandler { name: spec.name.clone() }),
        None => Ok(()),
    }
}

/// Removes everything that [`install`] has installed.
///
/// # Errors
/// [`InstallError`]: nothing is installed, it is in use, or a file cannot be changed.
pub fn uninstall(options: &InstallOptions) -> Result<Steps, InstallError> {
    let lock = lock(options)?;
    let Some(record) = InstallRecord::read(&options.state_dir)? else {
        if lock.is_some() {
            tidy(options, None)?;
        }
        return Err(InstallError::NotInstalled(options.state_dir.clone()));
    };
    let folders = folders::of(options)?;
    unused(options, &folders, options.drain)?;
    let node = ContainerdNode::find(options.socket(Some(&record)));
    uninstall_from(node, options, folders, lock, record)
}

/// Waits for at most `within` until no container and no job uses the installation.
fn unused(
    options: &InstallOptions,
    folders: &PathsFile,
    within: Duration,
) -> Result<(), InstallError> {
    match containerd::drain(&options.prefix, &folders::run_dir(folders), within) {
        (0, 0, 0) => Ok(()),
        (0, 0, podman) => Err(InstallError::Podman(podman)),
        (0, jobs, _) => Err(InstallError::Jobs(jobs)),
        (shims, ..) => Err(InstallError::InUse(shims)),
    }
}

/// Removes the installation of a record. `node` is the record's containerd, or the reason why it
/// was not found. `folders` are the folders of the installation.
fn uninstall_from(
    node: Result<ContainerdNode, NodeError>,
    options: &InstallOptions,
    folders: PathsFile,
    mut lock: Option<InstallLock>,
    record: InstallRecord,
) -> Result<Steps, InstallError> {
    let docker = DockerPlan::of_removal(&options.state_dir)?;
    let unit = UnitPlan::of_removal(&options.state_dir)?;
    let plan = plan::uninstall(options, &record, node.as_ref().ok())?;
    let restart = node.as_ref().map_or(options.restart.clone(), |node| node.way(&options.restart));
    // Without containerd, the handlers cannot be removed. This must be known before Docker is
    // changed.
    let node = match node {
        Err(error) if plan.edit.is_some() => return Err(error.into()),
        node => node.ok(),
    };
    let before = node.as_ref().map(|node| removable(node, &plan)).transpose()?.flatten();
    let mut steps = docker.steps();
    steps.extend(plan.edit.iter().map(ConfigEdit::to_string));
    if plan.restarts {
        steps.push(restart.to_string());
    }
    steps.extend(unit.steps());
    let (ours, changed) = record.files()?;
    steps.extend(ours.iter().map(|path| format!("remove {}", path.display())));
    steps.extend(
        changed
            .iter()
            .map(|path| format!("leave {}: it was changed after the installation", path.display())),
    );
    let Some(lock) = &mut lock else { return Ok(steps) };
    tidy(options, Some(&record))?;
    docker.make(&options.state_dir)?;
    if let (Some(edit), Some(node), Some(before)) = (&plan.edit, &node, &before) {
        InstallEffect { node, before, restart: &restart, options }.edit(edit, &plan)?;
    }
    // containerd may have started a shim until the handler was removed. From here on no container
    // can start.
    unused(options, &folders, Duration::ZERO).map_err(|error| InstallError::Late(error.into()))?;
    let config = folders.config.unwrap_or_else(Config::path);
    let host_pool = Config::load(&config).ok().map(|config| host_pool::cgroup_of(&config.memory));
    // The unit is removed before the program that it runs. No container is left that needs a
    // controller.
    unit.make(&options.state_dir)?;
    for path in &ours {
        files::remove(path)?;
    }
    files::remove_folders(&record.folders);
    record.remove(&options.state_dir)?;
    lock.made.splice(..0, record.folders);
    // Only an empty cgroup can be removed. The host pool's process has ended with the controller.
    if let Some(cgroup) = host_pool {
        let _ = fs::remove_dir(cgroup);
    }
    Ok(steps)
}

/// Checks that the handlers can be removed from containerd's configuration. Returns this
/// configuration if files must be edited.
fn removable(node: &ContainerdNode, plan: &HandlerPlan) -> Result<Option<toml::Table>, NodeError> {
    if plan.edit.is_some() {
        if let Some(managed) = node.managed() {
            return Err(managed);
        }
        let dump = node.dump()?;
        return no_default(plan, &dump).map(|()| Some(dump));
    }
    // The file of k3s and rke2 may still contain the handler. At their next start they render the
    // file again, without the handler.
    let rendered = node.config_file().ends_with(target::RENDERED);
    match node.config() {
        Ok(dump) if !rendered => gone(plan, &dump).map(|()| None),
        _ => Ok(None),
    }
}

/// Acquires the installer's lock, unless this is a dry run.
fn lock(options: &InstallOptions) -> Result<Option<InstallLock>, InstallError> {
    if options.dry_run { Ok(None) } else { InstallLock::take(&options.state_dir).map(Some) }
}

#[cfg(test)]
mod tests;
