//! Tests of the limit of a container's VRAM. The simulated processes follow the library's protocol.

use std::collections::VecDeque;

use affinode_proto::wire::{
    Capabilities, Hazards, Phase,
    message::{AgentMessage, ControllerMessage},
    vram_view::VramView,
};
use proptest::prelude::*;

use super::{
    super::{
        ContainerSpec, Effect, GpuSample, Input, Key, Millis, Node, ProcessId, Settings,
        input::{Identity, SwapStatus},
        vram_limit::MAX_READINGS,
    },
    world::{GPU, key},
};

const LIMIT: u64 = 1 << 30;
const UUID: [u8; 16] = [7; 16];

/// The stage of an allocation in a simulated process. Each stage contains the bytes of the
/// allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocation {
    /// The process has added the bytes to its pending bytes, but has not checked its allowance yet.
    Announced(u64),
    /// The allowance was too small, so the process has asked the controller for a larger allowance.
    Asked(u64),
    /// The driver makes the allocation. NVML does not count the bytes yet.
    InDriver(u64),
    /// NVML counts the bytes, but the process has not removed them from its pending bytes yet.
    Mapped(u64),
}

#[derive(Default)]
struct LimitedProcess {
    /// Epoch of the most recent recall, which the controller writes into the counters of the
    /// process.
    epoch: u64,
    pending_bytes: u64,
    /// The allowance of the process: its remaining bytes, and its epoch.
    allowance: (u64, u64),
    /// Bytes on the GPU, as NVML reports them.
    held_bytes: u64,
    allocation: Option<Allocation>,
    ticket: u32,
    inbox: VecDeque<ControllerMessage>,
    /// What the container held or was about to allocate when the last reply was sent, in bytes.
    held_at_reply: u64,
    /// Whether the process must still send VramTaken for its current allowance.
    owes_taken: bool,
    never_says_taken: bool,
    /// The failed allocations. Each entry has the wanted bytes, and the bytes that were free under
    /// the limit.
    refused: Vec<(u64, u64)>,
}

struct LimitedContainer {
    node: Node,
    processes: Vec<LimitedProcess>,
    /// The reading of VRAM that the controller has requested: its epoch, and the pending bytes of
    /// each process.
    reading: Option<(u64, Vec<(ProcessId, u64)>)>,
    others_bytes: u64,
    /// VRAM that an offloaded process needs for its restore.
    offloaded_bytes: u64,
    /// The contents of the file that shows the container its VRAM.
    shown: Vec<Vec<VramView>>,
    now: Millis,
}

fn id(n: usize) -> ProcessId {
    ProcessId(n as u64 + 1)
}

fn pid(n: usize) -> u32 {
    n as u32 + 100
}

impl LimitedContainer {
    fn new(processes: usize) -> LimitedContainer {
        let mut container = LimitedContainer {
            node: Node::new(Settings::default()),
            processes: (0..processes).map(|_| LimitedProcess::default()).collect(),
            reading: None,
            others_bytes: 0,
            offloaded_bytes: 0,
            shown: Vec::new(),
            now: 0,
        };
        let annotations = [("affinode.io/vram-limit".to_owned(), "1Gi".to_owned())];
        let spec =
            ContainerSpec { annotations: annotations.into_iter().collect(), ..Default::default() };
        container.feed(Input::Announced(Box::new(spec), key(1)));
        for n in 0..processes {
            container.join(n, Capabilities::LIMITS_VRAM);
        }
        container
    }

    fn join(&mut self, n: usize, capabilities: Capabilities) {
        self.join_container(key(1), n, capabilities);
    }

    fn join_container(&mut self, key: Key, n: usize, capabilities: Capabilities) {
        self.feed(Input::Joined {
            key,
            process: id(n),
            identity: Identity { pid: pid(n), start_ticks: 1, ..Identity::default() },
            phase: Phase::Open,
            generation: 0,
            hazards: Hazards::default(),
            capabilities,
            swap: SwapStatus::default(),
        });
    }

