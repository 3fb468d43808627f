//! Puts Affinode on a node and takes it off again.
//!
//! ```text
//! install:    plan ──> record ──> files ──> block in containerd's file ──> dump again ──> restart ──> Done
//!              │                              ^                              │ more than our   │ does not
//!              │ nothing to do                └────── the file as it was <───┴ handler differs ┘ come back
//! uninstall:  containers of ours? ──> block out ──> dump again ──> restart ──> files ──> record
//! ```
//!
//! Nothing is touched before everything has been looked at. The record names what is put
//! where before it is, so that an installation that was killed can be taken off. A first one
//! that fails leaves nothing behind.

mod block;
mod edit;
mod files;
mod node;
mod record;
mod status;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};

pub use block::BlockError;
pub use edit::EditError;
pub use files::{FileError, Source};
pub use node::{NodeError, Restart};
pub use record::RecordError;
pub use status::{FileState, HandlerState, Status, status};

use self::{edit::Edit, files::Change, node::Node, record::Record};

/// What to do, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// containerd's socket; where distributions put it when `None`.
    pub containerd: Option<PathBuf>,
    /// Below it are `bin` and `lib/affinode`.
    pub prefix: PathBuf,
    /// Where the record is.
    pub state_dir: PathBuf,
    /// Name of the handler.
    pub runtime_name: String,
    /// How containerd takes note.
    pub restart: Restart,
    /// How long an uninstallation waits for running containers to end.
    pub drain: Duration,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// Why it was not done. Unless it says so, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The name would not be one key of TOML.
    #[error("{0:?} is no name for a runtime: letters, digits, - and _")]
    Name(String),
    /// Another is at it.
    #[error("another affinode install or uninstall is at work: try again when it is done")]
    Busy,
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// containerd.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Its configuration.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The edit of it.
    #[error(transparent)]
    Edit(#[from] EditError),
    /// The record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The node's root is not to be had.
    #[error(
        "cannot enter {}, the node's root: that takes root with CAP_SYS_CHROOT; for /proc/1/root also the node's pid namespace and CAP_SYS_PTRACE",
        root.display()
    )]
    HostRoot {
        /// As it was named.
        root: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// Containers would lose their shim.
    #[error(
        "{} of Affinode: end their containers first, containerd would lose them; --drain waits for their end",
        if *.0 == 1 { "1 shim runs".to_owned() } else { format!("{} shims run", .0) }
    )]
    InUse(usize),
    /// Nothing to take off.
    #[error("there is no record of an installation in {}", .0.display())]
    NotInstalled(PathBuf),
}

/// What was done, or would be, line by line. None: everything is in place.
pub type Steps = Vec<String>;

/// Goes to the node whose root is `root`, from a container: from here on all paths of this
/// process are the node's, and what it runs is.
///
/// # Errors
/// [`InstallError::HostRoot`].
pub fn enter(root: &Path) -> Result<(), InstallError> {
    let failed = |source| InstallError::HostRoot { root: root.to_owned(), source };
    std::os::unix::fs::chroot(root).map_err(failed)?;
    std::env::set_current_dir("/").map_err(failed)
}

