//! The vaults of this node, one for each GPU from which somebody is away: processes that fill the
//! memory of who comes home while the driver restores the rest (crate `affinode-vault`).
//!
//! ```text
//! none ──a process is about to leave──> started ──Ready──> serves ──nobody is away for a while,
//!   ^                                      │                       or somebody waits for VRAM──┐
//!   └────────────── it ends (left alone for some minutes) ◄────────────────────────────────────┘
//! ```
//!
//! Nothing depends on one: a process that has none, or whose vault has ended, comes home by itself.

mod child;

use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use affinode_proto::{
    api::control,
    wire::vault::{VaultOrder, VaultReport},
};
use affinode_vault::socket;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc;

use self::child::Child;
use crate::{
    config::VaultSection,
    core::{GpuSample, ProcessId},
};

/// Nobody away for so long: it ends.
const LINGER: Duration = Duration::from_secs(30);
/// One that could not serve is not started again within this.
const AGAIN: Duration = Duration::from_secs(300);
/// A fill that takes longer is over, whether that was heard or not.
const FILLS: Duration = Duration::from_secs(20);
/// A start that takes longer fails: proofs of room wait for it.
const STARTS: Duration = Duration::from_secs(5);
/// An end that takes longer is waited for no more.
const ENDS: Duration = Duration::from_secs(5);

/// What a vault says, or that it has ended.
#[derive(Debug)]
pub struct VaultMail {
    uuid: String,
    number: u64,
    said: Option<VaultReport>,
}

/// All of them.
#[derive(Debug)]
pub struct Vaults {
    config: VaultSection,
    of: HashMap<String, Vault>,
    members: HashMap<ProcessId, Member>,
    failed: HashMap<String, Instant>,
    fills: HashMap<String, u64>,
    /// Those that were ended, until they have: the driver may still be giving them memory.
    ending: Vec<(Instant, Child)>,
    started: u64,
    held: bool,
    mail: mpsc::UnboundedSender<VaultMail>,
}

#[derive(Debug)]
struct Vault {
    number: u64,
    child: Child,
    is_ready: bool,
    idle_since: Instant,
    /// By NVML.
    vram_bytes: u64,
    /// It lets go of memory of those that are home.
    lets_go: bool,
    /// Whom it was told to fill last, and when, until it has.
    filling: Option<(ProcessId, Instant)>,
    started: Instant,
}

/// A process that has a way to a vault.
#[derive(Debug)]
struct Member {
    uuid: String,
    is_held: bool,
}

impl Vaults {
    /// None yet.
    #[must_use]
    pub fn new(config: VaultSection, mail: mpsc::UnboundedSender<VaultMail>) -> Vaults {
        Vaults {
            config,
            of: HashMap::new(),
            members: HashMap::new(),
            failed: HashMap::new(),
            fills: HashMap::new(),
            ending: Vec::new(),
            started: 0,
            held: false,
            mail,
        }
    }

    /// A way to the vault of a GPU for a process that is about to leave it, which had so much
    /// there at most. Starts the vault if there is none; the process need not wait for it.
    pub fn attach(&mut self, process: ProcessId, uuid: &str, most_bytes: u64) -> Option<OwnedFd> {
        let failed = self.failed.get(uuid).is_some_and(|at| at.elapsed() < AGAIN);
        if !self.config.enabled || failed {
            return None;
        }
        if !self.of.contains_key(uuid) {
            self.start(uuid)?;
        }
        let (ours, theirs) = pair()?;
        if self.held {
            self.tell(uuid, VaultOrder::Hold { on: true }, None)?;
        }
        let order = VaultOrder::Attach { process: process.0, most_bytes };
        self.tell(uuid, order, Some(&ours))?;
        self.members.insert(process, Member { uuid: uuid.to_owned(), is_held: false });
        Some(theirs)
    }

    /// A process is told to come home: its vault fills its memory, if it holds it.
    pub fn fill(&mut self, process: ProcessId) {
        if let Some(member) = self.members.get(&process).filter(|member| member.is_held) {
            let uuid = member.uuid.clone();
            let told = self.tell(&uuid, VaultOrder::Fill { process: process.0 }, None);
            if let (Some(()), Some(vault)) = (told, self.of.get_mut(&uuid)) {
                vault.filling = Some((process, Instant::now()));
            }
        }
    }

