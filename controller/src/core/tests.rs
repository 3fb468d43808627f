//! The core against a world of agents and one device, kept by the test: random calls,
//! wakes, failures, deaths and controller restarts in random order.

use std::collections::{BTreeMap, VecDeque};

use affinode_proto::{
    api::control::Announcement,
    reason::Reason,
    state::State,
    wire::{
        Hazards, Phase,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
        page::PageSnapshot,
    },
};
use proptest::prelude::*;

use super::{
    DeviceBytes, Effect, GpuSample, Input, Key, Millis, Node, ProcessId, Record, Request, Settings,
    Survey,
    input::{CommandId, Identity},
    policy::{KeepAlive, OnOom, Policies, Policy},
};

const GPU: &str = "GPU-07070707-0707-0707-0707-070707070707";
const UUID: [u8; 16] = [7; 16];
const TOTAL: u64 = 1_000;

/// A process with its agent and its share of the device.
struct Agent {
    container: usize,
    pid: u32,
    phase: Phase,
    /// VRAM that it holds when it is on the device.
    size: u64,
    /// What came on its connection and was not looked at yet.
    inbox: VecDeque<ControllerMessage>,
    /// Lost its controller in the middle of something: says Hello when that is done.
    orphaned: bool,
    welcomed: bool,
    generation: u64,
    calls: u64,
    wants: bool,
    held: bool,
    /// The allocation that waits for room, outside the driver.
    asking: Option<Asking>,
    tickets: u64,
    /// Told to hold on this connection.
    held_here: bool,
    /// The number under which the controller watches it.
    known_as: ProcessId,
}

impl Agent {
    fn on_device(&self) -> u64 {
        if self.phase == Phase::Away { 0 } else { self.size }
    }
}

/// An allocation that found no memory.
#[derive(Clone, Copy)]
struct Asking {
    bytes: u64,
    attempts: u32,
    /// Told that there is room.
    goes_ahead: bool,
}

struct World {
    node: Node,
    containers: usize,
    now: Millis,
    agents: BTreeMap<ProcessId, Agent>,
    /// Bytes of somebody who is not managed.
    others: u64,
    questions: VecDeque<Effect>,
    journal: BTreeMap<Key, Record>,
    next: u64,
    answers: Vec<(CommandId, bool)>,
    /// Reasons of refusals, as they were told.
    refused: Vec<String>,
    /// The next checkpoint or close fails.
    fail: Option<Outcome>,
}

fn key(n: usize) -> Key {
    Key::parse(&format!("{n:032x}")).unwrap()
}

fn settings() -> Settings {
    // With everything that is learned, too.
    let (keep_alive, prewake) = (KeepAlive::Learned, true);
    let node = Policy {
        idle_timeout_ms: 100,
        minimum_residency_ms: 0,
        keep_alive,
        prewake,
        on_oom: OnOom::Wait,
        ..Policy::default()
    };
    Settings { policies: Policies { node, rules: Vec::new() }, ..Settings::default() }
}

impl World {
    fn new(containers: usize) -> World {
        let mut world = World {
            node: Node::new(settings()),
            containers,
            now: 0,
            agents: BTreeMap::new(),
            others: 0,
            questions: VecDeque::new(),
            journal: BTreeMap::new(),
            next: 0,
            answers: Vec::new(),
            refused: Vec::new(),
            fail: None,
        };
        (0..containers).for_each(|n| world.announce(n));
        world
    }

    fn announce(&mut self, n: usize) {
        let announcement = Announcement {
            key: key(n).to_string(),
            id: format!("c{n}"),
            annotations: [("affinode.io/priority".to_owned(), (n % 2).to_string())].into(),
            ..Announcement::default()
        };
        self.feed(Input::Announced(Box::new(announcement), key(n)));
    }

    fn used(&self) -> u64 {
        self.others + self.agents.values().map(Agent::on_device).sum::<u64>()
    }

