//! The node: all containers and processes, and the decisions that follow from each input.
//!
//! Registration and exit are in `registration.rs`, counters and NVML samples in `measurements.rs`.
//! Requests of operators are in `requests.rs`, offload and restore in `transitions.rs`. Grants are
//! in `grants.rs`, and the lists for operators in `view.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::message::{AgentMessage, PROOF_TTL_MS},
};
use foldhash::fast::FixedState;
use indexmap::IndexMap;

use super::{
    ContainerSpec, DeviceBytes, Effect, Key, Millis, ProcessId,
    container::Container,
    copiers::CopierRegistry,
    grant::Grant,
    history::Pauses,
    holds::HoldOrder,
    host_memory::{HostLedger, MemoryPool},
    input::{GpuSample, Input, SwapStatus},
    ledger::Ledger,
    order_report::OrderReport,
    plan::OrderDeadlines,
    policy::Policies,
    processes::Processes,
    queue::Queue,
    registration::RegistrationStatus,
    victims::VictimRule,
};

/// Settings of the node, from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Policies of the node and of its namespaces.
    pub policies: Policies,
    /// Deadlines of the close and lock orders.
    pub deadlines: OrderDeadlines,
    /// Time limit for a process to pause its allocations after the order, in milliseconds.
    pub hold_ms: u32,
    /// Maximum number of managed CUDA processes in one container.
    pub max_processes: usize,
    /// Whether copiers are used on this node.
    pub copiers: bool,
    /// Minimum number of bytes that an agent must be able to copy for its process to be prefaulted.
    pub prefault_min_bytes: u64,
    /// The rule that chooses containers to evict for a waiter.
    pub victims: VictimRule,
    /// Whether processes pause their allocations while another container is restored. False only in
    /// simulations, whose processes never allocate.
    pub hold: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            policies: Policies::default(),
            deadlines: OrderDeadlines { close_ms: 1_000, lock_ms: 5_000 },
            hold_ms: 500,
            max_processes: 256,
            copiers: true,
            prefault_min_bytes: 16 << 20,
            victims: VictimRule::Expected,
            hold: true,
        }
    }
}

/// The journal's record of a process that has not registered with this controller.
#[derive(Debug, Default)]
pub(super) struct JournalClaim {
    pub(super) offloaded: Vec<DeviceBytes>,
    /// UUID of the target GPU of a migration in progress. `None`: the process is restored on its
    /// own GPU.
    pub(super) to: Option<String>,
    pub(super) restoring: bool,
    /// The pools of host memory that the process's offload uses, each with the full number of bytes
    /// that the offload takes.
    pub(super) host: Vec<MemoryPool>,
    /// The process's VRAM in the last NVML sample, in bytes. `None` before the first sample.
    pub(super) held_bytes: Option<u64>,
}

/// The whole state of the node. One task drives it.
#[derive(Debug, Default)]
pub struct Node {
    pub(super) settings: Settings,
    pub(super) overrides: super::overrides::OperatorOverrides,
    /// When this controller started, in clock ticks. 0: unknown.
    pub(super) started_ticks: u64,
    pub(super) now: Millis,
    /// Wall clock when `now` was 0, in milliseconds since 1970.
    pub(super) clock_ms: i64,
    /// The containers, ordered by key. They are found by hash, because each input looks up several
    /// containers.
    pub(super) containers: IndexMap<Key, Container, FixedState>,
    pub(super) processes: Processes,
    pub(super) gpus: Vec<GpuSample>,
    pub(super) gpu_error: Option<String>,
    /// Time of the last NVML sample of all GPUs.
    pub(super) gpus_read: Millis,
    /// Time of the last NVML utilisation sample. `None`: there was no sample, so utilisation is
    /// unknown.
    pub(super) utilization_sampled_at: Option<Millis>,
    /// VRAM per GPU that was freed since the last sample of memory.
    pub(super) freed_since_sample: Vec<DeviceBytes>,
    pub(super) ledger: Ledger,
    pub(super) host_ledger: HostLedger,
    pub(super) queue: Queue,
    /// Buffer for the waiters in queue order. It is empty between calls and only keeps its
    /// capacity.
    pub(super) queue_scratch: Vec<Key>,
    pub(super) grants: BTreeMap<Key, Grant>,
    pub(super) hold_orders: BTreeMap<u64, HoldOrder>,
    pub(super) copiers: CopierRegistry,
    pub(super) unclaimed_journal: BTreeMap<(Key, u32, u64), JournalClaim>,
    /// Pauses of all containers. They predict the pauses of a container that has too few of its
    /// own.
    pub(super) pauses: Pauses,
    pub(super) oversubscription: super::oversubscription::Oversubscription,
    pub(super) gpus_under_pressure: BTreeSet<String>,
    pub(super) prewakes: u64,
    pub(super) prewake_hits: u64,
    pub(super) next_order: u64,
    pub(super) next_proof: u64,
    pub(super) effects: Vec<Effect>,
    /// Containers whose next orders are decided before the input is done.
    pub(super) resumed: VecDeque<Key>,
}

