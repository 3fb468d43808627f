//! The simulated world of the tests: agents and GPUs around a real core.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Deref, DerefMut},
};

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Phase, ProcessFlags,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};

pub(super) use super::super::harness::{Host, key};
use super::super::{
    ContainerSpec, Effect, GpuSample, Input, JournalStep, Key, Millis, Node, ProcessId, Record,
    Settings,
    container::Container,
    copiers::CopierId,
    copy_watch::TurnBackCause,
    driver_limit::DriverLimit,
    harness::{
        Bench,
        agent::{Agent, Asking},
    },
    host_memory::HostNeed,
    input::CommandId,
    policy::{KeepAlive, Mode, OnOom, Policies, Policy, Restore, WakeOn},
    process::Process,
};
use super::copiers::WorldCopier;
use super::nvml::Nvml;

pub(super) const GPU: &str = "GPU-07070707-0707-0707-0707-070707070707";
pub(super) const OTHER_GPU: &str = "GPU-08080808-0808-0808-0808-080808080808";
pub(super) const TOTAL: u64 = 1_000;
/// Minimum amount of memory, in bytes, that an agent must be able to copy for its process to be
/// prefaulted in the tests.
pub(super) const MIN_PREFAULT_BYTES: u64 = 100;
/// Number of passes of the simulated world from one step of a slow copier to its next step.
const COPIER_PASSES: Millis = 5;
/// Capabilities of this version's library.
pub(super) const ALL_CAPABILITIES: Capabilities = Capabilities(0b1111_1111_1111_1111);
/// Engines of the containers, by number.
pub(super) const ENGINES: [&str; 3] = ["checkpoint", "full", "auto"];

pub(super) struct World {
    pub(super) bench: Bench,
    pub(super) containers: usize,
    /// Whether there is a second GPU of the same model. If so, processes run on both GPUs.
    pub(super) two_gpus: bool,
    /// VRAM of unmanaged processes on the first GPU, in bytes.
    pub(super) others: u64,
    pub(super) nvml: Nvml,
    pub(super) journal: BTreeMap<Key, Record>,
    pub(super) next: u64,
    pub(super) answers: Vec<(CommandId, bool)>,
    /// Reasons of refused offloads, in the order of their events.
    pub(super) refused: Vec<String>,
    /// Whether the GPU is in MIG mode.
    pub(super) mig: bool,
    /// Numbers of the containers with restore policy `immediate`.
    pub(super) immediate: Vec<usize>,
    /// Whether containers have the policy `prefault`.
    pub(super) prepare: bool,
    /// Whether processes follow orders to prefault memory of the host pool.
    pub(super) prefaults: bool,
    /// Whether CUDA contexts release local memory (stacks of GPU threads) after a copy out.
    pub(super) local_memory: bool,
    /// Capabilities of the processes' libraries. New processes get them in turn.
    pub(super) libraries: Vec<Capabilities>,
    /// Whether containers have every policy that needs a capability of the library.
    pub(super) all_options: bool,
    /// Whether containers with the engine `full` have `auto` instead.
    pub(super) auto: bool,
    /// The copiers that the core has started, and that have not exited.
    pub(super) copiers: BTreeMap<CopierId, WorldCopier>,
    /// Whether copiers take VRAM and time. Otherwise they start and end at once.
    pub(super) slow_copiers: bool,
    /// Whether the controller was stopped for some time.
    pub(super) was_stopped: bool,
    /// Orders about prefaulting that the controller sent. Each entry has the process, and `true`
    /// for an order to begin or `false` for an order to end.
    pub(super) prepared: Vec<(ProcessId, bool)>,
    /// Pids of processes that the controller ordered to end. `true`: the order was SIGKILL.
    /// `false`: it was SIGTERM.
    pub(super) ended: Vec<(u32, bool)>,
    /// Whether copies out free VRAM in several steps, if the controller orders it.
    pub(super) slow_copies: bool,
    /// Number of restores that were ordered while VRAM was still being freed for them.
    pub(super) restored_as_freed: usize,
    /// If set, the next checkpoint or close fails with this outcome.
    pub(super) fail: Option<Outcome>,
    /// Host memory of the node in bytes. `None`: it is unlimited.
    pub(super) host_total: Option<u64>,
    /// Memory that is free below the limit of each container, in bytes. `None`: no limit.
    pub(super) limit_bytes: Option<u64>,
    /// Free memory of the host pool in bytes. `None`: the node has no host pool.
    pub(super) host_pool_bytes: Option<u64>,
    /// Orders that the agents carried out, the oldest first.
    pub(super) ordered: Vec<Action>,
    /// Processes whose copy out the controller ordered to cancel.
    pub(super) turned_back: Vec<ProcessId>,
    /// Processes that were told to cancel a copy out whose offload was given up.
    pub(super) given_up: Vec<ProcessId>,
    /// Permissions to use the host pool, in bytes, in their order.
    pub(super) allowed: Vec<(ProcessId, u64)>,
    /// Orders to move content to disk, with the maximum size of the disk file in bytes, in their
    /// order.
    pub(super) stored: Vec<(ProcessId, u64)>,
    /// Processes that may store no further content on disk.
    pub(super) stopped: Vec<ProcessId>,
    /// Kinds and texts of the events about disk steps, in their order.
    pub(super) disk_events: Vec<(EventKind, String)>,
    /// Processes whose connection to the host pool was ended.
    pub(super) left_host_pool: Vec<ProcessId>,
}