    /// Their processes, those included that are about to end.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        let ending = self.ending.iter().map(|(_, child)| child);
        self.of.values().map(|vault| &vault.child).chain(ending).map(Child::pid)
    }

    /// Whether a GPU has one that serves.
    #[must_use]
    pub fn has_ready(&self, uuid: &str) -> bool {
        self.of.get(uuid).is_some_and(|vault| vault.is_ready)
    }

    /// Whether one is on its way to its context, or to its end: what is free now may not be free
    /// in a moment. Of one that the driver does not let end nothing more is to be feared after
    /// a while.
    pub fn is_moving(&mut self) -> bool {
        self.ending.retain_mut(|(since, child)| since.elapsed() < ENDS && !child.has_ended());
        !self.ending.is_empty() || self.of.values().any(|vault| !vault.is_ready)
    }

    /// Somebody's room is being proven or taken, or it is over: nothing else of a vault's may
    /// take VRAM meanwhile.
    pub fn hold(&mut self, on: bool) {
        if self.held == on {
            return;
        }
        self.held = on;
        for uuid in self.of.keys().cloned().collect::<Vec<_>>() {
            self.tell(&uuid, VaultOrder::Hold { on }, None);
        }
    }

    /// Somebody waits for VRAM on these GPUs: what their vaults have is given back, unless one
    /// brings somebody home just now.
    pub fn make_room<'a>(&mut self, uuids: impl IntoIterator<Item = &'a String>) {
        for uuid in uuids {
            let fills = |vault: &Vault| vault.filling.is_some_and(|(_, at)| at.elapsed() < FILLS);
            if self.of.get(uuid).is_some_and(|vault| !fills(vault)) {
                tracing::info!(gpu = uuid, "the vault ends: somebody waits for its VRAM");
                self.end(uuid);
            }
        }
    }

    /// Devices were read.
    pub fn seen(&mut self, gpus: &[GpuSample]) {
        for gpu in gpus {
            if let Some(vault) = self.of.get_mut(&gpu.uuid) {
                let own = gpu.processes.iter().find(|(pid, _)| *pid == vault.child.pid());
                vault.vram_bytes = own.map_or(0, |(_, bytes)| *bytes);
            }
        }
    }

    /// Writes to a device of a list what there is to know.
    pub fn show(&self, gpu: &mut control::Gpu) {
        let here = self.members.values().filter(|member| member.uuid == gpu.uuid);
        let (held, pending): (Vec<_>, Vec<_>) = here.partition(|member| member.is_held);
        gpu.vault_holds = u32::try_from(held.len()).unwrap_or(u32::MAX);
        gpu.vault_pending = u32::try_from(pending.len()).unwrap_or(u32::MAX);
        gpu.vault_fills = self.fills.get(&gpu.uuid).copied().unwrap_or(0);
        if let Some(vault) = self.of.get(&gpu.uuid) {
            gpu.vault_pid = vault.child.pid();
            gpu.vault_vram_bytes = vault.vram_bytes;
            gpu.vault_pending += u32::from(vault.lets_go);
        }
    }

    /// Ends those that nobody has needed for a while, or that do not get ready.
    pub fn tick(&mut self) {
        let stuck = |vault: &Vault| !vault.is_ready && vault.started.elapsed() >= STARTS;
        let stuck: Vec<String> =
            self.of.iter().filter(|(_, v)| stuck(v)).map(|(uuid, _)| uuid.clone()).collect();
        for uuid in stuck {
            tracing::warn!(gpu = uuid, "the vault does not get ready, and is ended");
            self.failed.insert(uuid.clone(), Instant::now());
            self.end(&uuid);
        }
        let used: HashSet<&String> = self.members.values().map(|member| &member.uuid).collect();
        let mut over = Vec::new();
        for (uuid, vault) in &mut self.of {
            if used.contains(uuid) {
                vault.idle_since = Instant::now();
            } else if vault.idle_since.elapsed() >= LINGER {
                over.push(uuid.clone());
            }
        }
        over.iter().for_each(|uuid| self.end(uuid));
    }

    /// Takes in what one has said.
    pub fn heard(&mut self, mail: VaultMail) {
        let VaultMail { uuid, number, said } = mail;
        let Some(vault) = self.of.get_mut(&uuid).filter(|vault| vault.number == number) else {
            return;
        };
        match said {
            Some(VaultReport::Ready) => {
                vault.is_ready = true;
                tracing::info!(gpu = uuid, "a vault serves");
            }
            Some(VaultReport::Held { process, bytes }) => {
                tracing::debug!(process, bytes, "held by the vault");
                let member = self.members.get_mut(&ProcessId(process));
                if let Some(member) = member.filter(|member| member.uuid == uuid) {
                    member.is_held = true;
                }
            }
            Some(VaultReport::Prepared { process, bytes }) => {
                tracing::debug!(process, bytes, "prepared by the vault");
            }
            Some(VaultReport::Copied { process, bytes, elapsed_us }) => {
                tracing::info!(process, bytes, elapsed_us, "copied out by the vault");
            }
            Some(VaultReport::Filled { process, bytes, elapsed_us }) => {
                tracing::info!(process, bytes, elapsed_us, "filled by the vault");
                vault.filling = None;
                *self.fills.entry(uuid).or_default() += 1;
            }
            Some(VaultReport::Left { process }) => {
                vault.lets_go = true;
                vault.filling = vault.filling.filter(|(filled, _)| filled.0 != process);
                if self.members.get(&ProcessId(process)).is_some_and(|member| member.uuid == uuid) {
                    self.members.remove(&ProcessId(process));
                }
            }
            Some(VaultReport::LetGo) => vault.lets_go = false,
            None => {
                if vault.is_ready {
                    tracing::warn!(gpu = uuid, "the vault has ended");
                } else {
                    tracing::warn!(gpu = uuid, "no vault: processes come home without one");
                    self.failed.insert(uuid.clone(), Instant::now());
                }
                self.end(&uuid);
            }
        }
    }

    fn start(&mut self, uuid: &str) -> Option<()> {
        self.started += 1;
        let number = self.started;
        let (mail, of) = (self.mail.clone(), uuid.to_owned());
        let tell = move |said| mail.send(VaultMail { uuid: of.clone(), number, said }).is_ok();
        let (ours, theirs) = pair()?;
        match Child::start(&self.config.library, uuid, ours, theirs, tell) {
            Ok(child) => {
                let vault = Vault {
                    number,
                    child,
                    is_ready: false,
                    idle_since: Instant::now(),
                    vram_bytes: 0,
                    lets_go: false,
                    filling: None,
                    started: Instant::now(),
                };
                self.of.insert(uuid.to_owned(), vault);
                Some(())
            }
            Err(error) => {
                tracing::warn!(gpu = uuid, %error, "no vault can be started");
                self.failed.insert(uuid.to_owned(), Instant::now());
                None
            }
        }
    }

    /// Whoever does not listen is of no use any more.
    fn tell(&mut self, uuid: &str, order: VaultOrder, along: Option<&OwnedFd>) -> Option<()> {
        let vault = self.of.get(uuid)?;
        if let Err(error) = socket::send(vault.child.socket(), &order.encode(), along) {
            tracing::warn!(gpu = uuid, %error, "the vault does not listen, and is ended");
            self.end(uuid);
            return None;
        }
        Some(())
    }

    fn end(&mut self, uuid: &str) {
        if let Some(mut vault) = self.of.remove(uuid) {
            vault.child.kill();
            self.ending.push((Instant::now(), vault.child));
        }
        self.members.retain(|_, member| member.uuid != uuid);
    }
}

