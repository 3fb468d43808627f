//! Runs the copiers as processes (crate `affinode-copier`), and owns the controller's ends of their
//! sockets. The core (the module that decides about moves) decides which GPUs have a copier, and
//! when a copier ends (`core/copiers.rs`).
//!
//! ```text
//!                    ┌──Report──> the core
//! start ──> running ─┼──Closed──> the core: end
//!                    └──end: killed ──Exited──> the core: its memory is free
//! ```

mod child;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, io, os::fd::OwnedFd};

use affinode_core::{GpuSample, ProcessId, copiers::CopierId};
use affinode_proto::{
    api::control,
    wire::copier::{CopierOrder, CopierReport},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc;

use self::child::CopierProcess;
use crate::driver_library::DriverLibrary;

/// A message to the actor about a copier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopierMessage {
    /// A copier sent a report.
    Report(CopierId, CopierReport),
    /// A copier closed its socket, or sent an invalid message. The copier's process may still run.
    Closed(CopierId),
    /// The process of a copier has exited, so its memory is free.
    Exited(CopierId),
}

/// Reason why a process cannot be attached to a copier.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The copier's process has exited.
    #[error("the copier has exited")]
    Exited,
    /// The controller cannot create a socket between the process and the copier.
    #[error("cannot create the sockets between a process and its copier")]
    Socket,
    /// The order to attach the process cannot be sent, for example because the copier does not read
    /// its socket.
    #[error("cannot send an order to the copier")]
    Order(#[source] io::Error),
}

/// All copiers whose processes have not exited yet.
#[derive(Debug)]
pub struct CopierProcesses {
    library: DriverLibrary,
    running: BTreeMap<CopierId, RunningCopier>,
    mail: mpsc::UnboundedSender<CopierMessage>,
}

#[derive(Debug)]
struct RunningCopier {
    gpu: String,
    child: CopierProcess,
    /// Whether the controller has killed the copier. The entry stays until the copier's exit is
    /// reported.
    ends: bool,
    /// VRAM that the copier uses in bytes, as NVML reports it.
    vram_bytes: u64,
}

impl CopierProcesses {
    /// Creates an empty list of copiers. `library` is the CUDA library that copiers load.
    #[must_use]
    pub fn new(
        library: DriverLibrary,
        mail: mpsc::UnboundedSender<CopierMessage>,
    ) -> CopierProcesses {
        CopierProcesses { library, running: BTreeMap::new(), mail }
    }

    /// Starts a copier on a GPU.
    ///
    /// # Errors
    /// The copier's socket or process cannot be created.
    pub fn start(&mut self, id: CopierId, gpu: &str) -> io::Result<()> {
        let (ours, theirs) = pair()?;
        let mail = self.mail.clone();
        let child = CopierProcess::start(&self.library, gpu, ours, theirs, id, mail)?;
        let copier = RunningCopier { gpu: gpu.to_owned(), child, ends: false, vram_bytes: 0 };
        self.running.insert(id, copier);
        Ok(())
    }

    /// Attaches a process to a copier. Returns the socket end for the process.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(
        &mut self,
        id: CopierId,
        process: ProcessId,
        most_bytes: u64,
        domain: u64,
    ) -> Result<OwnedFd, AttachError> {
        let copier = self.running.get(&id).ok_or(AttachError::Exited)?;
        let (ours, theirs) = pair().map_err(|_| AttachError::Socket)?;
        let order = CopierOrder::Attach { process: process.0, most_bytes, domain };
        copier.child.tell(order, Some(&ours)).map_err(AttachError::Order)?;
        Ok(theirs)
    }

    /// Sends an order to a copier. Does nothing if the copier has exited.
    ///
    /// # Errors
    /// The order cannot be sent, for example because the copier does not read its socket.
    pub fn tell(&self, id: CopierId, order: CopierOrder) -> io::Result<()> {
        self.running.get(&id).map_or(Ok(()), |copier| copier.child.tell(order, None))
    }

    /// Sends SIGKILL to a copier, without waiting. Its exit is reported later. Returns the GPU of
    /// the copier.
    pub fn end(&mut self, id: CopierId) -> Option<&str> {
        let copier = self.running.get_mut(&id)?;
        copier.child.kill();
        copier.ends = true;
        Some(&copier.gpu)
    }

    /// Removes a copier from the list. Called when the exit of the copier's process is reported.
    pub fn forget(&mut self, id: CopierId) {
        self.running.remove(&id);
    }

    /// Returns the UUID of a copier's GPU, or `None` if the copier is not known.
    #[must_use]
    pub fn gpu(&self, id: CopierId) -> Option<&str> {
        self.running.get(&id).map(|copier| copier.gpu.as_str())
    }

    /// Returns the pids of all copiers, including those that are being ended.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.running.values().map(|copier| copier.child.pid())
    }

    /// Stores the VRAM that each copier uses, from a reading of all GPUs.
    pub fn seen(&mut self, gpus: &[GpuSample]) {
        for copier in self.running.values_mut() {
            let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == copier.gpu) else { continue };
            let own = gpu.processes.iter().find(|(pid, _)| *pid == copier.child.pid());
            copier.vram_bytes = own.map_or(0, |(_, bytes)| *bytes);
        }
    }

    /// Adds the pid and the VRAM of the GPU's copier to the GPU's record for the control API.
    pub fn show(&self, gpu: &mut control::Gpu) {
        let here = |copier: &&RunningCopier| copier.gpu == gpu.uuid && !copier.ends;
        if let Some(copier) = self.running.values().find(here) {
            gpu.copier_pid = copier.child.pid();
            gpu.copier_vram_bytes = copier.vram_bytes;
        }
    }
}

/// Creates a pair of connected sockets that preserve packet boundaries.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let made = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    Ok(made.inspect_err(
        |error| tracing::warn!(%error, "cannot create a pair of sockets for a copier"),
    )?)
}
