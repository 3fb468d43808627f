//! The copiers of the node: at most one process per GPU with offloaded processes. Here is decided
//! which GPU has one, which processes it serves, when it ends, and when a proof of free VRAM waits
//! for it.
//!
//! ```text
//! none ──offload or prefault begins──> Starting ──CopierReport: Ready──> Ready
//!   ^                                     │ not ready in time,             │ LINGER_MS without a
//!   │                                     │ ended: RestartBackoff          │ process, a container
//!   │                                     v                                │ waits for its VRAM
//!   └──────────CopierExited──────────── ending <───────────────────────────┘
//! ```
//!
//! A copier that starts or ends moves memory: VRAM that is free now may not be free in a moment.
//! So a proof waits until no copier does, and copiers register nothing meanwhile
//! ([`super::Effect::HoldCopier`]). None is started while a container waits or VRAM is promised.
//!
//! A copier is optional: a process without one, or whose copier has ended, restores its memory
//! itself. The processes and sockets of copiers are in `controller/src/copier`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use affinode_proto::wire::copier::CopierReport;
use foldhash::fast::FixedState;

use super::{Domain, Effect, Millis, ProcessId, copier_backoff::RestartBackoff};

/// A copier without an attached process ends after this time.
pub(super) const LINGER_MS: Millis = 30_000;
/// A fill that takes longer counts as over, even without a report.
const FILL_MS: Millis = 20_000;
/// A start that takes longer counts as failed: proofs of free VRAM wait for it.
pub(super) const START_MS: Millis = 5_000;
/// An end that takes longer is not waited for.
pub(super) const END_MS: Millis = 5_000;

/// The number of a copier. Numbers are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CopierId(pub u64);

/// Why a copier is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierEnd {
    /// It has served no process for a while.
    Unused,
    /// A container waits for its VRAM.
    MakesRoom,
    /// Its connection ended, or its process.
    Lost,
    /// It never was ready. None is started on its GPU for this time.
    NeverReady {
        /// Time before the next start, in milliseconds.
        pause_ms: Millis,
    },
}

/// Whether a copier serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopierStage {
    /// It creates its context since this time.
    Starting(Millis),
    Ready,
}

#[derive(Debug)]
struct GpuCopier {
    id: CopierId,
    stage: CopierStage,
    /// When a process was attached last.
    used_at: Millis,
    /// Whether it is unregistering memory of processes that are resident again.
    unregisters: bool,
    /// The process that it fills now, and since when; `None`: no fill in progress.
    filling: Option<(ProcessId, Millis)>,
    /// Size of the files with deduplicated memory, in bytes.
    stored_bytes: u64,
}

/// What a copier has of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttachmentState {
    /// The process is resident, and was attached ahead of its offload. Its prefaulted memory is
    /// registered, or will be.
    Ahead { prefaulted: bool },
    /// The process is being offloaded. Its memory was registered before, and is not copied yet; or
    /// it will be registered.
    Offloading { prefaulted: bool },
    /// The memory of the offloaded process is registered: it can be filled.
    Registered,
}

#[derive(Debug)]
struct AttachedProcess {
    uuid: String,
    attachment: AttachmentState,
    /// How much of its memory is deduplicated, in bytes.
    shared_bytes: u64,
}

/// What users see of the copier of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopierFigures {
    /// Resident processes whose prefaulted memory is registered.
    pub prefaulted: u32,
    /// Processes whose memory is being registered or unregistered.
    pub registering: u32,
    /// Offloaded processes whose memory is registered.
    pub registered: u32,
    /// Restores in which a copier of this GPU filled the memory.
    pub restores: u64,
    /// Offloads in which a copier of this GPU copied the memory.
    pub offloads: u64,
    /// Deduplicated memory of its processes, in bytes.
    pub shared_bytes: u64,
    /// Size of the files with deduplicated memory, in bytes.
    pub stored_bytes: u64,
}

/// The copiers, and the processes that are attached to them.
#[derive(Debug, Default)]
pub(super) struct CopierRegistry {
    by_gpu: BTreeMap<String, GpuCopier>,
    attached: BTreeMap<ProcessId, AttachedProcess>,
    /// Copiers that were ended and whose processes have not exited yet, and since when: the driver
    /// may still hold memory for them.
    ending: BTreeMap<CopierId, Millis>,
    backoff: RestartBackoff,
    restores: BTreeMap<String, u64>,
    offloads: BTreeMap<String, u64>,
    /// The number of each dedup domain, from 1. Numbers are not reused; there are as many as there
    /// were namespaces.
    domains: HashMap<Domain, u64, FixedState>,
    started: u64,
    held: bool,
}