    /// Ends the first process and starts it again. Returns the limit that its library gets.
    fn join_again(&mut self, capabilities: Capabilities) -> Option<u64> {
        self.feed(Input::Exited(id(0)));
        self.processes[0].inbox.clear();
        self.join(0, capabilities);
        self.processes[0].inbox.iter().find_map(|message| match message {
            ControllerMessage::Welcome { vram_limit_bytes, .. } => Some(*vram_limit_bytes),
            _ => None,
        })
    }

    fn feed(&mut self, input: Input) {
        for effect in self.node.handle(self.now, input) {
            match effect {
                Effect::Send(to, message) => {
                    self.processes[to.0 as usize - 1].inbox.push_back(message)
                }
                Effect::ReadVram { epoch, processes, .. } => {
                    assert!(self.reading.is_none(), "one reading at a time");
                    let recall = |id: &ProcessId| {
                        let process = &mut self.processes[id.0 as usize - 1];
                        process.epoch = epoch;
                        (*id, process.pending_bytes)
                    };
                    self.reading = Some((epoch, processes.iter().map(recall).collect()));
                }
                Effect::RecallVram { epoch, processes } => {
                    for id in processes {
                        self.processes[id.0 as usize - 1].epoch = epoch;
                    }
                }
                Effect::ShowVram { views, .. } => self.shown.push(views),
                _ => {}
            }
        }
    }

    fn show(&mut self) {
        let gpus = Ok(vec![self.gpu()]);
        self.feed(Input::Gpus(gpus));
    }

    fn gpu(&self) -> GpuSample {
        let held = self.processes.iter().enumerate().map(|(n, p)| (pid(n), p.held_bytes));
        let processes = held.chain([(9, self.others_bytes)]).collect();
        GpuSample { uuid: GPU.into(), total_bytes: 80 << 30, processes, ..GpuSample::default() }
    }

    /// Completes the requested reading of VRAM: gives NVML's figures to the controller, which then
    /// replies to the process.
    fn read(&mut self) {
        let Some((epoch, pending)) = self.reading.take() else { return };
        let gpus = Ok(vec![self.gpu()]);
        let asked = |process: &LimitedProcess| match process.allocation {
            Some(Allocation::Announced(bytes) | Allocation::InDriver(bytes)) => bytes,
            _ => 0,
        };
        let held_bytes: u64 = self.processes.iter().map(|p| p.held_bytes + asked(p)).sum();
        let held_bytes = held_bytes + self.offloaded_bytes;
        let has_no_reply = |process: &&mut LimitedProcess| {
            let reply =
                |m: &ControllerMessage| matches!(m, ControllerMessage::VramAllowance { .. });
            !process.inbox.iter().any(reply)
        };
        for process in self.processes.iter_mut().filter(has_no_reply) {
            process.held_at_reply = held_bytes;
        }
        self.feed(Input::VramRead { key: key(1), epoch, pending, gpus });
    }

    /// Makes the process with this index read the next message in its inbox.
    fn receive(&mut self, n: usize) {
        let process = &mut self.processes[n];
        let Some(ControllerMessage::VramAllowance { ticket, uuid, bytes, free_bytes, epoch }) =
            process.inbox.pop_front()
        else {
            return;
        };
        assert_eq!((ticket, uuid), (process.ticket, UUID));
        process.allowance = (bytes, epoch);
        process.owes_taken = true;
        if let Some(Allocation::Asked(wanted)) = process.allocation {
            process.allocation = None;
            if wanted > free_bytes {
                assert!(wanted + process.held_at_reply > LIMIT, "refused below the limit");
                process.refused.push((wanted, free_bytes));
                self.say_taken(n);
            } else {
                self.announce(n, wanted);
            }
        }
    }

    fn say_taken(&mut self, n: usize) {
        let process = &mut self.processes[n];
        if std::mem::take(&mut process.owes_taken) && !process.never_says_taken {
            self.feed(Input::Message(id(n), AgentMessage::VramTaken));
        }
    }

