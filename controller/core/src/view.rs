//! What users see of a node: states of containers, their names, and texts about processes.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Hazards, ProcessFlags},
};

use super::{
    GpuSample, Key, Millis, Node, ProcessId, container::Container, copiers::CopierFigures,
    input::Identity, policy::Policies, process::Process,
};

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
    /// The containers, ordered by key.
    pub fn containers(&self) -> impl Iterator<Item = (&Key, &Container)> {
        self.containers.iter()
    }

    /// The connected and disconnected processes of a container.
    pub fn processes(&self, key: &Key) -> impl Iterator<Item = &Process> {
        self.processes.of(key).map(|(_, process)| process)
    }

    /// The GPUs as NVML reported them last.
    #[must_use]
    pub fn gpus(&self) -> &[GpuSample] {
        &self.gpus
    }

    /// Why the last reading of NVML failed. `None`: it succeeded.
    #[must_use]
    pub fn gpu_error(&self) -> Option<&str> {
        self.gpu_error.as_deref()
    }

    /// VRAM of a GPU that offloaded processes gave up, in bytes.
    #[must_use]
    pub fn reclaimed_bytes(&self, uuid: &str) -> u64 {
        let offloaded = self.processes.values().filter(|p| p.phase.is_offloaded());
        let given_up = offloaded.flat_map(|p| p.vram_to_restore().unwrap_or_default());
        given_up.filter(|device| device.uuid == uuid).map(|device| device.bytes).sum()
    }

    /// VRAM of a GPU that is promised to containers, in bytes.
    #[must_use]
    pub fn promised_bytes(&self, uuid: &str) -> u64 {
        self.ledger.promised_bytes(uuid)
    }

    /// Figures about the copier of a GPU.
    #[must_use]
    pub fn copier_figures(&self, uuid: &str) -> CopierFigures {
        self.copiers.figures(uuid)
    }

    /// The policies of the node and its namespaces.
    #[must_use]
    pub fn policies(&self) -> &Policies {
        &self.settings.policies
    }

    /// The state of each container.
    pub fn statuses(&self, now: Millis) -> impl Iterator<Item = (&Key, ContainerStatus)> {
        self.containers.iter().map(move |(key, container)| {
            let status = ContainerStatus {
                state: container.shown.state,
                since: container.shown.since,
                reason: container.shown.reason.0,
                waiters_before: self.queue.position(key, now),
            };
            (key, status)
        })
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
        self.containers.get(key).map(|container| container.shown.state)
    }

    /// VRAM that the processes of a container hold, in bytes.
    #[must_use]
    pub fn vram_bytes(&self, key: &Key) -> u64 {
        self.processes.of(key).map(|(_, p)| p.vram_bytes()).sum()
    }

    /// VRAM that the offloaded processes of a container gave up, in bytes.
    #[must_use]
    pub fn offloaded_bytes(&self, key: &Key) -> u64 {
        self.offloaded(key).map(Process::offloaded_vram_bytes).sum()
    }

    /// VRAM in bytes that the offloaded processes of a container still hold, and the hazards that
    /// keep it on the GPU.
    #[must_use]
    pub fn staying(&self, key: &Key) -> (u64, Hazards) {
        let hazards =
            self.offloaded(key).fold(0, |all, p| all | p.hazards.0 & p.copyable_hazards().0);
        (self.offloaded(key).map(Process::vram_bytes).sum(), Hazards(hazards))
    }

    fn offloaded(&self, key: &Key) -> impl Iterator<Item = &Process> {
        self.processes.of(key).map(|(_, p)| p).filter(|p| p.phase.is_offloaded())
    }

    /// Warnings about a container for users: its invalid annotations, and problems with the memory
    /// of its processes.
    #[must_use]
    pub fn warnings(&self, key: &Key) -> Vec<String> {
        let known = self.containers.get(key).map(|c| c.warnings.as_slice()).unwrap_or_default();
        let of = |has: fn(&Process) -> bool, text: fn(u32) -> String| {
            let having = self.processes.of(key).filter(move |(_, p)| has(p));
            having.map(move |(_, p)| text(p.identity.pid))
        };
        let is_damaged = |p: &Process| p.hazards.intersects(Hazards::DAMAGED_MEMORY);
        let is_refused = |p: &Process| {
            p.counters.as_ref().is_some_and(|page| page.notes.intersects(ProcessFlags::IPC_REFUSED))
        };
        known
            .iter()
            .cloned()
            .chain(of(is_damaged, damaged_text))
            .chain(of(is_refused, ipc_refused))
            .chain(of(|p| p.copy_failed, copy_failed_text))
            .collect()
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
}

/// Warning of a process whose memory could not be copied.
fn copy_failed_text(pid: u32) -> String {
    format!(
        "the memory of process {pid} could not be copied: the driver's checkpoint moves it instead"
    )
}

/// Warning of a process that could not export memory as an IPC handle, and what to do.
pub(super) fn ipc_refused(pid: u32) -> String {
    format!(
        "process {pid} could not export an IPC handle of its memory, because a copier restored the memory: set affinode.io/engine to copy or checkpoint"
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
