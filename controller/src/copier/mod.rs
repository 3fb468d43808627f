//! The copiers of this node, one for each GPU from which somebody is away: processes that fill the
//! memory of who comes home while the driver restores the rest (crate `affinode-copier`).
//!
//! ```text
//! none ──a process is about to leave──> started ──Ready──> serves ──nobody is away for a while,
//!   ^                                      │                       or somebody waits for VRAM──┐
//!   └────────────── it ends (did it never serve: `failures`) ◄──────────────────────────────────┘
//! ```
//!
//! Who is prepared (`policy.prepare`) is shown its copier while it is at home, and keeps that way to
//! it when it leaves.
//!
//! Nothing depends on one: a process that has none, or whose copier has ended, comes home by itself.

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
    config::CopierSection,
    core::{Domain, GpuSample, ProcessId},
};

/// Nobody away for so long: it ends.
const LINGER: Duration = Duration::from_secs(30);
/// A fill that takes longer is over, whether that was heard or not.
const FILLS: Duration = Duration::from_secs(20);
/// A start that takes longer fails: proofs of room wait for it.
const STARTS: Duration = Duration::from_secs(5);
/// An end that takes longer is waited for no more.
const ENDS: Duration = Duration::from_secs(5);

/// What a copier says, or that it has ended.
#[derive(Debug)]
pub struct CopierMessage {
    uuid: String,
    number: u64,
    said: Option<CopierReport>,
}

/// All of them.
#[derive(Debug)]
pub struct Copiers {
    config: CopierSection,
    of: HashMap<String, CopierState>,
    members: HashMap<ProcessId, AttachedProcess>,
    failures: RestartBackoff,
    fills: HashMap<String, u64>,
    copies: HashMap<String, u64>,
    /// The numbers of who may share, from 1: none is ever another's. As many as there were
    /// namespaces.
    domains: HashMap<Domain, u64>,
    /// Those that were ended, until they have: the driver may still be giving them memory.
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
    /// By NVML.
    vram_bytes: u64,
    /// It lets go of memory of those that are home.
    lets_go: bool,
    /// Whom it was told to fill last, and when, until it has.
    filling: Option<(ProcessId, Instant)>,
    /// Files that hold what several have in common.
    stored_bytes: u64,
    started: Instant,
}

/// A process that has a way to a copier.
#[derive(Debug)]
struct AttachedProcess {
    uuid: String,
    is_held: bool,
    /// It was shown the way while it was at home, and has not left since.
    is_ahead: bool,
    /// Its memory is registered before it leaves, and is not full yet.
    is_prepared: bool,
    /// What of it is in such files.
    shared_bytes: u64,
}

