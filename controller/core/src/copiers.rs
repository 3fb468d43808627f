//! The copiers of the node: at most one process per GPU that copies memory for other processes.
//! This module decides which GPU has a copier, which processes the copier serves, when it ends, and
//! when NVML's proof of free VRAM waits for it.
//!
//! ```text
//! none ──offload or prefault begins──> Starting ──CopierReport: Ready──> Ready
//!   ^                                     │ not ready in time,             │ LINGER_MS without a
//!   │                                     │ ended: RestartBackoff          │ process, a container
//!   │                                     v                                │ waits for its VRAM
//!   └──────────CopierExited──────────── ending <───────────────────────────┘
//! ```
//!
//! A copier allocates VRAM when it starts and frees it when it ends, so a sample of free VRAM may
//! be wrong a moment later. A proof therefore waits until no copier starts or ends, and copiers
//! register no memory during a proof ([`super::Effect::HoldCopier`]). No copier is started while a
//! container waits or VRAM is promised.
//!
//! A copier is optional. A process that has no copier, or whose copier has ended, restores its
//! memory itself. The processes and sockets of copiers are in `controller/src/copier`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use affinode_proto::wire::copier::CopierReport;
use foldhash::fast::FixedState;

use super::{Domain, Effect, Millis, ProcessId, copier_backoff::RestartBackoff};

/// Time after which a copier without attached processes is ended.
pub(super) const LINGER_MS: Millis = 30_000;
/// Time limit for a fill, which is a copier's copy back into VRAM. If the copier has not reported
/// the end by then, the fill counts as ended.
const FILL_MS: Millis = 20_000;
/// Time limit for the start of a copier. A slower start counts as failed, because proofs of free
/// VRAM wait until the copier has started.
pub(super) const START_MS: Millis = 5_000;
/// Maximum time for which a proof of free VRAM waits until a copier has ended.
pub(super) const END_MS: Millis = 5_000;

/// Number that identifies a copier. Numbers are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CopierId(pub u64);

/// Why a copier is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopierEnd {
    /// No process was attached to the copier for `LINGER_MS`.
    Unused,
    /// A container waits for VRAM, so the copier must free the VRAM of its CUDA context.
    MakesRoom,
    /// The copier lost its connection to the controller, or its process ended.
    Lost,
    /// The copier did not become ready in time. No other copier is started on its GPU for
    /// `pause_ms`.
    NeverReady {
        /// Time until the next copier may be started on the GPU, in milliseconds.
        pause_ms: Millis,
    },
}

/// Stage of a copier: starting or ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopierStage {
    /// The copier is creating its CUDA context. Contains the time at which it was started.
    Starting(Millis),
    Ready,
}

#[derive(Debug)]
struct GpuCopier {
    id: CopierId,
    stage: CopierStage,
    /// When a process was last attached to the copier.
    used_at: Millis,
    /// Whether the copier is unregistering host memory of processes that have detached from it.
    unregisters: bool,
    /// The process whose memory the copier is copying back into VRAM (a fill), and when the copy
    /// began. `None`: no fill is in progress.
    filling: Option<(ProcessId, Millis)>,
    /// Size of the files in which the copier stores deduplicated memory, in bytes.
    stored_bytes: u64,
}

/// Stage of a process that is attached to a copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttachmentState {
    /// The process is resident, and was attached to the copier before its offload. `prefaulted`:
    /// whether the copier has already registered the host memory that the process prepared for the
    /// offload.
    Ahead { prefaulted: bool },
    /// The process is being offloaded. `prefaulted`: whether the copier registered the process's
    /// host memory before the offload and has not copied to it yet. If false, the copier has not
    /// registered the memory before the offload, or has copied to it already.
    Offloading { prefaulted: bool },
    /// The process is offloaded, and the copier has registered its host memory. The copier can copy
    /// the content back into VRAM.
    Registered,
}

#[derive(Debug)]
struct AttachedProcess {
    uuid: String,
    attachment: AttachmentState,
    /// Amount of the process's memory that is deduplicated, in bytes.
    shared_bytes: u64,
}

/// Figures about the copier of a GPU that users see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopierFigures {
    /// Number of resident processes whose prepared (prefaulted) host memory the copier has
    /// registered.
    pub prefaulted: u32,
    /// Number of processes whose host memory the copier is registering or unregistering.
    pub registering: u32,
    /// Number of offloaded processes whose host memory the copier has registered.
    pub registered: u32,
    /// Number of restores in which a copier of this GPU copied the memory back into VRAM.
    pub restores: u64,
    /// Number of offloads in which a copier of this GPU copied the memory.
    pub offloads: u64,
    /// Amount of deduplicated memory of the processes that are attached to the copier, in bytes.
    pub shared_bytes: u64,
    /// Size of the files with deduplicated memory, in bytes.
    pub stored_bytes: u64,
}

