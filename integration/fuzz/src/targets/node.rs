//! The node against one container that lies, beside one that is honest: whatever the
//! first says, in whatever order, the second comes home when it is called, and nobody
//! panics.

use std::collections::VecDeque;

use affinode_controller::core::{
    Effect, GpuSample, Input, Key, Node, ProcessId, Settings, Survey,
    input::{Carried, Identity},
    policy::{Mode, Policies, Policy},
};
use affinode_proto::{
    api::control::Announcement,
    wire::{
        Hazards, Notes, Phase,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
        page::PageSnapshot,
    },
};
use arbitrary::{Result, Unstructured};

const GOOD: u64 = 1;
const GOOD_VRAM: u64 = 100;
/// Plenty for both: only lies could keep the honest one out.
const TOTAL_VRAM: u64 = 1_000;
/// Things that happen in one run.
const STEPS: usize = 400;
/// Rounds of half a second in which the honest container must come home.
const PATIENCE: usize = 600;

struct World {
    node: Node,
    now_ms: u64,
    inbox: VecDeque<ControllerMessage>,
    questions: VecDeque<Effect>,
    phase: Phase,
    generation: u64,
    calls: u64,
    waits: bool,
    /// The number of the liar's connection.
    liar: u64,
}

/// Interprets the bytes as what the liar, the honest agent and time do.
pub fn hostile(data: &[u8]) {
    let mut world = World::new();
    let mut bytes = Unstructured::new(data);
    for _ in 0..STEPS {
        if bytes.is_empty() || world.step(&mut bytes).is_err() {
            break;
        }
    }
    world.comes_home();
}

fn key(letter: char) -> Key {
    Key::parse(&letter.to_string().repeat(32)).unwrap_or_else(|text| panic!("{text} is a key"))
}

impl World {
    fn new() -> World {
        let node = Policy {
            mode: Mode::Eager,
            idle_timeout_ms: 1_000,
            minimum_residency_ms: 0,
            ..Policy::default()
        };
        let settings =
            Settings { policies: Policies { node, ..Policies::default() }, ..Settings::default() };
        let mut world = World {
            node: Node::new(settings),
            now_ms: 0,
            inbox: VecDeque::new(),
            questions: VecDeque::new(),
            phase: Phase::Open,
            generation: 0,
            calls: 1,
            waits: false,
            liar: GOOD + 1,
        };
        world.node.started(1);
        for letter in ['a', 'b'] {
            let announcement = Announcement {
                key: key(letter).to_string(),
                id: letter.into(),
                ..Announcement::default()
            };
            world.feed(Input::Announced(Box::new(announcement), key(letter)));
        }
        let identity = Identity { pid: 10, start_ticks: 1, command: "good".into() };
        world.feed(Input::Joined {
            key: key('a'),
            process: ProcessId(GOOD),
            identity,
            phase: Phase::Open,
            generation: 0,
            hazards: Hazards::default(),
            carried: Carried::default(),
        });
        world
    }

    fn step(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        let liar = ProcessId(self.liar);
        match bytes.int_in_range(0..=15)? {
            0 => self.feed(Input::Message(liar, wake(bytes)?)),
            1..=3 => self.feed(Input::Message(liar, report(bytes)?)),
            4 => {
                let hazards = Hazards(bytes.arbitrary()?);
                self.feed(Input::Message(liar, AgentMessage::Notice { hazards }));
            }
            5 | 6 => self.feed(Input::Page(liar, page(bytes)?)),
            7 => self.feed(Input::BadPage(liar, "scribbled".into())),
            8 => self.feed(Input::Detached(liar)),
            9 | 10 => self.liar_joins(bytes)?,
            11 => self.feed(Input::Exited(liar)),
            12 => self.tick(u64::from(bytes.arbitrary::<u16>()?)),
            13 => self.answer(),
            14 => self.work(),
            _ => self.call(),
        }
        Ok(())
    }

    /// Another connection of the same process, or of another one.
    fn liar_joins(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        self.liar += 1;
        let pid = bytes.int_in_range(20..=23)?;
        self.feed(Input::Joined {
            key: key('b'),
            process: ProcessId(self.liar),
            identity: Identity { pid, start_ticks: 1, command: "liar".into() },
            phase: phase(bytes)?,
            generation: bytes.arbitrary()?,
            hazards: Hazards(bytes.arbitrary()?),
            carried: Carried {
                bytes: bytes.arbitrary()?,
                parked_bytes: bytes.arbitrary()?,
                unchanged_bytes: bytes.arbitrary()?,
                zero_bytes: bytes.arbitrary()?,
            },
        });
        Ok(())
    }

    fn feed(&mut self, input: Input) {
        for effect in self.node.handle(self.now_ms, input) {
            match effect {
                Effect::Send(ProcessId(GOOD), message) => self.inbox.push_back(message),
                Effect::Survey { .. } | Effect::Prove(..) => self.questions.push_back(effect),
                _ => {}
            }
        }
    }

    fn gpus(&self) -> Vec<GpuSample> {
        let here = if self.phase == Phase::Away { 0 } else { GOOD_VRAM };
        vec![GpuSample {
            uuid: "GPU-0".into(),
            total_bytes: TOTAL_VRAM,
            used_bytes: here + 50,
            processes: [(10, here), (20, 50)].into_iter().filter(|(_, bytes)| *bytes > 0).collect(),
            ..GpuSample::default()
        }]
    }

