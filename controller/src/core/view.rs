//! The node's GPUs and containers as the control API lists them.

use affinode_proto::{
    api::control,
    reason::Reason,
    state::State,
    wire::{Hazards, ProcessFlags, counters::CounterSnapshot},
};

use super::{
    DeviceBytes, Key, Millis, Node, ProcessId, container::Container, input::Identity,
    node::text_of, process::Process,
};
use crate::conversion::announcement_of;

/// State of a container as its own programs can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerStatus {
    /// State of the GPU memory.
    pub state: State,
    /// When the container entered this state, on the controller's monotonic clock.
    pub since: Millis,
    /// Why the container is in this state.
    pub reason: Reason,
    /// Number of waiters that are served before the container. `None`: it does not wait for VRAM.
    pub waiters_before: Option<usize>,
}

/// Reason why no container was found by a name. The text is for an operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// The name is empty.
    #[error("name a container; `affinode ps` lists them")]
    Unnamed,
    /// No container matches the name.
    #[error("no container is named {0:?}; `affinode ps` lists them")]
    Unknown(String),
    /// Several containers match the name.
    #[error("{name:?} matches {}; name one of them", found.join(", "))]
    Ambiguous {
        /// The given name, which may be a prefix of a container's key, id or name.
        name: String,
        /// Names of the containers that match it.
        found: Vec<String>,
    },
}

impl Node {
    /// The state of each container.
    pub fn statuses(&self, now: Millis) -> impl Iterator<Item = (&Key, ContainerStatus)> {
        self.containers.iter().map(move |(key, container)| {
            let status = ContainerStatus {
                state: container.state,
                since: container.state_since,
                reason: container.reason.0,
                waiters_before: self.queue.position(key, now),
            };
            (key, status)
        })
    }

    /// The current GPUs and containers. `unix_ms`: the wall clock now.
    #[must_use]
    pub fn list(&self, now: Millis, unix_ms: i64) -> control::ListResponse {
        control::ListResponse {
            gpus: self.list_gpus(),
            containers: self
                .containers
                .iter()
                .map(|(key, c)| self.list_container(key, c, now, unix_ms))
                .collect(),
            gpu_error: self.gpu_error.clone().unwrap_or_default(),
            auto_offload: self.overrides().auto_offload,
            ..control::ListResponse::default()
        }
    }

    /// Finds a container by its key, id or name, or by a prefix that matches no other container.
    ///
    /// # Errors
    /// [`FindError`]: no container or several match.
    pub fn find(&self, name: &str) -> Result<Key, FindError> {
        let whole = |(key, c): &(&Key, &Container)| {
            key.as_str() == name || c.spec.id == name || c.display_name() == name
        };
        if let Some((key, _)) = self.containers.iter().find(whole) {
            return Ok(key.clone());
        }
        let begins = |(key, c): &(&Key, &Container)| {
            [key.as_str(), c.spec.id.as_str(), c.spec.pod.as_str(), c.display_name().as_str()]
                .iter()
                .any(|known| known.starts_with(name))
        };
        let found: Vec<(&Key, &Container)> = self.containers.iter().filter(begins).collect();
        match found.as_slice() {
            _ if name.is_empty() => Err(FindError::Unnamed),
            [] => Err(FindError::Unknown(name.to_owned())),
            [(key, _)] => Ok((*key).clone()),
            several => {
                let found = several.iter().map(|(_, c)| c.display_name()).collect();
                Err(FindError::Ambiguous { name: name.to_owned(), found })
            }
        }
    }

    /// Name of a container for users; empty if it is unknown.
    #[must_use]
    pub fn display_name(&self, key: &Key) -> String {
        self.containers.get(key).map(Container::display_name).unwrap_or_default()
    }

    /// State of a container; `None` if it is unknown.
    #[must_use]
    pub fn state(&self, key: &Key) -> Option<State> {
        self.containers.get(key).map(|container| container.state)
    }

    /// Connected processes of the selected containers: number, key, identity and the container's
    /// name.
    pub fn callers(
        &self,
        wanted: impl Fn(&Key) -> bool,
    ) -> impl Iterator<Item = (ProcessId, &Key, &Identity, String)> {
        let of = move |(key, container): (_, &Container)| {
            let name = container.display_name();
            let connected = self.processes.of(key).filter(|(_, p)| p.connected);
            connected.map(move |(id, p)| (id, key, &p.identity, name.clone()))
        };
        self.containers.iter().filter(move |(key, _)| wanted(key)).flat_map(of)
    }

