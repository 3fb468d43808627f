//! Fuzz target that models a node with one hostile container. Honest containers with every engine
//! run on two GPUs. Whatever the hostile container sends, each honest container must be restored
//! within a time limit after its call, and the controller's core must not panic.

use std::collections::VecDeque;

use affinode_core::{
    ContainerSpec, Effect, GpuSample, Input, Key, Node, ProcessId, Settings, Survey,
    input::{Identity, SwapStatus},
    policy::{Mode, OnOom, Policies, Policy},
};
use affinode_proto::{
    reason::Reason,
    wire::{
        Capabilities, Hazards, Phase, ProcessFlags,
        copier::CopierReport,
        counters::CounterSnapshot,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};
use arbitrary::{Result, Unstructured};

/// Letter of the hostile container. Its key consists of this letter only.
const LIAR: char = 'f';
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

/// A process of an honest container. It executes the controller's orders correctly.
struct Honest {
    id: ProcessId,
    pid: u32,
    gpu: usize,
    swap: u64,
    phase: Phase,
    copied_out: bool,
    inbox: VecDeque<ControllerMessage>,
    generation: u64,
    calls: u64,
    waits: bool,
}

struct World {
    node: Node,
    now_ms: u64,
    honest: Vec<Honest>,
    questions: VecDeque<Effect>,
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

fn key(letter: char) -> Key {
    Key::parse(&letter.to_string().repeat(32))
        .unwrap_or_else(|text| panic!("cannot parse the key: {text}"))
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
            node: Node::new(settings),
            now_ms: 0,
            honest: Vec::new(),
            questions: VecDeque::new(),
            refuses: false,
            liar: 100,
            told: VecDeque::new(),
        };
        world.feed(Input::Started(1));
        let engines =
            [('a', "checkpoint"), ('b', "copy"), ('c', "full"), ('d', "auto"), (LIAR, "auto")];
        for (letter, engine) in engines {
            let spec = ContainerSpec {
                id: letter.into(),
                annotations: [("affinode.io/engine", engine), ("affinode.io/vram-limit", "1Mi")]
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .into(),
                ..ContainerSpec::default()
            };
            world.feed(Input::Announced(Box::new(spec), key(letter)));
        }
        for (n, (letter, engine)) in engines.into_iter().take(4).enumerate() {
            world.honest_joins(n, letter, if engine == "checkpoint" { 0 } else { CARRIED });
        }
        world
    }

    fn honest_joins(&mut self, n: usize, letter: char, swap: u64) {
        let (id, pid) = (ProcessId(n as u64 + 1), n as u32 + 10);
        self.honest.push(Honest {
            id,
            pid,
            gpu: n % 2,
            swap,
            phase: Phase::Open,
            copied_out: false,
            inbox: VecDeque::new(),
            generation: 0,
            calls: 1,
            waits: false,
        });
        self.feed(Input::Joined {
            key: key(letter),
            process: id,
            identity: Identity { pid, start_ticks: 1, command: "honest".into() },
            phase: Phase::Open,
            generation: 0,
            hazards: Hazards::default(),
            capabilities: Capabilities::default(),
            swap: SwapStatus { swappable_bytes: swap, ..SwapStatus::default() },
        });
    }

    fn step(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        match bytes.int_in_range(0..=7)? {
            0 => self.tick(u64::from(bytes.arbitrary::<u16>()?)),
            1 => self.answer(),
            2 | 3 => self.work(bytes.choose_index(self.honest.len())?),
            4 => self.call(bytes.choose_index(self.honest.len())?),
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
            identity: Identity { pid, start_ticks: 1, command: "liar".into() },
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
        self.feed(Input::Joined {
            key: key(LIAR),
            process: ProcessId(self.liar),
            identity: Identity { pid: 24, start_ticks: 1, command: "liar".into() },
            phase: Phase::Open,
            generation: 0,
            hazards: Hazards::default(),
            capabilities: Capabilities::default(),
            swap: SwapStatus::default(),
        });
    }

    /// Replies to all orders of the hostile container with the same outcome, including orders that
    /// these replies cause.
    fn answer_alike(&mut self, outcome: Outcome) {
        const MAX_ROUNDS: usize = 1_000;
        for answered in 0.. {
            let Some(order) = self.told.pop_front() else { return };
            assert!(answered < MAX_ROUNDS, "its replies cause orders without end");
            let report = AgentMessage::Report {
                order,
                outcome,
                phase: Phase::Open,
                cuda_error: 0,
                elapsed_us: 1,
                swappable_bytes: 0,
                copied_out_bytes: 0,
                unchanged_bytes: 0,
                zero_bytes: 0,
                local_memory_bytes: 0,
            };
            self.feed(Input::Message(ProcessId(self.liar), report));
        }
    }

    fn feed(&mut self, input: Input) {
        let mut later = Vec::new();
        for effect in self.node.handle(self.now_ms, input) {
            match effect {
                Effect::StartCopier { copier, .. } => {
                    later.push(Input::CopierReport(copier, CopierReport::Ready));
                }
                Effect::EndCopier { copier, .. } => later.push(Input::CopierExited(copier)),
                Effect::Send(id, message) => {
                    if let Some(honest) = self.honest.iter_mut().find(|honest| honest.id == id) {
                        honest.inbox.push_back(message);
                    } else if let ControllerMessage::Order { order, .. } = message {
                        self.told.push_back(order);
                    }
                }
                Effect::Survey { .. } | Effect::Prove(..) | Effect::ReadVram { .. } => {
                    self.questions.push_back(effect);
                }
                _ => {}
            }
        }
        later.into_iter().for_each(|input| self.feed(input));
    }

    fn gpus(&self) -> Vec<GpuSample> {
        let sample = |(gpu, uuid): (usize, &&str)| {
            let here = self.honest.iter().filter(|honest| honest.gpu == gpu);
            let honest = here.map(|honest| (honest.pid, honest.on_device()));
            let all = honest.chain([(20, LIAR_VRAM)]).filter(|(_, bytes)| *bytes > 0);
            let processes: Vec<(u32, u64)> = all.collect();
            GpuSample {
                uuid: (*uuid).into(),
                total_bytes: TOTAL_VRAM,
                used_bytes: processes.iter().map(|(_, bytes)| bytes).sum(),
                processes,
                ..GpuSample::default()
            }
        };
        GPUS.iter().enumerate().map(sample).collect()
    }

    fn tick(&mut self, ms: u64) {
        self.now_ms += ms;
        let pages: Vec<(ProcessId, CounterSnapshot)> =
            self.honest.iter().map(|honest| (honest.id, honest.page())).collect();
        for (id, page) in pages {
            self.feed(Input::Page(id, page));
        }
        let gpus = self.gpus();
        self.feed(Input::Gpus(Ok(gpus)));
        self.feed(Input::Tick);
    }

    fn answer(&mut self) {
        let gpus = self.gpus();
        match self.questions.pop_front() {
            Some(Effect::Survey { key, .. }) => {
                let host = match self.refuses {
                    true => Err((Reason::HostMemory, String::new())),
                    false => Ok(Vec::new()),
                };
                self.feed(Input::Surveyed(key, Survey { gpus: Ok(gpus), host }));
            }
            Some(Effect::Prove(key, number)) => self.feed(Input::Proven(key, number, Ok(gpus))),
            Some(Effect::ReadVram { key, epoch, processes }) => {
                let pending = processes.into_iter().map(|id| (id, u64::MAX)).collect();
                self.feed(Input::VramRead { key, epoch, pending, gpus: Ok(gpus) });
            }
            _ => {}
        }
    }

    /// Makes the agent of the honest container with index `n` execute its oldest order.
    fn work(&mut self, n: usize) {
        let honest = &mut self.honest[n];
        let Some(message) = honest.inbox.pop_front() else { return };
        let ControllerMessage::Order { order, action, .. } = message else { return };
        honest.obey(action);
        let (id, phase) = (honest.id, honest.phase);
        let copied_out_bytes = if honest.copied_out { honest.swap } else { 0 };
        let swappable_bytes = honest.swap;
        self.feed(Input::Message(
            id,
            AgentMessage::Report {
                order,
                outcome: Outcome::Done,
                phase,
                cuda_error: 0,
                elapsed_us: 1,
                swappable_bytes,
                copied_out_bytes,
                unchanged_bytes: 0,
                zero_bytes: 0,
                local_memory_bytes: 0,
            },
        ));
    }

    fn call(&mut self, n: usize) {
        let honest = &mut self.honest[n];
        if honest.phase == Phase::Open {
            honest.calls += 1;
            return;
        }
        honest.waits = true;
        let wake = AgentMessage::Wake { generation: honest.generation, waiters: 1, hook: 1 };
        let id = honest.id;
        self.feed(Input::Message(id, wake));
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
        let called_ms = self.now_ms;
        while self.now_ms - called_ms <= BOUND_MS {
            (0..self.honest.len()).for_each(|n| self.call(n));
            if self.honest.iter().all(|honest| honest.phase == Phase::Open) {
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
            for n in 0..self.honest.len() {
                while !self.honest[n].inbox.is_empty() {
                    self.work(n);
                }
            }
            while !self.questions.is_empty() {
                self.answer();
            }
            self.tick(ROUND_MS);
        }
        let left: Vec<Phase> = self.honest.iter().map(|honest| honest.phase).collect();
        panic!("the hostile container's messages left honest processes in the phases {left:?}");
    }
}

impl Honest {
    fn on_device(&self) -> u64 {
        match self.phase {
            Phase::Checkpointed => 0,
            Phase::CopiedOut => HONEST_VRAM - self.swap,
            _ => HONEST_VRAM,
        }
    }

    fn obey(&mut self, action: Action) {
        let was = self.phase;
        let (fits, to) = match action {
            Action::Close { .. } => (was == Phase::Open, Phase::Closed),
            Action::Open => (was == Phase::Closed, Phase::Open),
            Action::Lock { .. } => (was == Phase::Closed, Phase::Locked),
            Action::CopyOut { .. } => {
                (matches!(was, Phase::Closed | Phase::Locked), Phase::CopiedOut)
            }
            Action::Checkpoint { .. } => {
                (matches!(was, Phase::Locked | Phase::CopiedOut), Phase::Checkpointed)
            }
            Action::Restore if self.copied_out => (was.is_offloaded(), Phase::Closed),
            Action::Restore => (was == Phase::Checkpointed, Phase::Locked),
            Action::Unlock => (was == Phase::Locked, Phase::Closed),
            _ => (true, was),
        };
        assert!(fits, "{action:?} does not fit an honest process that is {was:?}");
        self.phase = to;
        match action {
            Action::Close { .. } => self.generation += 1,
            Action::CopyOut { .. } => self.copied_out = true,
            Action::Restore => self.copied_out = false,
            Action::Open => self.waits = false,
            _ => {}
        }
    }

    fn page(&self) -> CounterSnapshot {
        CounterSnapshot {
            phase: self.phase,
            waiters: u32::from(self.waits),
            hazards: Hazards::default(),
            generation: self.generation,
            allocated_bytes: HONEST_VRAM,
            allocations: 1,
            swappable_bytes: self.swap,
            copied_out_bytes: if self.copied_out { self.swap } else { 0 },
            notes: ProcessFlags::ONE_GPU,
            call_cost_ps: 0,
            held_us: 0,
            kept_bytes: 0,
            filling_bytes: 0,
            calls: self.calls,
            polls: 0,
            inflight: 0,
            last_hook: 1,
        }
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
    if bytes.arbitrary()? {
        return Ok(AgentMessage::VramTaken);
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
    })
}
