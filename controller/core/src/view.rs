//! Queries on the state of a node, for users, the daemon and the simulator.

use std::collections::BTreeSet;

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Hazards, ProcessFlags},
};

use super::{
    ContainerSpec, GpuSample, Key, Millis, Node, ProcessId, connection_prewake,
    container::Container,
    copiers::CopierFigures,
    copy_watch::{self, CopyInProgress},
    driver_limit,
    explain::{self, Value},
    idle,
    input::Identity,
    needs, no_progress,
    overrides::OperatorOverrides,
    policy::Policies,
    prewake,
    process::Process,
    registration,
    texts::{copy_failed_text, damaged_text, ipc_refused_text, no_driver_limit_text},
};

/// State of a container, with the details that programs in the container can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerStatus {
    /// State of the container, such as `Offloaded`.
    pub state: State,
    /// When the container entered this state, on the controller's monotonic clock.
    pub since: Millis,
    /// Why the container is in this state.
    pub reason: Reason,
    /// Number of containers that get VRAM before this container. `None`: it does not wait for VRAM.
    pub waiters_before: Option<usize>,
}

/// Error of a search for a container by name: the search found no container, or found several. The
/// text is for an operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// The name is empty.
    #[error("no container name was given; `affinode ps` lists the names")]
    Unnamed,
    /// No container matches the name.
    #[error("no container is named {0:?}; `affinode ps` lists them")]
    Unknown(String),
    /// Several containers match the name.
    #[error("{name:?} matches {}; name one of them", found.join(", "))]
    Ambiguous {
        /// The given name. It may be a prefix of a container's key, id or name.
        name: String,
        /// Names of the containers that match the given name.
        found: Vec<String>,
    },
}

impl Node {
    /// The containers, ordered by key.
    pub fn containers(&self) -> impl Iterator<Item = (&Key, &Container)> {
        self.state.registry.containers.iter()
    }

    /// All processes of a container, including processes without a connection.
    pub fn processes(&self, key: &Key) -> impl Iterator<Item = &Process> {
        self.state.registry.processes.of(key).map(|(_, process)| process)
    }

    /// The GPUs in the last NVML sample.
    #[must_use]
    pub fn gpus(&self) -> &[GpuSample] {
        &self.state.gpus.samples
    }

    /// Why the last reading of NVML failed, or why it could not read some of the GPUs. `None`: it
    /// read all GPUs.
    #[must_use]
    pub fn gpu_error(&self) -> Option<String> {
        let gpus = &self.state.gpus;
        let unreadable: Vec<&str> =
            gpus.unreadable.iter().filter_map(|gpu| gpu.error.as_deref()).collect();
        let of_some = || (!unreadable.is_empty()).then(|| unreadable.join("; "));
        gpus.error.clone().or_else(of_some)
    }

    /// VRAM that offloaded processes released on a GPU, in bytes.
    #[must_use]
    pub fn reclaimed_bytes(&self, uuid: &str) -> u64 {
        let offloaded =
            self.state.registry.processes.values().filter(|p| p.agent.phase.is_offloaded());
        let given_up = offloaded.flat_map(|p| p.vram_to_restore().unwrap_or_default());
        given_up.filter(|device| device.uuid == uuid).map(|device| device.bytes).sum()
    }

    /// VRAM of a GPU that no offload can free, in bytes: the VRAM of containers that must stay on the
    /// GPU for a lasting reason, of contexts that stay when their containers are offloaded, and of
    /// everything that is not a container of Affinode. 0 if the GPU is not in the last NVML sample.
    #[must_use]
    pub fn unmovable_bytes(&self, uuid: &str) -> u64 {
        needs::unmovable_bytes(&self.state, uuid)
    }

    /// VRAM that is promised to containers on a GPU, in bytes.
    #[must_use]
    pub fn promised_bytes(&self, uuid: &str) -> u64 {
        self.state.admission.ledger.promised_bytes(uuid)
    }

    /// Figures of a GPU's copier: numbers of processes, offloads and restores, and sizes of its
    /// memory.
    #[must_use]
    pub fn copier_figures(&self, uuid: &str) -> CopierFigures {
        self.state.copiers.figures(uuid)
    }

    /// The policies of the node and its namespaces.
    #[must_use]
    pub fn policies(&self) -> &Policies {
        &self.state.settings.policies
    }

