//! The node: every container and process, and what happens on each input.
//! Who comes and goes is in `roster.rs`, what is read in `readings.rs`, what people ask in
//! `requests.rs`, the way out and home in `moves.rs`, grants in `grants.rs`, the list that
//! people see in `view.rs`.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::{
    api::control::{Announcement, Event},
    reason::Reason,
    state::State,
    wire::message::{Action, AgentMessage, ControllerMessage, PROOF_TTL_MS},
};
use foldhash::fast::FixedState;
use indexmap::IndexMap;

use super::{
    Change, DeviceBytes, Effect, Key, Millis, ProcessId,
    container::{Container, Goal},
    grant::Grant,
    history::Pauses,
    holds::HoldOrder,
    host_memory::{HostLedger, MemoryPool},
    input::{GpuSample, Input, SwapStatus},
    ledger::Ledger,
    plan::OrderDeadlines,
    policy::Policies,
    process::PendingOrder,
    processes::Processes,
    queue::Queue,
    registration::RegistrationStatus,
    victims::VictimRule,
};

/// What the node is configured with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Policies of node and namespaces.
    pub policies: Policies,
    /// Deadlines of close and lock.
    pub deadlines: OrderDeadlines,
    /// How long processes are given to hold their allocations.
    pub hold_ms: u32,
    /// Most CUDA processes of one container.
    pub max_processes: usize,
    /// Whose agent copies less is not worth a preparation, in bytes.
    pub prefault_min_bytes: u64,
    /// Who makes room for a waiter.
    pub victims: VictimRule,
    /// Whether processes hold their allocations while another is restored. A simulation
    /// whose processes never allocate leaves it out.
    pub hold: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            policies: Policies::default(),
            deadlines: OrderDeadlines { close_ms: 1_000, lock_ms: 5_000 },
            hold_ms: 500,
            max_processes: 256,
            prefault_min_bytes: 16 << 20,
            victims: VictimRule::Expected,
            hold: true,
        }
    }
}

/// What the journal says of a process that has not come back yet.
#[derive(Debug, Default)]
pub(super) struct JournalClaim {
    pub(super) away: Vec<DeviceBytes>,
    /// Where it may be restored, if not where it was.
    pub(super) to: Option<String>,
    pub(super) restoring: bool,
    /// The pools of host memory that pay for it, with all that its offload takes there.
    pub(super) host: Vec<MemoryPool>,
    /// VRAM that it holds by the last reading of NVML; `None` before the first.
    pub(super) held_bytes: Option<u64>,
}

/// Everything that is known of the node. One task drives it.
#[derive(Debug, Default)]
pub struct Node {
    pub(super) settings: Settings,
    pub(super) overrides: super::overrides::OperatorOverrides,
    /// When this controller started, in clock ticks; 0: not known.
    pub(super) started_ticks: u64,
    pub(super) now: Millis,
    /// Wall clock when `now` was 0, milliseconds since 1970.
    clock_ms: i64,
    /// In order of their keys, and found by hash: every input asks for some, many times.
    pub(super) containers: IndexMap<Key, Container, FixedState>,
    pub(super) processes: Processes,
    pub(super) gpus: Vec<GpuSample>,
    pub(super) gpu_error: Option<String>,
    /// When all devices were read last.
    pub(super) gpus_read: Millis,
    /// When the second witness spoke last; never: nobody knows who works.
    pub(super) utilization_sampled_at: Option<Millis>,
    /// What has left devices since their memory was read.
    pub(super) freed_since_sample: Vec<DeviceBytes>,
    pub(super) ledger: Ledger,
    pub(super) host_ledger: HostLedger,
    pub(super) queue: Queue,
    /// Empty; its room is used again for who waits, in order of turns.
    pub(super) queue_scratch: Vec<Key>,
    pub(super) grants: BTreeMap<Key, Grant>,
    pub(super) hold_orders: BTreeMap<u64, HoldOrder>,
    pub(super) unclaimed_journal: BTreeMap<(Key, u32, u64), JournalClaim>,
    /// Pauses of all containers: what a new one is expected to do.
    pub(super) pauses: Pauses,
    pub(super) oversubscription: super::oversubscription::Oversubscription,
    pub(super) gpus_under_pressure: BTreeSet<String>,
    /// Of absences in which a context stayed, the share in which it had to go after
    /// all, of 1024.
    pub(super) context_evicted_share: u32,
    pub(super) prewakes: u64,
    pub(super) prewake_hits: u64,
    next_order: u64,
    pub(super) next_proof: u64,
    pub(super) effects: Vec<Effect>,
}

