//! Installs Affinode on a node and uninstalls it.
//!
//! ```text
//! install:    plan ──> record ──> files ──> block in containerd's file ──> dump again ──> restart ──> Done
//!              │                              ^                              │ more than the   │ does not
//!              │ nothing to do                └─── the original file <──────┴ handler differs ┘ start
//! uninstall:  shims or jobs? ──> block removed ──> dump again ──> restart ──> files ──> record
//! ```
//!
//! Nothing is changed before everything has been examined. The record lists every file before it is
//! written, so that an installation that was killed can be uninstalled. A first installation that
//! fails leaves no files.

mod block;
mod containerd;
mod edit;
mod files;
mod imports;
mod lock;
mod record;
mod status;
mod target;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

pub use block::BlockError;
pub use containerd::{NodeError, RestartRequest};
pub use edit::EditError;
pub use files::{FileError, SourceFile};
pub use record::RecordError;
pub use status::{FileState, HandlerState, InstallStatus, status};

use self::{
    containerd::ContainerdNode, edit::ConfigEdit, files::FileChange, lock::InstallLock,
    record::InstallRecord,
};
use crate::{doctor::programs::SHIM, inventory::process};

/// In the folder of the record: containerd's future file, for `containerd config dump`.
const SCRATCH: &str = "containerd-check.toml";

/// What to install, and where.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// containerd's socket; `None`: the one of the installation, or the usual places of
    /// distributions.
    pub containerd: Option<PathBuf>,
    /// Folder above `bin` and `lib/affinode`.
    pub prefix: PathBuf,
    /// Folder of the record.
    pub state_dir: PathBuf,
    /// Name of the handler.
    pub runtime_name: String,
    /// How containerd loads its new configuration.
    pub restart: RestartRequest,
    /// How long an uninstallation waits for running containers and jobs.
    pub drain: Duration,
    /// Only report what would be done.
    pub dry_run: bool,
}

impl InstallOptions {
    /// The given socket, or that of the containerd of the installation: while that one does not
    /// run, no other containerd of the machine is used.
    fn socket<'a>(&'a self, record: Option<&'a InstallRecord>) -> Option<&'a Path> {
        self.containerd.as_deref().or_else(|| record?.containerd.as_deref())
    }
}

/// What to do about a file that cannot be written; follows its name in a message.
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

/// The advice for Affinode's own files.
const ANOTHER_PLACE: &str = "choose another folder with --prefix or --state-dir";
/// The advice for containerd's files.
const BY_HAND: &str = "add the handler by hand: config/containerd";

/// The advice for programs that need no handler.
const NO_HANDLER: &str = "copy affinode and containerd-shim-affinode-v1 to /usr/local/bin, libaffinode_preload.so to /usr/local/lib/affinode";

/// Why nothing was installed or uninstalled. Unless it says otherwise, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The name is not a plain TOML key.
    #[error("invalid runtime name {0:?}: accepted: letters, digits, - and _")]
    Name(String),
    /// Another installer holds the lock.
    #[error("another affinode install or uninstall is running: try again when it has ended")]
    Busy,
    /// A file of Affinode failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// containerd is missing or rejected the change.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The block cannot be created.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// containerd's file cannot be edited.
    #[error(transparent)]
    Edit(#[from] EditError),
    /// The record cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The node's root cannot be entered.
    #[error(
        "cannot enter {}, the node's root: run as root with CAP_SYS_CHROOT; for /proc/1/root also with the node's pid namespace and CAP_SYS_PTRACE",
        root.display()
    )]
    HostRoot {
        /// Path of the root that was given.
        root: PathBuf,
        /// The cause of the failure.
        #[source]
        source: std::io::Error,
    },
    /// Running containers would lose their shim.
    #[error(
        "{}: end the containers first (`affinode ps`, `crictl pods`), containerd would lose them; --drain 10m waits for their end",
        if *.0 == 1 { "1 shim runs".to_owned() } else { format!("{} shims run", .0) }
    )]
    InUse(usize),
    /// Running jobs would lose their controller.
    #[error(
        "{} of `affinode run`: end the jobs first, an offloaded job may not be restored without Affinode; --drain waits for their end",
        if *.0 == 1 { "1 job runs".to_owned() } else { format!("{} jobs run", .0) }
    )]
    Jobs(usize),
    /// There is no record.
    #[error("no record of an installation in {}: nothing is installed, or it was installed with another --state-dir", .0.display())]
    NotInstalled(PathBuf),
}

