//! The simulated environment of the node: processes, agents, GPUs, and a clock that jumps from
//! event to event.
//!
//! ```text
//! trace ──Arrival──> process.rs ──Page, Wake──> Node ──orders──> orders.rs ──Done──> Node
//! ```
//!
//! The node receives the start and the end of each use, as the counters would show them. The engine
//! queries the node again about a container when [`Node::due_at`] requests it, and twice a second
//! while a container waits.

mod content;
mod decision;
mod event_queue;
pub(super) mod names;
mod orders;
mod outcome;
mod process;

use std::collections::VecDeque;

use affinode_core::{
    ContainerSpec, DeviceBytes, Effect, Input, Millis, Node, Settings,
    input::Identity,
    ledger::margin_bytes,
    policy::{Policies, Policy},
};
use affinode_proto::wire::{Capabilities, Hazards, Phase, message::Action};

pub use self::decision::PolicyDecision;
use self::{
    content::OffloadedContent,
    event_queue::EventQueue,
    names::{id, key, pid, uuid},
    process::SimulatedProcess,
};
use super::{
    Baseline, SimulatedMachine, SimulationError, SimulationSummary, TraceLoad, WorkloadTrace,
    baselines::CallForesight,
    calibration::Calibration,
    host::HostUse,
    memory::{OffloadLevel, ProcessMemory, STEP_MS},
    no_offload,
    summary::{CallDelay, ContainerTotals, SummaryMeter},
};

/// Interval at which the node is queried while a container waits for VRAM.
const POLL_MS: Millis = 500;
/// The simulation fails if a container waits for VRAM for longer than this and no other event
/// happens.
const STUCK_MS: Millis = 86_400_000;
/// Minimum time from a due query of the node to the next query about the same container. After any
/// other event, the next query may be earlier.
const AGAIN_MS: Millis = 5_000;

/// Time after the end of the trace in which the node is still queried about processes without
/// further calls. A process for which host memory is too small would be queried without end.
const AFTER_END_MS: Millis = 3_600_000;

#[derive(Clone, Copy, Debug)]
enum SimulationEvent {
    Arrival(u32),
    UseEnds(u32),
    Done(u32, Action),
    /// The process has cancelled its copy out.
    Cancelled(u32),
    Due(u32),
    /// The content of the process may move to disk.
    DiskDue(u32),
    /// The content of the process is on disk.
    Stored(u32),
    Poll,
}

struct SimulatedNode<'a> {
    node: Node,
    now: Millis,
    agenda: EventQueue,
    processes: Vec<SimulatedProcess<'a>>,
    /// For each GPU, the indexes of its processes.
    by_gpu: Vec<Vec<usize>>,
    /// UUIDs of the GPUs, one entry per GPU.
    uuids: Vec<String>,
    /// Inputs that the node will handle after the current effects are executed.
    inputs: VecDeque<Input>,
    /// Buffer for effects. It is empty between inputs and exists only so that its allocation is
    /// reused.
    effects: Vec<Effect>,
    machine: SimulatedMachine,
    costs: Calibration,
    foresight: CallForesight,
    wake_cost_ms: Millis,
    trace_end_ms: Millis,
    /// VRAM in use in bytes, one entry per GPU.
    used_bytes: Vec<u64>,
    resident_bytes: u64,
    host: HostUse,
    polling: bool,
    /// Time since which the node's queries are the only planned events. `None`: another event is
    /// planned.
    quiet_since: Option<Millis>,
    wakes: u64,
    meter: SummaryMeter,
    delays: Vec<CallDelay>,
    figures: SimulationSummary,
    /// The decisions so far, if they are recorded. `None`: they are not recorded.
    decisions: Option<Vec<PolicyDecision>>,
}

/// Simulates one baseline (a policy to compare) on the trace and returns the results.
///
/// # Errors
/// A process never fits, or the node violated one of its guarantees.
pub fn run(
    trace: &WorkloadTrace,
    machine: SimulatedMachine,
    contender: &Baseline,
) -> Result<SimulationSummary, SimulationError> {
    check(trace, machine)?;
    let Some(settings) = &contender.settings else {
        return Ok(no_offload::run(trace, machine, &contender.name));
    };
    let mut world = SimulatedNode::new(trace, machine, contender, settings);
    world.play(trace, &settings.policies)?;
    Ok(outcome::finish(world, contender.reloads))
}

/// Simulates one baseline (a policy to compare) and returns its decisions in order. A baseline
/// without offloads has none.
///
/// # Errors
/// The errors of [`run`].
pub fn decisions(
    trace: &WorkloadTrace,
    machine: SimulatedMachine,
    contender: &Baseline,
) -> Result<Vec<PolicyDecision>, SimulationError> {
    check(trace, machine)?;
    let Some(settings) = &contender.settings else { return Ok(Vec::new()) };
    let mut world = SimulatedNode::new(trace, machine, contender, settings);
    world.decisions = Some(Vec::new());
    world.play(trace, &settings.policies)?;
    Ok(world.decisions.unwrap_or_default())
}

