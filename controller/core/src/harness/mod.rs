//! Hosts a [`Node`] in virtual time, for the tests of this crate, for fuzzing, and for the
//! comparison of the simulation with the daemon.
//!
//! ```text
//!  Host::feed ──Input──> Node ──Effect──> Host::execute ──> Bench::deliver: inboxes, questions
//!      ^                                       │
//!      └─── results that are known at once ────┘
//! ```
//!
//! A [`Bench`] consists of the node, the time, the simulated processes and the requests for
//! readings. A [`Host`] adds what differs: the duration and the failures of orders, the answers to
//! requests, and everything else in the simulated environment.
//!
//! The harness is a module with the feature `harness`, and not a crate of its own. The unit tests
//! of this crate examine the private state of `Node`. A harness in another crate would be linked
//! with a second build of this crate, whose `Node` is a different type.

pub mod agent;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::DerefMut,
};

use affinode_proto::{
    reason::Reason,
    wire::message::{ControllerMessage, Outcome},
};

use self::agent::Agent;
use super::{
    Effect, GpuSample, Input, Key, Millis, Node, ProcessId, Settings, Survey,
    host_memory::SurveyedMemory,
};

/// A reading of the GPUs, or the reason why it failed.
pub type Reading = Result<Vec<GpuSample>, String>;
/// A reading of the host memory for an offload, or the reason not to offload.
pub type HostReading = Result<SurveyedMemory, (Reason, String)>;

/// A node, the time, and the simulated processes and GPUs.
pub struct Bench {
    /// The node that is tested.
    pub node: Node,
    /// The present time in milliseconds.
    pub now: Millis,
    /// The simulated processes, by the numbers of their connections.
    pub agents: BTreeMap<ProcessId, Agent>,
    /// The node's requests for readings that are not answered yet, the oldest first.
    pub questions: VecDeque<Effect>,
    /// UUIDs of the GPUs.
    uuids: Vec<String>,
    /// VRAM of each GPU, in bytes.
    total_bytes: u64,
}

/// Returns the key of the container with this number.
#[must_use]
pub fn key(container: usize) -> Key {
    Key::parse(&format!("{container:032x}")).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the input that answers a request for a reading. For `ReadVram`, the input states that
/// each process has `u64::MAX` pending bytes, so that no VRAM is left under the limit.
#[must_use]
pub fn answer(question: Effect, gpus: Reading, host: HostReading) -> Input {
    match question {
        Effect::Survey { key, .. } => Input::Surveyed(key, Survey { gpus, host }),
        Effect::Prove { key, number, with_processes } => {
            let mut gpus = gpus;
            if !with_processes {
                gpus.iter_mut().flatten().for_each(|gpu| gpu.processes.clear());
            }
            Input::Proven(key, number, gpus)
        }
        Effect::ReadVram { key, epoch, processes } => {
            let pending = processes.into_iter().map(|id| (id, u64::MAX)).collect();
            Input::VramRead { key, epoch, pending, gpus }
        }
        other => panic!("{other:?} does not request a reading"),
    }
}

impl Bench {
    /// Creates a node without containers, and GPUs without processes.
    #[must_use]
    pub fn new(settings: Settings, uuids: &[&str], total_bytes: u64) -> Bench {
        Bench {
            node: Node::new(settings),
            now: 0,
            agents: BTreeMap::new(),
            questions: VecDeque::new(),
            uuids: uuids.iter().map(|uuid| (*uuid).to_owned()).collect(),
            total_bytes,
        }
    }

    /// Puts a message into the inbox of its process, or stores a request for a reading. Other
    /// effects are ignored. Asserts that the process's library supports the order.
    pub fn deliver(&mut self, effect: Effect) {
        match effect {
            Effect::Send(id, message) => {
                let Some(agent) = self.agents.get_mut(&id) else { return };
                if let ControllerMessage::Order { action, .. } = message {
                    let able = agent.capabilities;
                    assert!(
                        able.contains(action.requires()),
                        "{action:?} needs capabilities that the agent lacks; it has {able:?}"
                    );
                }
                agent.inbox.push_back(message);
            }
            Effect::Survey { .. } | Effect::Prove { .. } | Effect::ReadVram { .. } => {
                self.questions.push_back(effect);
            }
            _ => {}
        }
    }

    /// Samples of the GPUs, with the VRAM of the simulated processes.
    #[must_use]
    pub fn samples(&self) -> Vec<GpuSample> {
        let sample = |(gpu, uuid): (usize, &String)| {
            let there = self.agents.values().filter(|a| a.gpu == gpu && a.on_device() > 0);
            let processes: Vec<_> = there.map(|a| (a.pid, a.on_device())).collect();
            GpuSample {
                uuid: uuid.clone(),
                total_bytes: self.total_bytes,
                used_bytes: processes.iter().map(|(_, bytes)| bytes).sum(),
                processes,
                ..GpuSample::default()
            }
        };
        self.uuids.iter().enumerate().map(sample).collect()
    }
}

/// The environment of a node: executes effects and feeds inputs.
pub trait Host: DerefMut<Target = Bench> {
    /// Executes an effect. Returns the input that reports the result, if it is known at once.
    fn execute(&mut self, effect: Effect) -> Option<Input>;

    /// Samples of the GPUs as NVML would show them now.
    fn gpus(&self) -> Vec<GpuSample> {
        self.samples()
    }

    /// Makes the node handle one input. A host may check invariants here.
    fn handle(&mut self, input: Input) -> Vec<Effect> {
        let now = self.now;
        self.node.handle(now, input)
    }

    /// Makes the node handle an input, and then the results of the effects in their order.
    fn feed(&mut self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for effect in self.handle(input) {
                inputs.extend(self.execute(effect));
            }
        }
    }

    /// Registers a process, for the first time or again.
    fn hello(&mut self, id: ProcessId) {
        if let Some(joined) = self.agents.get_mut(&id).map(|agent| agent.joined(id)) {
            self.feed(joined);
        }
    }

    /// Makes a CUDA call in a process. The call passes the gate, or waits there and wakes the
    /// container.
    fn call(&mut self, id: ProcessId) {
        if let Some(wake) = self.agents.get_mut(&id).and_then(Agent::call) {
            self.feed(Input::Message(id, wake));
        }
    }

    /// Reports the end of an order with the present state of the process.
    fn report(&mut self, id: ProcessId, order: u64, outcome: Outcome, cuda_error: u32) {
        let agent = &self.agents[&id];
        let report = agent.swap().report(order, outcome, agent.phase, cuda_error);
        self.feed(Input::Message(id, report));
    }

    /// Reads the counters of all processes.
    fn read_counters(&mut self) {
        let pages = self.agents.iter().map(|(id, agent)| Input::Page(*id, agent.page()));
        pages.collect::<Vec<_>>().into_iter().for_each(|page| self.feed(page));
    }
}