/// The steps that were or would be done, one per line; empty: everything is in place.
pub type Steps = Vec<String>;

/// Enters the root file system of the node from a container: all paths and programs of this process
/// are then the node's.
///
/// # Errors
/// [`InstallError::HostRoot`]: a right is missing.
pub fn enter(root: &Path) -> Result<(), InstallError> {
    let failed = |source| InstallError::HostRoot { root: root.to_owned(), source };
    std::os::unix::fs::chroot(root).map_err(failed)?;
    std::env::set_current_dir("/").map_err(failed)
}

/// Installs Affinode.
///
/// # Errors
/// [`InstallError`]: containerd's configuration was restored.
pub fn install(options: &InstallOptions, source: &SourceFile) -> Result<Steps, InstallError> {
    let name = &options.runtime_name;
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) {
        return Err(InstallError::Name(name.clone()));
    }
    let mut lock = lock(options)?;
    let older = InstallRecord::read(&options.state_dir)?;
    let node = ContainerdNode::find(options.socket(older.as_ref()))?;
    if lock.is_some() {
        heal(options, older.as_ref(), &node)?;
    }
    let before = node.dump()?;
    let restart = node.way(&options.restart);
    let (edit, restarts) = match older.as_ref().filter(|older| node.has_block(older)) {
        // The handler exists already: a new version uses the same one.
        Some(older) => (None, !older.settled),
        None => {
            let shim = options.prefix.join("bin").join(SHIM);
            let target = node.target();
            (Some(ConfigEdit::plan(&target, &node.own(&target), &before, name, &shim)?), true)
        }
    };
    let changes = files::plan(source, &options.prefix);
    let replaces_shim =
        changes.iter().any(|change| change.replaces() && change.to().ends_with(SHIM));
    let controllers = containerd::old_controllers(&options.prefix, replaces_shim);
    let mut steps: Steps = changes.iter().map(FileChange::to_string).collect();
    steps.extend(edit.iter().map(ConfigEdit::to_string));
    if restarts {
        steps.push(restart.to_string());
    }
    steps.extend(controllers.iter().map(|controller| {
        format!(
            "end the controller of the earlier version, process {}: a shim starts the new one",
            controller.pid
        )
    }));
    let Some(lock) = lock.as_mut().filter(|_| !steps.is_empty()) else { return Ok(steps) };
    let fresh = older.is_none() && !changes.iter().any(FileChange::replaces);
    let targets = edit.iter().map(|edit| edit.added.path.as_path());
    for folder in changes.iter().map(FileChange::to).chain(targets).filter_map(Path::parent) {
        let made = files::missing_folders(folder);
        lock.made.extend(
            made.into_iter().filter(|folder| !lock.made.contains(folder)).collect::<Vec<_>>(),
        );
    }
    let mut record = InstallRecord::of(&options.prefix, source, older, edit.as_ref(), &lock.made);
    record.containerd = Some(node.socket().to_owned());
    record.write(&options.state_dir)?;
    let change = InstallEffect { node: &node, before: &before, restart: &restart, options };
    let made = put(&change, &changes, edit.as_ref(), restarts);
    if made.is_err() && fresh {
        // It was a first installation: all its files are removed again.
        for change in &changes {
            files::remove(change.to())?;
        }
        files::remove_folders(&record.folders);
        record.remove(&options.state_dir)?;
    }
    made?;
    record.settled = true;
    record.write(&options.state_dir)?;
    for controller in &controllers {
        // A controller that cannot be ended continues; `affinode doctor` reports it.
        let _ = process::end(controller, false);
    }
    Ok(steps)
}

/// Removes what a killed installer left: partly written files, a handler that was not compared and
/// that containerd may not have loaded, and a handler in a file that is no longer read.
fn heal(
    options: &InstallOptions,
    older: Option<&InstallRecord>,
    node: &ContainerdNode,
) -> Result<(), InstallError> {
    tidy(options, older)?;
    files::tidy(node.target().path())?;
    let stale = older.filter(|older| !older.settled || !node.has_block(older));
    match stale.and_then(|older| older.block.as_ref()) {
        Some(added) => ConfigEdit::removal(added)?.map_or(Ok(()), |edit| Ok(edit.make()?)),
        None => Ok(()),
    }
}