impl Node {
    /// Creates a node without containers.
    #[must_use]
    pub fn new(settings: Settings) -> Node {
        Node { settings, ..Node::default() }
    }

    /// Handles one input and returns the effects to execute, in order.
    #[must_use]
    pub fn handle(&mut self, now: Millis, input: Input) -> Vec<Effect> {
        self.decide(now, input);
        std::mem::take(&mut self.effects)
    }

    /// Like [`handle`](Node::handle), but appends the effects to the caller's buffer. This saves
    /// the simulator one allocation per input.
    pub fn handle_into(&mut self, now: Millis, input: Input, effects: &mut Vec<Effect>) {
        self.decide(now, input);
        effects.append(&mut self.effects);
    }

    fn decide(&mut self, now: Millis, input: Input) {
        let silent_ms = now.saturating_sub(self.now);
        self.now = self.now.max(now);
        if silent_ms > PROOF_TTL_MS {
            self.doubt_grants();
        }
        self.excuse_stall(silent_ms);
        // These inputs neither free nor request VRAM, so the queue is not served after them. Most
        // inputs are counter readings.
        let may_serve = !matches!(
            input,
            Input::Page(..)
                | Input::Worked(_)
                | Input::Clock(_)
                | Input::Foreseen(..)
                | Input::CopierReport(..)
        );
        self.take(input);
        self.advance_resumed();
        if may_serve {
            self.serve_queue();
            self.settle_host_memory();
        }
        self.prove_when_copiers_rest();
    }

    /// Passes an input to the part that handles it.
    fn take(&mut self, input: Input) {
        match input {
            Input::Started(ticks) => self.started_ticks = ticks,
            Input::Clock(unix_ms) => self.set_clock(unix_ms),
            Input::Reconfigured(settings) => self.reconfigure(*settings),
            Input::Overridden(overrides) => self.overrides = overrides,
            Input::Foreseen(key, next_use) => self.foresee(&key, next_use),
            Input::Announced(spec, key) => self.announced(*spec, &key),
            Input::Withdrawn(key) => self.withdrawn(&key),
            Input::Joined {
                key,
                process,
                identity,
                phase,
                generation,
                hazards,
                capabilities,
                swap,
            } => {
                let standing =
                    RegistrationStatus { phase, generation, hazards, capabilities, swap };
                self.register(&key, process, identity, standing);
            }
            Input::Detached(process) => self.detached(process),
            Input::Exited(process) => self.exited(process),
            Input::Message(process, message) => self.message(process, message),
            Input::Page(process, page) => self.page(process, page),
            Input::BadPage(process, why) => self.bad_page(process, why),
            Input::Gpus(gpus) => self.gpus_read(gpus),
            Input::Worked(work) => self.worked(&work),
            Input::CopierReport(copier, report) => self.copier_reported(copier, report),
            Input::CopierEnded(copier) => self.copier_ended(copier),
            Input::CopierExited(copier) => self.copier_exited(copier),
            Input::NotAttached(process) => self.not_attached(process),
            Input::Surveyed(key, survey) => self.surveyed(&key, survey),
            Input::HostLevels(levels) => self.host_levels_read(levels),
            Input::Proven(key, number, gpus) => self.proven(&key, number, gpus),
            Input::Recalled { key, identity, offloaded, to, restoring, host } => {
                let claim = JournalClaim { offloaded, to, restoring, host, held_bytes: None };
                self.recall(key, identity, claim);
            }
            Input::Command(command, key, request) => self.command(command, &key, request),
            Input::Hinted(key, hint, who) => {
                self.hinted(&key, hint, &who);
                self.due(&key);
            }
            Input::Connections(key, count) => self.connections(&key, count),
            Input::Due(key) => self.due(&key),
            Input::Tick => self.tick(),
        }
    }

    fn set_clock(&mut self, unix_ms: i64) {
        self.clock_ms = unix_ms.saturating_sub(i64::try_from(self.now).unwrap_or(i64::MAX));
    }

    fn reconfigure(&mut self, settings: Settings) {
        self.settings = settings;
        for container in self.containers.values_mut() {
            let (policy, warnings) = policy_of(&self.settings.policies, &container.spec);
            container.policy = policy;
            container.warnings = warnings;
        }
    }

    /// Time until the next [`Input::Tick`] is due, at most `usual_ms`, in milliseconds.
    #[must_use]
    pub fn tick_ms(&self, usual_ms: Millis) -> Millis {
        let busy = !self.queue.is_empty()
            || self
                .containers
                .values()
                .any(|c| c.goal.is_offloaded() && c.shown.state != State::Offloaded);
        if busy { usual_ms.min(50) } else { usual_ms }
    }