/// Checks that the largest process fits on a GPU.
fn check(trace: &WorkloadTrace, machine: SimulatedMachine) -> Result<(), SimulationError> {
    let largest = trace.loads.iter().map(|load| load.vram_bytes).max().unwrap_or(0);
    if largest + margin_bytes(machine.vram_bytes) > machine.vram_bytes {
        return Err(SimulationError::TooLarge {
            process_bytes: largest,
            total_bytes: machine.vram_bytes,
        });
    }
    Ok(())
}

impl<'a> SimulatedNode<'a> {
    fn new(
        trace: &'a WorkloadTrace,
        machine: SimulatedMachine,
        contender: &Baseline,
        settings: &Settings,
    ) -> SimulatedNode<'a> {
        let costs = if contender.reloads {
            machine.calibration.kill_and_reload()
        } else {
            machine.calibration
        };
        SimulatedNode {
            node: Node::new(settings.clone()),
            now: 0,
            agenda: EventQueue::default(),
            processes: Vec::new(),
            by_gpu: vec![Vec::new(); machine.gpus],
            uuids: (0..machine.gpus).map(uuid).collect(),
            inputs: VecDeque::new(),
            effects: Vec::new(),
            machine,
            costs,
            foresight: contender.foresight,
            wake_cost_ms: settings.policies.node.wake_cost_ms,
            trace_end_ms: trace.end_ms(),
            used_bytes: vec![0; machine.gpus],
            resident_bytes: 0,
            host: HostUse::new(machine.host),
            polling: false,
            quiet_since: None,
            wakes: 0,
            meter: SummaryMeter::new(trace.end_ms(), machine.vram_bytes * machine.gpus as u64),
            delays: Vec::new(),
            figures: SimulationSummary {
                policy: contender.name.clone(),
                requests: trace.requests(),
                ..SimulationSummary::default()
            },
            decisions: None,
        }
    }

    fn play(
        &mut self,
        trace: &'a WorkloadTrace,
        policies: &Policies,
    ) -> Result<(), SimulationError> {
        // The trace begins on a Monday at midnight.
        self.tell(Input::Clock(4 * 86_400_000))?;
        self.begin(trace, policies)?;
        while let Some((at, event)) = self.agenda.next() {
            self.now = at;
            let quiet = matches!(event, SimulationEvent::Poll) && self.agenda.is_empty();
            let since = if quiet { *self.quiet_since.get_or_insert(at) } else { at };
            self.quiet_since = self.quiet_since.filter(|_| quiet);
            if at - since > STUCK_MS {
                return Err(SimulationError::Stuck);
            }
            self.take(event)?;
        }
        Ok(())
    }

    /// Registers every process as offloaded, and plans its first call. A process that starts later
    /// than the trace is registered at its first call.
    fn begin(
        &mut self,
        trace: &'a WorkloadTrace,
        policies: &Policies,
    ) -> Result<(), SimulationError> {
        let gpus = (0..self.machine.gpus).map(|gpu| orders::gpu_sample(self, gpu, None)).collect();
        self.inputs.push_back(Input::Gpus(Ok(gpus)));
        for (n, load) in trace.loads.iter().enumerate() {
            self.create(n, load, &policies.before_annotations(&load.namespace));
            if !load.starts_late() {
                self.register(n);
            }
            process::arrival(self, n);
        }
        self.drain()
    }

    /// Announces the container of a process, and registers the process as offloaded.
    pub(super) fn register(&mut self, n: usize) {
        let p = &self.processes[n];
        let (load, key, phase, gpu, memory) = (p.load, p.key.clone(), p.phase, p.gpu, p.memory);
        let spec = ContainerSpec {
            id: load.name.clone(),
            namespace: load.namespace.clone(),
            ..ContainerSpec::default()
        };
        let offloaded = vec![DeviceBytes { uuid: uuid(gpu), bytes: load.vram_bytes }];
        self.inputs.extend([
            Input::Announced(Box::new(spec), key.clone()),
            Input::Recalled {
                key: key.clone(),
                identity: (pid(n), 1),
                offloaded,
                to: None,
                restoring: false,
                host: Vec::new(),
            },
            Input::Joined {
                key: key.clone(),
                process: id(n),
                identity: Identity {
                    pid: pid(n),
                    start_ticks: 1,
                    command: load.name.clone(),
                    memory_cgroup: String::new(),
                },
                phase,
                generation: 1,
                hazards: Hazards::default(),
                capabilities: self.capabilities(),
                swap: memory.swap(),
            },
        ]);
        let page = Input::Page(id(n), process::page(self, n));
        self.inputs.push_back(page);
    }

    /// What the library of each process can do.
    fn capabilities(&self) -> Capabilities {
        let basic = Capabilities::GIVES_UP_COPIES;
        match self.host.has_host_pool() {
            true => Capabilities(
                basic.0 | Capabilities::USES_HOST_POOL.0 | Capabilities::STORES_ON_DISK.0,
            ),
            false => basic,
        }
    }

    fn create(&mut self, n: usize, load: &'a TraceLoad, policy: &Policy) {
        let engine = policy.engine;
        let (key, phase) = (key(n), Phase::Checkpointed);
        let gpu = load.gpu_number.min(self.machine.gpus - 1);
        self.by_gpu[gpu].push(n);
        let memory = ProcessMemory::new(load.vram_bytes, &self.costs).offloaded(engine);
        self.processes.push(SimulatedProcess {
            load,
            key,
            gpu,
            phase,
            memory,
            engine,
            restored_from: OffloadLevel::Resident,
            phase_after_restore: phase,
            content: OffloadedContent::default(),
            disk_after_ms: policy.disk_after_ms,
            busy_until: None,
            next: 0,
            waiting: Vec::new(),
            calls: 1,
            lived: ContainerTotals { requests: load.arrivals_ms.len() as u64, delayed: 0 },
            due: None,
            freed_byte_ms: 0,
            freed_until: 0,
            used_ms: 0,
            went: None,
            has_exited: false,
            order: 0,
            copy_ends: None,
            cancelled_end: None,
        });
    }

    fn at(&mut self, when: Millis, event: SimulationEvent) {
        self.agenda.plan(when, event);
    }

    fn take(&mut self, event: SimulationEvent) -> Result<(), SimulationError> {
        match event {
            SimulationEvent::Arrival(n) => process::called(self, n as usize)?,
            SimulationEvent::UseEnds(n) => process::use_ends(self, n as usize)?,
            SimulationEvent::Done(n, action) => orders::end_order(self, n as usize, action)?,
            SimulationEvent::Cancelled(n) => orders::copy_is_cancelled(self, n as usize)?,
            SimulationEvent::Due(n) => {
                let n = n as usize;
                if self.processes[n].due == Some(self.now) {
                    self.processes[n].due = None;
                    self.tell(Input::Due(self.processes[n].key.clone()))?;
                    self.drain()?;
                    self.plan_due(n, AGAIN_MS);
                }
            }
            SimulationEvent::DiskDue(n) => content::disk_is_due(self, n as usize)?,
            SimulationEvent::Stored(n) => content::is_stored(self, n as usize)?,
            SimulationEvent::Poll => {
                self.polling = false;
                // The node processes its queue on every input. Apart from that, this input is only
                // a reading of every GPU.
                let gpus =
                    (0..self.machine.gpus).map(|gpu| orders::gpu_sample(self, gpu, None)).collect();
                let key = self.processes[0].key.clone();
                self.tell(Input::Proven(key, u64::MAX, Ok(gpus)))?;
            }
        }
        self.drain()?;
        if let SimulationEvent::UseEnds(n) = event {
            self.plan_due(n as usize, STEP_MS);
        }
        if self.node.waiting() > 0 && !self.polling {
            self.polling = true;
            self.at(self.now + POLL_MS, SimulationEvent::Poll);
        }
        Ok(())
    }

    /// Plans a query of the node about a process, at the time at which the node's next decision
    /// about the process is due. If the process makes a call before that time, no query is planned.
    fn plan_due(&mut self, n: usize, not_before: Millis) {
        let p = &self.processes[n];
        if p.busy_until.is_some() || !p.waiting.is_empty() {
            return;
        }
        let Some(due) = self.node.due_at(&p.key) else { return };
        let due = due.max(self.now + not_before);
        let called_before = p.next_call().is_some_and(|at| at <= due);
        let is_after_end = due > self.trace_end_ms + AFTER_END_MS;
        let over = p.next_call().is_none() && (p.phase.is_offloaded() || is_after_end);
        if called_before || over || p.due.is_some_and(|planned| (self.now..=due).contains(&planned))
        {
            return;
        }
        self.processes[n].due = Some(due);
        self.at(due, SimulationEvent::Due(n as u32));
    }

    fn drain(&mut self) -> Result<(), SimulationError> {
        while let Some(input) = self.inputs.pop_front() {
            self.tell(input)?;
        }
        Ok(())
    }

    fn tell(&mut self, input: Input) -> Result<(), SimulationError> {
        let mut effects = std::mem::take(&mut self.effects);
        self.node.handle_into(self.now, input, &mut effects);
        for effect in effects.drain(..) {
            orders::simulate_effect(self, effect)?;
        }
        self.effects = effects;
        let waiting = self.node.waiting();
        self.meter.set(self.now, self.resident_bytes, waiting);
        Ok(())
    }
}