    fn gpus(&self) -> Vec<GpuSample> {
        let on_device = self.agents.values().filter(|a| a.on_device() > 0);
        vec![GpuSample {
            uuid: GPU.into(),
            total_bytes: TOTAL,
            used_bytes: self.used(),
            processes: on_device.map(|a| (a.pid, a.on_device())).collect(),
            ..GpuSample::default()
        }]
    }

    fn feed(&mut self, input: Input) {
        for effect in self.node.handle(self.now, input) {
            match effect {
                Effect::Send(id, message) => {
                    if let Some(agent) = self.agents.get_mut(&id) {
                        agent.inbox.push_back(message);
                    }
                }
                Effect::Journal(key, Some(record)) => {
                    self.journal.insert(key, record);
                }
                Effect::Journal(key, None) => {
                    self.journal.remove(&key);
                }
                Effect::Answer(command, answer) => self.answers.push((command, answer.done)),
                Effect::Survey { .. } | Effect::Prove(..) => self.questions.push_back(effect),
                Effect::Publish(event) if event.kind == "refused" => {
                    self.refused.push(event.reason);
                }
                Effect::Drop(_) | Effect::Publish(_) => {}
            }
        }
    }

    /// A process makes its first CUDA call; it holds no VRAM yet.
    fn join(&mut self, container: usize) {
        self.next += 1;
        let pid = u32::try_from(self.next).unwrap() + 1_000;
        let agent = Agent {
            container,
            pid,
            phase: Phase::Open,
            size: 0,
            inbox: VecDeque::new(),
            orphaned: false,
            welcomed: false,
            generation: 0,
            calls: 1,
            wants: false,
            held: false,
            asking: None,
            tickets: 0,
            held_here: false,
            known_as: ProcessId(self.next),
        };
        let id = ProcessId(self.next);
        self.agents.insert(id, agent);
        self.hello(id);
    }

    /// A process allocates, where it may. Without room it waits for it.
    fn allocate(&mut self, id: ProcessId, bytes: u64) {
        let room = TOTAL.saturating_sub(self.used());
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if agent.phase != Phase::Open || !agent.welcomed || agent.held || agent.asking.is_some() {
            return;
        }
        agent.calls += 1;
        if bytes <= room {
            agent.size += bytes;
        } else {
            agent.tickets += 1;
            agent.asking = Some(Asking { bytes, attempts: 0, goes_ahead: false });
            self.ask(id);
        }
    }

    fn ask(&mut self, id: ProcessId) {
        let agent = &self.agents[&id];
        let Some(Asking { bytes, attempts, .. }) = agent.asking else { return };
        let (ticket, uuid) = (agent.tickets, UUID);
        self.feed(Input::Message(id, AgentMessage::Want { ticket, bytes, uuid, attempts }));
    }

    /// An allocation that was told to go ahead does, through the gate.
    fn try_again(&mut self, id: ProcessId) {
        let room = TOTAL.saturating_sub(self.used());
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let Some(asking) = agent.asking.filter(|asking| asking.goes_ahead) else { return };
        if agent.phase != Phase::Open {
            return self.call(id);
        }
        if agent.held || !agent.welcomed {
            return;
        }
        if asking.bytes <= room {
            agent.size += asking.bytes;
            agent.calls += 1;
            self.end_ask(id, true);
        } else {
            let attempts = asking.attempts + 1;
            agent.asking = Some(Asking { attempts, goes_ahead: false, ..asking });
            self.ask(id);
        }
    }