pub(super) fn settings() -> Settings {
    let node = Policy {
        mode: Mode::Eager,
        idle_timeout_ms: 100,
        minimum_residency_ms: 0,
        // The simulated containers use learned times to keep alive.
        keep_alive: KeepAlive::Learned,
        prewake: true,
        on_oom: OnOom::Wait,
        restore: Restore::ByAnnotation,
        wake_on: WakeOn::Connection,
        allow_gpu_migration: true,
        ..Policy::default()
    };
    let policies = Policies { node, ..Policies::default() };
    Settings { policies, prefault_min_bytes: MIN_PREFAULT_BYTES, ..Settings::default() }
}

impl Agent {
    fn takes(&mut self, bytes: u64) {
        self.size += bytes;
        if ENGINES[self.container % ENGINES.len()] != "checkpoint" {
            self.swappable += bytes - bytes / 4;
        }
    }
}

impl Deref for World {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Bench {
        &mut self.bench
    }
}

impl World {
    pub(super) fn new(containers: usize) -> World {
        let mut world = World {
            bench: Bench::new(settings(), &[GPU, OTHER_GPU], TOTAL),
            containers,
            two_gpus: false,
            others: 0,
            nvml: Nvml::default(),
            journal: BTreeMap::new(),
            next: 0,
            answers: Vec::new(),
            refused: Vec::new(),
            mig: false,
            immediate: Vec::new(),
            prepare: false,
            prefaults: true,
            local_memory: false,
            libraries: vec![ALL_CAPABILITIES],
            all_options: false,
            auto: false,
            copiers: BTreeMap::new(),
            slow_copiers: false,
            was_stopped: false,
            prepared: Vec::new(),
            ended: Vec::new(),
            slow_copies: false,
            restored_as_freed: 0,
            fail: None,
            host_total: None,
            limit_bytes: None,
            host_pool_bytes: None,
            ordered: Vec::new(),
            turned_back: Vec::new(),
            given_up: Vec::new(),
            allowed: Vec::new(),
            stored: Vec::new(),
            stopped: Vec::new(),
            disk_events: Vec::new(),
            left_host_pool: Vec::new(),
        };
        (0..containers).for_each(|n| world.announce(n));
        world
    }

    pub(super) fn announce(&mut self, n: usize) {
        let auto = self.auto && n == 1;
        let spec = ContainerSpec {
            id: format!("c{n}"),
            annotations: [
                ("affinode.io/priority".to_owned(), (n % 2).to_string()),
                (
                    "affinode.io/engine".to_owned(),
                    if auto { "auto" } else { ENGINES[n % ENGINES.len()] }.to_owned(),
                ),
                ("affinode.io/prefault".to_owned(), self.prepare.to_string()),
                ("affinode.io/retain-host-copy".to_owned(), self.all_options.to_string()),
                ("affinode.io/checksum".to_owned(), self.all_options.to_string()),
                (
                    "affinode.io/restore".to_owned(),
                    if self.immediate.contains(&n) { "immediate" } else { "queue" }.to_owned(),
                ),
            ]
            .into(),
            ..ContainerSpec::default()
        };
        self.feed(Input::Announced(Box::new(spec), key(n)));
    }