impl CopierRegistry {
    /// Attaches a process to the copier of its GPU, and starts that copier if there is none; the
    /// process need not wait for it. The process has at most `most_bytes` there. With a `domain` the
    /// copier may deduplicate its memory with other processes of that domain. `ahead`: the process
    /// stays resident for now. Returns false while no copier may be started.
    pub(super) fn attach(
        &mut self,
        now: Millis,
        (process, uuid): (ProcessId, &str),
        most_bytes: u64,
        domain: Option<Domain>,
        ahead: bool,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if !self.by_gpu.contains_key(uuid) && !self.start(now, uuid, effects) {
            return false;
        }
        let domain = self.number_of(domain);
        let Some(copier) = self.by_gpu.get_mut(uuid) else { return false };
        copier.used_at = now;
        effects.push(Effect::AttachCopier { copier: copier.id, process, most_bytes, domain });
        let attachment = match ahead {
            true => AttachmentState::Ahead { prefaulted: false },
            false => AttachmentState::Offloading { prefaulted: false },
        };
        let attached = AttachedProcess { uuid: uuid.to_owned(), attachment, shared_bytes: 0 };
        self.attached.insert(process, attached);
        true
    }

    fn start(&mut self, now: Millis, uuid: &str, effects: &mut Vec<Effect>) -> bool {
        if !self.backoff.allow(uuid, now) {
            return false;
        }
        self.started += 1;
        let id = CopierId(self.started);
        let copier = GpuCopier {
            id,
            stage: CopierStage::Starting(now),
            used_at: now,
            unregisters: false,
            filling: None,
            stored_bytes: 0,
        };
        self.by_gpu.insert(uuid.to_owned(), copier);
        effects.push(Effect::StartCopier { copier: id, gpu: uuid.to_owned() });
        if self.held {
            effects.push(Effect::HoldCopier { copier: id, on: true });
        }
        true
    }

    /// Called when a process is offloaded: whether it was attached ahead to this GPU's copier. A
    /// second connection would discard what is registered.
    pub(super) fn was_attached_ahead(&mut self, process: ProcessId, uuid: &str) -> bool {
        let attached = self.attached.get_mut(&process).filter(|attached| attached.uuid == uuid);
        match attached.map(|attached| &mut attached.attachment) {
            Some(attachment @ AttachmentState::Ahead { .. }) => {
                let prefaulted = *attachment == AttachmentState::Ahead { prefaulted: true };
                *attachment = AttachmentState::Offloading { prefaulted };
                true
            }
            _ => false,
        }
    }

    /// Forgets a process: it needs its copier no longer, or has no connection to it. Reports of the
    /// copier about it are ignored from now on. Returns whether it was attached ahead of an offload.
    pub(super) fn detach(&mut self, process: ProcessId) -> bool {
        let attached = self.attached.remove(&process);
        attached.is_some_and(|a| matches!(a.attachment, AttachmentState::Ahead { .. }))
    }

    /// A process is being restored, with this much VRAM: its copier fills the memory, if it has it
    /// registered.
    pub(super) fn fill(
        &mut self,
        now: Millis,
        process: ProcessId,
        most_bytes: u64,
        effects: &mut Vec<Effect>,
    ) {
        let registered = |a: &&AttachedProcess| a.attachment == AttachmentState::Registered;
        let Some(attached) = self.attached.get(&process).filter(registered) else { return };
        if let Some(copier) = self.by_gpu.get_mut(&attached.uuid) {
            copier.filling = Some((process, now));
            effects.push(Effect::FillMemory { copier: copier.id, process, most_bytes });
        }
    }

    /// Whether a GPU has a copier that is ready.
    pub(super) fn has_ready(&self, uuid: &str) -> bool {
        self.by_gpu.get(uuid).is_some_and(|copier| copier.stage == CopierStage::Ready)
    }