    fn tick(&mut self, ms: u64) {
        self.now_ms += ms;
        let page = PageSnapshot {
            phase: self.phase,
            waiters: u32::from(self.waits),
            hazards: Hazards::default(),
            generation: self.generation,
            allocated_bytes: GOOD_VRAM,
            allocations: 1,
            carried_bytes: 0,
            parked_bytes: 0,
            notes: Notes::default(),
            call_cost_ps: 0,
            held_us: 0,
            kept_bytes: 0,
            calls: self.calls,
            polls: 0,
            inflight: 0,
            last_hook: 1,
        };
        self.feed(Input::Page(ProcessId(GOOD), page));
        let gpus = self.gpus();
        self.feed(Input::Gpus(Ok(gpus)));
        self.feed(Input::Tick);
    }

    fn answer(&mut self) {
        let gpus = self.gpus();
        match self.questions.pop_front() {
            Some(Effect::Survey { key, .. }) => {
                self.feed(Input::Surveyed(key, Survey { gpus: Ok(gpus), room: Ok(()) }));
            }
            Some(Effect::Prove(key, number)) => self.feed(Input::Proven(key, number, Ok(gpus))),
            _ => {}
        }
    }

    /// The honest agent carries out its oldest order.
    fn work(&mut self) {
        let Some(ControllerMessage::Order { order, action, .. }) = self.inbox.pop_front() else {
            return;
        };
        let (from, to) = match action {
            Action::Close { .. } => (Phase::Open, Phase::Closed),
            Action::Open => (Phase::Closed, Phase::Open),
            Action::Lock { .. } => (Phase::Closed, Phase::Locked),
            Action::Checkpoint { .. } => (Phase::Locked, Phase::Away),
            Action::Restore => (Phase::Away, Phase::Locked),
            Action::Unlock => (Phase::Locked, Phase::Closed),
            _ => (self.phase, self.phase),
        };
        assert_eq!(self.phase, from, "{action:?} does not fit the honest process");
        self.phase = to;
        match action {
            Action::Close { .. } => self.generation += 1,
            Action::Open => self.waits = false,
            _ => {}
        }
        self.feed(Input::Message(
            ProcessId(GOOD),
            AgentMessage::Report {
                order,
                outcome: Outcome::Done,
                phase: to,
                cuda_error: 0,
                elapsed_us: 1,
                carried_bytes: 0,
                parked_bytes: 0,
                unchanged_bytes: 0,
                zero_bytes: 0,
            },
        ));
    }

    fn call(&mut self) {
        if self.phase == Phase::Open {
            self.calls += 1;
            return;
        }
        self.waits = true;
        let wake = AgentMessage::Wake { generation: self.generation, waiters: 1, hook: 1 };
        self.feed(Input::Message(ProcessId(GOOD), wake));
    }

    fn comes_home(&mut self) {
        for _ in 0..PATIENCE {
            self.call();
            if self.phase == Phase::Open {
                return;
            }
            while !self.inbox.is_empty() {
                self.work();
            }
            while !self.questions.is_empty() {
                self.answer();
            }
            self.tick(500);
        }
        panic!(
            "the honest process is left {:?} because of what another container says",
            self.phase
        );
    }
}

fn phase(bytes: &mut Unstructured<'_>) -> Result<Phase> {
    Ok(Phase::from_u32(bytes.int_in_range(0..=12)?).unwrap_or(Phase::Open))
}

fn wake(bytes: &mut Unstructured<'_>) -> Result<AgentMessage> {
    let (generation, waiters) = (bytes.arbitrary()?, bytes.arbitrary()?);
    Ok(AgentMessage::Wake { generation, waiters, hook: bytes.arbitrary()? })
}

fn report(bytes: &mut Unstructured<'_>) -> Result<AgentMessage> {
    // Small numbers meet orders that were given.
    let order = if bytes.ratio(1, 8)? { bytes.arbitrary()? } else { bytes.int_in_range(0..=63)? };
    Ok(AgentMessage::Report {
        order,
        outcome: Outcome::from_u32(bytes.int_in_range(0..=7)?).unwrap_or(Outcome::Done),
        phase: phase(bytes)?,
        cuda_error: bytes.arbitrary()?,
        elapsed_us: bytes.arbitrary()?,
        carried_bytes: bytes.arbitrary()?,
        parked_bytes: bytes.arbitrary()?,
        unchanged_bytes: bytes.arbitrary()?,
        zero_bytes: bytes.arbitrary()?,
    })
}

fn page(bytes: &mut Unstructured<'_>) -> Result<PageSnapshot> {
    Ok(PageSnapshot {
        phase: phase(bytes)?,
        waiters: bytes.arbitrary()?,
        hazards: Hazards(bytes.arbitrary()?),
        generation: bytes.arbitrary()?,
        allocated_bytes: bytes.arbitrary()?,
        allocations: bytes.arbitrary()?,
        carried_bytes: bytes.arbitrary()?,
        parked_bytes: bytes.arbitrary()?,
        notes: Notes(bytes.arbitrary()?),
        call_cost_ps: bytes.arbitrary()?,
        held_us: bytes.arbitrary()?,
        kept_bytes: bytes.arbitrary()?,
        calls: bytes.arbitrary()?,
        polls: bytes.arbitrary()?,
        inflight: bytes.arbitrary()?,
        last_hook: bytes.arbitrary()?,
    })
}