    pub(super) fn pin(&mut self, n: usize, pinned: bool) {
        let overrides = self.node.overrides().with_pin(&key(n), pinned);
        self.feed(Input::Overridden(overrides));
    }

    pub(super) fn auto_offload(&mut self, on: bool) {
        let overrides = self.node.overrides().with_auto_offload(on);
        self.feed(Input::Overridden(overrides));
    }

    /// VRAM in use on the first GPU, in bytes.
    pub(super) fn used(&self) -> u64 {
        self.used_on(0)
    }

    pub(super) fn used_on(&self, gpu: usize) -> u64 {
        self.samples()[gpu].used_bytes + self.unmanaged_on(gpu)
    }

    /// VRAM that no agent holds on a GPU, in bytes.
    fn unmanaged_on(&self, gpu: usize) -> u64 {
        self.copier_bytes_on(gpu) + if gpu == 0 { self.others } else { 0 }
    }

    /// Sets the VRAM of unmanaged processes to this many bytes, if it is free.
    pub(super) fn take_unmanaged(&mut self, bytes: u64) {
        if self.used() - self.others + bytes <= TOTAL {
            self.others = bytes;
        }
    }

    /// Containers for which an eviction has been requested but has not begun.
    fn leaving(&self) -> BTreeSet<Key> {
        let pressed = |c: &Container| c.goal.is_requested() && c.cause == Reason::Pressure;
        let all = self.node.state.registry.containers.iter().filter(|(_, c)| pressed(c));
        all.map(|(key, _)| key.clone()).collect()
    }

    /// Asserts that each newly evicted container is evicted for a container that waits and has the
    /// same or a higher priority. Exception: the context of an offloaded container may be evicted
    /// for any waiter.
    fn assert_evictions_serve_a_waiter(&self, before: &BTreeSet<Key>) {
        let priority = |key: &Key| self.node.state.registry.containers[key].policy.priority;
        let waiting = self.node.state.admission.queue.in_order(self.now);
        for key in self.leaving().difference(before) {
            let offloaded =
                self.node.state.registry.containers[key].shown.state == State::Offloaded;
            let asks =
                |other: &&Key| *other != key && (offloaded || priority(other) >= priority(key));
            assert!(waiting.iter().any(|other| asks(&other)), "{key} is evicted for no waiter");
        }
    }

    /// Records an order to end a process. Asserts that the process is not offloaded and cannot be
    /// offloaded. Also asserts that a container with restore policy `immediate` exists whose
    /// priority is at least that of the process.
    fn told_to_end(&mut self, pid: u32, by_force: bool) {
        let agent = self.agents.values().find(|agent| agent.pid == pid).expect("it lives");
        assert!(!agent.phase.is_offloaded(), "{pid} is offloaded: its end frees no VRAM");
        let stayed = self.node.state.registry.containers[&key(agent.container)]
            .offload_failures
            .immovable_at;
        assert!(agent.fixed || stayed.is_some(), "{pid} could be moved");
        let asked = self.immediate.iter().any(|n| n % 2 >= agent.container % 2);
        assert!(asked, "{pid} is above every waiter that may ask");
        self.ended.push((pid, by_force));
    }

    /// Ends processes that were ordered to end. Every second process ignores SIGTERM and exits only
    /// when it is killed.
    fn end_them(&mut self) {
        let ends = |agent: &Agent| {
            let told = |by_force| self.ended.contains(&(agent.pid, by_force));
            told(true) || told(false) && agent.pid % 2 == 1
        };
        let ids = self.agents.iter().filter(|(_, agent)| ends(agent)).map(|(id, _)| *id);
        ids.collect::<Vec<_>>().into_iter().for_each(|id| self.exit(id));
    }