fn tidy(options: &InstallOptions, record: Option<&InstallRecord>) -> Result<(), FileError> {
    let listed =
        record.into_iter().flat_map(InstallRecord::listed).map(|(path, _)| path.to_owned());
    let added = record.and_then(|record| record.block.as_ref()).map(|added| added.path.clone());
    files::remove_left(&options.state_dir.join(SCRATCH))?;
    let own = InstallRecord::file(&options.state_dir);
    listed.chain(added).chain([own]).try_for_each(|path| files::tidy(&path))
}

/// What a change of the configuration needs.
struct InstallEffect<'a> {
    node: &'a ContainerdNode,
    before: &'a toml::Table,
    restart: &'a RestartRequest,
    options: &'a InstallOptions,
}

fn put(
    effect: &InstallEffect<'_>,
    changes: &[FileChange],
    edit: Option<&ConfigEdit>,
    restarts: bool,
) -> Result<(), InstallError> {
    let name = Some(effect.options.runtime_name.as_str());
    for change in changes {
        change.make()?;
    }
    match edit {
        Some(edit) => effect.edit(edit, name),
        None if restarts => Ok(effect.node.restart(effect.restart, name)?),
        None => Ok(()),
    }
}

impl InstallEffect<'_> {
    /// Edits the file, or restores it on an error.
    fn edit(&self, edit: &ConfigEdit, ours: Option<&str>) -> Result<(), InstallError> {
        edit.make()?;
        if let Err(error) = self.settle(edit, ours) {
            edit.undo()?;
            return Err(self.node.recovered(self.restart, error).into());
        }
        Ok(())
    }

    /// Checks containerd's configuration after the edit, and restarts it.
    fn settle(&self, edit: &ConfigEdit, ours: Option<&str>) -> Result<(), NodeError> {
        let differing =
            |after| block::only_handler_differs(self.before, after, edit.runtime_name());
        let after = self.node.dump_after(edit, &self.options.state_dir.join(SCRATCH))?;
        differing(&after).map_err(NodeError::Differs)?;
        if let Some(name) = ours.filter(|name| !block::has_handler(&after, name)) {
            let path = edit.added.path.clone();
            return Err(NodeError::Covered { name: name.into(), path });
        }
        self.node.restart(self.restart, ours)?;
        // A file that is rendered at the start could only be predicted until now.
        match self.restart {
            RestartRequest::Systemd { .. } => {
                differing(&self.node.again()?.dump()?).map_err(NodeError::Rendered)
            }
            RestartRequest::None => Ok(()),
        }
    }
}

/// Removes what [`install`] installed.
///
/// # Errors
/// [`InstallError`]: nothing is installed, or it is in use, or a file cannot be changed.
pub fn uninstall(options: &InstallOptions) -> Result<Steps, InstallError> {
    let mut lock = lock(options)?;
    let Some(record) = InstallRecord::read(&options.state_dir)? else {
        if lock.is_some() {
            tidy(options, None)?;
        }
        return Err(InstallError::NotInstalled(options.state_dir.clone()));
    };
    match containerd::drain(&options.prefix, options.drain) {
        (0, 0) => {}
        (0, jobs) => return Err(InstallError::Jobs(jobs)),
        (shims, _) => return Err(InstallError::InUse(shims)),
    }
    let edit = match &record.block {
        Some(block) => ConfigEdit::removal(block)?,
        None => None,
    };
    let node = ContainerdNode::find(options.socket(Some(&record)));
    let restart = node.as_ref().map_or(options.restart.clone(), |node| node.way(&options.restart));
    let mut steps: Steps = edit.iter().map(ConfigEdit::to_string).collect();
    if edit.is_some() {
        steps.push(restart.to_string());
    }
    let (ours, changed) = record.files()?;
    steps.extend(ours.iter().map(|path| format!("remove {}", path.display())));
    steps.extend(changed.iter().map(|path| format!("leave {}: it was changed", path.display())));
    let Some(lock) = &mut lock else { return Ok(steps) };
    tidy(options, Some(&record))?;
    if let Some(edit) = edit {
        let node = node?;
        let before = node.dump()?;
        let effect = InstallEffect { node: &node, before: &before, restart: &restart, options };
        effect.edit(&edit, None)?;
    }
    for path in &ours {
        files::remove(path)?;
    }
    files::remove_folders(&record.folders);
    record.remove(&options.state_dir)?;
    lock.made.splice(..0, record.folders);
    Ok(steps)
}

/// A dry run takes no lock.
fn lock(options: &InstallOptions) -> Result<Option<InstallLock>, InstallError> {
    if options.dry_run { Ok(None) } else { InstallLock::take(&options.state_dir).map(Some) }
}