impl Node {
    /// An empty node.
    #[must_use]
    pub fn new(settings: Settings) -> Node {
        Node { settings, ..Node::default() }
    }

    /// Takes one input and says what is to be done, in order.
    #[must_use]
    pub fn handle(&mut self, now: Millis, input: Input) -> Vec<Effect> {
        self.decide(now, input);
        std::mem::take(&mut self.effects)
    }

    /// Takes one input and adds what is to be done, in order: for one who feeds millions, and
    /// has a place for effects already.
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
        // Pages and work free nothing and ask for nothing, and pages are most of what comes.
        let may_serve = !matches!(input, Input::Page(..) | Input::Worked(_));
        match input {
            Input::Announced(announcement, key) => self.announced(*announcement, &key),
            Input::Withdrawn(key) => self.withdrawn(&key),
            Input::Joined { key, process, identity, phase, generation, hazards, carried } => {
                let standing = RegistrationStatus { phase, generation, hazards, carried };
                self.register(&key, process, identity, standing);
            }
            Input::Detached(process) => self.detached(process),
            Input::Exited(process) => self.exited(process),
            Input::Message(process, message) => self.message(process, message),
            Input::Page(process, page) => self.page(process, page),
            Input::BadPage(process, why) => self.bad_page(process, why),
            Input::Gpus(gpus) => self.gpus_read(gpus),
            Input::Worked(work) => self.worked(&work),
            Input::Surveyed(key, survey) => self.surveyed(&key, survey),
            Input::HostLevels(levels) => self.host_levels_read(levels),
            Input::Proven(key, number, gpus) => self.proven(&key, number, gpus),
            Input::Recalled { key, identity, away, to, restoring, host } => {
                let claim = JournalClaim { away, to, restoring, host, held_bytes: None };
                self.recall(key, identity, claim);
            }
            Input::Command(command, key, request) => self.command(command, &key, request),
            Input::Hinted(key, hint, who) => self.hinted(&key, hint, &who),
            Input::Connections(key, count) => self.connections(&key, count),
            Input::Due(key) => self.due(&key),
            Input::Tick => self.tick(),
        }
        if may_serve {
            self.serve_queue();
            self.settle_host_memory();
        }
    }

    /// Tells the wall clock at a moment of the node's: windows are times of the week.
    pub fn tell_clock(&mut self, now: Millis, unix_ms: i64) {
        self.clock_ms = unix_ms.saturating_sub(i64::try_from(now).unwrap_or(i64::MAX));
    }

    pub(super) fn week_minute(&self) -> u32 {
        let now = i64::try_from(self.now).unwrap_or(i64::MAX);
        super::window::week_minute(self.clock_ms.saturating_add(now))
    }

    /// Tells when this controller started, in clock ticks. A process that is younger was
    /// never moved by an earlier one.
    pub fn started(&mut self, ticks: u64) {
        self.started_ticks = ticks;
    }

    /// Replaces the settings; policies of known containers are resolved again.
    pub fn reconfigure(&mut self, settings: Settings) {
        self.settings = settings;
        for container in self.containers.values_mut() {
            let (policy, warnings) = policy_of(&self.settings.policies, &container.announcement);
            container.policy = policy;
            container.warnings = warnings;
        }
    }

    /// How long the caller may sleep before the next [`Input::Tick`].
    #[must_use]
    pub fn tick_ms(&self, usual_ms: Millis) -> Millis {
        let busy = !self.queue.is_empty()
            || self
                .containers
                .values()
                .any(|c| c.goal == Goal::Offloaded && c.state != State::Offloaded);
        if busy { usual_ms.min(50) } else { usual_ms }
    }

    /// Annotations of a container that were not understood.
    #[must_use]
    pub fn warnings(&self, key: &Key) -> Vec<String> {
        self.containers.get(key).map(|c| c.warnings.clone()).unwrap_or_default()
    }

    /// How many containers wait for VRAM.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Tells when a container is used next: what only a simulation knows.
    pub fn foresee(&mut self, key: &Key, next_use: Option<Millis>) {
        if let Some(container) = self.containers.get_mut(key) {
            container.next_use = next_use;
        }
    }

    /// Returns ahead of calls that were counted: all, and those that were used.
    #[must_use]
    pub fn prewakes(&self) -> (u64, u64) {
        (self.prewakes, self.prewake_hits)
    }

    /// The processes whose pages are to be read.
    pub fn connected(&self) -> impl Iterator<Item = ProcessId> + '_ {
        let all = self.processes.ids().into_iter();
        all.filter(|id| self.processes.get(id).is_some_and(|p| p.connected))
    }

    /// All managed processes.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.processes.values().map(|process| process.identity.pid)
    }

    /// Containers without a process, and their bundles.
    pub fn deserted(&self, lives: impl Fn(u32, u64) -> bool) -> impl Iterator<Item = (&Key, &str)> {
        let mut used: BTreeSet<&Key> = self.processes.values().map(|p| &p.key).collect();
        // Who is away and has not come forward yet (stopped, frozen) needs its socket to return.
        let unseen = self.unclaimed_journal.keys().filter(|(_, pid, start)| lives(*pid, *start));
        used.extend(unseen.map(|(key, ..)| key));
        self.containers
            .iter()
            .filter(move |(key, _)| !used.contains(key))
            .map(|(key, c)| (key, c.announcement.bundle.as_str()))
    }

    pub(super) fn members(&self, key: &Key) -> Vec<ProcessId> {
        self.processes.ids_of(key).collect()
    }

    pub(super) fn order(&mut self, process: ProcessId, action: Action) -> u64 {
        self.next_order += 1;
        let order = self.next_order;
        let decided_ms = self.now;
        let message = ControllerMessage::Order { order, action, decided_ms };
        self.effects.push(Effect::Send(process, message));
        if !matches!(action, Action::HoldAllocations { .. } | Action::ReleaseAllocations)
            && let Some(process) = self.processes.get_mut(&process)
        {
            process.pending = Some(PendingOrder { order, action, since: self.now });
        }
        order
    }

    pub(super) fn publish(&mut self, key: &Key, event: Event) {
        let name = self.containers.get(key).map(Container::display_name).unwrap_or_default();
        let event = Event { key: key.as_str().to_owned(), container: name, ..event };
        self.effects.push(Effect::Publish(Box::new(event)));
    }

    /// Shows a new state, with why. The same state again only renews the reason.
    pub(super) fn set_state(
        &mut self,
        key: &Key,
        to: State,
        reason: Reason,
        detail: &str,
        bytes: u64,
        elapsed_ms: Millis,
    ) {
        let now = self.now;
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        container.reason = (reason, detail.to_owned());
        let from = container.state;
        if from == to {
            return;
        }
        container.state = to;
        container.state_since = now;
        self.effects.push(Effect::Changed(Change {
            key: key.clone(),
            container: container.display_name(),
            from,
            to,
            reason,
            detail: detail.to_owned(),
            bytes,
            elapsed_ms,
        }));
    }

    fn message(&mut self, id: ProcessId, message: AgentMessage) {
        match message {
            // A second Hello on a connection is not in the protocol; the first one holds.
            AgentMessage::Hello { .. } => {}
            AgentMessage::Wake { generation, .. } => self.wake(id, generation),
            AgentMessage::Report {
                order,
                outcome,
                phase,
                cuda_error,
                swappable_bytes: bytes,
                copied_out_bytes,
                unchanged_bytes,
                zero_bytes,
                ..
            } => {
                let carried = SwapStatus {
                    swappable_bytes: bytes,
                    copied_out_bytes,
                    unchanged_bytes,
                    zero_bytes,
                };
                self.report(id, order, outcome, phase, cuda_error, carried);
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
    }

    pub(super) fn due(&mut self, key: &Key) {
        self.check_overdue(key);
        self.check_alloc_wait(key);
        self.evaluate(key);
        self.survey_again(key);
        self.update_prefault(key);
        self.expect(key);
        self.advance(key);
        self.settle_requests(key);
    }
}

/// Sentence and detail of a reason.
#[must_use]
pub fn text_of(reason: Reason, detail: &str) -> String {
    if detail.is_empty() {
        reason.sentence().to_owned()
    } else {
        format!("{}: {detail}", reason.sentence())
    }
}

/// The policy of a container that is announced so, and a warning for each annotation that was
/// not understood.
#[must_use]
pub fn policy_of(
    policies: &Policies,
    announcement: &Announcement,
) -> (super::policy::Policy, Vec<String>) {
    let annotations: BTreeMap<String, String> =
        announcement.annotations.clone().into_iter().collect();
    policies.resolve(Container::rule_namespace(announcement), &annotations)
}