    /// Creates a process that makes its first CUDA call in this container. It holds no VRAM yet.
    pub(super) fn join(&mut self, container: usize) {
        self.next += 1;
        let pid = u32::try_from(self.next).unwrap() + 1_000;
        let library = usize::try_from(self.next).unwrap() % self.libraries.len();
        let agent = Agent {
            container,
            capabilities: self.libraries[library],
            pid,
            gpu: usize::from(self.two_gpus && self.next.is_multiple_of(2)),
            has_local_memory: self.local_memory,
            calls: 1,
            notes: if self.two_gpus { ProcessFlags::MOVABLE } else { ProcessFlags::default() },
            ..Agent::default()
        };
        let id = ProcessId(self.next);
        self.agents.insert(id, agent);
        self.hello(id);
    }

    pub(super) fn room_of(&self, id: ProcessId) -> u64 {
        self.agents.get(&id).map_or(0, |agent| TOTAL.saturating_sub(self.used_on(agent.gpu)))
    }

    /// Makes a process allocate, if its allocations are not paused. If VRAM is missing, the
    /// allocation waits.
    pub(super) fn allocate(&mut self, id: ProcessId, bytes: u64) {
        let room = self.room_of(id);
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if agent.phase != Phase::Open || !agent.welcomed || agent.held || agent.asking.is_some() {
            return;
        }
        agent.calls += 1;
        if bytes <= room {
            agent.takes(bytes);
        } else {
            agent.tickets += 1;
            agent.asking = Some(Asking { bytes, attempts: 0, goes_ahead: false });
            self.ask(id);
        }
    }

    pub(super) fn ask(&mut self, id: ProcessId) {
        let agent = &self.agents[&id];
        let Some(Asking { bytes, attempts, .. }) = agent.asking else { return };
        let (ticket, uuid) = (agent.tickets, [[7; 16], [8; 16]][agent.gpu]);
        self.feed(Input::Message(id, AgentMessage::AllocWait { ticket, bytes, uuid, attempts }));
    }

    /// Makes a process repeat its waiting allocation, if the controller has ordered the process to
    /// try again.
    pub(super) fn try_again(&mut self, id: ProcessId) {
        let room = self.room_of(id);
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let Some(asking) = agent.asking.filter(|asking| asking.goes_ahead) else { return };
        if agent.phase != Phase::Open {
            return self.call(id);
        }
        if agent.held || !agent.welcomed {
            return;
        }
        if asking.bytes <= room {
            agent.takes(asking.bytes);
            agent.calls += 1;
            self.end_ask(id, true);
        } else {
            let attempts = asking.attempts + 1;
            agent.asking = Some(Asking { attempts, goes_ahead: false, ..asking });
            self.ask(id);
        }
    }