/// Two ends of a socket that keeps packets apart.
fn pair() -> Option<(OwnedFd, OwnedFd)> {
    let made = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    made.inspect_err(|error| tracing::warn!(%error, "no socket for a vault")).ok()
}

#[cfg(test)]
mod tests {
    use affinode_proto::wire::message::FRAME_BYTES;
    use tokio::process::Command;

    use super::*;

    const GPU: &str = "GPU-1";

    fn vaults() -> (Vaults, mpsc::UnboundedReceiver<VaultMail>) {
        let (mail, from) = mpsc::unbounded_channel();
        (Vaults::new(VaultSection::default(), mail), from)
    }

    /// A vault whose other end is ours.
    fn with_vault(vaults: &mut Vaults) -> OwnedFd {
        let (ours, theirs) = pair().unwrap();
        let child = Child::of_test(ours);
        let idle_since = Instant::now();
        vaults.of.insert(
            GPU.into(),
            Vault {
                number: 1,
                child,
                is_ready: true,
                idle_since,
                vram_bytes: 0,
                lets_go: false,
                filling: None,
                started: idle_since,
            },
        );
        theirs
    }

    fn said(number: u64, said: VaultReport) -> VaultMail {
        VaultMail { uuid: GPU.into(), number, said: Some(said) }
    }

    fn order(vault: &OwnedFd) -> Option<VaultOrder> {
        let (frame, _): ([u8; FRAME_BYTES], _) = socket::receive(vault).ok()?;
        VaultOrder::decode(&frame).ok()
    }

