//! Tests of copiers in the simulated world. The copiers allocate VRAM, register host memory, copy
//! it back into VRAM and end. While a copier starts or ends, there must be no proof of free VRAM.
//! During a proof, no copier may register memory.

use std::collections::BTreeSet;

use affinode_proto::{
    state::State,
    wire::{Phase, copier::CopierReport},
};

use super::{
    super::{
        Effect, Input, Millis, ProcessId, Settings,
        copiers::{CopierId, END_MS, LINGER_MS, START_MS},
        grant::Stage,
        input::{CommandId, Request},
        policy::Mode,
    },
    world::{GPU, Host, TOTAL, World, key, settings},
};

/// Number of the container whose engine is `full`.
const FULL: usize = 1;
/// VRAM of a copier's CUDA context, in bytes.
const CONTEXT_BYTES: u64 = 20;

/// Stage of a simulated copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopierState {
    Starting,
    Ready,
    /// The copier was ordered to end at this time and has not exited yet.
    Ending(Millis),
}

/// A simulated copier, which copies memory for the processes of one GPU.
#[derive(Debug)]
pub(super) struct WorldCopier {
    gpu: usize,
    state: CopierState,
    bytes: u64,
    /// Whether the copier was ordered to register no memory.
    held: bool,
    /// The attached processes. The flag tells whether the copier has registered the process's
    /// memory.
    attached: Vec<(ProcessId, bool)>,
    /// The process whose memory the copier is copying back into VRAM.
    filling: Option<ProcessId>,
}

impl World {
    /// VRAM that copiers hold on a GPU, in bytes.
    pub(super) fn copier_bytes_on(&self, gpu: usize) -> u64 {
        self.copiers.values().filter(|copier| copier.gpu == gpu).map(|copier| copier.bytes).sum()
    }

    /// Executes an effect on a copier. Without `slow_copiers`, a start or end completes at once,
    /// and the input that reports this is returned.
    pub(super) fn told_copier(&mut self, effect: Effect) -> Option<Input> {
        let slow = self.slow_copiers;
        match effect {
            Effect::StartCopier { copier, gpu } => {
                assert!(self.may_start_copier(), "VRAM is being proven or taken");
                let gpu = usize::from(gpu != GPU);
                let alone = self
                    .copiers
                    .values()
                    .all(|other| other.gpu != gpu || matches!(other.state, CopierState::Ending(_)));
                assert!(alone, "the GPU has a copier already");
                let state = if slow { CopierState::Starting } else { CopierState::Ready };
                let started = WorldCopier {
                    gpu,
                    state,
                    bytes: 0,
                    held: false,
                    attached: Vec::new(),
                    filling: None,
                };
                self.copiers.insert(copier, started);
                (!slow).then_some(Input::CopierReport(copier, CopierReport::Ready))
            }
            Effect::AttachCopier { copier, process, .. } => {
                if let Some(copier) = self.copiers.get_mut(&copier) {
                    copier.attached.retain(|(id, _)| *id != process);
                    copier.attached.push((process, false));
                }
                None
            }
            Effect::HoldCopier { copier, on } => {
                if let Some(copier) = self.copiers.get_mut(&copier) {
                    copier.held = on;
                }
                None
            }
            Effect::FillMemory { copier, process, .. } => {
                let agent = &self.agents[&process];
                let grant = &self.node.state.admission.grants[&key(agent.container)];
                assert!(
                    grant.is_granted() && grant.covers.contains(&process),
                    "memory is filled without a grant"
                );
                let copier = self.copiers.get_mut(&copier).expect("it lives");
                assert!(
                    copier.attached.contains(&(process, true)),
                    "the process's memory is not registered"
                );
                copier.filling = Some(process);
                None
            }
            Effect::EndCopier { copier, .. } if slow => {
                if let Some(ending) = self.copiers.get_mut(&copier) {
                    ending.state = CopierState::Ending(self.bench.now);
                }
                None
            }
            Effect::EndCopier { copier, .. } => {
                self.copiers.remove(&copier);
                Some(Input::CopierExited(copier))
            }
            _ => None,
        }
    }

    fn may_start_copier(&self) -> bool {
        // A grant that began later in the same input waits until this copier has started or ended.
        let waits = |stage: &Stage| matches!(stage, Stage::Holding(_) | Stage::AwaitingCopiers);
        self.node.state.admission.grants.values().all(|grant| waits(&grant.stage))
    }

    /// Asserts that no copier changes the free VRAM while it is being proven.
    pub(super) fn assert_no_copier_moves(&self) {
        for (id, copier) in &self.copiers {
            match copier.state {
                CopierState::Starting => panic!("{id:?} starts during a proof"),
                CopierState::Ready => {
                    assert!(copier.held, "{id:?} registers memory during a proof")
                }
                CopierState::Ending(since) => {
                    assert!(self.now - since >= END_MS, "{id:?} ends during a proof");
                }
            }
        }
    }