    fn announce(&mut self, n: usize, bytes: u64) {
        let process = &mut self.processes[n];
        if process.allocation.is_none() {
            process.pending_bytes += bytes;
            process.allocation = Some(Allocation::Announced(bytes));
        }
    }

    /// Runs the next step of a process's allocation.
    fn step(&mut self, n: usize) {
        let process = &mut self.processes[n];
        match process.allocation {
            Some(Allocation::Announced(bytes)) => {
                let (left, epoch) = process.allowance;
                if epoch == process.epoch && left >= bytes && epoch != 0 {
                    process.allowance = (left - bytes, epoch);
                    process.allocation = Some(Allocation::InDriver(bytes));
                    self.say_taken(n);
                } else {
                    process.pending_bytes -= bytes;
                    process.allocation = Some(Allocation::Asked(bytes));
                    process.ticket += 1;
                    process.owes_taken = false;
                    let ask = AgentMessage::AskVram { ticket: process.ticket, bytes, uuid: UUID };
                    self.feed(Input::Message(id(n), ask));
                }
            }
            Some(Allocation::InDriver(bytes)) => {
                process.held_bytes += bytes;
                process.allocation = Some(Allocation::Mapped(bytes));
            }
            Some(Allocation::Mapped(bytes)) => {
                process.pending_bytes -= bytes;
                process.allocation = None;
            }
            Some(Allocation::Asked(_)) | None => {}
        }
    }

    /// VRAM that the container holds or is about to hold.
    fn held_bytes(&self) -> u64 {
        let of = |process: &LimitedProcess| {
            let coming = match process.allocation {
                Some(Allocation::InDriver(bytes)) => bytes,
                _ => 0,
            };
            process.held_bytes + coming
        };
        self.processes.iter().map(of).sum()
    }

    /// Advances the time by 20 seconds, so that the allocations of all processes come to an end.
    fn settle(&mut self) {
        for _ in 0..200 {
            self.read();
            self.now += 100;
            self.feed(Input::Due(key(1)));
            for n in 0..self.processes.len() {
                self.receive(n);
                self.step(n);
            }
        }
    }

    fn allocate(&mut self, n: usize, bytes: u64) {
        self.announce(n, bytes);
        self.settle();
        assert_eq!(self.processes[n].allocation, None, "the allocation has ended");
    }
}

#[test]
fn limit_is_used_to_the_last_byte() {
    let mut container = LimitedContainer::new(1);
    container.others_bytes = 70 << 30;
    container.processes[0].held_bytes = 400;
    container.allocate(0, LIMIT - 400);
    assert_eq!(container.held_bytes(), LIMIT);
    container.allocate(0, 1);
    assert_eq!(container.processes[0].refused, [(1, 0)]);
    container.processes[0].held_bytes -= 100;
    container.allocate(0, 100);
    assert_eq!(container.held_bytes(), LIMIT, "freed memory can be allocated again");
}

#[test]
fn allowance_spares_messages() {
    let mut container = LimitedContainer::new(1);
    (0..100).for_each(|_| container.allocate(0, 1_000));
    assert_eq!(container.processes[0].ticket, 1);
}

#[test]
fn processes_of_a_container_share_its_limit() {
    let mut container = LimitedContainer::new(3);
    container.allocate(0, LIMIT / 2);
    container.allocate(1, LIMIT / 4);
    container.allocate(2, LIMIT / 4);
    assert_eq!(container.held_bytes(), LIMIT);
    container.allocate(0, 1);
    assert_eq!(container.processes[0].refused, [(1, 0)]);
}

#[test]
fn offloaded_process_keeps_its_share() {
    let mut container = LimitedContainer::new(2);
    container.allocate(0, LIMIT / 2);
    let gpus = vec![container.gpu()];
    container.feed(Input::Gpus(Ok(gpus)));
    // The process of the container that is being moved is not on the GPU any more.
    let process = container.node.state.registry.processes.get_mut(&id(0)).unwrap();
    process.agent.phase = Phase::CopyingOut;
    container.processes[0].held_bytes = 0;
    container.offloaded_bytes = LIMIT / 2;
    container.allocate(1, LIMIT / 2 + 1);
    assert_eq!(container.processes[1].refused, [(LIMIT / 2 + 1, LIMIT / 2)]);
}