    fn end_ask(&mut self, id: ProcessId, served: bool) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        agent.asking = None;
        let ticket = agent.tickets;
        self.feed(Input::Message(id, AgentMessage::WantOver { ticket, served }));
    }

    /// A process that is welcome and holds VRAM: for tests that need no more.
    fn running(&mut self, container: usize, bytes: u64) -> ProcessId {
        self.join(container);
        let id = ProcessId(self.next);
        while !self.agents[&id].welcomed {
            self.work(id);
        }
        self.allocate(id, bytes);
        assert_eq!(self.agents[&id].size, bytes, "no room for the test's own process");
        id
    }

    fn hello(&mut self, id: ProcessId) {
        let agent = self.agents.get_mut(&id).unwrap();
        (agent.orphaned, agent.welcomed, agent.held_here) = (false, false, false);
        agent.known_as = id;
        let agent = &self.agents[&id];
        let input = Input::Joined {
            key: key(agent.container),
            process: id,
            identity: Identity { pid: agent.pid, start_ticks: 1, command: "test".into() },
            phase: agent.phase,
            generation: agent.generation,
            hazards: Hazards::default(),
        };
        self.feed(input);
    }

    /// A CUDA call: goes through, or waits at the gate and wakes.
    fn call(&mut self, id: ProcessId) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if agent.phase == Phase::Open {
            // One that waits for room makes no other call; it may have other threads.
            agent.calls += 1;
        } else {
            agent.wants = true;
            let (generation, alone) = (agent.generation, agent.orphaned);
            if alone {
                return;
            }
            self.feed(Input::Message(id, AgentMessage::Wake { generation, waiters: 1, hook: 1 }));
        }
    }

    /// The agent looks at its oldest message.
    fn work(&mut self, id: ProcessId) {
        let used = self.used();
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let (order, action) = match agent.inbox.pop_front() {
            Some(ControllerMessage::Order { order, action }) => (order, action),
            Some(ControllerMessage::Welcome { .. }) => {
                agent.welcomed = true;
                agent.held = agent.held_here;
                if let Some(asking) = &mut agent.asking {
                    asking.goes_ahead = false;
                }
                return self.ask(id);
            }
            Some(ControllerMessage::Room { ticket, granted }) if ticket == agent.tickets => {
                match &mut agent.asking {
                    Some(asking) if granted => asking.goes_ahead = true,
                    Some(_) => self.end_ask(id, false),
                    None => {}
                }
                return self.try_again(id);
            }
            _ => return,
        };
        let mut outcome = Outcome::Done;
        let (from, to) = match action {
            Action::Close { .. } => (Phase::Open, Phase::Closed),
            Action::Open => (Phase::Closed, Phase::Open),
            Action::Lock { .. } => (Phase::Closed, Phase::Locked),
            Action::Checkpoint { .. } => (Phase::Locked, Phase::Away),
            Action::Restore => (Phase::Away, Phase::Locked),
            Action::Unlock => (Phase::Locked, Phase::Closed),
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => {
                (agent.phase, agent.phase)
            }
        };
        assert_eq!(agent.phase, from, "{action:?} does not fit");
        let failing = matches!(
            action,
            Action::Close { .. } | Action::Lock { .. } | Action::Checkpoint { .. }
        );
        if let Some(fail) = self.fail.take_if(|_| failing) {
            outcome = fail;
        } else {
            if action == Action::Restore {
                assert!(
                    used + agent.size <= TOTAL,
                    "restored without room: the process would be lost"
                );
            }
            agent.phase = to;
            match action {
                Action::Close { .. } => agent.generation += 1,
                Action::Open => agent.wants = false, // Its caller went through.
                Action::HoldAllocations { .. } => (agent.held, agent.held_here) = (true, true),
                Action::ReleaseAllocations => (agent.held, agent.held_here) = (false, false),
                _ => {}
            }
        }
        if agent.orphaned {
            self.hello(id); // Nobody is there for the report; the Hello says it all.
            return;
        }
        let phase = agent.phase;
        let cuda_error = if outcome == Outcome::Done { 0 } else { 304 };
        self.feed(Input::Message(
            id,
            AgentMessage::Report { order, outcome, phase, cuda_error, elapsed_us: 1 },
        ));
    }

    fn answer_question(&mut self) {
        match self.questions.pop_front() {
            Some(Effect::Survey { key, .. }) => {
                let survey = Survey { gpus: Ok(self.gpus()), room: Ok(()) };
                self.feed(Input::Surveyed(key, survey));
            }
            Some(Effect::Prove(key, number)) => {
                let gpus = Ok(self.gpus());
                self.feed(Input::Proven(key, number, gpus));
            }
            _ => {}
        }
    }

    fn tick(&mut self) {
        self.now += 60;
        let pages: Vec<(ProcessId, PageSnapshot)> =
            self.agents.iter().map(|(id, a)| (*id, page(a))).collect();
        for (id, page) in pages {
            self.feed(Input::Page(id, page));
        }
        let gpus = Ok(self.gpus());
        self.feed(Input::Gpus(gpus));
        self.feed(Input::Tick);
    }

    fn exit(&mut self, id: ProcessId) {
        if let Some(agent) = self.agents.remove(&id) {
            self.feed(Input::Exited(agent.known_as));
        }
    }

    /// The connection breaks. What the agent is in the middle of it finishes; it holds
    /// its allocations until somebody welcomes it again.
    fn cut(&mut self, id: ProcessId, busy: bool) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        agent.inbox.retain(|message| matches!(message, ControllerMessage::Order { .. }));
        agent.inbox.truncate(usize::from(busy));
        agent.orphaned = true;
    }

    /// kill -9 of the controller, and the next one: shims announce, agents come back.
    fn restart(&mut self, busy: bool) {
        self.questions.clear();
        self.answers.clear();
        let ids: Vec<ProcessId> = self.agents.keys().copied().collect();
        ids.iter().for_each(|id| self.cut(*id, busy));
        self.node = Node::new(settings());
        for (key, record) in self.journal.clone() {
            for process in record.processes {
                if self.agents.values().all(|agent| agent.pid != process.pid) {
                    continue;
                }
                let restoring = record.step == "restore";
                let identity = (process.pid, process.start_ticks);
                self.feed(Input::Recalled {
                    key: key.clone(),
                    identity,
                    away: process.away,
                    restoring,
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

    /// Lets everything that is on its way arrive, with whoever waits calling again as agents do.
    fn settle(&mut self) {
        for _ in 0..400 {
            let ids: Vec<ProcessId> = self.agents.keys().copied().collect();
            for id in ids {
                while self.agents.get(&id).is_some_and(|a| !a.inbox.is_empty()) {
                    self.work(id);
                }
                if self.agents[&id].orphaned {
                    self.hello(id);
                }
                if self.agents[&id].wants {
                    self.call(id);
                }
                self.try_again(id);
            }
            while !self.questions.is_empty() {
                self.answer_question();
            }
            self.tick();
        }
    }

    fn state(&self, n: usize) -> State {
        self.node.containers[&key(n)].state
    }
}

fn page(agent: &Agent) -> PageSnapshot {
    PageSnapshot {
        phase: agent.phase,
        waiters: u32::from(agent.wants),
        hazards: Hazards::default(),
        generation: agent.generation,
        allocated_bytes: agent.size,
        allocations: 1,
        calls: agent.calls,
        polls: 0,
        inflight: 0,
        last_hook: 0,
    }
}

#[test]
fn idle_goes_out_and_a_call_brings_it_back() {
    let mut world = World::new(1);
    world.running(0, 600);
    world.tick();
    assert_eq!(world.state(0), State::Active);
    world.settle();
    assert_eq!((world.state(0), world.used()), (State::Offloaded, 0));
    assert_eq!(
        world.journal[&key(0)].processes[0].away,
        [DeviceBytes { uuid: GPU.into(), bytes: 600 }]
    );
    let id = *world.agents.keys().next().unwrap();
    world.call(id);
    assert_eq!(world.state(0), State::Queued);
    for _ in 0..10 {
        world.answer_question();
        world.work(id);
    }
    assert_eq!((world.state(0), world.used()), (State::Active, 600));
    assert!(world.journal.is_empty());
}

#[test]
fn two_that_do_not_fit_together_take_turns() {
    let mut world = World::new(2);
    let first = world.running(0, 600);
    world.settle();
    world.running(1, 600);
    world.call(first);
    assert_eq!(world.state(0), State::Queued);
    world.settle();
    // The second went idle, the first came home, and went idle again.
    assert_eq!(world.node.containers[&key(0)].restores, 1);
    assert_eq!((world.state(0), world.state(1)), (State::Offloaded, State::Offloaded));
}

/// A controller dies between the restores of a container's two processes, and one that needs
/// the VRAM of the first was called before: it must not keep the second away.
#[test]
fn who_is_half_way_home_is_not_kept_behind_one_that_needs_its_room() {
    let mut world = World::new(2);
    let (one, _other) = (world.running(0, 250), world.running(0, 250));
    world.settle();
    let large = world.running(1, 800);
    world.settle();
    world.call(one);
    while world.used() == 0 {
        world.agents.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| world.work(id));
        world.answer_question();
    }
    world.restart(false);
    world.call(large);
    world.call(one);
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "somebody still waits");
    assert_eq!((world.state(0), world.state(1)), (State::Offloaded, State::Offloaded));
}

/// Two controllers die one after the other while a process is being moved out: the second
/// never heard of it but from the journal, and must not leave it out of its own records.
#[test]
fn what_an_earlier_controller_knew_reaches_the_one_after_the_next() {
    let mut world = World::new(1);
    let ids = [world.running(0, 300), world.running(0, 300), world.running(0, 300)];
    while world.journal.is_empty() {
        world.tick();
        ids.into_iter().for_each(|id| world.work(id));
        world.answer_question();
    }
    // The first is in the middle of its checkpoint; the next controller moves the others.
    let first = *ids.iter().find(|id| !world.agents[*id].inbox.is_empty()).unwrap();
    world.restart(true);
    for _ in 0..20 {
        world.tick();
        ids.into_iter().filter(|id| *id != first).for_each(|id| world.work(id));
        world.answer_question();
    }
    let pid = world.agents[&first].pid;
    let record = &world.journal[&key(0)];
    assert!(record.processes.iter().any(|process| process.pid == pid), "{record:?}");
    world.restart(false);
    ids.into_iter().for_each(|id| world.call(id));
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "somebody still waits");
}

/// Nobody knows what two processes held: they come home when the device is empty.
#[test]
fn a_container_without_any_record_comes_home_to_an_empty_device() {
    let mut world = World::new(2);
    let ids = [world.running(0, 300), world.running(0, 300)];
    world.running(1, 100);
    world.settle();
    world.journal.clear();
    world.restart(false);
    ids.into_iter().for_each(|id| world.call(id));
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "somebody still waits");
}