    /// The container's invalid annotations, one warning each.
    #[must_use]
    pub fn annotation_warnings(&self, key: &Key) -> Vec<String> {
        self.containers.get(key).map(|c| c.warnings.clone()).unwrap_or_default()
    }

    /// Number of containers that wait for VRAM.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    fn foresee(&mut self, key: &Key, next_use: Option<Millis>) {
        if let Some(container) = self.containers.get_mut(key) {
            container.usage.next_use = next_use;
        }
    }

    /// Number of prewakes, and number of prewakes that a call followed.
    #[must_use]
    pub fn prewakes(&self) -> (u64, u64) {
        (self.prewakes, self.prewake_hits)
    }

    /// Connected processes. Their counters can be read.
    pub fn connected(&self) -> impl Iterator<Item = ProcessId> + '_ {
        let all = self.processes.ids().into_iter();
        all.filter(|id| self.processes.get(id).is_some_and(|p| p.connected))
    }

    /// Connected processes of a container.
    pub fn connected_of(&self, key: &Key) -> Vec<ProcessId> {
        self.processes.of(key).filter(|(_, p)| p.connected).map(|(id, _)| id).collect()
    }

    /// Host pids of all managed processes.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.processes.values().map(|process| process.identity.pid)
    }

    /// Containers without a process, each with its spec. `lives` returns whether a process with
    /// this pid and start time exists.
    pub fn deserted(
        &self,
        lives: impl Fn(u32, u64) -> bool,
    ) -> impl Iterator<Item = (&Key, &ContainerSpec)> {
        let mut used: BTreeSet<&Key> = self.processes.values().map(|p| &p.key).collect();
        // A process that an earlier controller offloaded may be stopped or frozen, and register
        // later. It then needs the socket of its container, so the container does not count as
        // deserted.
        let unseen = self.unclaimed_journal.keys().filter(|(_, pid, start)| lives(*pid, *start));
        used.extend(unseen.map(|(key, ..)| key));
        self.containers
            .iter()
            .filter(move |(key, _)| !used.contains(key))
            .map(|(key, c)| (key, &c.spec))
    }

    fn message(&mut self, id: ProcessId, message: AgentMessage) {
        match message {
            // The protocol allows one Hello per connection. Later ones are ignored.
            AgentMessage::Hello { .. } => {}
            AgentMessage::Wake { generation, .. } => {
                if self.wake(id, generation) {
                    // Orders of the restore come first: they decide the place in the queue.
                    self.advance_resumed();
                    self.acknowledge_wake(id, generation);
                }
            }
            AgentMessage::Report {
                order,
                outcome,
                phase,
                cuda_error,
                swappable_bytes: bytes,
                copied_out_bytes,
                unchanged_bytes,
                zero_bytes,
                local_memory_bytes,
                ..
            } => {
                let swap = SwapStatus {
                    swappable_bytes: bytes,
                    copied_out_bytes,
                    unchanged_bytes,
                    zero_bytes,
                    local_memory_bytes,
                };
                self.report(id, OrderReport { order, outcome, phase, cuda_error, swap });
            }
            AgentMessage::AllocWait { ticket, bytes, uuid, attempts } => {
                self.alloc_wait_began(id, ticket, bytes, &uuid, attempts);
            }
            AgentMessage::AllocWaitDone { ticket, served } => {
                self.alloc_wait_ended(id, ticket, served)
            }
            AgentMessage::Notice { hazards } => self.learn_hazards(id, hazards),
            AgentMessage::AskReadings => self.send_readings(id),
        }
    }

    fn tick(&mut self) {
        let keys: BTreeSet<Key> = self.containers.keys().cloned().collect();
        for key in keys {
            self.due(&key);
        }
        self.check_grants();
        self.check_terminations();
        self.look_at_pressure();
        self.keep_copiers();
    }

    /// Sends the next orders of each container that was resumed.
    fn advance_resumed(&mut self) {
        while let Some(key) = self.resumed.pop_front() {
            self.advance(&key);
        }
    }

    fn due(&mut self, key: &Key) {
        self.check_overdue(key);
        self.check_alloc_wait(key);
        self.evaluate(key);
        self.survey_again(key);
        self.update_prefault(key);
        self.expect(key);
        self.resume(key);
        self.advance_resumed();
        self.settle_requests(key);
    }
}

/// The text of a reason, followed by the detail if there is one.
#[must_use]
pub fn text_of(reason: Reason, detail: &str) -> String {
    if detail.is_empty() {
        reason.sentence().to_owned()
    } else {
        format!("{}: {detail}", reason.sentence())
    }
}

/// The policy of an announced container, with a warning for each invalid annotation.
#[must_use]
pub fn policy_of(
    policies: &Policies,
    spec: &ContainerSpec,
) -> (super::policy::Policy, Vec<String>) {
    policies.resolve(spec.rule_namespace(), &spec.annotations)
}
