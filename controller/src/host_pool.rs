//! Runs the host pool as a child process (crate `affinode-host-pool`), and owns the controller's
//! end of its socket. The core (the module that decides about moves) decides which processes use
//! the host pool, and how much of its memory they get (`core/host_pool.rs`). After an exit, the
//! next attach starts the process again, but not within 10 s of its last start.
//!
//! ```text
//! first attach ──> running ──exits──> not running ──attach, 10 s after the start──> running
//! ```

mod child;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use affinode_core::{ProcessId, ReadySizes};
use affinode_proto::wire::host_pool::HostPoolOrder;
use tokio::{process::Command, time::Instant};

use self::child::HostPoolProcess;
use crate::{config::MemorySection, copier::pair, inventory::memory};

/// Minimum time between two starts of the host pool.
const RESTART_AFTER: Duration = Duration::from_secs(10);

/// Time during which no offload uses a host pool that could not start, or that has ended with an
/// error.
const UNUSABLE_FOR: Duration = Duration::from_secs(300);

/// Which memory files the host pool keeps ready, and the limits of their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptReady {
    /// Size of each file in bytes. 0: no file.
    pub sizes: ReadySizes,
    /// Available memory of the node, in bytes, below which no pages are kept ready.
    pub min_available_bytes: u64,
    /// Maximum size of the host pool in bytes, including the ready files.
    pub max_bytes: u64,
}

/// The host pool of the node. Its process is started when the first process is attached. Dropping
/// this value kills the process.
#[derive(Debug)]
pub struct HostPool {
    cgroup: PathBuf,
    child: Option<HostPoolProcess>,
    /// Time of the latest attempt to start the process.
    started_at: Option<Instant>,
    /// The memory files that the process keeps ready.
    kept_ready: KeptReady,
    /// Memory of the ready files in bytes, as the process reports it.
    ready_bytes: Arc<AtomicU64>,
    program: fn(&Path) -> Command,
}

/// Size of the host pool and its memory in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolUse {
    /// Maximum size. 0: the node has no host pool.
    pub size_bytes: u64,
    /// Memory with the content of processes, rounded to steps of 64 MiB, so that small changes are
    /// not shown.
    pub used_bytes: u64,
    /// Memory that is kept ready for the next offloads, rounded likewise.
    pub ready_bytes: u64,
}

/// Returns the size of the host pool and its memory in use. `ready_bytes`: memory of its ready
/// files.
#[must_use]
pub fn size_and_use(section: &MemorySection, ready_bytes: u64) -> HostPoolUse {
    const STEP: u64 = 64 << 20;
    let size_bytes = memory::total_bytes().map_or(0, |total| section.host_pool_bytes(total));
    if size_bytes == 0 {
        return HostPoolUse::default();
    }
    let charged_bytes = affinode_host_pool::used_bytes(&cgroup_of(section)).unwrap_or(0);
    let used_bytes = charged_bytes.saturating_sub(ready_bytes) / STEP * STEP;
    HostPoolUse { size_bytes, used_bytes, ready_bytes: ready_bytes / STEP * STEP }
}

/// Returns the folder of the host pool's memory cgroup.
#[must_use]
pub fn cgroup_of(section: &MemorySection) -> PathBuf {
    affinode_host_pool::cgroup_path(&section.host_pool_cgroup)
}

impl HostPool {
    /// Creates a host pool without a process. `cgroup` is the folder of its memory cgroup.
    #[must_use]
    pub fn new(cgroup: PathBuf) -> HostPool {
        HostPool {
            cgroup,
            child: None,
            started_at: None,
            kept_ready: KeptReady::default(),
            ready_bytes: Arc::default(),
            program: child::command,
        }
    }

