//! The copiers of this node: at most one process per GPU with offloaded processes. A copier copies
//! memory back while the driver restores the context, and copies prefaulted memory out (crate
//! `affinode-copier`).
//!
//! ```text
//! none ──offload or prefault begins──> starting ──Ready──> ready ──LINGER without a process,
//!   ^                                     │                      or a container waits for VRAM──┐
//!   └──────── ended (if it never was ready: RestartBackoff) ◄───────────────────────────────────┘
//! ```
//!
//! A process that is prefaulted (`policy.prefault`) is attached to its copier while it is resident,
//! and keeps this connection for the offload.
//!
//! A copier is optional: a process without one, or whose copier has ended, restores its memory
//! itself.

mod backoff;
mod child;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use affinode_copier::socket;
use affinode_proto::{
    api::control,
    wire::copier::{CopierOrder, CopierReport},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc;

use self::{backoff::RestartBackoff, child::CopierProcess};
use crate::{
    core::{Domain, GpuSample, ProcessId},
    driver_library::DriverLibrary,
};

/// A copier without an attached process ends after this time.
const LINGER: Duration = Duration::from_secs(30);
/// A fill that takes longer counts as over, even without a report.
const FILLS: Duration = Duration::from_secs(20);
/// A start that takes longer counts as failed: proofs of free VRAM wait for it.
const STARTS: Duration = Duration::from_secs(5);
/// An end that takes longer is not waited for.
const ENDS: Duration = Duration::from_secs(5);

/// A report of a copier; `None`: it has ended.
#[derive(Debug)]
pub struct CopierMessage {
    uuid: String,
    number: u64,
    said: Option<CopierReport>,
}

/// The copiers, and the processes that are attached to them.
#[derive(Debug)]
pub struct Copiers {
    enabled: bool,
    library: DriverLibrary,
    of: HashMap<String, CopierState>,
    members: HashMap<ProcessId, AttachedProcess>,
    failures: RestartBackoff,
    fills: HashMap<String, u64>,
    copies: HashMap<String, u64>,
    /// The number of each dedup domain, from 1. Numbers are not reused; there are as many as there
    /// were namespaces.
    domains: HashMap<Domain, u64>,
    /// Copiers that were killed and have not ended yet: the driver may still allocate memory for
    /// them.
    ending: Vec<(Instant, CopierProcess)>,
    started: u64,
    held: bool,
    mail: mpsc::UnboundedSender<CopierMessage>,
}

#[derive(Debug)]
struct CopierState {
    number: u64,
    child: CopierProcess,
    is_ready: bool,
    idle_since: Instant,
    /// Its VRAM in bytes, by NVML.
    vram_bytes: u64,
    /// Whether it is unregistering memory of processes that are resident again.
    lets_go: bool,
    /// The process that it fills now, and since when; `None`: no fill in progress.
    filling: Option<(ProcessId, Instant)>,
    /// Size of the files with deduplicated memory, in bytes.
    stored_bytes: u64,
    started: Instant,
}

/// A process with a connection to a copier.
#[derive(Debug)]
struct AttachedProcess {
    uuid: String,
    is_held: bool,
    /// It was attached while it was resident, and has not been offloaded since.
    is_ahead: bool,
    /// Its memory is registered before the offload, and is not filled yet.
    is_prepared: bool,
    /// How much of its memory is deduplicated, in bytes.
    shared_bytes: u64,
}

impl Copiers {
    /// Creates the registry without any copier.
    #[must_use]
    pub fn new(
        enabled: bool,
        library: DriverLibrary,
        mail: mpsc::UnboundedSender<CopierMessage>,
    ) -> Copiers {
        Copiers {
            enabled,
            library,
            of: HashMap::new(),
            members: HashMap::new(),
            failures: RestartBackoff::default(),
            fills: HashMap::new(),
            copies: HashMap::new(),
            domains: HashMap::new(),
            ending: Vec::new(),
            started: 0,
            held: false,
            mail,
        }
    }

    /// Attaches a process that is about to be offloaded to the copier of its GPU; returns the
    /// process's end of the connection. The process had at most `most_bytes` there. With a `domain`
    /// the copier may deduplicate its memory with other processes of that domain. Starts the copier
    /// if there is none; the process need not wait for it.
    pub fn attach(
        &mut self,
        process: ProcessId,
        uuid: &str,
        most_bytes: u64,
        domain: Option<Domain>,
    ) -> Option<OwnedFd> {
        if !self.enabled {
            return None;
        }
        if !self.of.contains_key(uuid) {
            self.failures.allow(uuid, Instant::now()).then(|| self.start(uuid))??;
        }
        let (ours, theirs) = pair()?;
        if self.held {
            self.tell(uuid, CopierOrder::HoldVram { on: true }, None)?;
        }
        let domain = self.number_of(domain);
        let order = CopierOrder::Attach { process: process.0, most_bytes, domain };
        self.tell(uuid, order, Some(&ours))?;
        let member = AttachedProcess {
            uuid: uuid.to_owned(),
            is_held: false,
            is_ahead: false,
            is_prepared: false,
            shared_bytes: 0,
        };
        self.members.insert(process, member);
        Some(theirs)
    }

    /// Attaches a process that stays resident for now, and whose memory is to be registered before
    /// it is offloaded.
    pub fn prepare(
        &mut self,
        process: ProcessId,
        uuid: &str,
        most_bytes: u64,
        domain: Option<Domain>,
    ) -> Option<OwnedFd> {
        let socket = self.attach(process, uuid, most_bytes, domain)?;
        if let Some(member) = self.members.get_mut(&process) {
            member.is_ahead = true;
        }
        Some(socket)
    }

    /// Detaches a resident process that needs no preparation any longer. Reports of its copier
    /// about it are ignored from now on.
    pub fn unprepare(&mut self, process: ProcessId) {
        self.members.remove(&process);
    }

    /// Called when a process is offloaded: whether it was attached ahead to this GPU's copier. A
    /// second connection would discard what is prepared.
    pub fn was_shown(&mut self, process: ProcessId, uuid: &str) -> bool {
        let member = self.members.get_mut(&process).filter(|member| member.uuid == uuid);
        member.is_some_and(|member| std::mem::take(&mut member.is_ahead))
    }

    /// A process is being restored, with this much VRAM: tells its copier to fill the memory, if
    /// the copier has it registered.
    pub fn fill(&mut self, process: ProcessId, most_bytes: u64) {
        if let Some(member) = self.members.get(&process).filter(|member| member.is_held) {
            let uuid = member.uuid.clone();
            let told = self.tell(&uuid, CopierOrder::Fill { process: process.0, most_bytes }, None);
            if let (Some(()), Some(copier)) = (told, self.of.get_mut(&uuid)) {
                copier.filling = Some((process, Instant::now()));
            }
        }
    }

    /// The pids of all copiers, including those that are ending.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        let ending = self.ending.iter().map(|(_, child)| child);
        self.of.values().map(|copier| &copier.child).chain(ending).map(CopierProcess::pid)
    }

    /// Whether a GPU has a copier that is ready.
    #[must_use]
    pub fn has_ready(&self, uuid: &str) -> bool {
        self.of.get(uuid).is_some_and(|copier| copier.is_ready)
    }

    /// Whether a copier is still creating its context, or still ending: VRAM that is free now may
    /// not be free in a moment. A copier that has not ended after `ENDS` is ignored.
    pub fn is_moving(&mut self) -> bool {
        self.ending.retain_mut(|(since, child)| since.elapsed() < ENDS && !child.has_ended());
        !self.ending.is_empty() || self.of.values().any(|copier| !copier.is_ready)
    }

    /// Pauses (`true`) or resumes registrations while VRAM is being proven free or taken: copiers
    /// must not take VRAM meanwhile.
    pub fn hold(&mut self, on: bool) {
        if self.held == on {
            return;
        }
        self.held = on;
        for uuid in self.of.keys().cloned().collect::<Vec<_>>() {
            self.tell(&uuid, CopierOrder::HoldVram { on }, None);
        }
    }

    /// Ends the copiers of GPUs on which a container waits for VRAM. A copier that is filling a
    /// process or copying one out goes on: its work ends sooner, or frees VRAM itself.
    pub fn make_room<'a>(
        &mut self,
        uuids: impl IntoIterator<Item = &'a String>,
        leaves: impl Fn(ProcessId) -> bool,
    ) {
        for uuid in uuids {
            let fills =
                |copier: &CopierState| copier.filling.is_some_and(|(_, at)| at.elapsed() < FILLS);
            let copies =
                self.members.iter().any(|(p, m)| m.uuid == *uuid && m.is_prepared && leaves(*p));
            if self.of.get(uuid).is_some_and(|copier| !fills(copier) && !copies) {
                tracing::info!(gpu = uuid, "copier {uuid}: ended, a container waits for its VRAM");
                self.end(uuid);
            }
        }
    }

    /// Updates the VRAM of the copiers from a reading of the GPUs.
    pub fn seen(&mut self, gpus: &[GpuSample]) {
        for gpu in gpus {
            if let Some(copier) = self.of.get_mut(&gpu.uuid) {
                let own = gpu.processes.iter().find(|(pid, _)| *pid == copier.child.pid());
                copier.vram_bytes = own.map_or(0, |(_, bytes)| *bytes);
            }
        }
    }

    /// Fills in the copier's fields of a GPU in a list.
    pub fn show(&self, gpu: &mut control::Gpu) {
        gpu.copier_shared_bytes = self.shared_bytes(&gpu.uuid);
        let here = self.members.values().filter(|member| member.uuid == gpu.uuid);
        let (held, rest): (Vec<_>, Vec<_>) = here.partition(|member| member.is_held);
        let ready = |member: &&AttachedProcess| member.is_ahead && member.is_prepared;
        let (prepared, pending): (Vec<_>, Vec<_>) = rest.into_iter().partition(ready);
        gpu.copier_registered = u32::try_from(held.len()).unwrap_or(u32::MAX);
        gpu.copier_prefaulted = u32::try_from(prepared.len()).unwrap_or(u32::MAX);
        gpu.copier_registering = u32::try_from(pending.len()).unwrap_or(u32::MAX);
        gpu.copier_restores = self.fills.get(&gpu.uuid).copied().unwrap_or(0);
        gpu.copier_offloads = self.copies.get(&gpu.uuid).copied().unwrap_or(0);
        if let Some(copier) = self.of.get(&gpu.uuid) {
            gpu.copier_pid = copier.child.pid();
            gpu.copier_vram_bytes = copier.vram_bytes;
            gpu.copier_stored_bytes = copier.stored_bytes;
            gpu.copier_registering += u32::from(copier.lets_go);
        }
    }

    /// Ends copiers that had no process for `LINGER`, or that do not become ready.
    pub fn tick(&mut self) {
        let stuck = |copier: &CopierState| !copier.is_ready && copier.started.elapsed() >= STARTS;
        let stuck: Vec<String> =
            self.of.iter().filter(|(_, v)| stuck(v)).map(|(uuid, _)| uuid.clone()).collect();
        for uuid in stuck {
            tracing::warn!(
                gpu = uuid,
                "copier {uuid}: ended, not ready after {} s",
                STARTS.as_secs()
            );
            self.has_failed(&uuid);
            self.end(&uuid);
        }
        let used: HashSet<&String> = self.members.values().map(|member| &member.uuid).collect();
        let mut over = Vec::new();
        for (uuid, copier) in &mut self.of {
            if used.contains(uuid) {
                copier.idle_since = Instant::now();
            } else if copier.idle_since.elapsed() >= LINGER {
                over.push(uuid.clone());
            }
        }
        over.iter().for_each(|uuid| self.end(uuid));
    }

    /// Handles a report of a copier.
    pub fn received(&mut self, mail: CopierMessage) {
        let CopierMessage { uuid, number, said } = mail;
        let Some(copier) = self.of.get_mut(&uuid).filter(|copier| copier.number == number) else {
            return;
        };
        match said {
            Some(CopierReport::Ready) => {
                copier.is_ready = true;
                self.failures.forget(&uuid);
                tracing::info!(gpu = uuid, "copier {uuid}: ready");
            }
            Some(CopierReport::Registered { process, bytes }) => {
                tracing::debug!(
                    process,
                    bytes,
                    "process {process}: {bytes} bytes registered by the copier"
                );
                if let Some(member) = self.member(process, &uuid) {
                    (member.is_held, member.is_prepared) = (true, false);
                }
            }
            Some(CopierReport::Prefaulted { process, bytes }) => {
                tracing::debug!(process, bytes, "process {process}: {bytes} bytes prefaulted");
                if let Some(member) = self.member(process, &uuid) {
                    member.is_prepared = true;
                }
            }
            Some(CopierReport::Copied { process, bytes, elapsed_us }) => {
                tracing::info!(
                    process,
                    bytes,
                    elapsed_us,
                    "process {process}: {bytes} bytes copied out by the copier"
                );
                if let Some(member) = self.member(process, &uuid) {
                    member.is_prepared = false;
                }
                *self.copies.entry(uuid).or_default() += 1;
            }
            Some(CopierReport::Filled { process, bytes, elapsed_us }) => {
                tracing::info!(
                    process,
                    bytes,
                    elapsed_us,
                    "process {process}: {bytes} bytes copied in by the copier"
                );
                copier.filling = None;
                *self.fills.entry(uuid).or_default() += 1;
            }
            Some(CopierReport::Detached { process }) => {
                copier.lets_go = true;
                copier.filling = copier.filling.filter(|(filled, _)| filled.0 != process);
                if self.member(process, &uuid).is_some() {
                    self.members.remove(&ProcessId(process));
                }
                // A file without a process is removed by the copier.
                if self.shared_bytes(&uuid) == 0
                    && let Some(copier) = self.of.get_mut(&uuid)
                {
                    copier.stored_bytes = 0;
                }
            }
            Some(CopierReport::Released) => copier.lets_go = false,
            Some(CopierReport::Shared { process, bytes, stored_bytes }) => {
                tracing::debug!(
                    process,
                    bytes,
                    stored_bytes,
                    "process {process}: {bytes} bytes deduplicated"
                );
                copier.stored_bytes = stored_bytes;
                if let Some(member) = self.member(process, &uuid) {
                    member.shared_bytes = bytes;
                }
            }
            None => {
                if copier.is_ready {
                    tracing::warn!(gpu = uuid, "copier {uuid}: ended");
                } else {
                    tracing::warn!(
                        gpu = uuid,
                        "copier {uuid}: failed to start, processes are restored without one"
                    );
                    self.has_failed(&uuid);
                }
                self.end(&uuid);
            }
        }
    }

    fn has_failed(&mut self, uuid: &str) {
        let pause = self.failures.note(uuid, Instant::now());
        let pause_s = pause.as_secs();
        tracing::info!(gpu = uuid, pause_s, "copier {uuid}: not started again for {pause_s} s");
    }

    /// The number by which copiers know a domain; 0: no domain.
    fn number_of(&mut self, domain: Option<Domain>) -> u64 {
        let next = self.domains.len() as u64 + 1;
        domain.map_or(0, |domain| *self.domains.entry(domain).or_insert(next))
    }

    /// Deduplicated memory of the processes of a GPU, in bytes.
    fn shared_bytes(&self, uuid: &str) -> u64 {
        let here = self.members.values().filter(|member| member.uuid == uuid);
        here.map(|member| member.shared_bytes).fold(0, u64::saturating_add)
    }

    /// An attached process, by the number that the copier uses.
    fn member(&mut self, process: u64, uuid: &str) -> Option<&mut AttachedProcess> {
        self.members.get_mut(&ProcessId(process)).filter(|member| member.uuid == uuid)
    }

    fn start(&mut self, uuid: &str) -> Option<()> {
        self.started += 1;
        let number = self.started;
        let (mail, of) = (self.mail.clone(), uuid.to_owned());
        let tell = move |said| mail.send(CopierMessage { uuid: of.clone(), number, said }).is_ok();
        let (ours, theirs) = pair()?;
        match CopierProcess::start(&self.library, uuid, ours, theirs, tell) {
            Ok(child) => {
                let copier = CopierState {
                    number,
                    child,
                    is_ready: false,
                    idle_since: Instant::now(),
                    vram_bytes: 0,
                    lets_go: false,
                    filling: None,
                    stored_bytes: 0,
                    started: Instant::now(),
                };
                self.of.insert(uuid.to_owned(), copier);
                Some(())
            }
            Err(error) => {
                tracing::warn!(gpu = uuid, %error, "copier {uuid}: cannot start the process");
                self.has_failed(uuid);
                None
            }
        }
    }

    /// Sends an order. A copier that does not read its socket is ended.
    fn tell(&mut self, uuid: &str, order: CopierOrder, along: Option<&OwnedFd>) -> Option<()> {
        let copier = self.of.get(uuid)?;
        if let Err(error) = socket::send(copier.child.socket(), &order.encode(), along) {
            tracing::warn!(gpu = uuid, %error, "copier {uuid}: ended, cannot send an order");
            self.end(uuid);
            return None;
        }
        Some(())
    }

    fn end(&mut self, uuid: &str) {
        if let Some(mut copier) = self.of.remove(uuid) {
            copier.child.kill();
            self.ending.push((Instant::now(), copier.child));
        }
        self.members.retain(|_, member| member.uuid != uuid);
    }
}

/// A pair of connected sockets that preserve packet boundaries.
pub(crate) fn pair() -> Option<(OwnedFd, OwnedFd)> {
    let made = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    made.inspect_err(|error| tracing::warn!(%error, "cannot create a socket for a copier")).ok()
}