    /// Whether a copier is still creating its context, or still ending: VRAM that is free now may
    /// not be free in a moment. A copier that has not exited after `END_MS` is ignored.
    pub(super) fn is_moving(&self, now: Millis) -> bool {
        self.ending.values().any(|since| now.saturating_sub(*since) < END_MS)
            || self.by_gpu.values().any(|copier| copier.stage != CopierStage::Ready)
    }

    /// Pauses (`true`) or resumes registrations while VRAM is being proven free or taken.
    pub(super) fn hold(&mut self, on: bool, effects: &mut Vec<Effect>) {
        if self.held != on {
            self.held = on;
            let all = self.by_gpu.values();
            effects.extend(all.map(|copier| Effect::HoldCopier { copier: copier.id, on }));
        }
    }

    /// Ends the copiers of GPUs on which a container waits for VRAM. A copier that is filling a
    /// process or copying one out goes on: its work ends sooner, or frees VRAM itself.
    pub(super) fn make_room(
        &mut self,
        now: Millis,
        uuids: &BTreeSet<String>,
        leaves: impl Fn(ProcessId) -> bool,
        effects: &mut Vec<Effect>,
    ) {
        let copies = |id: &ProcessId, attached: &AttachedProcess| {
            let prefaulted = matches!(
                attached.attachment,
                AttachmentState::Ahead { prefaulted: true }
                    | AttachmentState::Offloading { prefaulted: true }
            );
            prefaulted && leaves(*id)
        };
        let copying: BTreeSet<&String> =
            self.attached.iter().filter(|(id, a)| copies(id, a)).map(|(_, a)| &a.uuid).collect();
        let fills = |copier: &GpuCopier| {
            copier.filling.is_some_and(|(_, since)| now.saturating_sub(since) < FILL_MS)
        };
        let idle = |uuid: &&String| {
            self.by_gpu.get(*uuid).is_some_and(|copier| !fills(copier)) && !copying.contains(uuid)
        };
        let over: Vec<String> = uuids.iter().filter(idle).cloned().collect();
        over.iter().for_each(|uuid| self.end(now, uuid, CopierEnd::MakesRoom, effects));
    }

    /// Ends copiers that had no process for `LINGER_MS`, or that do not become ready.
    pub(super) fn tick(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        self.ending.retain(|_, since| now.saturating_sub(*since) < END_MS);
        let used: BTreeSet<&String> = self.attached.values().map(|a| &a.uuid).collect();
        let (mut stuck, mut unused) = (Vec::new(), Vec::new());
        for (uuid, copier) in &mut self.by_gpu {
            if used.contains(uuid) {
                copier.used_at = now;
            }
            match copier.stage {
                CopierStage::Starting(since) if now.saturating_sub(since) >= START_MS => {
                    stuck.push(uuid.clone());
                }
                _ if now.saturating_sub(copier.used_at) >= LINGER_MS => unused.push(uuid.clone()),
                _ => {}
            }
        }
        for uuid in stuck {
            self.end_lost(now, &uuid, effects);
        }
        for uuid in unused {
            self.end(now, &uuid, CopierEnd::Unused, effects);
        }
    }

    /// The connection of a copier ended. Its process may still live.
    pub(super) fn ended(&mut self, now: Millis, id: CopierId, effects: &mut Vec<Effect>) {
        if let Some(uuid) = self.gpu_of(id) {
            self.end_lost(now, &uuid, effects);
        }
    }

    /// The process of a copier has exited: it holds no memory any longer.
    pub(super) fn exited(&mut self, now: Millis, id: CopierId, effects: &mut Vec<Effect>) {
        self.ended(now, id, effects);
        self.ending.remove(&id);
    }