    fn list_gpus(&self) -> Vec<control::Gpu> {
        let reclaimed = |uuid: &str| {
            let offloaded = self
                .processes
                .values()
                .filter(|p| p.phase.is_offloaded())
                .flat_map(|p| p.vram_to_restore().unwrap_or_default());
            offloaded.filter(|d| d.uuid == uuid).map(|d| d.bytes).sum()
        };
        self.gpus
            .iter()
            .map(|gpu| (gpu, self.copiers.figures(&gpu.uuid)))
            .map(|(gpu, copier)| control::Gpu {
                index: gpu.index,
                uuid: gpu.uuid.clone(),
                name: gpu.name.clone(),
                vram_total_bytes: gpu.total_bytes,
                vram_used_bytes: gpu.used_bytes,
                vram_reclaimed_bytes: reclaimed(&gpu.uuid),
                vram_reserved_bytes: self.ledger.promised_bytes(&gpu.uuid),
                utilization_percent: gpu.utilization_percent,
                simulated: gpu.name.contains("Simulated"),
                copier_prefaulted: copier.prefaulted,
                copier_registering: copier.registering,
                copier_registered: copier.registered,
                copier_restores: copier.restores,
                copier_offloads: copier.offloads,
                copier_shared_bytes: copier.shared_bytes,
                copier_stored_bytes: copier.stored_bytes,
                ..control::Gpu::default()
            })
            .collect()
    }

    fn list_container(
        &self,
        key: &Key,
        c: &Container,
        now: Millis,
        unix_ms: i64,
    ) -> control::Container {
        let processes: Vec<(ProcessId, &Process)> = self.processes.of(key).collect();
        let ago = |then: Millis| i64::try_from(now.saturating_sub(then)).unwrap_or(i64::MAX);
        let (staying_bytes, staying_reasons) = staying(&processes);
        control::Container {
            announcement: Some(announcement_of(key, &c.spec)).into(),
            state: c.state.to_string(),
            since_unix_ms: unix_ms.saturating_sub(ago(c.state_since)),
            idle_ms: if processes.is_empty() { 0 } else { now.saturating_sub(c.last_use) },
            reason: c.reason.0.to_string(),
            reason_text: text_of(c.reason.0, &c.reason.1),
            vram_bytes: processes.iter().map(|(_, p)| p.vram_bytes()).sum(),
            offloaded_bytes: processes
                .iter()
                .filter(|(_, p)| p.phase.is_offloaded())
                .map(|(_, p)| p.offloaded_vram_bytes())
                .sum(),
            offloads: c.offloads,
            restores: c.restores,
            last_offload_ms: c.last_offload_ms,
            last_wake_ms: c.last_wake_ms,
            last_restore_ms: c.last_restore_ms,
            wake_p99_ms: c.wakes.p99_ms(),
            idle_after_ms: c.idle_after_ms(),
            mode: c.policy.mode.as_str().to_owned(),
            engine: c.policy.engine.as_str().to_owned(),
            idle_timeout_ms: c.policy.idle_timeout_ms,
            priority: c.policy.priority,
            warnings: warnings(c, &processes),
            processes: processes.into_iter().map(|(_, p)| self.list_process(p)).collect(),
            pinned: self.overrides().pinned.contains(key),
            staying_bytes,
            staying_reasons,
            ..control::Container::default()
        }
    }