    /// Runs the next step of a copier.
    pub(super) fn copier_step(&mut self, id: CopierId) {
        let Some(copier) = self.copiers.get(&id) else { return };
        let (gpu, room) = (copier.gpu, TOTAL.saturating_sub(self.used_on(copier.gpu)));
        match copier.state {
            CopierState::Starting if room >= CONTEXT_BYTES => {
                let copier = self.copiers.get_mut(&id).unwrap();
                (copier.state, copier.bytes) = (CopierState::Ready, CONTEXT_BYTES);
                self.feed(Input::CopierReport(id, CopierReport::Ready));
            }
            CopierState::Starting => self.feed(Input::CopierEnded(id)),
            CopierState::Ending(_) => {
                self.copiers.remove(&id);
                self.feed(Input::CopierExited(id));
            }
            CopierState::Ready => self.serve_processes(id, gpu, room),
        }
    }

    fn serve_processes(&mut self, id: CopierId, gpu: usize, room: u64) {
        let gone = |(process, _): &&(ProcessId, bool)| {
            self.agents.get(process).is_none_or(|agent| {
                let leaves = agent.prepared || agent.phase != Phase::Open;
                agent.orphaned || agent.gpu != gpu || !leaves
            })
        };
        let waits = |(process, registered): &&(ProcessId, bool)| {
            let agent = self.agents.get(process);
            let prepared = agent.is_some_and(|agent| agent.prepared);
            let checkpointed = agent.is_some_and(|agent| agent.phase == Phase::Checkpointed);
            !*registered && (prepared || checkpointed)
        };
        let copier = &self.copiers[&id];
        let report = if let Some(process) = copier.filling {
            CopierReport::Filled { process: process.0, bytes: 1, elapsed_us: 1 }
        } else if let Some((process, _)) = copier.attached.iter().find(gone) {
            CopierReport::Detached { process: process.0 }
        } else if let Some((process, _)) =
            copier.attached.iter().find(waits).filter(|_| !copier.held && room > 0)
        {
            let process = process.0;
            match self.agents[&ProcessId(process)].prepared {
                true => CopierReport::Prefaulted { process, bytes: 1 },
                false => CopierReport::Registered { process, bytes: 1 },
            }
        } else {
            return;
        };
        let copier = self.copiers.get_mut(&id).unwrap();
        match report {
            CopierReport::Filled { .. } => copier.filling = None,
            CopierReport::Detached { process } => {
                let place = copier.attached.iter().position(|(id, _)| id.0 == process).unwrap();
                let (_, registered) = copier.attached.remove(place);
                copier.bytes -= u64::from(registered);
            }
            // The page tables for registered memory take VRAM, here one byte. A prefaulted file is
            // registered again later.
            CopierReport::Registered { process, .. } => {
                let attached = copier.attached.iter_mut().find(|(id, _)| id.0 == process);
                attached.unwrap().1 = true;
                copier.bytes += 1;
            }
            _ => {}
        }
        self.feed(Input::CopierReport(id, report));
    }

    /// Runs the next step of each copier.
    pub(super) fn copiers_step(&mut self) {
        let all: Vec<CopierId> = self.copiers.keys().copied().collect();
        all.into_iter().for_each(|id| self.copier_step(id));
    }
}

/// A world with slow copiers, with an offloaded process of the engine `full` and its copier. The
/// copier has run no step yet.
fn with_starting_copier() -> (World, ProcessId, CopierId) {
    let mut world = World::new(3);
    world.slow_copiers = true;
    let id = world.running(FULL, 600);
    world.container_mut(FULL).policy.mode = Mode::Manual;
    (0..2).for_each(|_| world.tick());
    world.feed(Input::Command(CommandId(1), key(FULL), Request::Offload));
    while world.agents[&id].phase != Phase::Checkpointed {
        if world.is_asked() { world.answer_question() } else { world.work(id) }
    }
    let copier = *world.copiers.keys().next().expect("the copy out starts a copier");
    (world, id, copier)
}

/// A world with an offloaded process and its copier, as `with_starting_copier` creates it. The
/// copier has then registered the process's memory.
fn with_registered() -> (World, ProcessId, CopierId) {
    let (mut world, id, copier) = with_starting_copier();
    (0..3).for_each(|_| world.copier_step(copier));
    assert_eq!(world.copiers[&copier].attached, [(id, true)]);
    (world, id, copier)
}

fn stage(world: &World) -> Option<Stage> {
    world.node.state.admission.grants.get(&key(FULL)).map(|grant| grant.stage.clone())
}

