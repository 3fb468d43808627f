//! The controller's process (daemon). A lock ensures that only one controller serves a node.
//!
//! At its start, the controller reads the configuration, takes the lock, reads the journal and
//! opens the control socket. Then one task, the actor, drives the core (the module that decides
//! about moves, see [`serve`]). The controller may end at any time. Shims then start another
//! controller and announce their containers again, and agents connect again and report their state.
//! If systemd runs a controller as a unit while another controller holds the lock, the controller
//! of the unit waits for the lock.

mod actor;
mod api;
mod call_sources;
mod commands;
mod connection_polling;
mod containers;
mod copiers;
mod effects;
mod event_limits;
mod frontend;
mod gc;
mod gpu_polling;
mod hints;
mod host_pool;
mod incoming;
mod job_socket;
mod jobs;
mod log;
mod log_file;
mod moves;
mod overrides;
mod pending_commands;
mod policies;
mod recall;
mod serve;
mod tick;
mod user_count;
mod viewers;
mod vram;

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use affinode_proto::{installation::InstallationPaths, paths};

use crate::{
    config::{Config, ConfigError},
    error_chain, socket_activation,
};

/// Exit status of the controller if its configuration is invalid: `EX_USAGE` of `sysexits.h`.
const EXIT_CONFIG: u8 = 64;

/// Time after which a controller that systemd supervises ends if it could not start, and the start
/// before it failed too. systemd starts it again after `RestartSec=`, which is short, because it
/// also applies after a crash.
const FAILED_START_PAUSE: Duration = Duration::from_secs(5);

/// File in the run directory that exists if the last start failed.
const FAILED_START_FILE: &str = "start-failed";

/// Reason why the controller did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DaemonError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{what} {path}")]
    File {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the controller cannot start its threads or signal handlers")]
    Runtime(#[source] io::Error),
    #[error("the controller cannot serve the socket {path}")]
    Serve {
        path: PathBuf,
        #[source]
        source: ttrpc::Error,
    },
}

impl DaemonError {
    /// Returns a function that converts an I/O error into a [`DaemonError`]. The new error states
    /// the failed operation `what` and the file's path.
    fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DaemonError {
        let path = path.to_owned();
        move |source| DaemonError::File { what, path, source }
    }
}

/// Runs the controller until it ends. `args` are the arguments after the subcommand. The controller
/// accepts no arguments.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    if let Some(extra) = args.into_iter().next() {
        tracing_subscriber::fmt().with_writer(io::stderr).init();
        tracing::error!(
            "unexpected argument {extra:?}: the controller accepts no arguments; configure it in \
             {}",
            Config::path().display()
        );
        return ExitCode::from(2);
    }
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If the configuration is invalid, no logger is installed yet.
            let _ = tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(false).try_init();
            let why = error_chain::chain(&error);
            tracing::error!("{why}");
            if socket_activation::supervised() {
                socket_activation::tell_status(&format!("cannot start: {why}"));
                std::thread::sleep(pause_after_failure(&InstallationPaths::own().run_dir));
            }
            ExitCode::from(if matches!(error, DaemonError::Config(_)) { EXIT_CONFIG } else { 1 })
        }
    }
}

/// Records that a start failed, and returns the pause before the next one. After a single failure
/// there is none, because offloaded processes wait for a controller, and restore themselves if none
/// comes.
fn pause_after_failure(run_dir: &Path) -> Duration {
    let file = run_dir.join(FAILED_START_FILE);
    match File::options().create_new(true).write(true).open(file) {
        Ok(_) => Duration::ZERO,
        // The last start failed too, or this failure cannot be recorded.
        Err(_) => FAILED_START_PAUSE,
    }
}

/// Records that a start succeeded.
fn forget_failure(run_dir: &Path) {
    let _ = fs::remove_file(run_dir.join(FAILED_START_FILE));
}

fn start() -> Result<(), DaemonError> {
    let InstallationPaths { run_dir, config, .. } = InstallationPaths::own();
    let config = Config::load(&config)?;
    log::begin(&config.log);
    // The lock is taken before anything else in the run directory is read, because two controllers
    // would promise the same VRAM.
    let Some(_lock) = lock(&run_dir)? else {
        tracing::info!(
            "another controller uses run directory {}, so this controller exits",
            run_dir.display()
        );
        return Ok(());
    };
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(DaemonError::Runtime)?;
    let served = runtime.block_on(serve::serve(run_dir, config));
    // Requests that read or write a file may still wait for the disk. The end does not.
    runtime.shutdown_background();
    served
}

/// Raises the soft limit of open files to the hard limit, because the controller needs three
/// descriptors for each process of a container.
fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "controller: cannot raise the limit of open files");
    }
}

/// Takes the lock that allows this controller to serve the node. If another controller holds the
/// lock, returns `None`, or waits for the lock if systemd supervises this controller. A signal can
/// end this process while it waits. The kernel releases the lock when the process ends for any
/// reason.
fn lock(run_dir: &Path) -> Result<Option<nix::fcntl::Flock<File>>, DaemonError> {
    let path = run_dir.join(paths::CONTROLLER_LOCK);
    let fail = DaemonError::file;
    fs::create_dir_all(run_dir).map_err(fail("cannot create", run_dir))?;
    // Users pass through the run directory to the folders of their own jobs. Only root can enter
    // the folders of containers.
    fs::set_permissions(run_dir, fs::Permissions::from_mode(0o711))
        .map_err(fail("cannot set the mode of", run_dir))?;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(fail("cannot open", &path))?;
    // A user who could open the file could hold the lock, and no controller would start.
    file.set_permissions(fs::Permissions::from_mode(0o600))
        .map_err(fail("cannot set the mode of", &path))?;
    match nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((file, nix::errno::Errno::EWOULDBLOCK)) if socket_activation::supervised() => {
            tracing::info!(
                "another controller uses run directory {}, so this controller waits until the \
                 other exits",
                run_dir.display()
            );
            socket_activation::tell_ready(
                "another controller serves this node: waiting until it exits",
            );
            nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive)
                .map(Some)
                .map_err(|(_, errno)| fail("cannot lock", &path)(errno.into()))
        }
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(fail("cannot lock", &path)(errno.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_repeated_failures_pause() {
        let dir = tempfile::tempdir().unwrap();
        let pauses = || [(); 3].map(|()| pause_after_failure(dir.path()));
        let wanted = [Duration::ZERO, FAILED_START_PAUSE, FAILED_START_PAUSE];
        assert_eq!(pauses(), wanted);
        forget_failure(dir.path());
        assert_eq!(pauses(), wanted, "a start succeeded between them");
        assert_eq!(pause_after_failure(&dir.path().join("missing")), FAILED_START_PAUSE);
    }

    #[test]
    fn only_root_can_hold_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(paths::CONTROLLER_LOCK);
        // Earlier controllers created the file with this mode.
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let held = lock(dir.path()).unwrap();
        assert!(held.is_some());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
