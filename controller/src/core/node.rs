//! The node: every container and process, and what happens on each input.
//! The way out and home is in `moves.rs`, grants in `grants.rs`, the list that people
//! see in `view.rs`.

use std::collections::{BTreeMap, BTreeSet};

use affinode_proto::{
    api::control::{ActionResponse, Announcement, Event},
    reason::Reason,
    state::State,
    wire::{
        Hazards, Phase, WIRE_VERSION,
        message::{Action, AgentMessage, ControllerMessage},
        page::PageSnapshot,
    },
};

use super::{
    CommandId, DeviceBytes, Effect, Key, Millis, ProcessId,
    container::{Container, Goal},
    grant::Grant,
    history::Pauses,
    idle,
    input::{GpuSample, Identity, Input, Request},
    ledger::Ledger,
    plan::Deadlines,
    policy::Policies,
    process::{Pending, Process},
    processes::Processes,
    queue::Queue,
    victims::VictimRule,
};

/// What the node is configured with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Policies of node and namespaces.
    pub policies: Policies,
    /// Deadlines of close and lock.
    pub deadlines: Deadlines,
    /// How long processes are given to hold their allocations.
    pub hold_ms: u32,
    /// Most CUDA processes of one container.
    pub max_processes: usize,
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
            deadlines: Deadlines { close_ms: 1_000, lock_ms: 5_000 },
            hold_ms: 500,
            max_processes: 256,
            victims: VictimRule::Expected,
            hold: true,
        }
    }
}

/// What the journal says of a process that has not come back yet.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    pub(super) away: Vec<DeviceBytes>,
    pub(super) restoring: bool,
}