impl Copiers {
    /// None yet.
    #[must_use]
    pub fn new(config: CopierSection, mail: mpsc::UnboundedSender<CopierMessage>) -> Copiers {
        Copiers {
            config,
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

    /// A way to the copier of a GPU for a process that is about to leave it, which had so much
    /// there at most, and may hold what it has in common with others of its domain once with
    /// them, if it has one. Starts the copier if there is none; the process need not wait for it.
    pub fn attach(
        &mut self,
        process: ProcessId,
        uuid: &str,
        most_bytes: u64,
        domain: Option<Domain>,
    ) -> Option<OwnedFd> {
        if !self.config.enabled {
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

    /// The same for a process that stays for now, and whose memory is to be registered before it
    /// leaves.
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

    /// A process at home was told that it needs no preparation any more. What its copier says of it
    /// until it hangs up does not count.
    pub fn unprepare(&mut self, process: ProcessId) {
        self.members.remove(&process);
    }

    /// A process leaves its GPU. Whether it has been shown that one's copier ahead: another way
    /// would make it forget what is prepared.
    pub fn was_shown(&mut self, process: ProcessId, uuid: &str) -> bool {
        let member = self.members.get_mut(&process).filter(|member| member.uuid == uuid);
        member.is_some_and(|member| std::mem::take(&mut member.is_ahead))
    }

    /// A process is told to come home, with so much room: its copier fills its memory, if it holds
    /// it.
    pub fn fill(&mut self, process: ProcessId, most_bytes: u64) {
        if let Some(member) = self.members.get(&process).filter(|member| member.is_held) {
            let uuid = member.uuid.clone();
            let told = self.tell(&uuid, CopierOrder::Fill { process: process.0, most_bytes }, None);
            if let (Some(()), Some(copier)) = (told, self.of.get_mut(&uuid)) {
                copier.filling = Some((process, Instant::now()));
            }
        }
    }

    /// Their processes, those included that are about to end.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        let ending = self.ending.iter().map(|(_, child)| child);
        self.of.values().map(|copier| &copier.child).chain(ending).map(CopierProcess::pid)
    }

    /// Whether a GPU has one that serves.
    #[must_use]
    pub fn has_ready(&self, uuid: &str) -> bool {
        self.of.get(uuid).is_some_and(|copier| copier.is_ready)
    }

    /// Whether one is on its way to its context, or to its end: what is free now may not be free
    /// in a moment. Of one that the driver does not let end nothing more is to be feared after
    /// a while.
    pub fn is_moving(&mut self) -> bool {
        self.ending.retain_mut(|(since, child)| since.elapsed() < ENDS && !child.has_ended());
        !self.ending.is_empty() || self.of.values().any(|copier| !copier.is_ready)
    }

    /// Somebody's room is being proven or taken, or it is over: nothing else of a copier's may
    /// take VRAM meanwhile.
    pub fn hold(&mut self, on: bool) {
        if self.held == on {
            return;
        }
        self.held = on;
        for uuid in self.of.keys().cloned().collect::<Vec<_>>() {
            self.tell(&uuid, CopierOrder::HoldVram { on }, None);
        }
    }

    /// Somebody waits for VRAM on these GPUs: what their copiers have is given back, unless one
    /// brings somebody home just now, or copies who leaves: that is the room, and sooner so.
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
                tracing::info!(gpu = uuid, "the copier ends: somebody waits for its VRAM");
                self.end(uuid);
            }
        }
    }

    /// Devices were read.
    pub fn seen(&mut self, gpus: &[GpuSample]) {
        for gpu in gpus {
            if let Some(copier) = self.of.get_mut(&gpu.uuid) {
                let own = gpu.processes.iter().find(|(pid, _)| *pid == copier.child.pid());
                copier.vram_bytes = own.map_or(0, |(_, bytes)| *bytes);
            }
        }
    }

    /// Writes to a device of a list what there is to know.
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

