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
    time::Duration,
};

use affinode_core::ProcessId;
use affinode_proto::wire::host_pool::HostPoolOrder;
use tokio::{process::Command, time::Instant};

use self::child::HostPoolProcess;
use crate::{
    config::{DiskFolder, MemorySection},
    copier::pair,
    inventory::memory,
};

/// Minimum time between two starts of the host pool.
const RESTART_AFTER: Duration = Duration::from_secs(10);

/// Time during which no offload uses a host pool that could not start, or that has ended with an
/// error.
const UNUSABLE_FOR: Duration = Duration::from_secs(300);

/// The host pool of the node. Its process is started when the first process is attached. Dropping
/// this value kills the process.
#[derive(Debug)]
pub struct HostPool {
    cgroup: PathBuf,
    /// Folder for disk files. `None`: the node has none.
    disk: Option<DiskFolder>,
    child: Option<HostPoolProcess>,
    /// Time of the latest attempt to start the process.
    started_at: Option<Instant>,
    program: fn(&Path, Option<&DiskFolder>) -> Command,
}

/// Returns the maximum size of the host pool and its memory in use, in bytes. The latter is rounded
/// to steps of 64 MiB, so that small changes are not shown. Both are 0 if the node has no host pool.
#[must_use]
pub fn size_and_use(section: &MemorySection) -> (u64, u64) {
    const STEP: u64 = 64 << 20;
    let size_bytes = memory::total_bytes().map_or(0, |total| section.host_pool_bytes(total));
    let cgroup = cgroup_of(section);
    let used = || affinode_host_pool::used_bytes(&cgroup).unwrap_or(0);
    (size_bytes, if size_bytes == 0 { 0 } else { used() / STEP * STEP })
}

/// Returns the folder of the host pool's memory cgroup.
#[must_use]
pub fn cgroup_of(section: &MemorySection) -> PathBuf {
    affinode_host_pool::cgroup_path(&section.host_pool_cgroup)
}

impl HostPool {
    /// Creates a host pool without a process. `cgroup` is the folder of its memory cgroup, and `disk`
    /// the folder for disk files of processes that are offloaded for long.
    #[must_use]
    pub fn new(cgroup: PathBuf, disk: Option<DiskFolder>) -> HostPool {
        HostPool { cgroup, disk, child: None, started_at: None, program: child::command }
    }

    /// Attaches a process of the container with this number to the host pool, and starts the host
    /// pool if it does not run. Returns the socket end for the process.
    ///
    /// # Errors
    /// The host pool cannot be started, has been started shortly before and has ended, or does not
    /// read its socket.
    pub fn attach(&mut self, process: ProcessId, container: u64) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        let order = HostPoolOrder::Attach { process: process.0, container };
        self.running()?.tell(order, Some(&ours))?;
        Ok(theirs)
    }

    /// Sets how much memory the file of a process may contain. `kept_bytes` is the part of it that the
    /// file should contain already.
    ///
    /// # Errors
    /// The host pool does not run, or does not read its socket.
    pub fn allow(&mut self, process: ProcessId, bytes: u64, kept_bytes: u64) -> io::Result<()> {
        self.order(HostPoolOrder::Allow { process: process.0, bytes, kept_bytes })
    }

    /// Sets the maximum size of the disk file of a process. 0: nothing more may be written to it.
    ///
    /// # Errors
    /// The host pool does not run, or does not read its socket.
    pub fn allow_disk(&mut self, process: ProcessId, bytes: u64) -> io::Result<()> {
        self.order(HostPoolOrder::AllowDisk { process: process.0, bytes })
    }

    /// Ends the connection of a process. Its content stays.
    ///
    /// # Errors
    /// The host pool does not run, or does not read its socket.
    pub fn detach(&mut self, process: ProcessId) -> io::Result<()> {
        self.order(HostPoolOrder::Detach { process: process.0 })
    }

    /// Sends an order to the host pool if it runs.
    fn order(&self, order: HostPoolOrder) -> io::Result<()> {
        let child = self.child.as_ref().filter(|child| child.is_running());
        let child = child.ok_or_else(|| io::Error::other("the host pool does not run"))?;
        child.tell(order, None)
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
        HostPoolProcess::start((self.program)(&self.cgroup, self.disk.as_ref()), ours, theirs)
    }
}