/// Everything that is known of the node. One task drives it.
#[derive(Debug, Default)]
pub struct Node {
    pub(super) settings: Settings,
    pub(super) now: Millis,
    pub(super) containers: BTreeMap<Key, Container>,
    pub(super) processes: Processes,
    pub(super) gpus: Vec<GpuSample>,
    pub(super) gpu_error: Option<String>,
    pub(super) ledger: Ledger,
    pub(super) queue: Queue,
    pub(super) grants: BTreeMap<Key, Grant>,
    pub(super) hold_orders: BTreeMap<u64, (Key, ProcessId)>,
    pub(super) recalled: BTreeMap<(Key, u32, u64), Recalled>,
    /// Pauses of all containers: what a new one is expected to do.
    pub(super) pauses: Pauses,
    /// When room was last looked for.
    pub(super) sought_room: Option<Millis>,
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
        self.now = self.now.max(now);
        // A page frees nothing and asks for nothing, and pages are most of what comes.
        let may_serve = !matches!(input, Input::Page(..));
        match input {
            Input::Announced(announcement, key) => self.announced(*announcement, &key),
            Input::Withdrawn(key) => self.withdrawn(&key),
            Input::Joined { key, process, identity, phase, generation, hazards } => {
                self.joined(&key, process, identity, phase, generation, hazards);
            }
            Input::Detached(process) => self.detached(process),
            Input::Exited(process) => self.exited(process),
            Input::Message(process, message) => self.message(process, message),
            Input::Page(process, page) => self.page(process, page),
            Input::BadPage(process, why) => self.bad_page(process, why),
            Input::Gpus(gpus) => self.gpus_read(gpus),
            Input::Surveyed(key, survey) => self.surveyed(&key, survey),
            Input::Proven(key, number, gpus) => self.proven(&key, number, gpus),
            Input::Recalled { key, identity, away, restoring } => {
                self.recall(key, identity, Recalled { away, restoring });
            }
            Input::Command(command, key, request) => self.command(command, &key, request),
            Input::Due(key) => self.due(&key),
            Input::Tick => self.tick(),
        }
        if may_serve {
            self.serve_queue();
        }
        std::mem::take(&mut self.effects)
    }

    /// Replaces the settings; policies of known containers are resolved again.
    pub fn reconfigure(&mut self, settings: Settings) {
        self.settings = settings;
        for container in self.containers.values_mut() {
            let (policy, warnings) = resolve(&self.settings.policies, &container.announcement);
            container.policy = policy;
            container.warnings = warnings;
        }
    }

    /// How long the caller may sleep before the next [`Input::Tick`].
    #[must_use]
    pub fn tick_ms(&self, usual_ms: Millis) -> Millis {
        let busy = !self.queue.is_empty()
            || self.containers.values().any(|c| c.goal == Goal::Out && c.state != State::Offloaded);
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
        self.processes.iter().filter(|(_, p)| p.connected).map(|(id, _)| *id)
    }

    /// Containers without a process, and their bundles.
    pub fn deserted(&self) -> impl Iterator<Item = (&Key, &str)> {
        let used: BTreeSet<&Key> = self.processes.values().map(|p| &p.key).collect();
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
        self.effects.push(Effect::Send(process, ControllerMessage::Order { order, action }));
        if !matches!(action, Action::HoldAllocations { .. } | Action::ReleaseAllocations)
            && let Some(process) = self.processes.get_mut(&process)
        {
            process.pending = Some(Pending { order, action, since: self.now });
        }
        order
    }

    pub(super) fn publish(&mut self, key: &Key, event: Event) {
        let name = self.containers.get(key).map(Container::display_name).unwrap_or_default();
        self.effects.push(Effect::Publish(Event {
            key: key.to_string(),
            container: name,
            ..event
        }));
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
        container.since = now;
        self.publish(
            key,
            Event {
                kind: "state".into(),
                from: from.to_string(),
                to: to.to_string(),
                reason: reason.to_string(),
                text: text_of(reason, detail),
                bytes,
                elapsed_ms,
                ..Event::default()
            },
        );
    }

    pub(super) fn answer(
        &mut self,
        key: &Key,
        which: Request,
        done: bool,
        bytes: u64,
        elapsed_ms: Millis,
    ) {
        let Some(container) = self.containers.get_mut(key) else {
            return;
        };
        let (asked, others) =
            std::mem::take(&mut container.commands).into_iter().partition(|(_, r)| *r == which);
        container.commands = others;
        let asked: Vec<(CommandId, Request)> = asked;
        let (reason, detail) = container.reason.clone();
        let response = ActionResponse {
            done,
            state: container.state.to_string(),
            reason: reason.to_string(),
            reason_text: text_of(reason, &detail),
            bytes,
            elapsed_ms,
            ..ActionResponse::default()
        };
        self.effects.extend(
            asked.into_iter().map(|(command, _)| Effect::Answer(command, response.clone())),
        );
    }

    fn announced(&mut self, announcement: Announcement, key: &Key) {
        if let Some(known) = self.containers.get_mut(key) {
            known.announcement = announcement;
            let (policy, warnings) = resolve(&self.settings.policies, &known.announcement);
            (known.policy, known.warnings) = (policy, warnings);
            return;
        }
        let (policy, warnings) = resolve(&self.settings.policies, &announcement);
        let container = Container::new(announcement, policy, warnings.clone(), self.now);
        self.containers.insert(key.clone(), container);
        for text in warnings {
            self.publish(key, Event { kind: "annotation".into(), text, ..Event::default() });
        }
    }

    fn withdrawn(&mut self, key: &Key) {
        for process in self.members(key) {
            self.processes.remove(&process);
            self.forget_holds(process);
            self.effects.push(Effect::Drop(process));
        }
        self.end_grant(key);
        self.ledger.release(key);
        self.queue.leave(key);
        self.effects.push(Effect::Journal(key.clone(), None));
        if let Some(container) = self.containers.get_mut(key) {
            container.reason = (Reason::NotRegistered, "the container was deleted".into());
        }
        self.answer(key, Request::Offload, false, 0, 0);
        self.answer(key, Request::Restore, false, 0, 0);
        self.containers.remove(key);
        self.recalled.retain(|(other, ..), _| other != key);
        self.recall_settled(key);
    }

    fn joined(
        &mut self,
        key: &Key,
        id: ProcessId,
        identity: Identity,
        phase: Phase,
        generation: u64,
        hazards: Hazards,
    ) {
        let known = self
            .processes
            .of(key)
            .find(|(_, p)| {
                p.identity.pid == identity.pid && p.identity.start_ticks == identity.start_ticks
            })
            .map(|(old, _)| old);
        let full = known.is_none() && self.members(key).len() >= self.settings.max_processes;
        let Some(container) = self.containers.get_mut(key).filter(|_| !full) else {
            self.effects.push(Effect::Send(
                id,
                ControllerMessage::Refuse { version: WIRE_VERSION, retry: !full },
            ));
            self.effects.push(Effect::Drop(id));
            return;
        };
        let before = known.and_then(|old| self.processes.remove(&old));
        let recalled = self.recalled.remove(&(key.clone(), identity.pid, identity.start_ticks));
        let away = before.as_ref().and_then(|p| p.away.clone()).or(recalled.map(|r| r.away));
        if container.state == State::Unregistered {
            // The first process; or, after a controller died, the first that came back.
            container.last_use = self.now;
            container.goal = if phase == Phase::Away { Goal::Out } else { Goal::Home };
        } else if phase == Phase::Open && container.goal != Goal::Home {
            // A process that just started to use CUDA: the container is in use.
            container.goal = Goal::Home;
            container.cause = Reason::Called;
            container.last_use = self.now;
        }
        let first = container.state == State::Unregistered;
        let out = container.goal == Goal::Out;
        self.processes.insert(
            id,
            Process {
                key: key.clone(),
                identity,
                connected: true,
                phase,
                generation,
                hazards,
                pending: None,
                holds: 0,
                vram: before.as_ref().map(|p| p.vram.clone()).unwrap_or_default(),
                away,
                waits_for_siblings: false,
                ignores_holds: before.as_ref().is_some_and(|p| p.ignores_holds),
                bad_page: before.as_ref().and_then(|p| p.bad_page.clone()),
                page: before.and_then(|p| p.page),
            },
        );
        self.recall_settled(key);
        // Before the Welcome: until then it allocates nothing.
        self.hold_newcomer(id);
        self.hold_for_siblings(id);
        self.effects.push(Effect::Send(id, ControllerMessage::Welcome { process: id.0 }));
        if let Some(old) = known {
            self.forget_holds(old);
            self.effects.push(Effect::Drop(old));
        }
        if first {
            let state = if out { State::Offloaded } else { State::Active };
            self.set_state(
                key,
                state,
                if out { Reason::IdleTimeout } else { Reason::Called },
                "",
                0,
                0,
            );
        }
        self.advance(key);
    }

    fn detached(&mut self, id: ProcessId) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        process.connected = false;
        process.pending = None;
        let key = process.key.clone();
        self.forget_holds(id);
        self.advance(&key);
    }

    fn exited(&mut self, id: ProcessId) {
        let Some(process) = self.processes.remove(&id) else {
            return;
        };
        self.forget_holds(id);
        self.effects.push(Effect::Drop(id));
        let key = process.key;
        if self.members(&key).is_empty() {
            self.end_grant(&key);
            self.ledger.release(&key);
            self.queue.leave(&key);
            self.effects.push(Effect::Journal(key.clone(), None));
            self.set_state(
                &key,
                State::Unregistered,
                Reason::NotRegistered,
                "its CUDA processes ended",
                0,
                0,
            );
            self.answer(&key, Request::Offload, false, 0, 0);
            self.answer(&key, Request::Restore, false, 0, 0);
            if let Some(container) = self.containers.get_mut(&key) {
                container.goal = Goal::Home;
                container.surveying = false;
                (container.offload_began, container.wake_began, container.restore_began) =
                    (None, None, None);
            }
        } else {
            self.advance(&key);
        }
    }

    fn message(&mut self, id: ProcessId, message: AgentMessage) {
        match message {
            // A second Hello on a connection is not in the protocol; the first one holds.
            AgentMessage::Hello { .. } => {}
            AgentMessage::Wake { generation, .. } => self.wake(id, generation),
            AgentMessage::Report { order, outcome, phase, cuda_error, .. } => {
                self.report(id, order, outcome, phase, cuda_error);
            }
            AgentMessage::Notice { hazards } => {
                if let Some(process) = self.processes.get_mut(&id) {
                    process.hazards.0 |= hazards.0;
                }
            }
        }
    }

    fn page(&mut self, id: ProcessId, page: PageSnapshot) {
        let now = self.now;
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let moved = idle::moved(process.page.as_ref(), &page);
        let process_was_free = process.page.as_ref().is_some_and(|older| older.inflight == 0);
        process.hazards.0 |= page.hazards.0;
        process.page = Some(page);
        if !moved {
            return;
        }
        let key = process.key.clone();
        let Some(container) = self.containers.get_mut(&key) else {
            return;
        };
        let pause = if process_was_free { container.pause_ends(now, &mut self.pauses) } else { 0 };
        if container.expected_until.take().is_some() {
            container.history.prewake_hit();
            self.prewake_hits += 1;
            container.history.returned(pause);
        }
        container.last_use = now;
        if container.goal == Goal::Leaving {
            container.goal = Goal::Home;
        }
        if container.state == State::Idle {
            self.set_state(&key, State::Active, Reason::Called, "", 0, 0);
        }
    }

    /// Without counters nobody can say whether it is idle: it stays where it is, and
    /// when it is away it still comes back.
    fn bad_page(&mut self, id: ProcessId, why: String) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        if process.bad_page.is_some() {
            return;
        }
        process.bad_page = Some(why.clone());
        let (key, pid) = (process.key.clone(), process.identity.pid);
        self.publish(
            &key,
            Event {
                kind: "refused".into(),
                reason: Reason::BadPeer.to_string(),
                text: text_of(Reason::BadPeer, &format!("process {pid}: {why}")),
                ..Event::default()
            },
        );
    }

    fn gpus_read(&mut self, gpus: Result<Vec<GpuSample>, String>) {
        match gpus {
            Ok(gpus) => {
                self.gpu_error = None;
                self.take_gpus(gpus);
            }
            Err(error) => self.gpu_error = Some(error),
        }
    }

    /// Notes the memory of devices; what processes hold stays as it was read before.
    pub(super) fn take_memory(&mut self, gpus: &[GpuSample]) {
        for gpu in gpus {
            match self.gpus.iter_mut().find(|known| known.uuid == gpu.uuid) {
                Some(known) => {
                    (known.total_bytes, known.used_bytes) = (gpu.total_bytes, gpu.used_bytes)
                }
                None => self.gpus.push(gpu.clone()),
            }
        }
    }

    /// Notes the memory of devices, and what the processes of one container hold.
    pub(super) fn take_survey(&mut self, key: &Key, gpus: &[GpuSample]) {
        self.gpu_error = None;
        self.take_memory(gpus);
        for id in self.members(key) {
            let Some(process) = self.processes.get_mut(&id) else { continue };
            let pid = process.identity.pid;
            process.vram = gpus
                .iter()
                .flat_map(|gpu| gpu.processes.iter().map(move |held| (gpu, held)))
                .filter(|(_, (other, _))| *other == pid)
                .map(|(gpu, (_, bytes))| DeviceBytes { uuid: gpu.uuid.clone(), bytes: *bytes })
                .collect();
        }
    }

    /// Notes what devices and processes hold. A process that is away holds nothing.
    pub(super) fn take_gpus(&mut self, gpus: Vec<GpuSample>) {
        let mut by_pid: BTreeMap<u32, Vec<DeviceBytes>> = BTreeMap::new();
        for gpu in &gpus {
            for (pid, bytes) in &gpu.processes {
                let device = DeviceBytes { uuid: gpu.uuid.clone(), bytes: *bytes };
                by_pid.entry(*pid).or_default().push(device);
            }
        }
        for process in self.processes.values_mut() {
            process.vram = by_pid.remove(&process.identity.pid).unwrap_or_default();
        }
        self.gpus = gpus;
    }

    fn command(&mut self, command: CommandId, key: &Key, request: Request) {
        let Some(container) = self.containers.get_mut(key) else {
            let response = ActionResponse {
                reason_text: "no such container".into(),
                ..ActionResponse::default()
            };
            self.effects.push(Effect::Answer(command, response));
            return;
        };
        container.commands.push((command, request));
        match (request, container.state) {
            (Request::Offload, State::Offloaded) => self.answer(key, request, true, 0, 0),
            (Request::Offload, State::Active | State::Idle) => match self.may_offload(key, true) {
                Ok(()) => self.leave(key, Reason::Requested),
                Err((reason, detail)) => {
                    if let Some(container) = self.containers.get_mut(key) {
                        container.reason = (reason, detail);
                    }
                    self.answer(key, request, false, 0, 0);
                }
            },
            (Request::Restore, State::Active | State::Idle) => {
                self.answer(key, request, true, 0, 0)
            }
            (Request::Restore, State::Offloaded) => {
                container.goal = Goal::Home;
                container.cause = Reason::Requested;
                self.advance(key);
            }
            (Request::Restore, State::Closing | State::Offloading) => {
                container.goal = Goal::Home;
                container.cause = Reason::Requested;
                container.reason = (Reason::Requested, String::new());
                self.answer(key, Request::Offload, false, 0, 0);
                self.advance(key);
            }
            // Nothing registered or lost: now. Else on its way: the answer comes with the arrival.
            (_, State::Unregistered | State::Lost) => self.answer(key, request, false, 0, 0),
            _ => {}
        }
    }

    fn tick(&mut self) {
        let keys: BTreeSet<Key> = self.containers.keys().cloned().collect();
        for key in keys {
            self.due(&key);
        }
        self.check_grants();
    }

    fn due(&mut self, key: &Key) {
        self.check_overdue(key);
        self.consider(key);
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

fn resolve(
    policies: &Policies,
    announcement: &Announcement,
) -> (super::policy::Policy, Vec<String>) {
    let annotations: BTreeMap<String, String> =
        announcement.annotations.clone().into_iter().collect();
    policies.resolve(Container::rule_namespace(announcement), &annotations)
}