    /// Ends those that nobody has needed for a while, or that do not get ready.
    pub fn tick(&mut self) {
        let stuck = |copier: &CopierState| !copier.is_ready && copier.started.elapsed() >= STARTS;
        let stuck: Vec<String> =
            self.of.iter().filter(|(_, v)| stuck(v)).map(|(uuid, _)| uuid.clone()).collect();
        for uuid in stuck {
            tracing::warn!(gpu = uuid, "the copier does not get ready, and is ended");
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

    /// Takes in what one has said.
    pub fn heard(&mut self, mail: CopierMessage) {
        let CopierMessage { uuid, number, said } = mail;
        let Some(copier) = self.of.get_mut(&uuid).filter(|copier| copier.number == number) else {
            return;
        };
        match said {
            Some(CopierReport::Ready) => {
                copier.is_ready = true;
                self.failures.forget(&uuid);
                tracing::info!(gpu = uuid, "a copier serves");
            }
            Some(CopierReport::Registered { process, bytes }) => {
                tracing::debug!(process, bytes, "held by the copier");
                if let Some(member) = self.member(process, &uuid) {
                    (member.is_held, member.is_prepared) = (true, false);
                }
            }
            Some(CopierReport::Prefaulted { process, bytes }) => {
                tracing::debug!(process, bytes, "prepared by the copier");
                if let Some(member) = self.member(process, &uuid) {
                    member.is_prepared = true;
                }
            }
            Some(CopierReport::Copied { process, bytes, elapsed_us }) => {
                tracing::info!(process, bytes, elapsed_us, "copied out by the copier");
                if let Some(member) = self.member(process, &uuid) {
                    member.is_prepared = false;
                }
                *self.copies.entry(uuid).or_default() += 1;
            }
            Some(CopierReport::Filled { process, bytes, elapsed_us }) => {
                tracing::info!(process, bytes, elapsed_us, "filled by the copier");
                copier.filling = None;
                *self.fills.entry(uuid).or_default() += 1;
            }
            Some(CopierReport::Detached { process }) => {
                copier.lets_go = true;
                copier.filling = copier.filling.filter(|(filled, _)| filled.0 != process);
                if self.member(process, &uuid).is_some() {
                    self.members.remove(&ProcessId(process));
                }
                // A file of which nobody has anything any more is gone.
                if self.shared_bytes(&uuid) == 0
                    && let Some(copier) = self.of.get_mut(&uuid)
                {
                    copier.stored_bytes = 0;
                }
            }
            Some(CopierReport::Released) => copier.lets_go = false,
            Some(CopierReport::Shared { process, bytes, stored_bytes }) => {
                tracing::debug!(process, bytes, stored_bytes, "held together with others");
                copier.stored_bytes = stored_bytes;
                if let Some(member) = self.member(process, &uuid) {
                    member.shared_bytes = bytes;
                }
            }
            None => {
                if copier.is_ready {
                    tracing::warn!(gpu = uuid, "the copier has ended");
                } else {
                    tracing::warn!(gpu = uuid, "no copier: processes come home without one");
                    self.has_failed(&uuid);
                }
                self.end(&uuid);
            }
        }
    }

    fn has_failed(&mut self, uuid: &str) {
        let pause = self.failures.note(uuid, Instant::now());
        tracing::info!(gpu = uuid, pause_s = pause.as_secs(), "no copier is started meanwhile");
    }

    /// What copiers know a domain by; 0: none.
    fn number_of(&mut self, domain: Option<Domain>) -> u64 {
        let next = self.domains.len() as u64 + 1;
        domain.map_or(0, |domain| *self.domains.entry(domain).or_insert(next))
    }

    /// What processes of a GPU hold together with others.
    fn shared_bytes(&self, uuid: &str) -> u64 {
        let here = self.members.values().filter(|member| member.uuid == uuid);
        here.map(|member| member.shared_bytes).fold(0, u64::saturating_add)
    }

    /// A process as the copier of a GPU names it.
    fn member(&mut self, process: u64, uuid: &str) -> Option<&mut AttachedProcess> {
        self.members.get_mut(&ProcessId(process)).filter(|member| member.uuid == uuid)
    }

    fn start(&mut self, uuid: &str) -> Option<()> {
        self.started += 1;
        let number = self.started;
        let (mail, of) = (self.mail.clone(), uuid.to_owned());
        let tell = move |said| mail.send(CopierMessage { uuid: of.clone(), number, said }).is_ok();
        let (ours, theirs) = pair()?;
        match CopierProcess::start(&self.config.library, uuid, ours, theirs, tell) {
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
                tracing::warn!(gpu = uuid, %error, "no copier can be started");
                self.has_failed(uuid);
                None
            }
        }
    }

    /// Whoever does not listen is of no use any more.
    fn tell(&mut self, uuid: &str, order: CopierOrder, along: Option<&OwnedFd>) -> Option<()> {
        let copier = self.of.get(uuid)?;
        if let Err(error) = socket::send(copier.child.socket(), &order.encode(), along) {
            tracing::warn!(gpu = uuid, %error, "the copier does not listen, and is ended");
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

/// Two ends of a socket that keeps packets apart.
pub(crate) fn pair() -> Option<(OwnedFd, OwnedFd)> {
    let made = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    made.inspect_err(|error| tracing::warn!(%error, "no socket for a copier")).ok()
}