/// All who have come forward are home; one whose restore is running has not. Its VRAM stays
/// promised to it.
#[test]
fn the_promise_to_one_that_is_not_seen_yet_is_kept() {
    let mut world = World::new(1);
    let unseen = (77, 1);
    let away = vec![DeviceBytes { uuid: GPU.into(), bytes: 400 }];
    let recalled = Input::Recalled { key: key(0), identity: unseen, away, restoring: true };
    world.feed(recalled);
    world.join(0);
    let id = ProcessId(world.next);
    world.work(id);
    world.work(id);
    assert_eq!(world.node.ledger.promised_bytes(GPU), 400);
    world.exit(id);
    assert_eq!(world.node.ledger.promised_bytes(GPU), 400);
}

/// After a controller's death one process of a container comes forward late, when the other's
/// VRAM is promised and proven already: that promise is not for it.
#[test]
fn who_comes_forward_after_the_proof_waits_for_one_of_its_own() {
    let mut world = World::new(1);
    let (early, late) = (world.running(0, 300), world.running(0, 300));
    world.settle();
    let busy = ControllerMessage::Order { order: 0, action: Action::ReleaseAllocations };
    world.agents.get_mut(&late).unwrap().inbox.push_back(busy);
    world.restart(true);
    world.call(early);
    while world.state(0) != State::Restoring {
        world.answer_question();
        world.work(early);
    }
    world.work(late);
    // Within what was proven free beyond the promise.
    world.others = 600;
    world.settle();
    assert_eq!(world.state(0), State::Queued);
    world.others = 0;
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "somebody still waits");
    assert_eq!(world.state(0), State::Offloaded);
}

