//! The world around the node: processes, agents, one device, a clock that jumps from
//! event to event.
//!
//! ```text
//! process:  quiet ──call──> busy (gate open) ──last call ends──> quiet
//!             └──call, gate closed──> waits, Wake ──Open──> busy
//! ```
//!
//! The node is told of use when it begins and ends, as the pages would show it, and asked
//! again about a container when [`Node::due_at`] says so; while somebody waits, twice a
//! second.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use affinode_proto::{
    api::control::Announcement,
    state::State,
    wire::{
        Hazards, Phase,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
        page::PageSnapshot,
    },
};

use super::{
    Contender, Figures, Machine, SimulationError, Trace,
    calibration::Calibration,
    contenders::Foresight,
    figures::{self, Lived, Meter},
    trace::Load,
};
use crate::core::{
    CommandId, DeviceBytes, Effect, GpuSample, Input, Key, Millis, Node, ProcessId, Request,
    Survey, history::PAUSE_MS, input::Identity, ledger::margin_bytes,
};

/// What closing, locking, unlocking and opening take.
const STEP_MS: Millis = 1;
/// How often the node looks again while somebody waits.
const POLL_MS: Millis = 500;
/// Something is due but nothing came of it: asked again after this.
const AGAIN_MS: Millis = 5_000;
/// A return sooner than this after an offload is thrash.
const THRASH_MS: Millis = 60_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(usize),
    UseEnds(usize),
    Done(usize, u64, Step),
    Due(usize),
    Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Close,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
    Open,
}

struct Process<'a> {
    load: &'a Load,
    key: Key,
    phase: Phase,
    on_device: bool,
    busy_until: Option<Millis>,
    next: usize,
    waiting: Vec<u32>,
    calls: u64,
    lived: Lived,
    due: Option<Millis>,
    away_since: Option<Millis>,
    freed_ms: Millis,
    used_ms: Millis,
    went: Option<Millis>,
}

impl Process<'_> {
    fn next_call(&self) -> Option<Millis> {
        self.load.arrivals_ms.get(self.next).map(|at| Millis::from(*at))
    }

    fn first(&self) -> Millis {
        self.load.arrivals_ms.first().map_or(0, |at| Millis::from(*at))
    }

    fn last(&self) -> Millis {
        self.load.arrivals_ms.last().map_or(0, |at| Millis::from(*at))
    }
}

struct World<'a> {
    node: Node,
    now: Millis,
    events: BinaryHeap<Reverse<(Millis, u64, Event)>>,
    sequence: u64,
    processes: Vec<Process<'a>>,
    inputs: VecDeque<Input>,
    machine: Machine,
    costs: Calibration,
    foresight: Foresight,
    wake_cost_ms: Millis,
    /// By device.
    used_bytes: Vec<u64>,
    away_bytes: u64,
    polling: bool,
    wakes: u64,
    meter: Meter,
    delays_ms: Vec<u32>,
    figures: Figures,
}

/// Runs one contender over the trace.
///
/// # Errors
/// A process never fits, or the node broke its own promise.
pub fn run(
    trace: &Trace,
    machine: Machine,
    contender: &Contender,
) -> Result<Figures, SimulationError> {
    let largest = trace.loads.iter().map(|load| load.vram_bytes).max().unwrap_or(0);
    if largest + margin_bytes(machine.vram_bytes) > machine.vram_bytes {
        return Err(SimulationError::TooLarge {
            process_bytes: largest,
            total_bytes: machine.vram_bytes,
        });
    }
    let Some(settings) = &contender.settings else {
        return Ok(kept(trace, machine, &contender.name));
    };
    let costs =
        if contender.reloads { machine.calibration.kill_and_reload() } else { machine.calibration };
    let mut world = World {
        node: Node::new(settings.clone()),
        now: 0,
        events: BinaryHeap::new(),
        sequence: 0,
        processes: Vec::new(),
        inputs: VecDeque::new(),
        machine,
        costs,
        foresight: contender.foresight,
        wake_cost_ms: settings.policies.node.wake_cost_ms,
        used_bytes: vec![0; machine.gpus],
        away_bytes: 0,
        polling: false,
        wakes: 0,
        meter: Meter::new(trace.end_ms(), machine.vram_bytes * machine.gpus as u64),
        delays_ms: Vec::new(),
        figures: Figures {
            policy: contender.name.clone(),
            requests: trace.requests(),
            ..Figures::default()
        },
    };
    world.begin(trace)?;
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        world.now = at;
        world.take(event)?;
    }
    Ok(world.finish(contender.reloads))
}