fn is_proving(world: &World) -> bool {
    matches!(stage(world), Some(Stage::Proving(_)))
}

#[test]
fn proof_waits_for_a_starting_copier() {
    let (mut world, id, copier) = with_starting_copier();
    world.call(id);
    assert_eq!(stage(&world), Some(Stage::AwaitingCopiers));
    world.tick();
    assert_eq!(stage(&world), Some(Stage::AwaitingCopiers));
    assert!(world.copiers[&copier].held, "the copier must register nothing when it is ready");
    world.copier_step(copier);
    assert!(is_proving(&world));
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Open);
}

#[test]
fn proof_waits_for_an_ending_copier() {
    let (mut world, id, copier) = with_registered();
    world.feed(Input::CopierEnded(copier));
    world.call(id);
    assert_eq!(stage(&world), Some(Stage::AwaitingCopiers));
    world.copier_step(copier);
    assert!(is_proving(&world), "the copier has exited");
}

/// A copier was ended, but its process blocks in the driver and does not exit. Only the first proof
/// of free VRAM must wait for its exit.
#[test]
fn proof_waits_for_an_end_in_vain_only_once() {
    let (mut world, id, copier) = with_registered();
    world.feed(Input::CopierEnded(copier));
    world.call(id);
    let mut waited = 0;
    while !is_proving(&world) {
        world.tick();
        waited += 60;
        assert!(waited <= END_MS + 2_000, "the proof waits too long for the copier");
    }
    assert!(waited + 60 > END_MS, "the proof waits for the copier");
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Open);
}

#[test]
fn stuck_copier_is_ended_for_the_proof() {
    let (mut world, id, copier) = with_starting_copier();
    world.call(id);
    let mut waited = 0;
    while world.copiers[&copier].state == CopierState::Starting {
        world.tick();
        waited += 60;
        assert!(waited <= START_MS + 60, "the slow copier is not ended");
    }
    world.copier_step(copier);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Open);
}

#[test]
fn registered_memory_is_filled_under_the_grant() {
    let (mut world, id, copier) = with_registered();
    assert_eq!(world.node.state.copiers.figures(GPU).registered, 1);
    world.call(id);
    while world.agents[&id].phase != Phase::Open {
        if world.is_asked() { world.answer_question() } else { world.work(id) }
    }
    assert_eq!(world.copiers[&copier].filling, Some(id), "`told_copier` has seen the grant");
    world.copier_step(copier);
    assert_eq!(world.node.state.copiers.figures(GPU).restores, 1);
    world.tick();
    assert!(!world.copiers[&copier].held, "the grant is over");
}

#[test]
fn copier_without_a_process_ends() {
    let (mut world, id, copier) = with_registered();
    world.call(id);
    world.settle();
    assert!(world.copiers[&copier].attached.is_empty());
    (0..=LINGER_MS / 60).for_each(|_| world.tick());
    assert!(matches!(world.copiers[&copier].state, CopierState::Ending(_)));
}

#[test]
fn no_copier_without_setting() {
    let mut world = World::new(3);
    world.slow_copiers = true;
    world.feed(Input::Reconfigured(Box::new(Settings { copiers: false, ..settings() })));
    world.running(FULL, 600);
    world.settle_all();
    assert_eq!(world.state(FULL), State::Offloaded);
    assert!(world.copiers.is_empty());
}

/// While a container waits for VRAM, no copier must be started, because its context would allocate
/// VRAM that the container needs.
#[test]
fn no_copier_starts_while_a_container_waits() {
    let mut world = World::new(3);
    world.slow_copiers = true;
    let waiter = world.running(0, 600);
    world.settle_all();
    let id = world.running(FULL, 600);
    world.container_mut(FULL).policy.mode = Mode::Manual;
    (0..2).for_each(|_| world.tick());
    world.call(waiter);
    assert_eq!(world.state(0), State::Queued, "there is no free VRAM");
    world.feed(Input::Command(CommandId(1), key(FULL), Request::Offload));
    while world.agents[&id].phase != Phase::Checkpointed {
        if world.is_asked() { world.answer_question() } else { world.work(id) }
    }
    assert!(world.copiers.is_empty());
}

#[test]
fn each_device_has_its_own_copier() {
    let mut world = World::new(3);
    (world.two_gpus, world.slow_copiers) = (true, true);
    for _ in 0..2 {
        world.running(FULL, 300);
    }
    for _ in 0..30 {
        world.pass();
    }
    let devices: BTreeSet<usize> = world.copiers.values().map(|copier| copier.gpu).collect();
    assert_eq!((devices.len(), world.copiers.len()), (2, 2));
}