    /// The status of each container at the time `now`.
    pub fn statuses(&self, now: Millis) -> impl Iterator<Item = (&Key, ContainerStatus)> {
        self.state.registry.containers.iter().map(move |(key, container)| {
            let status = ContainerStatus {
                state: container.shown.state,
                since: container.shown.since,
                reason: container.shown.reason.0,
                waiters_before: self.state.admission.queue.position(key, now),
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
        if let Some((key, _)) = self.state.registry.containers.iter().find(whole) {
            return Ok(key.clone());
        }
        let begins = |(key, c): &(&Key, &Container)| {
            [key.as_str(), c.spec.id.as_str(), c.spec.pod.as_str(), c.display_name().as_str()]
                .iter()
                .any(|known| known.starts_with(name))
        };
        let found: Vec<(&Key, &Container)> =
            self.state.registry.containers.iter().filter(begins).collect();
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
        self.state.display_name(key)
    }

    /// State of a container; `None` if it is unknown.
    #[must_use]
    pub fn state(&self, key: &Key) -> Option<State> {
        self.state.registry.containers.get(key).map(|container| container.shown.state)
    }

    /// VRAM that the processes of a container hold, in bytes.
    #[must_use]
    pub fn vram_bytes(&self, key: &Key) -> u64 {
        self.state.registry.processes.of(key).map(|(_, p)| p.vram_bytes()).sum()
    }

    /// VRAM that the offloaded processes of a container released, in bytes.
    #[must_use]
    pub fn offloaded_bytes(&self, key: &Key) -> u64 {
        self.state.offloaded_bytes(key)
    }

    /// Content of the offloaded processes of a container that is on disk and not in host memory, in
    /// bytes.
    #[must_use]
    pub fn disk_bytes(&self, key: &Key) -> u64 {
        self.offloaded(key).map(Process::disk_bytes).fold(0, u64::saturating_add)
    }

    /// VRAM in bytes that the offloaded processes of a container still hold, and the hazards that
    /// keep this VRAM on the GPU.
    #[must_use]
    pub fn staying(&self, key: &Key) -> (u64, Hazards) {
        let hazards =
            self.offloaded(key).fold(0, |all, p| all | p.agent.hazards.0 & p.copyable_hazards().0);
        (self.offloaded(key).map(Process::vram_bytes).sum(), Hazards(hazards))
    }

    fn offloaded(&self, key: &Key) -> impl Iterator<Item = &Process> {
        self.state
            .registry
            .processes
            .of(key)
            .map(|(_, p)| p)
            .filter(|p| p.agent.phase.is_offloaded())
    }

    /// Warnings about a container for users: its invalid annotations, and problems with the memory
    /// of its processes.
    #[must_use]
    pub fn warnings(&self, key: &Key) -> Vec<String> {
        let known = self
            .state
            .registry
            .containers
            .get(key)
            .map(|c| c.warnings.as_slice())
            .unwrap_or_default();
        let of = |has: fn(&Process) -> bool, text: fn(u32) -> String| {
            let having = self.state.registry.processes.of(key).filter(move |(_, p)| has(p));
            having.map(move |(_, p)| text(p.identity.pid))
        };
        let is_damaged = |p: &Process| p.agent.hazards.intersects(Hazards::DAMAGED_MEMORY);
        let is_refused = |p: &Process| {
            p.activity
                .counters
                .as_ref()
                .is_some_and(|page| page.notes.intersects(ProcessFlags::IPC_REFUSED))
        };
        known
            .iter()
            .cloned()
            .chain(of(is_damaged, damaged_text))
            .chain(of(is_refused, ipc_refused_text))
            .chain(of(|p| p.failed_moves.copy, copy_failed_text))
            .chain(self.no_progress_text(key))
            .chain(
                driver_limit::result(&self.state, key)
                    .and_then(Result::err)
                    .map(no_driver_limit_text),
            )
            .collect()
    }

    /// Whether the driver enforces the VRAM limit of a container, in addition to the library.
    #[must_use]
    pub fn has_driver_limit(&self, key: &Key) -> bool {
        driver_limit::result(&self.state, key).is_some_and(|result| result.is_ok())
    }

    fn no_progress_text(&self, key: &Key) -> Option<String> {
        let stop = self.state.registry.containers.get(key)?.usage.no_progress.as_ref()?;
        Some(stop.text(self.no_progress_ms(key)?))
    }

    /// Time for which the container has held a GPU without progress. `None`: it makes progress, is
    /// idle or waits, or the time is below its `no_progress_timeout`.
    #[must_use]
    pub fn no_progress_ms(&self, key: &Key) -> Option<Millis> {
        self.state.registry.containers.get(key)?.usage.no_progress.as_ref()?;
        no_progress::quiet_ms(&self.state, key)
    }

    /// Connected processes of the containers for which `wanted` returns true. Each entry has the
    /// process's number, the container's key, the process's identity and the container's name.
    pub fn callers(
        &self,
        wanted: impl Fn(&Key) -> bool,
    ) -> impl Iterator<Item = (ProcessId, &Key, &Identity, String)> {
        let of = move |(key, container): (_, &Container)| {
            let name = container.display_name();
            let connected =
                self.state.registry.processes.of(key).filter(|(_, p)| p.agent.connected);
            connected.map(move |(id, p)| (id, key, &p.identity, name.clone()))
        };
        self.state.registry.containers.iter().filter(move |(key, _)| wanted(key)).flat_map(of)
    }

    /// Time until the next [`super::Input::Tick`] is due, in milliseconds. It is at most
    /// `usual_ms`.
    #[must_use]
    pub fn tick_ms(&self, usual_ms: Millis) -> Millis {
        let busy = !self.state.admission.queue.is_empty()
            || self
                .state
                .registry
                .containers
                .values()
                .any(|c| c.goal.is_offloaded() && c.shown.state != State::Offloaded);
        if busy { usual_ms.min(50) } else { usual_ms }
    }

    /// The container's invalid annotations, one warning each.
    #[must_use]
    pub fn annotation_warnings(&self, key: &Key) -> Vec<String> {
        self.state.registry.containers.get(key).map(|c| c.warnings.clone()).unwrap_or_default()
    }

    /// Number of containers in the queue for VRAM.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.admission.queue.len()
    }

    /// Number of prewakes (restores before an expected CUDA call), and number of prewakes that a
    /// call followed.
    #[must_use]
    pub fn prewakes(&self) -> (u64, u64) {
        (self.state.prediction.prewakes, self.state.prediction.prewake_hits)
    }

    /// Processes with a connection. The controller can read the counters of these processes.
    pub fn connected(&self) -> impl Iterator<Item = ProcessId> + '_ {
        let all = self.state.registry.processes.ids().into_iter();
        all.filter(|id| self.state.registry.processes.get(id).is_some_and(|p| p.agent.connected))
    }

    /// Key of the container of a registered process.
    #[must_use]
    pub fn key_of(&self, process: ProcessId) -> Option<&Key> {
        self.state.registry.processes.get(&process).map(|process| &process.key)
    }

    /// Processes of a container that have a connection.
    pub fn connected_of(&self, key: &Key) -> Vec<ProcessId> {
        self.state
            .registry
            .processes
            .of(key)
            .filter(|(_, p)| p.agent.connected)
            .map(|(id, _)| id)
            .collect()
    }

    /// Host pids of all managed processes, which are processes that have registered.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.state.registry.processes.values().map(|process| process.identity.pid)
    }