/// Everybody keeps what he has: those who find no room are refused.
fn kept(trace: &Trace, machine: Machine, name: &str) -> Figures {
    let mut loads: Vec<&Load> = trace.loads.iter().collect();
    loads.sort_by_key(|load| load.arrivals_ms.first().copied());
    let mut meter = Meter::new(trace.end_ms(), machine.vram_bytes * machine.gpus as u64);
    let mut figures = Figures {
        policy: name.to_owned(),
        requests: trace.requests(),
        fairness_jain: 1.0,
        ..Figures::default()
    };
    let mut used = vec![0; machine.gpus];
    for load in loads {
        // Whoever comes takes the emptiest device.
        let Some(gpu) = used.iter_mut().min() else { continue };
        if *gpu + load.vram_bytes + margin_bytes(machine.vram_bytes) > machine.vram_bytes {
            figures.refused += load.arrivals_ms.len() as u64;
            continue;
        }
        *gpu += load.vram_bytes;
        let at = load.arrivals_ms.first().copied().unwrap_or(0);
        meter.set(at.into(), used.iter().sum(), 0);
    }
    meter.finish(&mut figures);
    figures
}

fn key(n: usize) -> Key {
    match Key::parse(&format!("{n:032x}")) {
        Ok(key) => key,
        Err(text) => unreachable!("{text} is 32 hex digits"),
    }
}

fn uuid(gpu: usize) -> String {
    format!("GPU-{gpu}")
}

fn id(n: usize) -> ProcessId {
    ProcessId(n as u64)
}

fn pid(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX).saturating_add(1)
}

impl<'a> World<'a> {
    /// Everybody is away until the first call.
    fn begin(&mut self, trace: &'a Trace) -> Result<(), SimulationError> {
        let gpus = (0..self.machine.gpus).map(|gpu| self.gpu(gpu, None)).collect();
        self.inputs.push_back(Input::Gpus(Ok(gpus)));
        for (n, load) in trace.loads.iter().enumerate() {
            let key = key(n);
            let announcement = Announcement {
                key: key.to_string(),
                id: load.name.clone(),
                ..Announcement::default()
            };
            self.inputs.push_back(Input::Announced(Box::new(announcement), key.clone()));
            let away =
                vec![DeviceBytes { uuid: uuid(n % self.machine.gpus), bytes: load.vram_bytes }];
            let identity = (pid(n), 1);
            self.inputs.push_back(Input::Recalled {
                key: key.clone(),
                identity,
                away,
                restoring: false,
            });
            let identity = Identity { pid: pid(n), start_ticks: 1, command: load.name.clone() };
            let (phase, hazards) = (Phase::Away, Hazards::default());
            self.inputs.push_back(Input::Joined {
                key: key.clone(),
                process: id(n),
                identity,
                phase,
                generation: 1,
                hazards,
            });
            self.processes.push(Process {
                load,
                key,
                phase,
                on_device: false,
                busy_until: None,
                next: 0,
                waiting: Vec::new(),
                calls: 1,
                lived: Lived { requests: load.arrivals_ms.len() as u64, delayed: 0 },
                due: None,
                away_since: None,
                freed_ms: 0,
                used_ms: 0,
                went: None,
            });
        }
        for n in 0..self.processes.len() {
            let page = Input::Page(id(n), self.page(n));
            self.inputs.push_back(page);
            self.arrival(n);
        }
        self.drain()
    }

