//! Fuzz target that models a node with one hostile container. Honest containers with every engine
//! run on two GPUs. Whatever the hostile container sends, each honest container must be restored
//! within a time limit after its call, and the controller's core must not panic.

use std::{
    collections::VecDeque,
    ops::{Deref, DerefMut},
};

use affinode_core::{
    ContainerSpec, Effect, GpuSample, Input, ProcessId, Settings,
    harness::{Bench, Host, agent::Agent, answer, key},
    host_memory::SurveyedMemory,
    input::{Identity, SwapStatus},
    policy::{Mode, OnOom, Policies, Policy},
};
use affinode_proto::{
    reason::Reason,
    wire::{
        Capabilities, Hazards, Phase, ProcessFlags,
        copier::CopierReport,
        counters::CounterSnapshot,
        message::{AgentMessage, ControllerMessage, Outcome},
    },
};
use arbitrary::{Result, Unstructured};

/// Engines of the containers, by number. The last container is hostile.
const ENGINES: [&str; 5] = ["checkpoint", "copy", "full", "auto", "auto"];
/// Number of the hostile container.
const LIAR: usize = 4;
const GPUS: [&str; 2] =
    ["GPU-07070707-0707-0707-0707-070707070707", "GPU-08080808-0808-0808-0808-080808080808"];
const HONEST_VRAM: u64 = 100;
/// Number of bytes of an honest container's VRAM that its agent copies. With the engine
/// `checkpoint`, the agent copies nothing.
const CARRIED: u64 = 75;
const LIAR_VRAM: u64 = 50;
/// VRAM of a GPU of the model, in bytes. It suffices for all containers, so only false values from
/// the hostile container could prevent a restore.
const TOTAL_VRAM: u64 = 1_000;
/// Maximum number of random steps before the honest containers make their calls.
const STEPS: usize = 400;
/// Number of inputs that the hostile container sends in each round while the honest containers are
/// restored.
const LIES_A_ROUND: usize = 3;
const ROUND_MS: u64 = 50;
/// Time limit in milliseconds of model time for the restores of the honest containers. The hostile
/// container may delay its own grant of VRAM by up to 10 s for an allocation, and by another 10 s
/// for a restore.
const BOUND_MS: u64 = 40_000;

/// State of the modelled node. The bench contains the honest processes, which execute the
/// controller's orders correctly.
struct World {
    bench: Bench,
    /// Whether the model's host memory is short, so that the controller must refuse every offload.
    refuses: bool,
    /// Id of the current connection of the hostile container.
    liar: u64,
    /// Numbers of the orders that the hostile container has received and not replied to.
    told: VecDeque<u64>,
}

/// Interprets the input as a sequence of actions of the hostile container, of the honest agents and
/// of the clock.
pub fn hostile(data: &[u8]) {
    let mut world = World::new();
    let mut bytes = Unstructured::new(data);
    let steps = bytes.int_in_range(0..=STEPS).unwrap_or(0);
    for _ in 0..steps {
        if bytes.is_empty() || world.step(&mut bytes).is_err() {
            break;
        }
    }
    world.restore_container(data);
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

impl Host for World {
    fn execute(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::StartCopier { copier, .. } => {
                return Some(Input::CopierReport(copier, CopierReport::Ready));
            }
            Effect::EndCopier { copier, .. } => return Some(Input::CopierExited(copier)),
            Effect::Send(id, ControllerMessage::Order { order, .. })
                if !self.agents.contains_key(&id) =>
            {
                self.told.push_back(order);
            }
            effect => self.deliver(effect),
        }
        None
    }

    fn gpus(&self) -> Vec<GpuSample> {
        let mut gpus = self.samples();
        for gpu in &mut gpus {
            gpu.used_bytes += LIAR_VRAM;
            gpu.processes.push((20, LIAR_VRAM));
        }
        gpus
    }
}

impl World {
    fn new() -> World {
        let node = Policy {
            mode: Mode::Eager,
            idle_timeout_ms: 1_000,
            minimum_residency_ms: 0,
            on_oom: OnOom::Wait,
            // Containers that wait behind an allocation may wait for as long.
            on_oom_timeout_ms: 10_000,
            ..Policy::default()
        };
        let settings =
            Settings { policies: Policies { node, ..Policies::default() }, ..Settings::default() };
        let mut world = World {
            bench: Bench::new(settings, &GPUS, TOTAL_VRAM),
            refuses: false,
            liar: 100,
            told: VecDeque::new(),
        };
        world.feed(Input::Started(1));
        for (n, engine) in ENGINES.into_iter().enumerate() {
            let spec = ContainerSpec {
                id: n.to_string(),
                annotations: [("affinode.io/engine", engine), ("affinode.io/vram-limit", "1Mi")]
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .into(),
                ..ContainerSpec::default()
            };
            world.feed(Input::Announced(Box::new(spec), key(n)));
        }
        for (n, engine) in ENGINES.into_iter().enumerate().take(LIAR) {
            let agent = Agent {
                container: n,
                pid: n as u32 + 10,
                gpu: n % 2,
                size: HONEST_VRAM,
                swappable: if engine == "checkpoint" { 0 } else { CARRIED },
                notes: ProcessFlags::ONE_GPU,
                calls: 1,
                ..Agent::default()
            };
            let id = ProcessId(n as u64 + 1);
            world.agents.insert(id, agent);
            world.hello(id);
        }
        world
    }