#[test]
fn unreadable_nvml_fails_no_allocation() {
    let mut container = LimitedContainer::new(1);
    container.announce(0, 5);
    container.step(0);
    let (epoch, pending) = container.reading.take().unwrap();
    let gpus = Err("NVML is gone".to_owned());
    container.feed(Input::VramRead { key: key(1), epoch, pending, gpus });
    container.settle();
    assert_eq!((container.held_bytes(), container.processes[0].refused.len()), (5, 0));
}

#[test]
fn exit_of_the_asking_process_serves_the_next() {
    let mut container = LimitedContainer::new(2);
    for n in [0, 1] {
        container.announce(n, 5);
        container.step(n);
    }
    container.feed(Input::Exited(id(0)));
    container.settle();
    assert_eq!(container.processes[1].held_bytes, 5);
}

#[test]
fn each_gpu_gets_a_reply_of_its_own() {
    let mut container = LimitedContainer::new(1);
    let ask = |ticket, uuid| AgentMessage::AskVram { ticket, bytes: 5, uuid };
    for (ticket, uuid) in [(1, UUID), (2, [8; 16]), (3, UUID)] {
        container.feed(Input::Message(id(0), ask(ticket, uuid)));
    }
    // The reading for the first request has begun before the third came, so the third waits.
    for expected in [(1, UUID), (2, [8; 16]), (3, UUID)] {
        container.read();
        let replies = container.processes[0].inbox.drain(..).filter_map(|message| match message {
            ControllerMessage::VramAllowance { ticket, uuid, .. } => Some((ticket, uuid)),
            _ => None,
        });
        assert_eq!(replies.collect::<Vec<_>>(), [expected]);
        container.feed(Input::Message(id(0), AgentMessage::VramTaken));
    }
}

/// A process forges its pending bytes, so that the GPUs are read again and again for its request. A
/// request of another container must wait for one of these readings, not for all of them.
#[test]
fn forged_pending_bytes_delay_one_reading() {
    let mut liar = LimitedContainer::new(1);
    let annotations = [("affinode.io/vram-limit".to_owned(), "1Gi".to_owned())];
    let annotations = annotations.into_iter().collect();
    let spec = ContainerSpec { id: "honest".into(), annotations, ..Default::default() };
    liar.feed(Input::Announced(Box::new(spec), key(2)));
    liar.processes.push(LimitedProcess::default());
    liar.join_container(key(2), 1, Capabilities::LIMITS_VRAM);
    let ask = |n| Input::Message(id(n), AgentMessage::AskVram { ticket: 1, bytes: 5, uuid: UUID });
    let read = |node: &mut Node, of: usize, pending| {
        let pending = vec![(id(of - 1), pending)];
        let gpus =
            Ok(vec![GpuSample { uuid: GPU.into(), total_bytes: 80 << 30, ..GpuSample::default() }]);
        node.handle(0, Input::VramRead { key: key(of), epoch: 0, pending, gpus })
    };
    let reads_for = |effects: &[Effect]| {
        let key_of = |effect: &Effect| match effect {
            Effect::ReadVram { key, .. } => Some(key.clone()),
            _ => None,
        };
        effects.iter().find_map(key_of)
    };
    let node = &mut liar.node;
    assert_eq!(reads_for(&node.handle(0, ask(0))), Some(key(1)));
    assert_eq!(reads_for(&node.handle(0, ask(1))), None, "one reading at a time");
    let again = read(node, 1, u64::MAX);
    assert_eq!(reads_for(&again), Some(key(2)), "the honest request comes before the liar's");
    let answered = read(node, 2, 0);
    assert!(answered.iter().any(|effect| matches!(effect, Effect::Send(to, _) if *to == id(1))));
    assert_eq!(reads_for(&answered), Some(key(1)), "then the liar's request is read again");
    let readings = (0..MAX_READINGS).take_while(|_| reads_for(&read(node, 1, u64::MAX)).is_some());
    assert_eq!(readings.count(), MAX_READINGS as usize - 2, "and it gets a reply in the end");
}