    #[tokio::test]
    async fn who_is_held_is_filled_and_nobody_else() {
        let (mut vaults, _from) = vaults();
        let vault = with_vault(&mut vaults);
        let process = ProcessId(7);
        assert!(vaults.attach(process, GPU, 100).is_some());
        assert_eq!(order(&vault), Some(VaultOrder::Attach { process: 7, most_bytes: 100 }));
        vaults.fill(process);
        assert_eq!(order(&vault), None, "its memory is not registered yet");
        vaults.heard(said(9, VaultReport::Held { process: 7, bytes: 100 }));
        vaults.fill(process);
        assert_eq!(order(&vault), None, "another vault's word");
        vaults.heard(said(1, VaultReport::Held { process: 7, bytes: 100 }));
        vaults.fill(process);
        assert_eq!(order(&vault), Some(VaultOrder::Fill { process: 7 }));
        vaults.heard(said(1, VaultReport::Left { process: 7 }));
        vaults.fill(process);
        assert_eq!(order(&vault), None, "it hung up");
    }

    #[tokio::test]
    async fn room_is_made_by_ending_it_and_one_that_failed_is_left_alone() {
        let (mut vaults, _from) = vaults();
        let vault = with_vault(&mut vaults);
        assert!(vaults.attach(ProcessId(7), GPU, 100).is_some());
        vaults.make_room(&["GPU-2".to_owned()]);
        assert!(vaults.of.contains_key(GPU));
        vaults.make_room(&[GPU.to_owned()]);
        assert!(vaults.of.is_empty() && vaults.members.is_empty());
        assert!(order(&vault).is_some() && order(&vault).is_none(), "nothing more is told");

        let _vault = with_vault(&mut vaults);
        vaults.of.get_mut(GPU).unwrap().is_ready = false;
        vaults.heard(VaultMail { uuid: GPU.into(), number: 1, said: None });
        assert!(vaults.attach(ProcessId(8), GPU, 100).is_none());
    }

    #[tokio::test]
    async fn nothing_takes_vram_beside_a_proof() {
        let (mut vaults, _from) = vaults();
        let vault = with_vault(&mut vaults);
        vaults.of.get_mut(GPU).unwrap().is_ready = false;
        assert!(vaults.is_moving() && !vaults.has_ready(GPU), "a proof waits for this one");
        vaults.heard(said(1, VaultReport::Ready));
        assert!(!vaults.is_moving() && vaults.has_ready(GPU));
        vaults.hold(true);
        vaults.hold(true);
        assert_eq!(order(&vault), Some(VaultOrder::Hold { on: true }));
        assert_eq!(order(&vault), None, "it knows");
        vaults.hold(false);
        assert_eq!(order(&vault), Some(VaultOrder::Hold { on: false }));
    }

    #[tokio::test]
    async fn one_that_ends_is_waited_for_until_it_has() {
        let (mut vaults, _from) = vaults();
        let _vault = with_vault(&mut vaults);
        let sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        let place = format!("/proc/{}", sleeper.id().unwrap());
        vaults.of.get_mut(GPU).unwrap().child.of_process(sleeper);
        vaults.end(GPU);
        assert_eq!(vaults.ending.len(), 1);
        while vaults.is_moving() {
            tokio::task::yield_now().await;
        }
        assert!(vaults.ending.is_empty());
        assert!(!std::path::Path::new(&place).exists(), "not given up: it has ended");
    }

    #[tokio::test]
    async fn one_that_brings_somebody_home_is_left_to_do_so() {
        let (mut vaults, _from) = vaults();
        let _vault = with_vault(&mut vaults);
        assert!(vaults.attach(ProcessId(7), GPU, 100).is_some());
        vaults.heard(said(1, VaultReport::Held { process: 7, bytes: 100 }));
        vaults.fill(ProcessId(7));
        vaults.make_room(&[GPU.to_owned()]);
        assert!(vaults.of.contains_key(GPU));
        vaults.heard(said(1, VaultReport::Filled { process: 7, bytes: 100, elapsed_us: 1 }));
        vaults.make_room(&[GPU.to_owned()]);
        assert!(vaults.of.is_empty());
    }

    #[tokio::test]
    async fn where_it_is_turned_off_there_is_none() {
        let (mut vaults, _from) = vaults();
        let _vault = with_vault(&mut vaults);
        vaults.config.enabled = false;
        assert!(vaults.attach(ProcessId(7), GPU, 100).is_none());
    }
}