    /// Chooses an honest process.
    fn honest(&self, bytes: &mut Unstructured<'_>) -> Result<ProcessId> {
        Ok(ProcessId(bytes.choose_index(self.agents.len())? as u64 + 1))
    }

    fn step(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        match bytes.int_in_range(0..=7)? {
            0 => self.tick(u64::from(bytes.arbitrary::<u16>()?)),
            1 => self.answer(),
            2 | 3 => self.work(self.honest(bytes)?),
            4 => self.call(self.honest(bytes)?),
            5 => self.refuses = bytes.arbitrary()?,
            _ => self.lie(bytes)?,
        }
        Ok(())
    }

    fn lie(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        let liar = ProcessId(self.liar);
        match bytes.int_in_range(0..=15)? {
            0 => self.feed(Input::Message(liar, wake(bytes)?)),
            1 | 2 => self.feed(Input::Message(liar, report(bytes, None)?)),
            // Replies to an order that the hostile container has received.
            3..=5 => {
                let order = self.told.pop_front();
                self.feed(Input::Message(liar, report(bytes, order)?));
            }
            6 => {
                let hazards = Hazards(bytes.arbitrary()?);
                self.feed(Input::Message(liar, AgentMessage::Notice { hazards }));
            }
            7 => self.feed(Input::Page(liar, page(bytes)?)),
            8 => self.feed(Input::BadPage(liar, "scribbled".into())),
            9 => self.feed(Input::Detached(liar)),
            10 | 11 => self.liar_joins(bytes)?,
            12 => self.feed(Input::Exited(liar)),
            13 => self.feed(Input::Message(liar, want(bytes)?)),
            14 => self.feed(Input::Message(liar, vram_request(bytes)?)),
            _ => {
                let over = AgentMessage::AllocWaitDone {
                    ticket: bytes.int_in_range(0..=3)?,
                    served: bytes.arbitrary()?,
                };
                self.feed(Input::Message(liar, over));
            }
        }
        Ok(())
    }

    /// Reconnects the hostile process, or connects another process of the same container.
    fn liar_joins(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        self.liar += 1;
        self.told.clear();
        let pid = bytes.int_in_range(20..=23)?;
        let (phase, generation) = (phase(bytes)?, bytes.arbitrary()?);
        let hazards: u32 = bytes.arbitrary()?;
        self.feed(Input::Joined {
            key: key(LIAR),
            process: ProcessId(self.liar),
            identity: Identity {
                pid,
                start_ticks: 1,
                command: "liar".into(),
                memory_cgroup: String::new(),
            },
            phase,
            generation,
            hazards: Hazards(hazards),
            capabilities: Capabilities(hazards.reverse_bits()),
            swap: SwapStatus {
                swappable_bytes: bytes.arbitrary()?,
                copied_out_bytes: bytes.arbitrary()?,
                unchanged_bytes: bytes.arbitrary()?,
                zero_bytes: bytes.arbitrary()?,
                local_memory_bytes: bytes.arbitrary()?,
            },
        });
        Ok(())
    }

    fn liar_stays(&mut self) {
        self.liar += 1;
        self.told.clear();
        let mut liar = Agent { container: LIAR, pid: 24, ..Agent::default() };
        self.feed(liar.joined(ProcessId(self.liar)));
    }

    /// Replies to all orders of the hostile container with the same outcome, including orders that
    /// these replies cause.
    fn answer_alike(&mut self, outcome: Outcome) {
        const MAX_ROUNDS: usize = 1_000;
        for answered in 0.. {
            let Some(order) = self.told.pop_front() else { return };
            assert!(answered < MAX_ROUNDS, "its replies cause orders without end");
            let report = SwapStatus::default().report(order, outcome, Phase::Open, 0);
            self.feed(Input::Message(ProcessId(self.liar), report));
        }
    }

    fn tick(&mut self, ms: u64) {
        self.now += ms;
        self.read_counters();
        self.feed(Input::Gpus(Ok(self.gpus())));
        self.feed(Input::Tick);
    }

    fn answer(&mut self) {
        if let Some(question) = self.questions.pop_front() {
            let host = match self.refuses {
                true => Err((Reason::HostMemory, String::new())),
                false => Ok(SurveyedMemory::default()),
            };
            self.feed(answer(question, Ok(self.gpus()), host));
        }
    }

    /// Makes the agent of an honest process handle its oldest message.
    fn work(&mut self, id: ProcessId) {
        let agent = self.agents.get_mut(&id);
        if let Some(agent) = agent
            && let Some(ControllerMessage::Order { order, action, .. }) = agent.inbox.pop_front()
        {
            agent.execute(action);
            self.report(id, order, Outcome::Done, 0);
        }
    }