    fn list_process(&self, p: &Process) -> control::Process {
        let device = |d: &DeviceBytes| control::DeviceBytes {
            uuid: d.uuid.clone(),
            bytes: d.bytes,
            ..control::DeviceBytes::default()
        };
        control::Process {
            pid: p.identity.pid,
            phase: format!("{:?}", p.phase),
            command: p.identity.command.clone(),
            vram_bytes: p.vram_bytes(),
            vram: p.vram.iter().map(device).collect(),
            last_call: p
                .counters
                .as_ref()
                .filter(|page| page.calls > 0)
                .map_or_else(String::new, last_call),
            offloaded: if p.phase.is_offloaded() {
                p.vram_to_restore().iter().flatten().map(device).collect()
            } else {
                Vec::new()
            },
            calls: p.counters.as_ref().map_or(0, |page| page.calls),
            inflight: p.counters.as_ref().map_or(0, |page| page.inflight),
            waiters: p.counters.as_ref().map_or(0, |page| page.waiters),
            hazards: hazard_words(p.hazards),
            polls: p.counters.as_ref().map_or(0, |page| page.polls),
            call_cost_ps: p.counters.as_ref().map_or(0, |page| page.call_cost_ps),
            held_us: p.counters.as_ref().map_or(0, |page| page.held_us),
            kept_bytes: p.counters.as_ref().map_or(0, |page| page.kept_bytes),
            unchanged_bytes: p.swap.unchanged_bytes,
            zero_bytes: p.swap.zero_bytes,
            swappable_bytes: p.swap.swappable_bytes,
            copied_out_bytes: p.swap.copied_out_bytes,
            utilization_percent: self.utilization_percent(p),
            ..control::Process::default()
        }
    }
}

/// VRAM that offloaded processes still hold, and the hazards that keep their contexts on the GPU.
fn staying(processes: &[(ProcessId, &Process)]) -> (u64, Vec<String>) {
    let offloaded = || processes.iter().filter(|(_, p)| p.phase.is_offloaded());
    let hazards = offloaded().fold(0, |all, (_, p)| all | p.hazards.0 & p.copyable_hazards().0);
    (offloaded().map(|(_, p)| p.vram_bytes()).sum(), hazard_words(Hazards(hazards)))
}

fn warnings(c: &Container, processes: &[(ProcessId, &Process)]) -> Vec<String> {
    let refused = processes.iter().filter(|(_, p)| {
        p.counters.as_ref().is_some_and(|page| page.notes.intersects(ProcessFlags::IPC_REFUSED))
    });
    let refused = refused.map(|(_, p)| ipc_refused(p.identity.pid));
    let slow = processes.iter().filter(|(_, p)| p.copy_failed).map(|(_, p)| {
        let pid = p.identity.pid;
        format!(
            "the memory of process {pid} could not be copied: the driver's checkpoint moves it \
             instead"
        )
    });
    let is_damaged = |p: &Process| p.hazards.intersects(Hazards::DAMAGED_MEMORY);
    let damaged = processes.iter().filter(|(_, p)| is_damaged(p));
    let damaged = damaged.map(|(_, p)| damaged_text(p.identity.pid));
    c.warnings.iter().cloned().chain(damaged).chain(refused).chain(slow).collect()
}

/// Warning of a process that could not export memory as an IPC handle, and what to do.
pub(super) fn ipc_refused(pid: u32) -> String {
    format!(
        "process {pid} asked for an IPC handle of memory that a copier restored, which cannot be exported: set affinode.io/engine to copy or checkpoint"
    )
}

/// Event text for a process that calls the driver without the hooks.
pub(super) fn hidden_text(pid: u32) -> String {
    format!(
        "a thread of process {pid} bypassed the library's hooks and blocked in the driver: \
         the process was restored, and its context stays on the GPU from now on"
    )
}

/// Warning of a process whose restored memory has changed, and what to do.
pub(super) fn damaged_text(pid: u32) -> String {
    format!(
        "the memory of process {pid} differs after a restore: the process wrote out of bounds, or \
         host memory or the bus failed. Its CUDA calls fail from now on; restart it"
    )
}

fn last_call(page: &CounterSnapshot) -> String {
    affinode_cuda_sys::hook::name(page.last_hook).unwrap_or_default().to_owned()
}

fn hazard_words(hazards: Hazards) -> Vec<String> {
    [
        (Hazards::MANAGED_MEMORY, "managed-memory"),
        (Hazards::PEER_ACCESS, "peer-access"),
        (Hazards::SHARED_MEMORY, "shared-memory"),
        (Hazards::DIRECT_ACCESS, "direct-access"),
        (Hazards::MPS, "mps"),
        (Hazards::NO_CHECKPOINT_API, "driver-too-old"),
        (Hazards::DAMAGED_MEMORY, "damaged-memory"),
        (Hazards::TOOLS, "tools"),
        (Hazards::VIDEO, "video"),
        (Hazards::HIDDEN_WAY, "hidden-way"),
    ]
    .into_iter()
    .filter(|(bit, _)| hazards.intersects(*bit))
    .map(|(_, word)| word.to_owned())
    .collect()
}
