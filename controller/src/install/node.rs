//! The containerd of this node: what it is configured with, and how it takes note.

use std::{
    fmt, fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use toml::Table;

use super::{block, record::Record};
use crate::{
    doctor::{
        containerd::{self, Absent, Daemon},
        programs::SHIM,
    },
    inventory::process,
    report,
};

/// So long containerd is waited for after a restart.
const BACK_WITHIN: Duration = Duration::from_secs(60);
/// The unit of start times in /proc, on every Linux machine of this architecture.
const TICK_MS: u64 = 10;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How containerd takes note of a new configuration. It reads it when it starts, only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restart {
    /// By systemd, which leaves running shims alone.
    Systemd {
        /// The unit.
        unit: String,
    },
    /// Somebody else restarts it.
    None,
}

/// Why containerd is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// None answers.
    #[error("no containerd: start it, or name its socket with --containerd")]
    Absent(#[from] Absent),
    /// Its configuration cannot be had.
    #[error("containerd does not understand its configuration: {0}")]
    Config(String),
    /// The new configuration does more than it should.
    #[error("with the handler {0} would change too: nothing was changed")]
    Differs(String),
    /// systemctl could not be run, or said no.
    #[error("systemctl restart {unit}: {why}")]
    Restart {
        /// The unit.
        unit: String,
        /// Why.
        why: String,
    },
    /// It does not answer.
    #[error("containerd did not come back within {} s: {why}", BACK_WITHIN.as_secs())]
    Gone {
        /// What was seen last.
        why: String,
    },
    /// And not with the old configuration either.
    #[error(
        "containerd's configuration was put back, but it does not come back with it either: {after}. Before that: {before}"
    )]
    Lost {
        /// What failed first.
        before: String,
        /// What failed then.
        after: String,
    },
}

/// A containerd that runs.
#[derive(Debug)]
pub struct Node {
    daemon: Daemon,
}

impl Node {
    /// Finds it.
    pub fn find(socket: Option<&Path>) -> Result<Node, NodeError> {
        Ok(Node { daemon: containerd::find(socket)? })
    }

    /// The file that it reads first.
    pub fn config_file(&self) -> PathBuf {
        self.daemon.config_file.clone()
    }

    /// All that its files say by now.
    pub fn dump(&self) -> Result<Table, NodeError> {
        self.daemon.dump().map_err(NodeError::Config)
    }

    /// Whether what a record says was added stands in the file still.
    pub fn has_block(&self, record: &Record) -> bool {
        let Some(added) = &record.block else { return false };
        let text = fs::read_to_string(&added.path).unwrap_or_default();
        added.path == self.daemon.config_file && text.contains(&added.text)
    }

    /// Whether its process is younger than that moment: it has read what was written then.
    pub fn runs_since(&self, moment: SystemTime) -> bool {
        let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let up_ms = u64::try_from(up.tv_sec * 1_000 + up.tv_nsec / 1_000_000).unwrap_or(0);
        let Ok(daemon) = process::identity(self.daemon.pid) else { return false };
        let age_ms = up_ms.saturating_sub(daemon.start_ticks * TICK_MS);
        // It cannot have started and read its file within a tick.
        SystemTime::now() + Duration::from_millis(TICK_MS) >= moment + Duration::from_millis(age_ms)
    }

    /// Restarts it, and waits until it answers; with the handler, where one is wanted.
    pub fn restart(&self, how: &Restart, handler: Option<&str>) -> Result<(), NodeError> {
        let Restart::Systemd { unit } = how else { return Ok(()) };
        let failed = |why| NodeError::Restart { unit: unit.clone(), why };
        let output =
            Command::new("systemctl").args(["restart", unit]).stdin(Stdio::null()).output();
        let output = output.map_err(|error| failed(report::chain(&error)))?;
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
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

    fn is_back(&self, handler: Option<&str>) -> Result<(), String> {
        let socket = self.daemon.socket.as_path();
        let daemon = containerd::find(Some(socket)).map_err(|error| report::chain(&error))?;
        if daemon.pid == self.daemon.pid {
            return Err("the old one still answers".into());
        }
        let config = daemon.config?;
        let known = |name: &str| block::cri(&config)?.get("runtimes")?.get(name);
        match handler {
            Some(name) if known(name).is_none() => Err(format!("it does not know handler {name}")),
            _ => Ok(()),
        }
    }

    /// After the old file was put back: containerd must run with it.
    pub fn recovered(&self, how: &Restart, failed: NodeError) -> NodeError {
        if !matches!(failed, NodeError::Restart { .. } | NodeError::Gone { .. }) {
            return failed;
        }
        match self.restart(how, None) {
            Ok(()) => failed,
            Err(after) => {
                NodeError::Lost { before: report::chain(&failed), after: report::chain(&after) }
            }
        }
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Restart::Systemd { unit } => write!(f, "systemctl restart {unit}"),
            Restart::None => write!(f, "restart containerd: it knows nothing of this until then"),
        }
    }
}

/// Waits until no shim of the installation runs any more: so many do after that time.
pub fn drain(prefix: &Path, within: Duration) -> usize {
    let began = Instant::now();
    loop {
        match running_shims(prefix) {
            0 => return 0,
            shims if began.elapsed() >= within => return shims,
            _ => thread::sleep(LOOK_EVERY),
        }
    }
}

/// How many shims of the installation run. The kernel says of a file that was replaced
/// since: ` (deleted)`. The controller is the same program: without shims it ends by itself.
pub fn running_shims(prefix: &Path) -> usize {
    let shim = prefix.join("bin").join(SHIM);
    let is_shim = |entry: io::Result<fs::DirEntry>| {
        let process = entry.ok()?.path();
        let exe = fs::read_link(process.join("exe")).ok()?;
        let ours = exe.as_os_str().as_bytes().starts_with(shim.as_os_str().as_bytes());
        let is_controller = || {
            let argv = fs::read(process.join("cmdline")).unwrap_or_default();
            argv.split(|byte| *byte == 0).nth(1) == Some(b"controller")
        };
        (ours && !is_controller()).then_some(())
    };
    fs::read_dir("/proc").into_iter().flatten().filter_map(is_shim).count()
}