    pub(super) fn end_ask(&mut self, id: ProcessId, served: bool) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        agent.asking = None;
        let ticket = agent.tickets;
        self.feed(Input::Message(id, AgentMessage::AllocWaitDone { ticket, served }));
    }

    /// Adds a registered process that holds VRAM, for tests in which the details do not matter.
    pub(super) fn running(&mut self, container: usize, bytes: u64) -> ProcessId {
        self.join(container);
        let id = ProcessId(self.next);
        while !self.agents[&id].welcomed {
            self.work(id);
        }
        self.allocate(id, bytes);
        assert_eq!(self.agents[&id].size, bytes, "no VRAM for the test's own process");
        id
    }

    pub(super) fn tick(&mut self) {
        self.tick_after(60);
    }

    pub(super) fn tick_after(&mut self, ms: Millis) {
        self.now += ms;
        self.end_them();
        self.read_counters();
        self.answer_tick();
        self.feed(Input::Tick);
    }

    pub(super) fn exit(&mut self, id: ProcessId) {
        if let Some(known_as) = self.agents.remove(&id).and_then(|agent| agent.known_as) {
            self.feed(Input::Exited(known_as));
        }
    }

    /// Simulates a controller that handles nothing for six seconds. Processes resume their
    /// allocations, and unmanaged processes then hold `bytes` of VRAM, if these are free.
    pub(super) fn stop_controller(&mut self, bytes: u64) {
        self.was_stopped = true;
        self.now += 6_000;
        for agent in self.agents.values_mut() {
            (agent.held, agent.held_here) = (false, false);
        }
        self.take_unmanaged(bytes);
    }

    /// Breaks the connection of a process. If `busy` is true, the agent of the process still
    /// completes one order. The process pauses its allocations until its agent receives the next
    /// Welcome.
    pub(super) fn cut(&mut self, id: ProcessId, busy: bool) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        agent.inbox.retain(|message| matches!(message, ControllerMessage::Order { .. }));
        agent.inbox.truncate(usize::from(busy));
        (agent.orphaned, agent.prepared) = (true, false);
    }

    /// Breaks the connection of a process. Its agent connects again as soon as it is not busy.
    /// Returns the new number of the process.
    pub(super) fn reconnect(&mut self, id: ProcessId, busy: bool) -> ProcessId {
        self.feed(Input::Detached(id));
        self.cut(id, busy);
        let agent = self.agents.remove(&id).unwrap();
        self.next += 1;
        let id = ProcessId(self.next);
        self.agents.insert(id, agent);
        if self.agents[&id].inbox.is_empty() {
            self.hello(id);
        }
        id
    }

    /// Kills the controller and starts the next one. Shims announce again and agents reconnect.
    pub(super) fn restart(&mut self, busy: bool) {
        self.forget_questions();
        self.answers.clear();
        // Copiers are children of the controller and end with it.
        self.copiers.clear();
        let ids: Vec<ProcessId> = self.agents.keys().copied().collect();
        ids.iter().for_each(|id| self.cut(*id, busy));
        self.node = Node::new(settings());
        for (key, record) in self.journal.clone() {
            for process in record.processes {
                if self.agents.values().all(|agent| agent.pid != process.pid) {
                    continue;
                }
                let restoring = record.step == JournalStep::Restore;
                let identity = (process.pid, process.start_ticks);
                let bytes = process.offloaded.iter().map(|on| on.bytes).sum();
                let need = HostNeed {
                    pid: process.pid,
                    vram_bytes: bytes,
                    bytes,
                    copied_bytes: 0,
                    kept_bytes: 0,
                    driver_moves: true,
                };
                let host = self.host_pools(&[need]).container;
                self.feed(Input::Recalled {
                    key: key.clone(),
                    identity,
                    offloaded: process.offloaded,
                    to: process.to,
                    restoring,
                    host,
                });
            }
        }
        let gpus = Ok(self.gpus());
        self.feed(Input::Gpus(gpus));
        (0..self.containers).for_each(|n| self.announce(n));
        for id in ids {
            if self.agents[&id].inbox.is_empty() {
                self.hello(id);
            }
        }
    }

    /// Delivers all pending messages. Agents with waiting calls repeat their wakes.
    pub(super) fn settle(&mut self) {
        (0..400).for_each(|_| self.pass());
    }

    /// Advances the world until no container, call or allocation waits, for at most 1200 passes.
    /// This suffices for a retry of a failed offload or restore, which may come a minute later. It
    /// is less than the timeout of an allocation.
    pub(super) fn settle_all(&mut self) {
        self.settle();
        for _ in 0..1_200 {
            let waits = |a: &Agent| a.wants || a.held || a.asking.is_some();
            if self.node.state.admission.queue.is_empty() && !self.agents.values().any(waits) {
                break;
            }
            self.pass();
        }
        self.settle();
    }

    /// Delivers the messages that are pending now.
    pub(super) fn pass(&mut self) {
        let ids: Vec<ProcessId> = self.agents.keys().copied().collect();
        for id in ids {
            let mut orders = 0;
            while self.agents.get(&id).is_some_and(|a| !a.inbox.is_empty()) {
                orders += 1;
                assert!(orders < 1_000, "messages and reports never end");
                self.work(id);
                let is_slow = |a: &Agent| a.released.is_some() || a.awaits_vram_since.is_some();
                if self.agents.get(&id).is_some_and(is_slow) {
                    break;
                }
            }
            if self.agents[&id].orphaned && self.agents[&id].inbox.is_empty() {
                self.hello(id);
            }
            if self.agents[&id].wants {
                self.call(id);
            }
            self.try_again(id);
        }
        while self.is_asked() {
            self.answer_question();
        }
        // Each step of a copier takes some time, during which processes are called.
        if self.slow_copiers && (self.now / 60).is_multiple_of(COPIER_PASSES) {
            self.copiers_step();
        }
        self.tick();
    }

    /// The node's data about the container with this number.
    pub(super) fn container(&self, n: usize) -> &Container {
        &self.node.state.registry.containers[&key(n)]
    }

    pub(super) fn container_mut(&mut self, n: usize) -> &mut Container {
        self.node.state.registry.containers.get_mut(&key(n)).expect("the container is known")
    }

    /// The node's data about the process with this number.
    pub(super) fn process(&self, id: ProcessId) -> &Process {
        self.node.state.registry.processes.get(&id).expect("the process is known")
    }

    pub(super) fn process_mut(&mut self, id: ProcessId) -> &mut Process {
        self.node.state.registry.processes.get_mut(&id).expect("the process is known")
    }

    pub(super) fn state(&self, n: usize) -> State {
        self.node.state.registry.containers[&key(n)].shown.state
    }
}

