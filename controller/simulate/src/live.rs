//! Tests that the daemon and the simulation make the same decisions for the same trace and seed.
//!
//! ```text
//!          ┌─> engine: start and end of each use, queries when something is due ───────> decisions
//!  trace ──┤                                                                          same, in order
//!          └─> here: counters, GPUs and ticks at the rate of the daemon ────────────────> decisions
//! ```
//!
//! [`Node`] and all its decisions are real in both. This test also includes parts of the daemon
//! that the simulation leaves out. Counters are read every half second. GPUs are read every second,
//! and after a move. The node ticks at the rate that it requests. Every process pauses its
//! allocations before the proof for a restore.
//!
//! Three parts are virtual. The clock jumps to the next event, so that the result does not depend
//! on the machine. The agents take the time of the calibration. The GPU is a sum of bytes. Sockets,
//! shared counters and the driver are tested end to end elsewhere.
//!
//! The engine sees a use immediately, but this test only at its next reading. Therefore the times
//! of the same decision can differ, by at most [`APART_MS`].

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use affinode_core::{
    ContainerSpec, DeviceBytes, Effect, GpuSample, Input, Millis, Node, Settings, Survey,
    input::Identity,
    policy::{Engine, KeepAlive, Mode, Policies, Policy},
    victims::VictimRule,
};
use affinode_proto::{
    state::State,
    wire::{
        Capabilities, Hazards, Phase, ProcessFlags,
        counters::CounterSnapshot,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};

use super::{
    engine::{self, PolicyDecision, names},
    memory::ProcessMemory,
    random::RandomSource,
    *,
};

const GIB: u64 = 1 << 30;
/// Interval at which counters are read. It is the default of the setting `timing.sample_interval`.
const SAMPLE_MS: Millis = 500;
/// Maximum difference between the time of a decision in the simulation and its time in the daemon's
/// loop. A decision can follow three steps: the victim is seen idle, the victim is seen offloaded,
/// and the waiter is restored. Each step takes at most two readings of the counters.
const APART_MS: Millis = 6 * SAMPLE_MS;

#[derive(Clone, Debug)]
struct Agent {
    phase: Phase,
    memory: ProcessMemory,
    calls: u64,
    inflight: u64,
    waiting: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    Call(usize),
    Returns(usize),
    /// The agent of this index has executed its order.
    Done(usize),
}

struct Live {
    node: Node,
    now: Millis,
    machine: SimulatedMachine,
    service_ms: Millis,
    agents: Vec<Agent>,
    orders: Vec<(usize, u64, Action)>,
    next: BinaryHeap<Reverse<(Millis, u64, Next)>>,
    sequence: u64,
    next_tick: Millis,
    gpus_read: Option<Millis>,
    inputs: VecDeque<Input>,
    decisions: Vec<PolicyDecision>,
}

impl Live {
    fn play(
        trace: &WorkloadTrace,
        machine: SimulatedMachine,
        settings: &Settings,
    ) -> Vec<PolicyDecision> {
        let costs = machine.calibration;
        let engine = settings.policies.node.engine;
        let agent = |load: &TraceLoad| Agent {
            phase: Phase::Checkpointed,
            memory: ProcessMemory::new(load.vram_bytes, &costs).offloaded(engine),
            calls: 1,
            inflight: 0,
            waiting: 0,
        };
        let mut live = Live {
            node: Node::new(settings.clone()),
            now: 0,
            machine,
            service_ms: trace.loads[0].service_ms.into(),
            agents: trace.loads.iter().map(agent).collect(),
            orders: Vec::new(),
            next: BinaryHeap::new(),
            sequence: 0,
            next_tick: 0,
            gpus_read: None,
            inputs: VecDeque::new(),
            decisions: Vec::new(),
        };
        live.inputs.push_back(Input::Clock(4 * 86_400_000));
        live.begin(trace);
        let end = trace.end_ms() + 3_600_000;
        while live.now < end {
            match live.next.pop() {
                Some(Reverse((at, _, next))) if at <= live.next_tick => {
                    live.now = at;
                    live.take(next);
                }
                later => {
                    live.next.extend(later);
                    live.now = live.next_tick;
                    live.tick();
                    live.next_tick = live.now + live.pause_ms();
                }
            }
            live.drain();
            // A queue or a move needs shorter ticks than planned.
            live.next_tick = live.next_tick.min(live.now + live.pause_ms());
        }
        live.decisions
    }

    /// Starts the node in a state in which an earlier controller has offloaded every container.
    fn begin(&mut self, trace: &WorkloadTrace) {
        self.inputs.push_back(Input::Gpus(Ok(self.gpus())));
        for (n, load) in trace.loads.iter().enumerate() {
            let (key, pid) = (names::key(n), names::pid(n));
            let spec = ContainerSpec { id: load.name.clone(), ..ContainerSpec::default() };
            let offloaded = vec![DeviceBytes { uuid: names::uuid(0), bytes: load.vram_bytes }];
            self.inputs.extend([
                Input::Announced(Box::new(spec), key.clone()),
                Input::Recalled {
                    key: key.clone(),
                    identity: (pid, 1),
                    offloaded,
                    to: None,
                    restoring: false,
                    host: Vec::new(),
                },
                Input::Joined {
                    key,
                    process: names::id(n),
                    identity: Identity { pid, start_ticks: 1, command: load.name.clone() },
                    phase: Phase::Checkpointed,
                    generation: 1,
                    hazards: Hazards::default(),
                    capabilities: Capabilities::default(),
                    swap: self.agents[n].memory.swap(),
                },
                Input::Page(names::id(n), page(&self.agents[n])),
            ]);
            load.arrivals_ms.iter().for_each(|at| self.at(Millis::from(*at), Next::Call(n)));
        }
        self.drain();
    }

    fn at(&mut self, when: Millis, next: Next) {
        self.sequence += 1;
        self.next.push(Reverse((when, self.sequence, next)));
    }

    fn pause_ms(&self) -> Millis {
        self.node.tick_ms(SAMPLE_MS)
    }

    fn gpus(&self) -> Vec<GpuSample> {
        let held = (0..).zip(&self.agents).map(|(n, a)| (names::pid(n), a.memory.held_bytes()));
        vec![GpuSample {
            uuid: names::uuid(0),
            total_bytes: self.machine.vram_bytes,
            used_bytes: self.agents.iter().map(|a| a.memory.held_bytes()).sum(),
            processes: held.filter(|(_, bytes)| *bytes > 0).collect(),
            ..GpuSample::default()
        }]
    }

    /// Runs one tick of the node in the way in which the daemon does.
    fn tick(&mut self) {
        for n in 0..self.agents.len() {
            self.inputs.push_back(Input::Page(names::id(n), page(&self.agents[n])));
        }
        let interval_ms = if self.pause_ms() < SAMPLE_MS { 100 } else { 1_000 };
        if self.gpus_read.is_none_or(|read| self.now - read >= interval_ms) {
            self.gpus_read = Some(self.now);
            self.inputs.push_back(Input::Gpus(Ok(self.gpus())));
        }
        self.inputs.push_back(Input::Tick);
    }

    fn take(&mut self, next: Next) {
        match next {
            Next::Call(n) if self.agents[n].phase == Phase::Open => self.goes_through(n),
            Next::Call(n) => {
                self.agents[n].waiting += 1;
                if self.agents[n].waiting == 1 {
                    let wake = AgentMessage::Wake { generation: 1, waiters: 1, hook: 1 };
                    self.inputs.push_back(Input::Message(names::id(n), wake));
                }
            }
            Next::Returns(n) => {
                self.agents[n].inflight -= 1;
                self.agents[n].calls += 1;
            }
            Next::Done(place) => self.done(place),
        }
    }

    /// Makes a CUDA call that passes the gate. The call launches a kernel and waits for its end.
    fn goes_through(&mut self, n: usize) {
        self.agents[n].calls += 1;
        self.agents[n].inflight += 1;
        self.at(self.now + self.service_ms, Next::Returns(n));
    }

    fn drain(&mut self) {
        while let Some(input) = self.inputs.pop_front() {
            for effect in self.node.handle(self.now, input) {
                self.execute_order(effect);
            }
        }
    }

    fn execute_order(&mut self, effect: Effect) {
        match effect {
            Effect::Send(process, ControllerMessage::Order { order, action, .. }) => {
                self.order(process.0 as usize, order, action);
            }
            Effect::Survey { key, .. } => {
                let survey = Survey { gpus: Ok(self.gpus()), host: Ok(Vec::new()) };
                self.inputs.push_back(Input::Surveyed(key, survey));
            }
            Effect::Prove(key, number) => {
                self.inputs.push_back(Input::Proven(key, number, Ok(self.gpus())));
            }
            Effect::Changed(change) => {
                if matches!(change.to, State::Offloaded | State::Active) {
                    self.inputs.push_back(Input::Gpus(Ok(self.gpus())));
                }
                self.decisions.extend(PolicyDecision::of(self.now, &change));
            }
            _ => {}
        }
    }

    fn order(&mut self, n: usize, order: u64, action: Action) {
        let used_bytes = self.gpus()[0].used_bytes;
        let agent = &mut self.agents[n];
        let takes_ms = agent.memory.order_ms(action, &self.machine.calibration);
        match action {
            Action::Close { .. } if agent.inflight == 0 => agent.phase = Phase::Closed,
            Action::Restore => {
                let bytes = agent.memory.gone_bytes();
                assert!(used_bytes + bytes <= self.machine.vram_bytes, "restored without room");
                agent.phase = agent.memory.execute_order(action);
            }
            _ => {}
        }
        let takes_ms = match action {
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => 0,
            _ => takes_ms,
        };
        self.orders.push((n, order, action));
        self.at(self.now + takes_ms, Next::Done(self.orders.len() - 1));
    }

    fn done(&mut self, place: usize) {
        let (n, order, action) = self.orders[place];
        let agent = &mut self.agents[n];
        let mut outcome = Outcome::Done;
        match action {
            Action::Close { .. } if agent.phase == Phase::Open => outcome = Outcome::Busy,
            Action::Unlock => agent.phase = Phase::Closed,
            Action::Lock { .. } => agent.phase = Phase::Locked,
            Action::CopyOut { .. } | Action::Checkpoint { .. } => {
                agent.phase = agent.memory.execute_order(action);
            }
            Action::Open => agent.phase = Phase::Open,
            _ => {}
        }
        let swap = agent.memory.swap();
        let report = AgentMessage::Report {
            order,
            outcome,
            phase: agent.phase,
            cuda_error: 0,
            elapsed_us: 0,
            swappable_bytes: swap.swappable_bytes,
            copied_out_bytes: swap.copied_out_bytes,
            unchanged_bytes: 0,
            zero_bytes: 0,
            local_memory_bytes: 0,
        };
        self.inputs.push_back(Input::Message(names::id(n), report));
        if action == Action::Open {
            (0..std::mem::take(&mut self.agents[n].waiting)).for_each(|_| self.goes_through(n));
        }
    }
}

fn page(agent: &Agent) -> CounterSnapshot {
    let swap = agent.memory.swap();
    CounterSnapshot {
        phase: agent.phase,
        waiters: u32::try_from(agent.waiting).unwrap(),
        hazards: Hazards::default(),
        generation: 1,
        allocated_bytes: agent.memory.copyable_bytes(),
        allocations: 1,
        swappable_bytes: swap.swappable_bytes,
        copied_out_bytes: swap.copied_out_bytes,
        notes: ProcessFlags::default(),
        call_cost_ps: 0,
        held_us: 0,
        kept_bytes: 0,
        filling_bytes: 0,
        calls: agent.calls,
        polls: 0,
        inflight: agent.inflight,
        last_hook: 0,
    }
}

/// Creates a trace of eight programs that are used for some seconds and then unused for minutes.
fn trace(seed: u64) -> WorkloadTrace {
    let mut random = RandomSource::new(seed);
    let load = |n: usize| {
        let mut arrivals_ms = Vec::new();
        let mut at = random.between(0.0, 600.0);
        while at < 4.0 * 3600.0 {
            for _ in 0..4 {
                arrivals_ms.push((at * 2.0) as u32 * 500);
                at += random.between(2.0, 6.0);
            }
            at += random.between(60.0, 1_500.0);
        }
        TraceLoad {
            name: format!("p{n}"),
            vram_bytes: (4 + 4 * (n as u64 % 3)) * GIB,
            service_ms: 1_000,
            arrivals_ms,
            ..TraceLoad::default()
        }
    };
    WorkloadTrace { loads: (0..8).map(load).collect() }
}

/// Groups the decisions by container. Each group is in order of time.
fn by_container(decisions: &[PolicyDecision]) -> BTreeMap<&str, Vec<&PolicyDecision>> {
    let mut by_container: BTreeMap<&str, Vec<&PolicyDecision>> = BTreeMap::new();
    decisions.iter().for_each(|d| by_container.entry(&d.key).or_default().push(d));
    by_container
}

/// Runs the trace in the simulation and in the daemon's loop. Returns the decisions of both until
/// the first process ends: first those of the simulation, then those of the daemon's loop.
fn both_ways(trace: &WorkloadTrace, gib: u64, settings: &Settings) -> [Vec<PolicyDecision>; 2] {
    let vram_bytes = gib * GIB + (512 << 20);
    let machine = SimulatedMachine {
        gpus: 1,
        vram_bytes,
        calibration: Calibration::default(),
        slo_ms: 1_000,
    };
    let contender = baselines::all(settings, 1).swap_remove(0);
    let simulated = engine::decisions(trace, machine, &contender).unwrap();
    let ends = trace.loads.iter().filter_map(|load| load.arrivals_ms.last());
    let until = ends.min().copied().map_or(0, Millis::from);
    [simulated, Live::play(trace, machine, settings)].map(|mut decisions| {
        decisions.retain(|decision| decision.at_ms < until);
        decisions
    })
}

/// Asserts that each container has the same decisions: the same reasons, in the same order, and at
/// the same times within [`APART_MS`]. The order among containers is then also the same, except for
/// decisions that are less than [`APART_MS`] apart.
fn assert_same([simulated, live]: &[Vec<PolicyDecision>; 2]) {
    let (simulated, live) = (by_container(simulated), by_container(live));
    assert_eq!(simulated.len(), 8);
    for (key, simulated) in simulated {
        let live = &live[key];
        for (n, (s, l)) in simulated.iter().zip(live).enumerate() {
            let same = (&s.to, &s.reason) == (&l.to, &l.reason);
            assert!(same && s.at_ms.abs_diff(l.at_ms) <= APART_MS, "{n}: {s:?} and live {l:?}");
        }
        assert_eq!(simulated.len(), live.len(), "{key}");
    }
}

fn count(decisions: &[PolicyDecision], to: State, reason: &str) -> usize {
    decisions.iter().filter(|d| d.to == to.as_str() && d.reason == reason).count()
}

/// Returns settings with a fixed idle timeout, so that the node learns no times from pauses. The
/// daemon's loop may see a pause half a second too short, which then does not change later
/// decisions.
fn settings() -> Settings {
    let node =
        Policy { keep_alive: KeepAlive::Fixed, idle_timeout_ms: 60_000, ..Policy::default() };
    let policies = Policies { node, ..Policies::default() };
    Settings { policies, victims: VictimRule::Lru, ..Settings::default() }
}

#[test]
fn with_room_for_all_decisions_are_equal() {
    let both = both_ways(&trace(5), 64, &settings());
    assert_same(&both);
    assert!(count(&both[0], State::Closing, "idle-timeout") > 50, "{}", both[0].len());
    assert!(count(&both[0], State::Restoring, "called") > 50, "{}", both[0].len());
}

#[test]
fn with_room_for_some_victims_are_equal() {
    let both = both_ways(&trace(6), 40, &settings());
    assert_same(&both);
    assert!(count(&both[0], State::Closing, "pressure") > 50, "{}", both[0].len());
    assert!(count(&both[0], State::Queued, "called") > 50, "{}", both[0].len());
}

/// With the engine `copy`, the simulation and the daemon's loop must choose the same victims at the
/// same times. Contexts are checkpointed only when a waiter needs their VRAM.
#[test]
fn with_a_copying_engine_victims_are_equal() {
    let mut settings = settings();
    (settings.policies.node.engine, settings.policies.node.mode) = (Engine::Copy, Mode::Pressure);
    let both = both_ways(&trace(6), 40, &settings);
    assert_same(&both);
    assert!(count(&both[0], State::Closing, "pressure") > 50, "{}", both[0].len());
}

/// With the default policy, the numbers of decisions in the simulation and in the daemon's loop
/// must differ by at most 5 %. The daemon's loop sees pauses up to half a second too short or too
/// long, so learned times and single decisions can differ. The engine `auto` is not compared here:
/// it may checkpoint a context some polls earlier or later, which changes further decisions.
#[test]
fn the_default_policy_moves_as_many() {
    let mut settings = Settings::default();
    settings.policies.node.engine = Engine::Checkpoint;
    for (gib, reason) in [(64, "idle-timeout"), (40, "pressure")] {
        let [simulated, live] = both_ways(&trace(7), gib, &settings);
        for (to, reason) in [(State::Closing, reason), (State::Restoring, "called")] {
            let (s, l) = (count(&simulated, to, reason), count(&live, to, reason));
            assert!(s > 50 && s.abs_diff(l) * 20 <= s, "{to} {reason}: {s}, and {l} live");
        }
    }
}
