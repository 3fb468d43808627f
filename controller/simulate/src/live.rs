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
//! In the simulation, the node learns of a use immediately. In this test, it learns of the use at
//! the next reading of the counters. The times of the same decision can therefore differ by up to
//! [`APART_MS`].

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    ops::{Deref, DerefMut},
};

use affinode_core::{
    ContainerSpec, DeviceBytes, Effect, Input, Millis, ProcessId, Settings,
    harness::{Bench, Host, agent::Agent, answer},
    host_memory::SurveyedMemory,
    policy::{Engine, KeepAlive, Mode, Policies, Policy},
    victims::VictimRule,
};
use affinode_proto::{
    state::State,
    wire::{
        Phase,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::{
    engine::{self, PolicyDecision, names},
    memory::{OffloadLevel, ProcessMemory},
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    Call(ProcessId),
    Returns(ProcessId),
    /// The agent has executed the order of this index.
    Done(usize),
}

struct Live {
    bench: Bench,
    machine: SimulatedMachine,
    service_ms: Millis,
    /// Numbers of calls that wait at the gates.
    waiting: BTreeMap<ProcessId, usize>,
    orders: Vec<(ProcessId, u64, Action)>,
    next: BinaryHeap<Reverse<(Millis, u64, Next)>>,
    sequence: u64,
    next_tick: Millis,
    gpus_read: Option<Millis>,
    decisions: Vec<PolicyDecision>,
}

impl Deref for Live {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl DerefMut for Live {
    fn deref_mut(&mut self) -> &mut Bench {
        &mut self.bench
    }
}

impl Host for Live {
    fn execute(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Send(id, ControllerMessage::Order { order, action, .. }) => {
                self.begin_order(id, order, action);
            }
            Effect::Survey { .. } | Effect::Prove { .. } => {
                return Some(answer(effect, Ok(self.gpus()), Ok(SurveyedMemory::default())));
            }
            Effect::Changed(change) => {
                self.decisions.extend(PolicyDecision::of(self.now, &change));
                if matches!(change.to, State::Offloaded | State::Active) {
                    return Some(Input::Gpus(Ok(self.gpus())));
                }
            }
            _ => {}
        }
        None
    }
}

impl Live {
    fn play(
        trace: &WorkloadTrace,
        machine: SimulatedMachine,
        settings: &Settings,
    ) -> Vec<PolicyDecision> {
        let mut live = Live {
            bench: Bench::new(settings.clone(), &[&names::uuid(0)], machine.vram_bytes),
            machine,
            service_ms: trace.loads[0].service_ms.into(),
            waiting: BTreeMap::new(),
            orders: Vec::new(),
            next: BinaryHeap::new(),
            sequence: 0,
            next_tick: 0,
            gpus_read: None,
            decisions: Vec::new(),
        };
        live.feed(Input::Clock(4 * 86_400_000));
        live.begin(trace, settings.policies.node.engine);
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
            // A queue or a move needs shorter ticks than planned.
            live.next_tick = live.next_tick.min(live.now + live.pause_ms());
        }
        live.decisions
    }

    /// Starts the node in a state in which an earlier controller has offloaded every container.
    fn begin(&mut self, trace: &WorkloadTrace, engine: Engine) {
        self.feed(Input::Gpus(Ok(self.gpus())));
        for (n, load) in trace.loads.iter().enumerate() {
            let (key, id) = (names::key(n), names::id(n));
            let memory = ProcessMemory::new(load.vram_bytes, &self.machine.calibration);
            let swap = memory.offloaded(engine).swap();
            let agent = Agent {
                container: n,
                pid: names::pid(n),
                phase: Phase::Checkpointed,
                size: load.vram_bytes,
                swappable: swap.swappable_bytes,
                copied_out: swap.copied_out_bytes > 0,
                generation: 1,
                calls: 1,
                ..Agent::default()
            };
            let page = Input::Page(id, agent.page());
            self.agents.insert(id, agent);
            let spec = ContainerSpec { id: load.name.clone(), ..ContainerSpec::default() };
            self.feed(Input::Announced(Box::new(spec), key.clone()));
            self.feed(Input::Recalled {
                key,
                identity: (names::pid(n), 1),
                offloaded: vec![DeviceBytes { uuid: names::uuid(0), bytes: load.vram_bytes }],
                to: None,
                restoring: false,
                host: Vec::new(),
            });
            self.hello(id);
            self.feed(page);
            load.arrivals_ms.iter().for_each(|at| self.at(Millis::from(*at), Next::Call(id)));
        }
    }

    fn at(&mut self, when: Millis, next: Next) {
        self.sequence += 1;
        self.next.push(Reverse((when, self.sequence, next)));
    }

    fn pause_ms(&self) -> Millis {
        self.node.tick_ms(SAMPLE_MS)
    }

    fn agent(&mut self, id: ProcessId) -> &mut Agent {
        self.agents.get_mut(&id).expect("each process lives until the end of the test")
    }

    /// Runs one tick of the node in the way in which the daemon does.
    fn tick(&mut self) {
        self.read_counters();
        let interval_ms = if self.pause_ms() < SAMPLE_MS { 100 } else { 1_000 };
        if self.gpus_read.is_none_or(|read| self.now - read >= interval_ms) {
            self.gpus_read = Some(self.now);
            self.feed(Input::Gpus(Ok(self.gpus())));
        }
        self.feed(Input::Tick);
    }

    fn take(&mut self, next: Next) {
        match next {
            Next::Call(id) if self.agent(id).phase == Phase::Open => self.goes_through(id),
            Next::Call(id) => {
                let waiting = self.waiting.entry(id).or_default();
                *waiting += 1;
                if *waiting == 1 {
                    self.call(id);
                }
            }
            Next::Returns(id) => {
                let agent = self.agent(id);
                agent.inflight -= 1;
                agent.calls += 1;
            }
            Next::Done(place) => self.end_order(place),
        }
    }

    /// Makes a CUDA call that passes the gate. The call launches a kernel and waits for its end.
    fn goes_through(&mut self, id: ProcessId) {
        let agent = self.agent(id);
        agent.calls += 1;
        agent.inflight += 1;
        self.at(self.now + self.service_ms, Next::Returns(id));
    }

    /// Begins an order. Two effects happen at the begin of the order, not at its end: a gate
    /// closes, and a restore allocates its VRAM.
    fn begin_order(&mut self, id: ProcessId, order: u64, action: Action) {
        let takes_ms = self.order_ms(id, action);
        let agent = self.agent(id);
        let closes = matches!(action, Action::Close { .. }) && agent.inflight == 0;
        if closes || action == Action::Restore {
            agent.execute(action);
        }
        let used_bytes = self.gpus()[0].used_bytes;
        assert!(used_bytes <= self.machine.vram_bytes, "restored without room");
        self.orders.push((id, order, action));
        self.at(self.now + takes_ms, Next::Done(self.orders.len() - 1));
    }

    /// Duration of an order that begins now, in milliseconds.
    fn order_ms(&self, id: ProcessId, action: Action) -> Millis {
        let agent = &self.agents[&id];
        let costs = &self.machine.calibration;
        let mut memory = ProcessMemory::new(agent.size, costs);
        memory.level = match (agent.phase, agent.copied_out) {
            (Phase::CopiedOut, _) => OffloadLevel::Copied,
            (Phase::Checkpointed, true) => OffloadLevel::CopiedAndCheckpointed,
            (Phase::Checkpointed, false) => OffloadLevel::Checkpointed,
            _ => OffloadLevel::Resident,
        };
        match action {
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => 0,
            _ => memory.order_ms(action, costs),
        }
    }

    /// Ends an order, and reports its outcome to the node.
    fn end_order(&mut self, place: usize) {
        let (id, order, action) = self.orders[place];
        let agent = self.agent(id);
        let mut outcome = Outcome::Done;
        match action {
            Action::Close { .. } if agent.phase == Phase::Open => outcome = Outcome::Busy,
            Action::Close { .. } | Action::Restore => {}
            _ => agent.execute(action),
        }
        self.report(id, order, outcome, 0);
        if action == Action::Open {
            let waiting = self.waiting.remove(&id).unwrap_or_default();
            (0..waiting).for_each(|_| self.goes_through(id));
        }
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
        host: HostLimits::default(),
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

/// Returns settings with a fixed idle timeout. The daemon's loop may see a pause up to half a
/// second too short. With a learned timeout, this difference would change later decisions.
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
/// must differ by at most 5 %, in four traces together. The daemon's loop sees pauses up to half
/// a second too short or too long, so learned times and single decisions can differ. The engine
/// `auto` is not compared here: it may checkpoint a context some polls earlier or later, which
/// changes further decisions.
#[test]
fn the_default_policy_moves_as_many() {
    let mut settings = Settings::default();
    settings.policies.node.engine = Engine::Checkpoint;
    for (gib, reason) in [(64, "idle-timeout"), (40, "pressure")] {
        let runs: Vec<_> = (7..11).map(|seed| both_ways(&trace(seed), gib, &settings)).collect();
        for (to, reason) in [(State::Closing, reason), (State::Restoring, "called")] {
            let sum = |n: usize| runs.iter().map(|both| count(&both[n], to, reason)).sum::<usize>();
            let (s, l) = (sum(0), sum(1));
            assert!(
                s > 150 && s.abs_diff(l) * 20 <= s,
                "{to} {reason}: {s} simulated, {l} in the daemon's loop"
            );
        }
    }
}