    /// Returns the counter of the memory in ready files, in bytes. The host pool's reports change
    /// it.
    #[must_use]
    pub fn ready_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.ready_bytes)
    }

    /// Sets which memory files are kept ready. Starts the host pool if a file is wanted and it does
    /// not run.
    ///
    /// # Errors
    /// The host pool cannot be started, or does not read its socket. The next start applies the
    /// sizes.
    pub fn keep_ready(&mut self, kept_ready: KeptReady) -> io::Result<()> {
        self.kept_ready = kept_ready;
        let is_wanted = kept_ready.sizes.iter().any(|bytes| *bytes > 0);
        if self.is_running() {
            self.tell_ready()
        } else if is_wanted && self.is_usable() {
            self.running().map(drop)
        } else {
            Ok(())
        }
    }

    fn tell_ready(&self) -> io::Result<()> {
        let KeptReady { sizes, min_available_bytes, max_bytes } = self.kept_ready;
        let order = HostPoolOrder::KeepReady { sizes, min_available_bytes, max_bytes };
        let child =
            self.child.as_ref().ok_or_else(|| io::Error::other("the host pool does not run"))?;
        child.tell(order, None)
    }

    /// Attaches a process with a content of `bytes` bytes to the host pool, and starts the host pool
    /// if it does not run. Returns the socket end for the process.
    ///
    /// # Errors
    /// The host pool cannot be started, has been started shortly before and has ended, or does not
    /// read its socket.
    pub fn attach(&mut self, process: ProcessId, bytes: u64) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        let order = HostPoolOrder::Attach { process: process.0, bytes };
        self.running()?.tell(order, Some(&ours))?;
        Ok(theirs)
    }

    /// Sets how much memory the file of a process may contain.
    ///
    /// # Errors
    /// The host pool does not run, or does not read its socket.
    pub fn allow(&mut self, process: ProcessId, bytes: u64) -> io::Result<()> {
        let child = self.child.as_ref().filter(|child| child.is_running());
        let child = child.ok_or_else(|| io::Error::other("the host pool does not run"))?;
        child.tell(HostPoolOrder::Allow { process: process.0, bytes }, None)
    }

    /// Ends the connection of a process. Its content stays.
    ///
    /// # Errors
    /// The host pool does not run, or does not read its socket.
    pub fn detach(&mut self, process: ProcessId) -> io::Result<()> {
        let child = self.child.as_ref().filter(|child| child.is_running());
        let child = child.ok_or_else(|| io::Error::other("the host pool does not run"))?;
        child.tell(HostPoolOrder::Detach { process: process.0 }, None)
    }

    /// Whether an offload may use the host pool. It may not for some time after the process could
    /// not be started, or has ended with an error. On a node where it never starts, no offload has
    /// to fail first.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let has_failed = match &self.child {
            Some(child) => child.has_failed(),
            None => self.started_at.is_some(),
        };
        !has_failed || self.started_at.is_none_or(|at| at.elapsed() >= UNUSABLE_FOR)
    }

    /// Whether the host pool's process runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.child.as_ref().is_some_and(HostPoolProcess::is_running)
    }

    /// Returns the folder of the host pool's memory cgroup.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Returns the process of the host pool. Starts it if it does not run.
    fn running(&mut self) -> io::Result<&HostPoolProcess> {
        if !self.is_running() {
            self.child = Some(self.start()?);
            if self.kept_ready.sizes.iter().any(|bytes| *bytes > 0) {
                self.tell_ready()?;
            }
        }
        self.child.as_ref().ok_or_else(|| io::Error::other("the host pool does not run"))
    }

    fn start(&mut self) -> io::Result<HostPoolProcess> {
        let now = Instant::now();
        if self.started_at.is_some_and(|at| now.duration_since(at) < RESTART_AFTER) {
            return Err(io::Error::other("the host pool has ended, and is not started again yet"));
        }
        self.started_at = Some(now);
        let (ours, theirs) = pair()?;
        HostPoolProcess::start((self.program)(&self.cgroup), ours, theirs, self.ready_bytes())
    }
}