    /// Makes calls in all honest containers until all are restored, or panics at the time limit.
    /// Meanwhile the hostile container sends inputs made from `data` again and again.
    fn restore_container(&mut self, data: &[u8]) {
        let mut bytes = Unstructured::new(data);
        // `None`: the hostile container sends the input's bytes. Otherwise it is connected, and
        // gives the same reply to all orders.
        let alike = [None, Some(Outcome::Busy), Some(Outcome::Late), Some(Outcome::Done)];
        let alike = *bytes.choose(&alike).unwrap_or(&None);
        if alike.is_some() {
            self.liar_stays();
        }
        let honest: Vec<ProcessId> = self.agents.keys().copied().collect();
        let called_ms = self.now;
        while self.now - called_ms <= BOUND_MS {
            honest.iter().for_each(|id| self.call(*id));
            if self.agents.values().all(|agent| agent.phase == Phase::Open) {
                return;
            }
            for _ in 0..LIES_A_ROUND {
                if let Some(outcome) = alike {
                    self.answer_alike(outcome);
                    continue;
                }
                if bytes.is_empty() {
                    bytes = Unstructured::new(data);
                }
                let _ = self.lie(&mut bytes);
            }
            for id in &honest {
                while !self.agents[id].inbox.is_empty() {
                    self.work(*id);
                }
            }
            while !self.questions.is_empty() {
                self.answer();
            }
            self.tick(ROUND_MS);
        }
        let left: Vec<Phase> = self.agents.values().map(|agent| agent.phase).collect();
        panic!("the hostile container's messages left honest processes in the phases {left:?}");
    }
}

fn phase(bytes: &mut Unstructured<'_>) -> Result<Phase> {
    Ok(Phase::from_u32(bytes.int_in_range(0..=12)?).unwrap_or(Phase::Open))
}

fn wake(bytes: &mut Unstructured<'_>) -> Result<AgentMessage> {
    let (generation, waiters) = (bytes.arbitrary()?, bytes.arbitrary()?);
    Ok(AgentMessage::Wake { generation, waiters, hook: bytes.arbitrary()? })
}

fn want(bytes: &mut Unstructured<'_>) -> Result<AgentMessage> {
    Ok(AgentMessage::AllocWait {
        // The range is small, so that ticket numbers are used repeatedly.
        ticket: bytes.int_in_range(0..=3)?,
        bytes: u64::from(bytes.arbitrary::<u16>()?),
        uuid: *bytes.choose(&[[7; 16], [8; 16]])?,
        attempts: bytes.int_in_range(0..=3)?,
    })
}

fn vram_request(bytes: &mut Unstructured<'_>) -> Result<AgentMessage> {
    match bytes.int_in_range(0..=3)? {
        0 => return Ok(AgentMessage::VramTaken),
        1 => return Ok(AgentMessage::Releasing),
        _ => {}
    }
    Ok(AgentMessage::AskVram {
        ticket: bytes.arbitrary()?,
        bytes: bytes.arbitrary()?,
        uuid: *bytes.choose(&[[7; 16], [9; 16]])?,
    })
}

fn report(bytes: &mut Unstructured<'_>, order: Option<u64>) -> Result<AgentMessage> {
    // Small numbers are likely to match orders that were sent.
    let guess = if bytes.ratio(1, 8)? { bytes.arbitrary()? } else { bytes.int_in_range(0..=63)? };
    let order = order.unwrap_or(guess);
    Ok(AgentMessage::Report {
        order,
        outcome: Outcome::from_u32(bytes.int_in_range(0..=7)?).unwrap_or(Outcome::Done),
        phase: phase(bytes)?,
        cuda_error: bytes.arbitrary()?,
        elapsed_us: bytes.arbitrary()?,
        swappable_bytes: bytes.arbitrary()?,
        copied_out_bytes: bytes.arbitrary()?,
        unchanged_bytes: bytes.arbitrary()?,
        zero_bytes: bytes.arbitrary()?,
        local_memory_bytes: bytes.arbitrary()?,
    })
}

fn page(bytes: &mut Unstructured<'_>) -> Result<CounterSnapshot> {
    Ok(CounterSnapshot {
        phase: phase(bytes)?,
        waiters: bytes.arbitrary()?,
        hazards: Hazards(bytes.arbitrary()?),
        generation: bytes.arbitrary()?,
        allocated_bytes: bytes.arbitrary()?,
        allocations: bytes.arbitrary()?,
        swappable_bytes: bytes.arbitrary()?,
        copied_out_bytes: bytes.arbitrary()?,
        notes: ProcessFlags(bytes.arbitrary()?),
        call_cost_ps: bytes.arbitrary()?,
        held_us: bytes.arbitrary()?,
        kept_bytes: bytes.arbitrary()?,
        calls: bytes.arbitrary()?,
        polls: bytes.arbitrary()?,
        inflight: bytes.arbitrary()?,
        last_hook: bytes.arbitrary()?,
        filling_bytes: bytes.arbitrary()?,
        disk_chunks: bytes.arbitrary()?,
    })
}