    /// Takes over a report of a copier. One of a copier that was ended is ignored.
    pub(super) fn report(&mut self, id: CopierId, report: CopierReport) {
        let Some(uuid) = self.gpu_of(id) else { return };
        let Some(copier) = self.by_gpu.get_mut(&uuid) else { return };
        match report {
            CopierReport::Ready => {
                copier.stage = CopierStage::Ready;
                self.backoff.forget(&uuid);
            }
            CopierReport::Registered { process, .. } => {
                if let Some(attached) = self.member(process, &uuid) {
                    attached.attachment = AttachmentState::Registered;
                }
            }
            CopierReport::Prefaulted { process, .. } => self.set_prefaulted(process, &uuid, true),
            CopierReport::Copied { process, .. } => {
                self.set_prefaulted(process, &uuid, false);
                *self.offloads.entry(uuid).or_default() += 1;
            }
            CopierReport::Filled { .. } => {
                copier.filling = None;
                *self.restores.entry(uuid).or_default() += 1;
            }
            CopierReport::Detached { process } => {
                copier.unregisters = true;
                copier.filling = copier.filling.filter(|(filled, _)| filled.0 != process);
                if self.member(process, &uuid).is_some() {
                    self.attached.remove(&ProcessId(process));
                }
                // A file without a process is removed by the copier.
                if self.shared_bytes(&uuid) == 0
                    && let Some(copier) = self.by_gpu.get_mut(&uuid)
                {
                    copier.stored_bytes = 0;
                }
            }
            CopierReport::Released => copier.unregisters = false,
            CopierReport::Shared { process, bytes, stored_bytes } => {
                copier.stored_bytes = stored_bytes;
                if let Some(attached) = self.member(process, &uuid) {
                    attached.shared_bytes = bytes;
                }
            }
        }
    }

    /// What users see of the copier of a GPU.
    pub(super) fn figures(&self, uuid: &str) -> CopierFigures {
        let here = || self.attached.values().filter(|attached| attached.uuid == uuid);
        let count = |matches: fn(AttachmentState) -> bool| {
            u32::try_from(here().filter(|a| matches(a.attachment)).count()).unwrap_or(u32::MAX)
        };
        let copier = self.by_gpu.get(uuid);
        let registered = count(|attachment| attachment == AttachmentState::Registered);
        let prefaulted =
            count(|attachment| attachment == AttachmentState::Ahead { prefaulted: true });
        let others = count(|_| true) - registered - prefaulted;
        CopierFigures {
            prefaulted,
            registering: others + u32::from(copier.is_some_and(|copier| copier.unregisters)),
            registered,
            restores: self.restores.get(uuid).copied().unwrap_or(0),
            offloads: self.offloads.get(uuid).copied().unwrap_or(0),
            shared_bytes: self.shared_bytes(uuid),
            stored_bytes: copier.map_or(0, |copier| copier.stored_bytes),
        }
    }

    /// Ends a copier that is lost or stuck. One that never was ready counts as a failure.
    fn end_lost(&mut self, now: Millis, uuid: &str, effects: &mut Vec<Effect>) {
        let why = match self.has_ready(uuid) {
            true => CopierEnd::Lost,
            false => CopierEnd::NeverReady { pause_ms: self.backoff.note(uuid, now) },
        };
        self.end(now, uuid, why, effects);
    }

    fn end(&mut self, now: Millis, uuid: &str, why: CopierEnd, effects: &mut Vec<Effect>) {
        if let Some(copier) = self.by_gpu.remove(uuid) {
            effects.push(Effect::EndCopier { copier: copier.id, why });
            self.ending.insert(copier.id, now);
        }
        self.attached.retain(|_, attached| attached.uuid != uuid);
    }

    fn set_prefaulted(&mut self, process: u64, uuid: &str, is: bool) {
        match self.member(process, uuid).map(|attached| &mut attached.attachment) {
            Some(
                AttachmentState::Ahead { prefaulted } | AttachmentState::Offloading { prefaulted },
            ) => *prefaulted = is,
            Some(AttachmentState::Registered) | None => {}
        }
    }

    fn gpu_of(&self, id: CopierId) -> Option<String> {
        self.by_gpu.iter().find(|(_, copier)| copier.id == id).map(|(uuid, _)| uuid.clone())
    }

    /// An attached process, by the number that the copier uses.
    fn member(&mut self, process: u64, uuid: &str) -> Option<&mut AttachedProcess> {
        self.attached.get_mut(&ProcessId(process)).filter(|attached| attached.uuid == uuid)
    }

    /// The number by which copiers know a domain; 0: no domain.
    fn number_of(&mut self, domain: Option<Domain>) -> u64 {
        let next = self.domains.len() as u64 + 1;
        domain.map_or(0, |domain| *self.domains.entry(domain).or_insert(next))
    }

    /// Deduplicated memory of the processes of a GPU, in bytes.
    fn shared_bytes(&self, uuid: &str) -> u64 {
        let here = self.attached.values().filter(|attached| attached.uuid == uuid);
        here.map(|attached| attached.shared_bytes).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
