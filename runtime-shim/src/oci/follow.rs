//! Announces a container to the controller after its runtime has created it. A separate process
//! makes the announcement. The container engine does not wait for that process, and may end before
//! it.
//!
//! ```text
//! create ─> follow: `create` has ended ─┬─ no container ──> folder removed
//!                                       └─ first process ─> announcement kept, announced if a controller runs
//! start ──> follow: first process ──────> announcement kept, controller started, announced ─> keeper
//! ```
//!
//! `create` runs below conmon, which adopts all processes that `create` leaves behind and waits for
//! their end. Therefore not `create` but `start` starts the controller and the keeper. The
//! container engine runs `start` itself, not below conmon. The container's program does not run
//! before `start`.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use affinode_proto::api::control::Announcement;
use serde::{Deserialize, Serialize};
use tracing::level_filters::LevelFilter;
use tracing::warn;

use super::keeper;
use super::names::is_below_monitor;
use super::runtime::OciRuntime;
use crate::launch::{LOG, Launcher};
use crate::paths::ShimPaths;
use crate::process::{self, start_ticks};
use crate::{BINARY, cgroup, report};

/// Internal command with which this program runs as the first of two processes. The first process
/// leaves the session and the cgroup of the container engine, and starts the second.
const FOLLOW: &str = "affinode-follow";
/// Internal command with which this program runs as the second of two processes. The second process
/// announces the container. No parent waits for it.
const FOLLOWED: &str = "affinode-followed";
/// First pause between two attempts to find the container that the command `run` creates. The pause
/// doubles each time.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Kind of the runtime's command for which a container is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FollowedStep {
    /// The runtime creates the container and then ends.
    Create,
    /// The runtime creates and starts the container. It may run until the container ends.
    Run,
    /// The runtime starts the program of a container that it created before.
    Start,
}

/// A container to announce, and the runtime command that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowOrder {
    /// Key of the container.
    pub key: String,
    /// Id of the container in the runtime.
    pub id: String,
    /// The runtime that creates or has created the container.
    pub runtime: OciRuntime,
    /// Folder of the runtime's state. `None` if the command line names none.
    pub root: Option<PathBuf>,
    /// The command that the runtime executes.
    pub step: FollowedStep,
}

/// A [`FollowOrder`], encoded as an argument of the internal commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PassedOrder {
    key: String,
    id: String,
    runtime: PathBuf,
    root: Option<PathBuf>,
    step: FollowedStep,
    /// Process id and start time of the process that called [`spawn`]. The runtime will replace the
    /// program of that process.
    process: (i32, u64),
    /// Whether the command may leave processes behind: the controller and the keeper.
    stays: bool,
}

/// Starts the process that announces a container. Must be called before the runtime replaces this
/// process.
pub fn spawn(paths: &ShimPaths, order: &FollowOrder) -> io::Result<()> {
    let own = std::process::id();
    let pid = i32::try_from(own).map_err(io::Error::other)?;
    let stays = order.step != FollowedStep::Create && !is_below_monitor(own);
    let passed = PassedOrder {
        key: order.key.clone(),
        id: order.id.clone(),
        runtime: order.runtime.path.clone(),
        root: order.root.clone(),
        step: order.step,
        process: (pid, start_ticks(pid).unwrap_or(0)),
        stays,
    };
    let words = [FOLLOW.into(), serde_json::to_string(&passed).map_err(io::Error::other)?];
    let status = command(paths, &words.map(OsString::from))?.status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

/// Runs one of the two internal commands. Returns `None` if the command line is meant for the
/// runtime.
pub fn main(argv: &[OsString]) -> Option<ExitCode> {
    let [command, order] = argv else { return None };
    let paths = ShimPaths::own();
    if command == FOLLOW {
        return Some(crate::finish(leave(&paths, order).map_err(Box::from)));
    }
    if command != FOLLOWED {
        return None;
    }
    crate::log::init(LevelFilter::INFO);
    Some(crate::finish(followed(&paths, order).map_err(Box::from)))
}

/// Does the work of the first process: leaves the session and the cgroup of the container engine,
/// and starts the second process.
fn leave(paths: &ShimPaths, order: &OsStr) -> io::Result<()> {
    let _ = rustix::process::setsid();
    let _ = cgroup::make_and_join(crate::launch::CGROUP, std::process::id());
    command(paths, &[FOLLOWED.into(), order.to_owned()])?.spawn().map(drop)
}

/// Builds the command for a process of this program with these arguments. The process writes its
/// messages to the log file in the run directory.
fn command(paths: &ShimPaths, words: &[OsString]) -> io::Result<Command> {
    let log = || -> io::Result<File> {
        OpenOptions::new().create(true).append(true).mode(0o640).open(paths.run_dir.join(LOG))
    };
    let mut command = Command::new(std::env::current_exe()?);
    command.args(words).current_dir("/").stdin(Stdio::null());
    command.stdout(log()?).stderr(log()?);
    Ok(command)
}

fn followed(paths: &ShimPaths, order: &OsStr) -> io::Result<()> {
    let order: PassedOrder = serde_json::from_str(&order.to_string_lossy())?;
    let folder = paths.container(&order.key);
    let mut announcement = folder.kept()?;
    let Some(init) = wait_for_init(&order)? else {
        // The runtime has not created the container, or the container has ended.
        return folder.remove(Some(announcement.generation));
    };
    (announcement.init_pid, announcement.init_start_ticks) = init;
    if !folder.keep(&announcement)? {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(announce(paths, &order, announcement));
    Ok(())
}

async fn announce(paths: &ShimPaths, order: &PassedOrder, announcement: Announcement) {
    let launcher = Launcher { paths: paths.clone(), program: shim() };
    if order.stays
        && let Err(error) = launcher.connect().await
    {
        warn!("container {}: runs unmanaged until a controller runs: {}", order.id, report(&error));
    }
    // A controller that starts later finds the announcement in the container's folder.
    if paths.control_socket().exists() {
        keeper::announce(paths, announcement).await;
    }
    if order.stays {
        keeper::keep(&launcher).await;
    }
}

/// Returns the path of the installed shim, which contains the controller. It is next to this
/// program, or in PATH.
fn shim() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(BINARY));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| Path::new(BINARY).to_owned())
}

/// Waits until the runtime has created the container. Returns process id and start time of the
/// container's first process. Returns `None` if there is no such container.
fn wait_for_init(order: &PassedOrder) -> io::Result<Option<(u32, u64)>> {
    let runtime = OciRuntime { path: order.runtime.clone() };
    let look = || -> io::Result<Option<(u32, u64)>> {
        let found = runtime.init_of(&order.id, order.root.as_deref())?;
        Ok(found.and_then(|pid| Some((u32::try_from(pid).ok()?, start_ticks(pid)?))))
    };
    let (pid, began) = order.process;
    let mut pause = match order.step {
        FollowedStep::Start => return look(),
        // The container exists once `create` has ended.
        FollowedStep::Create => PAUSE_MAX,
        FollowedStep::Run => PAUSE,
    };
    loop {
        let over = process::wait_for_end(pid, began, Instant::now() + pause)?;
        if (over || order.step == FollowedStep::Run)
            && let Some(init) = look()?
        {
            return Ok(Some(init));
        }
        if over {
            return Ok(None);
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests;