/// What is in the process itself is told once, however often the container is looked at.
#[test]
fn a_process_that_cannot_be_moved_is_told_of_once() {
    let mut world = World::new(1);
    let id = world.running(0, 300);
    let hazards = Hazards::MANAGED_MEMORY;
    world.feed(Input::Message(id, AgentMessage::Notice { hazards }));
    for _ in 0..10 {
        world.call(id);
        world.settle();
    }
    assert_eq!(world.refused, ["managed-memory"]);
    assert_eq!(world.state(0), State::Idle);
}

#[test]
fn somebody_unmanaged_who_takes_the_room_makes_a_restore_wait() {
    let mut world = World::new(1);
    world.running(0, 600);
    world.settle();
    world.others = 900;
    let id = *world.agents.keys().next().unwrap();
    world.call(id);
    world.settle();
    assert_eq!(world.state(0), State::Queued);
    world.others = 0;
    world.settle();
    assert_eq!(world.node.containers[&key(0)].restores, 1);
}

#[test]
fn a_request_is_answered_when_it_is_done() {
    let mut world = World::new(1);
    world.running(0, 10);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    for _ in 0..10 {
        world.answer_question();
        world.work(ProcessId(1));
    }
    assert_eq!(
        (world.state(0), world.answers.clone()),
        (State::Offloaded, vec![(CommandId(1), true)])
    );
    world.feed(Input::Command(CommandId(2), key(0), Request::Restore));
    for _ in 0..10 {
        world.answer_question();
        world.work(ProcessId(1));
    }
    assert_eq!((world.state(0), world.answers.len()), (State::Active, 2));
}