    /// Containers without a process, each with its spec. A process that is known only from the
    /// journal of an earlier controller counts as a process of its container while it exists.
    /// `lives` returns whether a process with this pid and start time exists.
    pub fn deserted(
        &self,
        lives: impl Fn(u32, u64) -> bool,
    ) -> impl Iterator<Item = (&Key, &ContainerSpec)> {
        let mut used: BTreeSet<&Key> =
            self.state.registry.processes.values().map(|p| &p.key).collect();
        // A process that an earlier controller offloaded may be stopped or frozen, and register
        // later. It then needs the socket of its container, so the container does not count as
        // deserted.
        let unseen = self
            .state
            .registry
            .unclaimed_journal
            .keys()
            .filter(|(_, pid, start)| lives(*pid, *start));
        used.extend(unseen.map(|(key, ..)| key));
        self.state
            .registry
            .containers
            .iter()
            .filter(move |(key, _)| !used.contains(key))
            .map(|(key, c)| (key, &c.spec))
    }

    /// Whether a container with this generation differs from the known container with this key. The
    /// generation is compared because ids of containers are reused. Generation 0 matches any
    /// container.
    #[must_use]
    pub fn is_of_another(&self, key: &Key, generation: u64) -> bool {
        registration::is_of_another(&self.state, key, generation)
    }

    /// Lists the effective settings of a container, including the choices of operators.
    #[must_use]
    pub fn explain(&self, key: &Key) -> Vec<Value> {
        explain::explain(&self.state, key)
    }

    /// Share of the last sample period in which work of the process ran on the GPU, in percent. 0:
    /// the process is not in the sample. `None`: there is no valid sample.
    #[must_use]
    pub fn utilization_percent(&self, process: &Process) -> Option<u32> {
        idle::utilization_percent(&self.state, process)
    }

    /// Next time at which a decision about the container is due, as far as it is known now. `None`:
    /// no decision is planned.
    #[must_use]
    pub fn due_at(&self, key: &Key) -> Option<Millis> {
        prewake::due_at(&self.state, key)
    }

    /// Containers whose new TCP connections the controller counts, each with the pid of a process
    /// in its network namespace.
    pub fn listening(&self) -> impl Iterator<Item = (&Key, u32)> {
        connection_prewake::listening(&self.state)
    }

    /// All containers with a copy out in progress.
    #[must_use]
    pub fn copies_in_progress(&self) -> Vec<CopyInProgress> {
        copy_watch::copies_in_progress(&self.state)
    }

    /// The operators' choices that apply now. [`super::Input::Overridden`] replaces them.
    #[must_use]
    pub fn overrides(&self) -> &OperatorOverrides {
        &self.state.overrides
    }

    /// UUIDs of the GPUs with pressure, which means that a container or an allocation waits for
    /// their VRAM.
    #[must_use]
    pub fn pressed(&self) -> &BTreeSet<String> {
        &self.state.gpus.under_pressure
    }
}