impl Host for World {
    fn gpus(&self) -> Vec<GpuSample> {
        let mut gpus = self.samples();
        gpus.truncate(1 + usize::from(self.two_gpus));
        for (n, gpu) in gpus.iter_mut().enumerate() {
            (gpu.name, gpu.minor) = ("GPU of the test".into(), u32::try_from(n).ok());
            gpu.mig = self.mig;
            gpu.used_bytes += self.unmanaged_on(n);
        }
        gpus
    }

    fn handle(&mut self, input: Input) -> Vec<Effect> {
        self.assert_host_memory_suffices();
        let (now, leaving) = (self.now, self.leaving());
        let effects = self.node.handle(now, input);
        self.assert_evictions_serve_a_waiter(&leaving);
        for uuid in [GPU, OTHER_GPU] {
            let promised = self.node.state.admission.ledger.promised_bytes(uuid);
            assert!(promised <= TOTAL, "more VRAM of {uuid} is promised than the GPU has");
        }
        effects
    }

    fn execute(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Send(id, ControllerMessage::Prefault { on }) => self.told_to_prepare(id, on),
            Effect::Journal(key, Some(record)) => {
                self.journal.insert(key, record);
            }
            Effect::Journal(key, None) => {
                self.journal.remove(&key);
            }
            Effect::Answer(command, answer) => self.answers.push((command, answer.done)),
            Effect::LimitInDriver(order) => assert_eq!(order.limit, DriverLimit::Removed),
            Effect::ReadVram { .. } | Effect::RecallVram { .. } | Effect::ShowVram { .. } => {
                panic!("no container here has a limit")
            }
            Effect::Prove { .. } => {
                self.assert_no_copier_moves();
                self.deliver(effect);
            }
            Effect::StartCopier { .. }
            | Effect::AttachCopier { .. }
            | Effect::FillMemory { .. }
            | Effect::HoldCopier { .. }
            | Effect::EndCopier { .. } => return self.told_copier(effect),
            Effect::TurnBack(id, TurnBackCause::HostMemory) => self.turned_back.push(id),
            Effect::TurnBack(id, TurnBackCause::NotWanted) => self.given_up.push(id),
            Effect::AllowHostPool { process, bytes, .. } => self.allowed.push((process, bytes)),
            Effect::StoreOnDisk { process, bytes } => {
                self.stored.push((process, bytes));
                self.deliver(Effect::Send(process, ControllerMessage::StoreOnDisk));
            }
            Effect::StopDisk(process) => self.stopped.push(process),
            Effect::LeaveHostPool(process) => self.left_host_pool.push(process),
            Effect::End { identity, by_force } => self.told_to_end(identity.pid, by_force),
            Effect::Publish(event) if event.kind == EventKind::Refused => {
                self.refused.extend(event.reason.map(|reason| reason.to_string()));
            }
            Effect::Publish(event)
                if [EventKind::StoredOnDisk, EventKind::DiskFailed].contains(&event.kind) =>
            {
                self.disk_events.push((event.kind, event.text));
            }
            effect => self.deliver(effect),
        }
        None
    }
}