    fn at(&mut self, when: Millis, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((when, self.sequence, event)));
    }

    fn arrival(&mut self, n: usize) {
        if let Some(at) = self.processes[n].next_call() {
            self.at(at.max(self.now), Event::Arrival(n));
        }
    }

    fn gpu(&self, gpu: usize, process: Option<usize>) -> GpuSample {
        let held = |n: &usize| (pid(*n), self.processes[*n].load.vram_bytes);
        GpuSample {
            uuid: uuid(gpu),
            total_bytes: self.machine.vram_bytes,
            used_bytes: self.used_bytes[gpu],
            processes: process.iter().filter(|n| self.processes[**n].on_device).map(held).collect(),
            ..GpuSample::default()
        }
    }

    fn page(&self, n: usize) -> PageSnapshot {
        let p = &self.processes[n];
        PageSnapshot {
            phase: p.phase,
            waiters: 0,
            hazards: Hazards::default(),
            generation: 1,
            allocated_bytes: p.load.vram_bytes,
            allocations: 1,
            calls: p.calls,
            polls: 0,
            inflight: u64::from(p.busy_until.is_some()),
            last_hook: 0,
        }
    }

    fn take(&mut self, event: Event) -> Result<(), SimulationError> {
        match event {
            Event::Arrival(n) => self.called(n),
            Event::UseEnds(n) => self.use_ends(n),
            Event::Done(n, order, step) => self.done(n, order, step),
            Event::Due(n) => {
                if self.processes[n].due == Some(self.now) {
                    self.processes[n].due = None;
                    let due = Input::Due(self.processes[n].key.clone());
                    self.inputs.push_back(due);
                    self.drain()?;
                    self.plan_due(n, AGAIN_MS);
                }
            }
            Event::Poll => {
                self.polling = false;
                // Any input serves the queue; this one does nothing else.
                self.inputs.push_back(self.reading(0));
            }
        }
        self.drain()?;
        if let Event::UseEnds(n) = event {
            self.plan_due(n, STEP_MS);
        }
        if self.node.waiting() > 0 && !self.polling {
            self.polling = true;
            self.at(self.now + POLL_MS, Event::Poll);
        }
        Ok(())
    }

    /// A reading of the device that answers no question.
    fn reading(&self, n: usize) -> Input {
        Input::Proven(key(0), u64::MAX, Ok(vec![self.gpu(n % self.machine.gpus, None)]))
    }

    fn called(&mut self, n: usize) {
        let now = self.now;
        let p = &mut self.processes[n];
        if p.busy_until.is_some() || p.next_call() != Some(now) {
            return; // Taken by the use in progress.
        }
        if p.phase == Phase::Open {
            self.use_begins(n);
            return;
        }
        p.next += 1;
        p.waiting.push(u32::try_from(now).unwrap_or(u32::MAX));
        if p.waiting.len() == 1 {
            self.wakes += 1;
            let wake = AgentMessage::Wake { generation: 1, waiters: 1, hook: 1 };
            self.inputs.push_back(Input::Message(id(n), wake));
        }
        self.arrival(n);
    }

    /// Calls that follow each other without a pause are one use.
    fn use_begins(&mut self, n: usize) {
        let now = self.now;
        let p = &mut self.processes[n];
        let service = Millis::from(p.load.service_ms);
        let mut until = if p.waiting.is_empty() { now } else { now + service };
        while let Some(at) = p.next_call().filter(|at| *at < until.max(now + 1) + PAUSE_MS) {
            until = until.max(at + service);
            p.next += 1;
        }
        let until = until.max(now + 1);
        p.busy_until = Some(until);
        p.calls += 1;
        p.used_ms += until - now;
        let page = Input::Page(id(n), self.page(n));
        self.inputs.push_back(page);
        self.at(until, Event::UseEnds(n));
    }

    fn use_ends(&mut self, n: usize) {
        let now = self.now;
        let p = &mut self.processes[n];
        p.busy_until = None;
        p.calls += 1;
        let (next, key) = (p.next_call(), p.key.clone());
        if self.foresight != Foresight::None {
            self.node.foresee(&key, Some(next.unwrap_or(Millis::MAX)));
        }
        let page = Input::Page(id(n), self.page(n));
        self.inputs.push_back(page);
        let bytes = self.processes[n].load.vram_bytes;
        let worth = self.wake_cost_ms + self.costs.offload_ms(bytes) + self.costs.restore_ms(bytes);
        if self.foresight == Foresight::Pauses && next.is_none_or(|at| at > now + worth) {
            self.inputs.push_back(Input::Command(CommandId(0), key, Request::Offload));
        }
        self.arrival(n);
    }

    /// Asks the node again when something is due, unless a call comes before.
    fn plan_due(&mut self, n: usize, not_before: Millis) {
        let p = &self.processes[n];
        if p.busy_until.is_some() || !p.waiting.is_empty() {
            return;
        }
        let Some(due) = self.node.due_at(&p.key) else { return };
        let due = due.max(self.now + not_before);
        let called_before = p.next_call().is_some_and(|at| at <= due);
        let over = p.next_call().is_none() && p.phase == Phase::Away;
        if called_before || over || p.due.is_some_and(|planned| (self.now..=due).contains(&planned))
        {
            return;
        }
        self.processes[n].due = Some(due);
        self.at(due, Event::Due(n));
    }

    fn drain(&mut self) -> Result<(), SimulationError> {
        while let Some(input) = self.inputs.pop_front() {
            for effect in self.node.handle(self.now, input) {
                self.carry_out(effect)?;
            }
            let waiting = self.node.waiting();
            self.meter.set(self.now, self.used_bytes.iter().sum(), waiting);
        }
        Ok(())
    }

    fn carry_out(&mut self, effect: Effect) -> Result<(), SimulationError> {
        match effect {
            Effect::Send(process, ControllerMessage::Order { order, action, .. }) => {
                return self.order(process.0 as usize, order, action);
            }
            Effect::Survey { key: asked, .. } => {
                let n = usize::from_str_radix(asked.as_str(), 16).unwrap_or(0);
                let survey = Survey {
                    gpus: Ok(vec![self.gpu(n % self.machine.gpus, Some(n))]),
                    room: Ok(()),
                };
                self.inputs.push_back(Input::Surveyed(asked, survey));
            }
            Effect::Prove(asked, number) => {
                let n = usize::from_str_radix(asked.as_str(), 16).unwrap_or(0);
                let gpus = Ok(vec![self.gpu(n % self.machine.gpus, None)]);
                self.inputs.push_back(Input::Proven(asked, number, gpus));
            }
            Effect::Publish(event) => {
                self.figures.refused += u64::from(event.kind == "refused");
                if event.to == State::Offloaded.as_str() || event.to == State::Active.as_str() {
                    let n = usize::from_str_radix(&event.key, 16).unwrap_or(0);
                    let reading = self.reading(n);
                    self.inputs.push_back(reading);
                    self.plan_due(n, STEP_MS);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn order(&mut self, n: usize, order: u64, action: Action) -> Result<(), SimulationError> {
        let bytes = self.processes[n].load.vram_bytes;
        let (step, takes) = match action {
            Action::Close { .. } => {
                // From now on calls wait.
                if self.processes[n].busy_until.is_none() {
                    self.processes[n].phase = Phase::Closed;
                }
                (Step::Close, STEP_MS)
            }
            Action::Lock { .. } => (Step::Lock, STEP_MS),
            Action::Checkpoint { .. } => (Step::Checkpoint, self.costs.offload_ms(bytes)),
            Action::Restore => {
                let used_bytes = &mut self.used_bytes[n % self.machine.gpus];
                if *used_bytes + bytes > self.machine.vram_bytes {
                    return Err(SimulationError::Overcommitted);
                }
                *used_bytes += bytes;
                self.returns(n);
                (Step::Restore, self.costs.restore_ms(bytes))
            }
            Action::Unlock => (Step::Unlock, STEP_MS),
            Action::Open => (Step::Open, STEP_MS),
            Action::HoldAllocations { .. } | Action::ReleaseAllocations => return Ok(()),
        };
        self.at(self.now + takes, Event::Done(n, order, step));
        Ok(())
    }

    fn returns(&mut self, n: usize) {
        let (now, p) = (self.now, &mut self.processes[n]);
        p.on_device = true;
        self.figures.restores += 1;
        if let Some(since) = p.away_since.take() {
            let (from, to) = (since.max(p.first()), now.min(p.last()));
            p.freed_ms += to.saturating_sub(from);
            self.away_bytes -= p.load.vram_bytes;
        }
        if p.went.is_some_and(|went| now - went < THRASH_MS) {
            self.figures.thrash += 1;
        }
    }

    fn done(&mut self, n: usize, order: u64, step: Step) {
        let (now, p) = (self.now, &mut self.processes[n]);
        let mut outcome = Outcome::Done;
        match step {
            Step::Close if p.phase == Phase::Open => outcome = Outcome::Busy,
            Step::Close | Step::Unlock => p.phase = Phase::Closed,
            Step::Lock | Step::Restore => p.phase = Phase::Locked,
            Step::Checkpoint => {
                p.phase = Phase::Away;
                p.on_device = false;
                (p.away_since, p.went) = (Some(now), Some(now));
                self.used_bytes[n % self.machine.gpus] -= p.load.vram_bytes;
                self.away_bytes += p.load.vram_bytes;
                self.figures.host_peak_bytes = self.figures.host_peak_bytes.max(self.away_bytes);
            }
            Step::Open => p.phase = Phase::Open,
        }
        let phase = p.phase;
        let report = AgentMessage::Report { order, outcome, phase, cuda_error: 0, elapsed_us: 0 };
        self.inputs.push_back(Input::Message(id(n), report));
        if step == Step::Open && !self.processes[n].waiting.is_empty() {
            let p = &mut self.processes[n];
            p.lived.delayed += p.waiting.len() as u64;
            let now = u32::try_from(now).unwrap_or(u32::MAX);
            self.delays_ms.extend(p.waiting.iter().map(|since| now.saturating_sub(*since)));
            self.use_begins(n);
            self.processes[n].waiting.clear();
        }
    }

    fn finish(mut self, reloads: bool) -> Figures {
        let mut figures = std::mem::take(&mut self.figures);
        let end = self.meter_end();
        let (mut freed, mut life, mut used, mut span) = (0_u128, 0_u128, 0_u128, 0_u128);
        for p in &mut self.processes {
            if let Some(since) = p.away_since.take() {
                p.freed_ms += p.last().saturating_sub(since.max(p.first()));
            }
            let bytes = u128::from(p.load.vram_bytes);
            freed += bytes * u128::from(p.freed_ms);
            life += bytes * u128::from(p.last() - p.first());
            used += bytes * u128::from(p.used_ms.min(p.last() - p.first()));
            span += bytes * u128::from(end);
        }
        let share = |of: u128| if of > 0 { freed as f64 / of as f64 } else { 0.0 };
        figures.freed_of_all = share(life);
        figures.freed_of_idle = share(life.saturating_sub(used));
        figures.freed_of_trace = share(span);
        figures.restores_per_process_hour = figures.restores as f64
            / (self.processes.len() as f64 * end.max(1) as f64 / 3_600_000.0);
        figures.wake_share = self.wakes as f64 / figures.requests.max(1) as f64;
        (figures.prewakes, figures.prewake_hits) = self.node.prewakes();
        if reloads {
            figures.host_peak_bytes = 0;
        }
        let lived: Vec<Lived> = self.processes.iter().map(|p| p.lived).collect();
        figures::latency(&mut figures, self.delays_ms, &lived);
        self.meter.finish(&mut figures);
        figures
    }

    fn meter_end(&self) -> Millis {
        self.processes.iter().map(Process::last).max().unwrap_or(0).max(1)
    }
}