#[test]
fn a_call_while_it_is_closing_turns_round_before_anything_is_moved() {
    let mut world = World::new(1);
    world.running(0, 10);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    world.answer_question();
    world.work(ProcessId(1));
    world.call(ProcessId(1));
    for _ in 0..10 {
        world.work(ProcessId(1));
        world.answer_question();
    }
    assert_eq!(
        (world.state(0), world.answers.clone()),
        (State::Active, vec![(CommandId(1), false)])
    );
    assert_eq!(world.agents[&ProcessId(1)].phase, Phase::Open);
}

/// Lets time pass until nobody asks for room any more.
fn until_served(world: &mut World) -> bool {
    (0..8).any(|_| {
        world.settle();
        world.agents.values().all(|agent| agent.asking.is_none())
    })
}

#[test]
fn an_allocation_that_finds_no_memory_waits_for_an_idle_neighbour_to_go() {
    let mut world = World::new(2);
    world.running(0, 600);
    let newcomer = world.running(1, 100);
    world.allocate(newcomer, 900);
    assert_eq!(world.agents[&newcomer].asking.map(|a| a.bytes), Some(900));
    assert!(until_served(&mut world));
    assert_eq!(world.agents[&newcomer].size, 1_000);
    assert_eq!(world.node.containers[&key(0)].offloads, 1);
}

#[test]
fn two_whose_allocations_need_each_others_room_take_turns() {
    let mut world = World::new(2);
    let first = world.running(0, 400);
    let second = world.running(1, 400);
    world.allocate(first, 400);
    world.allocate(second, 400);
    assert!(world.agents.values().all(|agent| agent.asking.is_some()));
    assert!(until_served(&mut world));
    assert_eq!((world.agents[&first].size, world.agents[&second].size), (800, 800));
}

#[test]
fn what_can_never_fit_fails_at_once() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    world.tick();
    world.allocate(id, 500);
    while !world.agents[&id].inbox.is_empty() {
        world.work(id);
    }
    assert!(world.agents[&id].asking.is_none());
    assert_eq!(world.agents[&id].size, 600);
}