/// The copiers, and the processes that are attached to them.
#[derive(Debug, Default)]
pub(super) struct CopierRegistry {
    by_gpu: BTreeMap<String, GpuCopier>,
    attached: BTreeMap<ProcessId, AttachedProcess>,
    /// Copiers that were ordered to end and have not exited, each with the time of the order. The
    /// driver may still have VRAM allocated for them.
    ending: BTreeMap<CopierId, Millis>,
    backoff: RestartBackoff,
    restores: BTreeMap<String, u64>,
    offloads: BTreeMap<String, u64>,
    /// The number of each dedup domain (a set of processes whose identical content is stored once),
    /// from 1. A domain keeps its number after all its processes have ended, so that no other
    /// domain gets it.
    domains: HashMap<Domain, u64, FixedState>,
    started: u64,
    held: bool,
}

impl CopierRegistry {
    /// Attaches a process to the copier of its GPU, and starts a copier if the GPU has none. The
    /// process need not wait until the copier has started. Returns false if no copier may be
    /// started.
    ///
    /// `most_bytes`: maximum number of bytes that the copier accepts from the process. `domain`:
    /// the dedup domain, which is the set of processes with which the copier may deduplicate the
    /// process's memory. `ahead`: whether the process is attached before its offload.
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

    /// Whether a process whose offload begins is attached to this GPU's copier already. The process
    /// must then keep its connection, because a second connection would discard the memory that the
    /// copier has registered. Records that the offload has begun.
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

    /// Removes a process that no longer needs its copier or has no connection to it. The controller
    /// ignores later reports of the copier about this process. Returns whether the process was
    /// attached in advance, for an offload that has not begun.
    pub(super) fn detach(&mut self, process: ProcessId) -> bool {
        let attached = self.attached.remove(&process);
        attached.is_some_and(|a| matches!(a.attachment, AttachmentState::Ahead { .. }))
    }

    /// Orders the copier to copy a process's memory back into VRAM. `most_bytes`: the granted VRAM,
    /// which the copier must not exceed. Does nothing if the copier has not registered the memory
    /// of that process.
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

    /// Whether a copier is starting or ending, so that a sample of free VRAM may soon be wrong. An
    /// ending copier is ignored after `END_MS`, even if it has not exited.
    pub(super) fn is_moving(&self, now: Millis) -> bool {
        self.ending.values().any(|since| now.saturating_sub(*since) < END_MS)
            || self.by_gpu.values().any(|copier| copier.stage != CopierStage::Ready)
    }

    /// Orders all copiers to pause (`true`) or resume (`false`) the registration of host memory.
    /// They pause while VRAM is being proven free or allocated for a grant.
    pub(super) fn hold(&mut self, on: bool, effects: &mut Vec<Effect>) {
        if self.held != on {
            self.held = on;
            let all = self.by_gpu.values();
            effects.extend(all.map(|copier| Effect::HoldCopier { copier: copier.id, on }));
        }
    }

    /// Ends the copiers of GPUs on which a container waits for VRAM. A copier that is copying a
    /// process's memory continues: a copy into VRAM ends soon, and a copy out of VRAM frees VRAM
    /// itself.
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

    /// Ends copiers that had no process for `LINGER_MS`, and copiers that did not become ready in
    /// time.
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

    /// Records that the connection of a copier ended. The copier's process may still run.
    pub(super) fn ended(&mut self, now: Millis, id: CopierId, effects: &mut Vec<Effect>) {
        if let Some(uuid) = self.gpu_of(id) {
            self.end_lost(now, &uuid, effects);
        }
    }

    /// Records that the process of a copier has exited, so that it no longer holds memory.
    pub(super) fn exited(&mut self, now: Millis, id: CopierId, effects: &mut Vec<Effect>) {
        self.ended(now, id, effects);
        self.ending.remove(&id);
    }

    /// Handles a report of a copier. A report of an ended copier is ignored.
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
                // When the last process that shares content with others has left, the copier
                // removes its file of deduplicated memory.
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

    /// Figures about the copier of a GPU that users see.
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

    /// Ends a copier that lost its connection or does not respond. If the copier was never ready,
    /// its start counts as failed.
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

    /// Finds the attached process by the number that the copier uses in its reports.
    fn member(&mut self, process: u64, uuid: &str) -> Option<&mut AttachedProcess> {
        self.attached.get_mut(&ProcessId(process)).filter(|attached| attached.uuid == uuid)
    }

    /// Number of a dedup domain in orders to copiers. 0: no domain. A new domain gets the next free
    /// number.
    fn number_of(&mut self, domain: Option<Domain>) -> u64 {
        let next = self.domains.len() as u64 + 1;
        domain.map_or(0, |domain| *self.domains.entry(domain).or_insert(next))
    }

    /// Amount of deduplicated memory of all processes of a GPU, in bytes.
    fn shared_bytes(&self, uuid: &str) -> u64 {
        let here = self.attached.values().filter(|attached| attached.uuid == uuid);
        here.map(|attached| attached.shared_bytes).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