/// Installs.
///
/// # Errors
/// [`InstallError`]; containerd's configuration is as it was then.
pub fn install(options: &Options, source: &Source) -> Result<Steps, InstallError> {
    let name = &options.runtime_name;
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) {
        return Err(InstallError::Name(name.clone()));
    }
    let _lock = lock(&options.state_dir, options.dry_run)?;
    let node = Node::find(options.containerd.as_deref())?;
    let before = node.dump()?;
    let older = Record::read(&options.state_dir)?;
    let (edit, restarts) = match older.as_ref().filter(|older| node.has_block(older)) {
        // Ours is there already: a new version has the same handler.
        Some(older) => (None, !older.settled),
        None => (Some(Edit::plan(&node.config_file(), &before, name)?), true),
    };
    let changes = files::plan(source, &options.prefix);
    let mut steps: Steps = changes.iter().map(Change::to_string).collect();
    steps.extend(edit.iter().map(Edit::to_string));
    if restarts {
        steps.push(options.restart.to_string());
    }
    if steps.is_empty() || options.dry_run {
        return Ok(steps);
    }
    let fresh = older.is_none() && !changes.iter().any(Change::replaces);
    let mut record = Record::of(&options.prefix, source, older, edit.as_ref());
    record.write(&options.state_dir)?;
    let made = put(options, &node, &before, &changes, edit.as_ref(), restarts);
    if made.is_err() && fresh {
        // Nothing of ours was there before, and nothing is now.
        for change in &changes {
            files::remove(change.to())?;
        }
        record.remove(&options.state_dir)?;
    }
    made?;
    record.settled = true;
    record.write(&options.state_dir)?;
    Ok(steps)
}

fn put(
    options: &Options,
    node: &Node,
    before: &toml::Table,
    changes: &[Change],
    edit: Option<&Edit>,
    restarts: bool,
) -> Result<(), InstallError> {
    let (name, restart) = (Some(options.runtime_name.as_str()), &options.restart);
    for change in changes {
        change.make()?;
    }
    match edit {
        Some(edit) => {
            edit.make()?;
            if let Err(error) = settle(node, before, edit, restart, name) {
                edit.undo()?;
                return Err(node.recovered(restart, error).into());
            }
        }
        None if restarts => node.restart(restart, name)?,
        None => {}
    }
    Ok(())
}

/// The file has changed: what containerd makes of it, and whether it comes back with it.
fn settle(
    node: &Node,
    before: &toml::Table,
    edit: &Edit,
    restart: &Restart,
    ours: Option<&str>,
) -> Result<(), NodeError> {
    block::only_handler_differs(before, &node.dump()?, edit.runtime_name())
        .map_err(NodeError::Differs)?;
    node.restart(restart, ours)
}

/// Takes off what [`install`] put there.
///
/// # Errors
/// [`InstallError`].
pub fn uninstall(options: &Options) -> Result<Steps, InstallError> {
    let _lock = lock(&options.state_dir, options.dry_run)?;
    let Some(record) = Record::read(&options.state_dir)? else {
        return Err(InstallError::NotInstalled(options.state_dir.clone()));
    };
    match node::drain(&options.prefix, options.drain) {
        0 => {}
        shims => return Err(InstallError::InUse(shims)),
    }
    let edit = match &record.block {
        Some(block) => Edit::removal(block)?,
        None => None,
    };
    let mut steps: Steps = edit.iter().map(Edit::to_string).collect();
    if edit.is_some() {
        steps.push(options.restart.to_string());
    }
    let (ours, changed) = record.files()?;
    steps.extend(ours.iter().map(|path| format!("remove {}", path.display())));
    steps.extend(changed.iter().map(|path| format!("leave {}: it was changed", path.display())));
    if options.dry_run {
        return Ok(steps);
    }
    if let Some(edit) = edit {
        let node = Node::find(options.containerd.as_deref())?;
        let before = node.dump()?;
        edit.make()?;
        if let Err(error) = settle(&node, &before, &edit, &options.restart, None) {
            edit.undo()?;
            return Err(node.recovered(&options.restart, error).into());
        }
    }
    for path in &ours {
        files::remove(path)?;
    }
    record.remove(&options.state_dir)?;
    Ok(steps)
}

/// Held by the one installer of a node.
fn lock(state_dir: &Path, dry_run: bool) -> Result<Option<Flock<File>>, InstallError> {
    if dry_run {
        return Ok(None);
    }
    let file = files::open_lock(state_dir)?;
    let held = Flock::lock(file, FlockArg::LockExclusiveNonblock);
    held.map(Some).map_err(|_| InstallError::Busy)
}