#[test]
fn an_allocation_of_higher_priority_does_not_wait_behind_a_return_that_may_not_take_its_room() {
    let mut world = World::new(2);
    let low = world.running(0, 700);
    world.settle();
    let high = world.running(1, 600);
    world.call(low);
    // The return has waited for so long that it stands first.
    world.now += 60_000;
    world.others = 200;
    world.allocate(high, 300);
    assert_eq!(world.node.queue.in_order(world.now), [key(0), key(1)]);
    world.others = 0;
    for _ in 0..4 {
        // It is in use, but for the allocation.
        world.agents.get_mut(&high).unwrap().calls += 1;
        world.tick();
        while !world.questions.is_empty() {
            world.answer_question();
        }
        for id in [low, high] {
            while !world.agents[&id].inbox.is_empty() {
                world.work(id);
            }
        }
    }
    assert_eq!(world.agents[&high].size, 900);
}

#[derive(Clone, Debug)]
enum Step {
    Join(usize),
    Allocate(usize, u64),
    Call(usize),
    Work(usize),
    Question,
    Tick,
    Exit(usize),
    Detach(usize, bool),
    Restart(bool),
    Others(u64),
    Fail(bool),
    Ask(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_usize..3).prop_map(Step::Join),
        4 => (0_usize..8, 1_u64..500).prop_map(|(n, s)| Step::Allocate(n, s)),
        6 => (0_usize..8).prop_map(Step::Call),
        16 => (0_usize..8).prop_map(Step::Work),
        10 => Just(Step::Question),
        8 => Just(Step::Tick),
        1 => (0_usize..8).prop_map(Step::Exit),
        1 => (0_usize..8, any::<bool>()).prop_map(|(n, busy)| Step::Detach(n, busy)),
        1 => any::<bool>().prop_map(Step::Restart),
        1 => (0_u64..600).prop_map(Step::Others),
        1 => any::<bool>().prop_map(Step::Fail),
        2 => (0_usize..3, any::<bool>()).prop_map(|(c, out)| Step::Ask(c, out)),
    ]
}

/// A container that claims to be away would be promised a whole device: one that nobody
/// moved is not believed, and keeps nobody from coming home.
#[test]
fn who_says_that_it_is_away_and_was_never_moved_is_not_believed() {
    let mut world = World::new(2);
    world.node.started(1);
    let honest = world.running(0, 500);
    world.join(1);
    let liar = world.agents.last_entry().unwrap();
    let id = *liar.key();
    liar.into_mut().phase = Phase::Away;
    world.hello(id);
    assert_eq!(world.state(1), State::Active);
    assert!(world.node.queue.is_empty());
    world.settle();
    assert_eq!(world.state(0), State::Offloaded);
    world.call(honest);
    world.settle();
    assert!(!world.agents[&honest].wants, "it still waits");
}

/// What an operator chose stands before every policy, and before those who wait for room.
#[test]
fn a_pin_and_the_switch_keep_containers_where_they_are() {
    let mut world = World::new(2);
    let first = world.running(0, 600);
    assert!(world.node.pin(&key(0), true) && !world.node.pin(&key(0), true));
    world.settle();
    assert_eq!(world.state(0), State::Idle);
    assert_eq!(world.node.containers[&key(0)].reason.0, Reason::Pinned);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    assert_eq!(world.answers.last(), Some(&(CommandId(1), false)), "not by hand either");

    world.node.pin(&key(0), false);
    world.node.set_auto_offload(false);
    world.settle();
    assert_eq!(world.node.containers[&key(0)].reason.0, Reason::AutoOff);
    world.feed(Input::Command(CommandId(2), key(0), Request::Offload));
    world.settle();
    assert_eq!(world.state(0), State::Offloaded, "by hand it goes");
    // Its room is taken; nobody makes room for it while the switch is off.
    let second = world.running(1, 600);
    world.call(first);
    world.settle();
    assert_eq!((world.state(0), world.agents[&second].phase), (State::Queued, Phase::Open));
    world.node.set_auto_offload(true);
    world.settle();
    assert!(!world.agents[&first].wants, "it still waits");
}