#[test]
fn process_without_a_limit_reads_nothing() {
    let mut container = LimitedContainer::new(1);
    container.feed(Input::Exited(id(0)));
    container.join(0, Capabilities::RECORDS_CALLS);
    let ask = AgentMessage::AskVram { ticket: 1, bytes: 5, uuid: UUID };
    container.feed(Input::Message(id(0), ask));
    assert!(container.reading.is_none());
}

#[test]
fn newcomer_recalls_the_allowances_of_others() {
    let mut container = LimitedContainer::new(1);
    container.allocate(0, 5);
    let before = container.processes[0].epoch;
    container.processes.push(LimitedProcess::default());
    container.join(1, Capabilities::LIMITS_VRAM);
    assert_ne!(container.processes[0].epoch, before);
}

#[test]
fn only_an_able_library_gets_a_limit() {
    for (capabilities, limit) in
        [(Capabilities::LIMITS_VRAM, LIMIT), (Capabilities::RECORDS_CALLS, 0)]
    {
        let mut container = LimitedContainer::new(1);
        assert_eq!(container.join_again(capabilities), Some(limit));
    }
}

#[test]
fn largest_claim_is_no_limit() {
    let mut container = LimitedContainer::new(1);
    let claimed = ("affinode.io/claimed-vram".to_owned(), u64::MAX.to_string());
    let spec = ContainerSpec { annotations: [claimed].into(), ..Default::default() };
    container.feed(Input::Announced(Box::new(spec), key(1)));
    container.show();
    assert_eq!(container.join_again(Capabilities::LIMITS_VRAM), Some(0));
}

#[test]
fn limit_of_a_whole_gpu_is_none() {
    for (vram_bytes, limit) in
        [(LIMIT, 0), (LIMIT + (1 << 20) - 1, 0), (LIMIT + (1 << 20), LIMIT), (LIMIT - 1, 0)]
    {
        let mut container = LimitedContainer::new(1);
        let gpu = GpuSample { total_bytes: vram_bytes, ..container.gpu() };
        container.feed(Input::Gpus(Ok(vec![gpu])));
        assert_eq!(container.join_again(Capabilities::LIMITS_VRAM), Some(limit), "{vram_bytes}");
    }
}

#[test]
fn file_follows_the_vram_in_use() {
    let mut container = LimitedContainer::new(1);
    let view = |used_bytes| VramView { uuid: UUID, limit_bytes: LIMIT, used_bytes };
    container.show();
    assert_eq!(container.shown, [vec![view(0)]]);
    container.allocate(0, 5);
    container.show();
    container.show();
    assert_eq!(container.shown, [vec![view(0)], vec![view(5)]], "written only if it changes");
    container.feed(Input::Withdrawn(key(1)));
    container.show();
    assert_eq!(container.shown.last(), Some(&Vec::new()));
}

proptest! {
    #[test]
    fn random_steps_stay_below_the_limit(
        processes in 1_usize..4,
        is_rude: bool,
        steps in prop::collection::vec((0_u8..8, 0_usize..4, 1_u64..6), 1..300),
    ) {
        let mut container = LimitedContainer::new(processes);
        container.processes[0].never_says_taken = is_rude;
        for (step, n, size) in steps {
            let n = n % processes;
            match step {
                0 => container.announce(n, size * LIMIT / 8),
                1..=3 => container.step(n),
                4 => container.read(),
                5 | 6 => container.receive(n),
                _ => {
                    let held = &mut container.processes[n].held_bytes;
                    *held -= (*held).min(size * LIMIT / 8);
                }
            }
            prop_assert!(container.held_bytes() <= LIMIT, "above the limit");
        }
        container.settle();
        prop_assert!(container.held_bytes() <= LIMIT);
        for process in &container.processes {
            prop_assert_eq!(process.allocation, None, "an allocation never ended");
            prop_assert_eq!(process.pending_bytes, 0);
        }
    }
}