/// More cases than usual, unless PROPTEST_CASES says how many.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(512);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Takes the steps, lets everything settle, and looks at what is left.
fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut world = World::new(3);
    let mut command = 0;
    let mut asked = std::collections::BTreeSet::new();
    for step in steps {
        let nth = |n: usize, world: &World| world.agents.keys().copied().nth(n);
        match step {
            Step::Join(container) => world.join(container),
            Step::Allocate(n, bytes) => {
                if let Some(id) = nth(n, &world) {
                    world.allocate(id, bytes)
                }
            }
            Step::Call(n) => {
                if let Some(id) = nth(n, &world) {
                    world.try_again(id);
                    world.call(id);
                }
            }
            Step::Work(n) => {
                if let Some(id) = nth(n, &world) {
                    world.work(id)
                }
            }
            Step::Question => world.answer_question(),
            Step::Tick => world.tick(),
            Step::Exit(n) => {
                if let Some(id) = nth(n, &world) {
                    world.exit(id)
                }
            }
            Step::Detach(n, busy) => {
                if let Some(id) = nth(n, &world) {
                    world.feed(Input::Detached(id));
                    world.cut(id, busy);
                    let agent = world.agents.remove(&id).unwrap();
                    world.next += 1;
                    let id = ProcessId(world.next);
                    world.agents.insert(id, agent);
                    if world.agents[&id].inbox.is_empty() {
                        world.hello(id);
                    }
                }
            }
            Step::Restart(busy) => {
                world.restart(busy);
                asked.clear();
            }
            Step::Others(bytes) => {
                if world.used() - world.others + bytes <= TOTAL {
                    world.others = bytes
                }
            }
            Step::Fail(busy) => {
                world.fail = Some(if busy { Outcome::Busy } else { Outcome::DriverError })
            }
            Step::Ask(container, out) => {
                command += 1;
                asked.insert(CommandId(command));
                let request = if out { Request::Offload } else { Request::Restore };
                world.feed(Input::Command(CommandId(command), key(container), request));
            }
        }
    }
    world.others = 0;
    world.fail = None;
    world.settle();
    for (id, agent) in &world.agents {
        prop_assert!(
            matches!(agent.phase, Phase::Open | Phase::Away),
            "{id:?} is left in {:?}",
            agent.phase
        );
        prop_assert!(!agent.wants, "{id:?} still waits");
        prop_assert!(!agent.held, "{id:?} may not allocate");
        prop_assert!(agent.asking.is_none(), "an allocation of {id:?} still waits");
    }
    for n in 0..3 {
        let members = world.agents.values().filter(|a| a.container == n).count();
        if members == 0 {
            continue;
        }
        let state = world.state(n);
        prop_assert!(
            matches!(state, State::Active | State::Idle | State::Offloaded),
            "{n} is left {state}"
        );
    }
    for (command, _) in &world.answers {
        asked.remove(command);
    }
    prop_assert!(asked.is_empty(), "nobody answers {asked:?}");
    prop_assert!(world.node.queue.is_empty());
    prop_assert!(world.node.grants.is_empty());
    prop_assert_eq!(world.node.ledger.promised_bytes(GPU), 0);
    Ok(())
}

proptest! {
    #![proptest_config(config())]

    /// Whatever happens in whatever order: no restore without room (asserted in `work`), no
    /// order that does not fit, and at the end nobody waits, nobody is stuck half way, and
    /// nobody's allocations are held.
    #[test]
    fn nobody_is_lost_or_stuck(steps in proptest::collection::vec(step(), 1..200)) {
        run(steps)?;
    }
}

/// What random steps have found once.
#[test]
fn a_process_that_was_closed_when_its_controller_died_and_then_finds_no_memory_is_served() {
    let mut steps = vec![Step::Join(2), Step::Join(2), Step::Work(1), Step::Ask(2, true)];
    steps.extend([Step::Allocate(1, 240), Step::Question, Step::Others(380), Step::Work(0)]);
    steps.extend([Step::Restart(true), Step::Allocate(0, 381), Step::Work(1), Step::Tick]);
    steps.extend([Step::Tick, Step::Others(0), Step::Tick]);
    run(steps).unwrap();
}
