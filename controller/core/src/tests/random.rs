//! Tests with random calls, wakes, failures, exits and controller restarts, in random order.

use std::collections::BTreeSet;

use affinode_proto::{
    state::State,
    wire::{Capabilities, Hazards, Phase, message::Outcome},
};
use proptest::prelude::*;

use super::{
    super::{
        Input, Request,
        harness::agent::{Agent, Refusal},
        input::{CommandId, Work},
        policy::Engine,
    },
    world::{GPU, Host, TOTAL, World, key},
};

#[derive(Clone, Debug)]
enum Step {
    Join(usize),
    Allocate(usize, u64),
    Call(usize),
    Work(usize),
    Question,
    Tick,
    Exit(usize),
    Detach(usize, bool),
    Restart(bool),
    Others(u64),
    /// A step in which the controller handles nothing for six seconds. At the end, unmanaged
    /// processes hold this many bytes of VRAM, if these bytes are free.
    Stopped(u64),
    Fail(bool),
    Ask(usize, bool),
    /// The process with this index uses managed memory from now on, so it cannot be moved.
    Fix(usize),
    /// From now on a part of the memory of the process with this index stays on the GPU, for
    /// example its CUDA context because of a tool.
    Tool(usize),
    /// A reading of the connections on a container's network. Contains the container's number and
    /// the number of connections.
    Connections(usize, u64),
    /// NVML shows work of the process with this index.
    Worked(usize),
    /// The controller's next reading of NVML is made now. A later step `Question` delivers its
    /// result.
    Read,
    /// NVML fails from now on, or works again.
    Nvml(bool),
    /// From now on there is too little host memory for any offload, or enough again.
    HostMemory(bool),
    /// The copier with this index runs its next step: it becomes ready, registers memory, copies
    /// memory back into VRAM, or exits.
    Copier(usize),
    /// The connection of the copier with this index ends. `true`: the controller has seen the exit
    /// of the copier's process before.
    CopierEnds(usize, bool),
    /// The process with this index disobeys orders to pause its allocations from now on, in the
    /// given way. `None`: the process follows these orders again.
    Refuse(usize, Option<Refusal>),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_usize..3).prop_map(Step::Join),
        4 => (0_usize..8, 1_u64..500).prop_map(|(n, s)| Step::Allocate(n, s)),
        6 => (0_usize..8).prop_map(Step::Call),
        16 => (0_usize..8).prop_map(Step::Work),
        10 => Just(Step::Question),
        8 => Just(Step::Tick),
        1 => (0_usize..8).prop_map(Step::Exit),
        1 => (0_usize..8, any::<bool>()).prop_map(|(n, busy)| Step::Detach(n, busy)),
        1 => any::<bool>().prop_map(Step::Restart),
        1 => (0_u64..600).prop_map(Step::Others),
        1 => (0_u64..600).prop_map(Step::Stopped),
        1 => any::<bool>().prop_map(Step::Fail),
        1 => (0_usize..8).prop_map(Step::Fix),
        1 => (0_usize..8).prop_map(Step::Tool),
        1 => (0_usize..8).prop_map(Step::Worked),
        5 => Just(Step::Read),
        1 => any::<bool>().prop_map(Step::Nvml),
        1 => any::<bool>().prop_map(Step::HostMemory),
        1 => (0_usize..8, refusal()).prop_map(|(n, refusal)| Step::Refuse(n, refusal)),
        8 => (0_usize..4).prop_map(Step::Copier),
        1 => (0_usize..4, any::<bool>()).prop_map(|(n, exits)| Step::CopierEnds(n, exits)),
        2 => (0_usize..3, 0_u64..9).prop_map(|(n, count)| Step::Connections(n, count)),
        2 => (0_usize..3, any::<bool>()).prop_map(|(c, out)| Step::Ask(c, out)),
    ]
}

/// Generates steps for containers that use copiers. They are offloaded and called while copiers
/// start and end.
fn copier_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Join(1)),
        3 => (0_usize..4, 1_u64..300).prop_map(|(n, bytes)| Step::Allocate(n, bytes)),
        6 => (0_usize..4).prop_map(Step::Call),
        24 => (0_usize..4).prop_map(Step::Work),
        12 => Just(Step::Question),
        6 => Just(Step::Tick),
        2 => any::<bool>().prop_map(|out| Step::Ask(1, out)),
        2 => (0_usize..4).prop_map(Step::Copier),
        1 => (0_usize..4, any::<bool>()).prop_map(|(n, exits)| Step::CopierEnds(n, exits)),
        12 => step(),
    ]
}

fn refusal() -> impl Strategy<Value = Option<Refusal>> {
    prop_oneof![Just(None), Just(Some(Refusal::Busy)), Just(Some(Refusal::Silent))]
}

/// Sets a higher number of cases than usual. PROPTEST_CASES overrides it.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(512);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Runs the steps, lets the world settle, and checks the final state.
fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    run_with(&[], steps)
}

/// Like `run`, but the containers with these numbers have the restore policy `immediate`.
fn run_with(immediate: &[usize], steps: Vec<Step>) -> Result<(), TestCaseError> {
    run_in(World::new(3), immediate, steps)
}

fn run_in(mut world: World, immediate: &[usize], steps: Vec<Step>) -> Result<(), TestCaseError> {
    world.immediate = immediate.to_vec();
    (0..3).for_each(|n| world.announce(n));
    let mut command = 0;
    let mut asked = BTreeSet::new();
    for step in steps {
        let nth = |n: usize, world: &World| world.agents.keys().copied().nth(n);
        match step {
            Step::Join(container) => world.join(container),
            Step::Allocate(n, bytes) => {
                if let Some(id) = nth(n, &world) {
                    world.allocate(id, bytes)
                }
            }
            Step::Call(n) => {
                if let Some(id) = nth(n, &world) {
                    world.try_again(id);
                    world.call(id);
                }
            }
            Step::Work(n) => {
                if let Some(id) = nth(n, &world) {
                    world.work(id)
                }
            }
            Step::Question => world.answer_question(),
            Step::Tick => world.tick(),
            Step::Exit(n) => {
                if let Some(id) = nth(n, &world) {
                    world.exit(id)
                }
            }
            Step::Detach(n, busy) => {
                if let Some(id) = nth(n, &world) {
                    world.reconnect(id, busy);
                }
            }
            Step::Restart(busy) => {
                world.restart(busy);
                asked.clear();
            }
            Step::Others(bytes) => world.take_unmanaged(bytes),
            Step::Stopped(bytes) => world.stop_controller(bytes),
            Step::Read => world.read_nvml(),
            Step::Nvml(works) => world.nvml.fails = !works,
            Step::HostMemory(enough) => world.nvml.no_host_memory = !enough,
            Step::Refuse(n, refusal) => {
                if let Some(agent) = nth(n, &world).and_then(|id| world.agents.get_mut(&id)) {
                    agent.refuses = refusal;
                }
            }
            Step::Copier(n) => {
                let nth = world.copiers.keys().copied().nth(n);
                nth.filter(|_| world.slow_copiers).into_iter().for_each(|id| world.copier_step(id));
            }
            Step::CopierEnds(n, exits) => {
                if let Some(id) = world.copiers.keys().copied().nth(n) {
                    if exits {
                        world.copiers.remove(&id);
                    }
                    world.feed(if exits {
                        Input::CopierExited(id)
                    } else {
                        Input::CopierEnded(id)
                    });
                }
            }
            Step::Fail(busy) => {
                world.fail = Some(if busy { Outcome::Busy } else { Outcome::DriverError })
            }
            Step::Fix(n) => {
                // Only while the process is resident: offloaded memory cannot become managed
                // memory.
                let id = nth(n, &world);
                let agent = id.and_then(|id| world.agents.get_mut(&id));
                if let Some(agent) = agent.filter(|agent| agent.phase == Phase::Open) {
                    agent.fixed = true;
                }
            }
            Step::Tool(n) => {
                let id = nth(n, &world);
                if let Some(agent) = id.and_then(|id| world.agents.get_mut(&id)) {
                    // Memory that stays is allocated only while the process is resident.
                    match n % 4 {
                        0 if agent.phase == Phase::Open => agent.in_part = Hazards::MANAGED_MEMORY,
                        1 if agent.phase == Phase::Open => agent.in_part = Hazards::SHARED_MEMORY,
                        _ => agent.tools = true,
                    }
                }
            }
            Step::Connections(n, count) => {
                world.feed(Input::Connections(key(n), Some(count)));
            }
            Step::Worked(n) => {
                let work = nth(n, &world).map(|id| Work {
                    uuid: GPU.into(),
                    pid: world.agents[&id].pid,
                    percent: 50,
                    age_ms: 0,
                });
                world.feed(Input::Worked(work.into_iter().collect()));
            }
            Step::Ask(container, out) => {
                command += 1;
                asked.insert(CommandId(command));
                let request = if out { Request::Offload } else { Request::Restore };
                world.feed(Input::Command(CommandId(command), key(container), request));
            }
        }
    }
    world.others = 0;
    world.fail = None;
    // Processes that refuse holds still refuse them here.
    (world.nvml.fails, world.nvml.no_host_memory) = (false, false);
    // A process that cannot be offloaded, or keeps its context, may block others until it exits.
    let stays = |agent: &Agent| agent.fixed || agent.keeps_context();
    let fixed = world.agents.iter().filter(|(_, agent)| stays(agent)).map(|(id, _)| *id);
    fixed.collect::<Vec<_>>().into_iter().for_each(|id| world.exit(id));
    exit_what_never_fits(&mut world);
    world.settle_all();
    for (id, agent) in &world.agents {
        let keeps = matches!(
            world.node.state.registry.containers[&key(agent.container)].policy.engine,
            Engine::Copy | Engine::Auto
        );
        let copies_out = keeps && agent.phase == Phase::CopiedOut;
        prop_assert!(
            copies_out || matches!(agent.phase, Phase::Open | Phase::Checkpointed),
            "{id:?} is left in {:?}",
            agent.phase
        );
        prop_assert!(!agent.wants, "{id:?} still waits");
        prop_assert!(!agent.held, "{id:?} may not allocate");
        prop_assert!(agent.asking.is_none(), "an allocation of {id:?} still waits");
    }
    for n in 0..3 {
        let members = world.agents.values().filter(|a| a.container == n).count();
        if members == 0 {
            continue;
        }
        let state = world.state(n);
        prop_assert!(
            matches!(state, State::Active | State::Idle | State::Offloaded),
            "{n} is left {state}"
        );
    }
    let permitted = world.node.state.registry.processes.values();
    let permitted: u64 = permitted.map(|process| process.host_pool.bytes).sum();
    prop_assert_eq!(permitted, 0, "a process may still take memory of the host pool");
    for (command, _) in &world.answers {
        asked.remove(command);
    }
    prop_assert!(asked.is_empty(), "no answer to {asked:?}");
    prop_assert!(world.node.state.admission.queue.is_empty());
    prop_assert!(world.node.state.admission.grants.is_empty());
    prop_assert_eq!(world.node.state.admission.ledger.promised_bytes(GPU), 0);
    Ok(())
}

/// Ends processes of a container whose resident and offloaded memory together exceed the GPU, until
/// the memory of its other processes fits. This is needed only after the controller was stopped.
/// Processes of the container then resumed their allocations, and allocated VRAM that an offloaded
/// process of the same container needs. Only an exit can solve this.
fn exit_what_never_fits(world: &mut World) {
    for container in 0..3 {
        for gpu in 0..2 {
            let here = |agent: &Agent| agent.container == container && agent.gpu == gpu;
            while world.was_stopped
                && world.agents.values().filter(|a| here(a)).map(|a| a.size).sum::<u64>() > TOTAL
                && let Some(id) =
                    world.agents.iter().rfind(|(_, a)| here(a) && a.size > 0).map(|(id, _)| *id)
            {
                world.exit(id);
            }
        }
    }
}

proptest! {
    #![proptest_config(config())]

    /// In any order of steps, no restore runs without VRAM (asserted in `work`), and no order is
    /// sent in a wrong phase. At the end no call waits, no container is partly restored, and no
    /// process pauses its allocations.
    #[test]
    fn random_steps_lose_no_container(
        prepare in any::<bool>(),
        auto in any::<bool>(),
        local_memory in any::<bool>(),
        has_host_pool in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(3).with_auto(auto);
        (world.prepare, world.local_memory) = (prepare, local_memory);
        if has_host_pool {
            (world.host_total, world.host_pool_bytes) = (Some(100 * TOTAL), Some(2 * TOTAL));
        }
        run_in(world, &[], steps)?;
    }

    /// Like `random_steps_lose_no_container`, but some containers have the restore policy
    /// `immediate`. Their restores do not wait for idle containers and may end processes
    /// (`told_to_end` asserts which).
    #[test]
    fn random_immediate_steps_lose_no_container(
        immediate in proptest::sample::subsequence(vec![0, 1, 2], 1..4),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        run_with(&immediate, steps)?;
    }
}

proptest! {
    #![proptest_config(config())]

    /// Like `random_steps_lose_no_container`, with libraries of any version and with each policy
    /// that needs a capability. A process gets only orders that its library supports (asserted in
    /// `feed`).
    #[test]
    fn random_libraries_follow_their_orders(
        libraries in proptest::collection::vec((0_u32..1 << 13).prop_map(Capabilities), 1..4),
        prepare in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(3);
        (world.libraries, world.all_options, world.prepare) = (libraries, true, prepare);
        run_in(world, &[], steps)?;
    }
}

proptest! {
    #![proptest_config(config())]

    /// Like `random_steps_lose_no_container`, but copies out free VRAM in several steps, so that a
    /// waiter is restored while its VRAM is being freed.
    #[test]
    fn random_slow_copies_lose_no_container(
        auto in any::<bool>(),
        local_memory in any::<bool>(),
        two_gpus in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(3).with_auto(auto);
        (world.slow_copies, world.local_memory, world.two_gpus) = (true, local_memory, two_gpus);
        run_in(world, &[], steps)?;
    }
}

proptest! {
    #![proptest_config(config())]

    /// Like `random_steps_lose_no_container`, but copiers need VRAM and time. While a copier
    /// starts, ends or may register memory, there must be no proof of free VRAM (asserted in
    /// `feed`). A copier may copy memory into VRAM only with a grant.
    #[test]
    fn random_copiers_move_nothing_beside_a_proof(
        prepare in any::<bool>(),
        two_gpus in any::<bool>(),
        steps in proptest::collection::vec(copier_step(), 1..300),
    ) {
        let mut world = World::new(3);
        (world.slow_copiers, world.two_gpus, world.prepare) = (true, two_gpus, prepare);
        run_in(world, &[], steps)?;
    }
}

proptest! {
    #![proptest_config(config())]

    /// Like `random_steps_lose_no_container`, with migrations between two GPUs, and in some cases
    /// with prefaulting.
    #[test]
    fn random_steps_on_two_gpus_lose_no_container(
        prepare in any::<bool>(),
        auto in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(3).with_auto(auto);
        (world.two_gpus, world.prepare) = (true, prepare);
        run_in(world, &[], steps)?;
    }
}

/// Regression test: a controller ends while it offloads a container. The next controller must serve
/// the container's process whose gate is still closed. Random steps once failed with this sequence.
#[test]
fn closed_process_of_dead_controller_is_served() {
    let mut steps = vec![Step::Join(2), Step::Join(2), Step::Work(1), Step::Ask(2, true)];
    steps.extend([Step::Allocate(1, 240), Step::Question, Step::Others(380), Step::Work(0)]);
    steps.extend([Step::Restart(true), Step::Allocate(0, 381), Step::Work(1), Step::Tick]);
    steps.extend([Step::Tick, Step::Others(0), Step::Tick]);
    run(steps).unwrap();
}

/// Regression test: the CUDA context of a container that waits for VRAM must be evicted if another
/// container needs the context's VRAM. Random steps once failed with this sequence.
#[test]
fn waiting_context_is_evicted_for_others() {
    let mut steps = vec![Step::Join(2), Step::Join(1), Step::Join(0), Step::Work(0)];
    steps.extend([Step::Join(0), Step::Join(1), Step::Work(1), Step::Allocate(1, 131)]);
    steps.extend([Step::Tick, Step::Allocate(0, 452), Step::Work(4), Step::Tick, Step::Tick]);
    steps.extend([Step::Allocate(0, 256), Step::Question, Step::Allocate(1, 205)]);
    steps.extend([Step::Join(0), Step::Detach(0, false), Step::Allocate(3, 488)]);
    steps.extend([Step::Work(5), Step::Allocate(5, 162)]);
    run(steps).unwrap();
}

#[test]
fn gpu_filling_process_is_restored() {
    let mut world = World::new(2);
    let id = world.running(0, 990);
    world.settle();
    let other = world.running(1, 300);
    world.call(id);
    world.settle();
    assert_eq!(world.agents[&other].phase, Phase::Checkpointed);
    assert!(!world.agents[&id].wants, "a call still waits");
}

#[test]
fn gpu_filling_container_survives_two_crashes() {
    let mut steps = vec![Step::Fail(false), Step::Join(1), Step::Join(1), Step::Join(1)];
    steps.extend([Step::Work(2), Step::Join(1), Step::Work(0), Step::Allocate(2, 219)]);
    steps.extend([Step::Allocate(0, 31), Step::Restart(false), Step::Tick, Step::Tick]);
    steps.extend([Step::Work(2), Step::Tick, Step::Work(3), Step::Work(0), Step::Question]);
    steps.extend([Step::Work(2), Step::Exit(1), Step::Allocate(0, 258), Step::Allocate(0, 473)]);
    steps.extend([Step::Work(2), Step::Restart(false), Step::Call(2)]);
    run(steps).unwrap();
}

#[test]
fn conflicting_waiters_of_two_priorities_finish() {
    let mut steps: Vec<Step> = [0, 0, 0, 2, 0, 1].map(Step::Join).into();
    steps.extend([Step::Work(3), Step::Join(1), Step::Work(6), Step::Work(5)]);
    steps.extend([Step::Allocate(5, 67), Step::Detach(0, false), Step::Allocate(2, 435)]);
    steps.extend([Step::Allocate(2, 499), Step::Stopped(179), Step::Detach(0, false)]);
    steps.extend([Step::Allocate(3, 179), Step::Stopped(0), Step::Allocate(3, 320)]);
    run(steps).unwrap();
}

#[test]
fn copied_out_container_restores_without_margin() {
    let mut steps = vec![Step::Join(2), Step::Work(0), Step::Allocate(0, 414)];
    steps.extend([0, 0, 0].map(Step::Join));
    steps.extend([Step::Work(1), Step::Allocate(0, 82), Step::Allocate(1, 306)]);
    steps.extend([0, 0].map(Step::Join));
    steps.extend([Step::Exit(2), Step::Exit(2), Step::Allocate(2, 1)]);
    steps.extend([0, 0, 0].map(Step::Join));
    steps.extend([Step::Work(6), Step::Allocate(6, 199), Step::Join(0), Step::Exit(2)]);
    steps.extend([Step::Detach(0, false), Step::Work(6), Step::Allocate(6, 485)]);
    run(steps).unwrap();
}

#[test]
fn evicted_waiter_evicts_no_other() {
    let mut steps = vec![Step::Allocate(0, 1), Step::Join(2), Step::Join(0), Step::Join(0)];
    steps.extend([Step::Detach(0, false), Step::Join(0), Step::Work(2), Step::Join(0)]);
    steps.extend([Step::Work(1), Step::Join(0), Step::Join(0), Step::Stopped(111)]);
    steps.extend([Step::Allocate(2, 416), Step::Work(5), Step::Allocate(1, 366), Step::Join(0)]);
    steps.extend([Step::Tick, Step::Exit(3), Step::Allocate(4, 108), Step::Tick]);
    steps.extend([Step::Allocate(2, 420), Step::Tick]);
    run(steps).unwrap();
}

/// Offloads of the container that holds the VRAM have failed several times, so the controller waits
/// for half a minute before it tries again. An allocation that waits for this VRAM must be served
/// after that delay.
#[test]
fn allocation_is_served_after_backoff() {
    let mut steps = vec![Step::Join(2), Step::Tick, Step::Tick, Step::Tick, Step::Question];
    steps.extend([Step::Ask(2, true), Step::Question, Step::Work(0), Step::Allocate(0, 88)]);
    steps.extend([Step::Tick, Step::Stopped(0), Step::Tick, Step::Question, Step::Fail(false)]);
    steps.extend([Step::Stopped(0), Step::Allocate(0, 417), Step::Tick, Step::Work(0)]);
    steps.extend([Step::Fail(false), Step::Ask(2, true), Step::Question, Step::Join(0)]);
    steps.extend([Step::Work(1), Step::Allocate(1, 496), Step::Work(0)]);
    run(steps).unwrap();
}

#[test]
fn offloaded_process_is_not_killed() {
    let mut steps =
        vec![Step::Join(0), Step::Join(0), Step::Join(0), Step::Work(2), Step::Ask(0, true)];
    steps.extend([Step::Allocate(2, 268), Step::Question, Step::Restart(true), Step::Join(0)]);
    steps.extend([Step::Work(2), Step::Call(2), Step::Join(0), Step::Join(0), Step::Work(3)]);
    steps.extend([
        Step::Allocate(0, 1),
        Step::Allocate(3, 297),
        Step::Exit(4),
        Step::Allocate(0, 1),
    ]);
    steps.extend([Step::Join(0), Step::Join(2), Step::Tick, Step::Allocate(0, 1), Step::Exit(4)]);
    steps.extend([Step::Tick, Step::Tick, Step::Question, Step::Work(5), Step::Allocate(5, 416)]);
    run_with(&[0], steps).unwrap();
}

#[test]
fn queue_place_ends_with_the_wait() {
    let mut steps = vec![Step::Join(2), Step::Join(2), Step::Join(2), Step::Work(0), Step::Work(1)];
    steps.extend([Step::Allocate(0, 194), Step::Allocate(0, 449), Step::Allocate(1, 358)]);
    steps.extend([Step::Detach(0, false), Step::Detach(0, false), Step::Restart(false)]);
    steps.extend([Step::Tick, Step::Tick, Step::Tick, Step::Question, Step::Restart(true)]);
    steps.extend([Step::Work(2), Step::Work(2), Step::Join(0), Step::Work(1), Step::Tick]);
    steps.extend([Step::Stopped(0), Step::Tick]);
    run(steps).unwrap();
}

#[test]
fn waiting_allocation_restores_after_crash() {
    let mut steps = vec![Step::Stopped(417), Step::Join(1), Step::Join(0), Step::Work(1)];
    steps.extend([
        Step::Allocate(1, 295),
        Step::Ask(0, true),
        Step::Question,
        Step::Allocate(1, 289),
    ]);
    steps.extend([
        Step::Join(1),
        Step::Allocate(0, 1),
        Step::Others(0),
        Step::Join(1),
        Step::Work(1),
    ]);
    steps.extend([
        Step::Work(0),
        Step::Join(1),
        Step::Work(1),
        Step::Allocate(1, 1),
        Step::Question,
    ]);
    steps.extend([Step::Work(3), Step::Work(1), Step::Detach(5, false), Step::Allocate(0, 1)]);
    steps.extend([Step::Work(3), Step::Work(2), Step::Call(2), Step::Work(2), Step::Work(4)]);
    steps.extend([Step::Work(0), Step::Detach(4, true), Step::Question, Step::Restart(false)]);
    steps.extend([Step::Join(1), Step::Join(1)]);
    run(steps).unwrap();
}

/// A process was copied out, but a part of its memory stayed on the GPU. All of its memory together
/// fills the GPU. The process must be restored although no margin of free VRAM remains beside it.
#[test]
fn gpu_filling_copied_out_process_is_restored() {
    let mut steps = vec![Step::Join(0), Step::Join(2), Step::Join(2), Step::Work(2)];
    steps.extend([Step::Allocate(2, 380), Step::Join(2), Step::Tick, Step::Tick, Step::Tick]);
    steps.extend([Step::Join(0), Step::Allocate(2, 485), Step::Allocate(2, 56), Step::Question]);
    steps.extend([Step::Question, Step::Work(3), Step::Join(0), Step::Allocate(2, 60)]);
    steps.extend([Step::Join(0), Step::Work(2), Step::Restart(false), Step::Exit(0)]);
    steps.extend([Step::Exit(0), Step::Call(0)]);
    run_with(&[2], steps).unwrap();
}

/// Regression test: the eviction of a waiting container's CUDA context must continue although the
/// container repeats its wake. Each repeated wake once ended the eviction.
#[test]
fn repeated_wake_does_not_end_an_eviction() {
    let mut steps = vec![Step::Join(2), Step::Join(1), Step::Work(0), Step::Allocate(0, 140)];
    steps.extend([Step::Join(1), Step::Tick, Step::Tick, Step::Tick, Step::Question]);
    steps.extend([Step::Question, Step::Work(1), Step::Allocate(1, 270), Step::Work(0)]);
    steps.extend([Step::Question, Step::Work(0), Step::Work(2), Step::Allocate(1, 139)]);
    steps.extend([Step::Others(35), Step::Allocate(1, 274), Step::Allocate(2, 283)]);
    steps.extend([Step::Work(1), Step::Allocate(0, 1), Step::Allocate(0, 1)]);
    steps.extend([Step::Allocate(0, 1), Step::Allocate(0, 1), Step::Question, Step::Join(1)]);
    steps.push(Step::Call(0));
    let mut world = World::new(3);
    world.slow_copiers = true;
    run_in(world, &[], steps).unwrap();
}

/// The context of an offloaded container must be evicted even for a waiter of lower priority.
#[test]
fn offloaded_context_leaves_for_lower_priority() {
    let mut steps = vec![Step::Join(0), Step::Others(51), Step::Join(0), Step::Join(0)];
    steps.extend([Step::Work(1), Step::Allocate(1, 470), Step::Join(0), Step::Allocate(2, 1)]);
    steps.extend([Step::Allocate(2, 1), Step::Allocate(2, 1), Step::Allocate(2, 1)]);
    steps.extend([Step::Join(0), Step::Join(1), Step::Allocate(1, 480), Step::Work(5)]);
    steps.push(Step::Allocate(5, 204));
    run_in(World::new(3).with_auto(true), &[], steps).unwrap();
}

/// Regression test: the VRAM grant of a waiting allocation must end when the allocation is refused.
/// A grant once remained, because the gate of another process of the container opened at that time.
#[test]
fn grant_ends_when_closed_processes_open() {
    let mut steps: Vec<Step> = [0, 1, 1].map(Step::Join).into();
    steps.extend([Step::Work(1), Step::Join(1), Step::Join(1), Step::Allocate(1, 50)]);
    steps.extend([1, 1, 1].map(Step::Join));
    steps.extend([Step::Fail(false), Step::Ask(1, true), Step::Question, Step::Join(1)]);
    steps.extend([Step::Allocate(1, 91), Step::Allocate(1, 255), Step::Work(3), Step::Join(1)]);
    steps.extend([Step::Allocate(1, 233), Step::Join(1), Step::Join(1), Step::Work(3)]);
    steps.extend([Step::Allocate(1, 219), Step::Allocate(3, 153), Step::Restart(true)]);
    steps.extend([Step::Work(3), Step::Join(1), Step::Join(1), Step::Work(1)]);
    steps.extend([Step::Tick, Step::Tick, Step::Tick]);
    let mut world = World::new(3);
    (world.slow_copiers, world.two_gpus) = (true, true);
    run_in(world, &[], steps).unwrap();
}

/// Regression test: the journal of an earlier controller records an offload that copied nothing.
/// The next controller must not count this offload as a use of prefaulted memory. It once did, and
/// ordered the process to prefault twice.
#[test]
fn offload_without_copy_keeps_prefault() {
    let mut steps = vec![Step::Join(1), Step::Join(1), Step::Work(1), Step::Allocate(1, 133)];
    steps.extend([Step::Exit(0), Step::Allocate(0, 1), Step::Ask(1, true), Step::Question]);
    steps.extend([Step::Work(0), Step::Question, Step::Restart(false), Step::Join(1)]);
    steps.extend([Step::Tick, Step::Work(0), Step::Work(0), Step::Tick, Step::Tick]);
    steps.extend([Step::Question, Step::CopierEnds(0, false), Step::Join(1), Step::Join(1)]);
    steps.extend([Step::Join(1), Step::Join(1), Step::Stopped(0), Step::Join(1)]);
    let mut world = World::new(3);
    (world.slow_copiers, world.prepare) = (true, true);
    run_in(world, &[], steps).unwrap();
}

/// Regression test: while a process is being copied out, the gates of the other processes of its
/// container must stay closed. A gate once opened, and the process behind it allocated VRAM that
/// the copied process needed. Both together then had more memory than the GPU has.
#[test]
fn gates_stay_closed_beside_a_copy_out() {
    let mut steps = vec![Step::Join(1), Step::Join(1), Step::Work(0), Step::Allocate(0, 271)];
    steps.extend([Step::Allocate(0, 267), Step::Work(1), Step::Allocate(1, 257)]);
    steps.extend([Step::Tick, Step::Tick, Step::Tick, Step::Question, Step::Work(0)]);
    steps.extend([Step::Work(1), Step::Question, Step::Ask(1, false), Step::Work(0)]);
    steps.extend([Step::Join(1), Step::Join(1), Step::Work(1), Step::Allocate(1, 206)]);
    let mut world = World::new(3);
    (world.slow_copiers, world.prepare) = (true, true);
    run_in(world, &[], steps).unwrap();
}

/// Regression test: a process that registers while another process of its container is being copied
/// out must not allocate VRAM. Such a process once allocated VRAM that the copied process needed.
#[test]
fn newcomer_waits_beside_a_copy_out() {
    let mut steps = vec![Step::Join(1), Step::Join(1), Step::Work(0), Step::Allocate(0, 237)];
    steps.extend([Step::Work(1), Step::Join(1), Step::Allocate(1, 1), Step::Join(1)]);
    steps.extend([Step::Exit(3), Step::Work(2), Step::Allocate(2, 250), Step::Tick]);
    steps.extend([Step::Tick, Step::Tick, Step::Allocate(2, 236), Step::Question]);
    steps.extend([Step::Work(2), Step::Work(0), Step::Work(1), Step::Question]);
    steps.extend([Step::Join(1), Step::Work(3), Step::Work(0), Step::Allocate(3, 278)]);
    let mut world = World::new(3);
    (world.slow_copiers, world.two_gpus, world.prepare) = (true, true, true);
    run_in(world, &[], steps).unwrap();
}

/// Regression test: the CUDA context of a copied-out container must be evicted for a waiter, even
/// if a process without VRAM starts in the container. Such a process once prevented the eviction.
#[test]
fn newcomer_keeps_no_context_from_a_waiter() {
    let mut steps = vec![Step::Join(2), Step::Work(0), Step::Allocate(0, 12), Step::Join(1)];
    steps.extend([Step::Join(1), Step::Others(234), Step::Ask(2, true), Step::Work(1)]);
    steps.extend([Step::Allocate(1, 80), Step::Allocate(0, 78), Step::Question]);
    steps.extend([Step::Work(0), Step::Join(1), Step::Allocate(1, 158), Step::Join(1)]);
    steps.extend([Step::Allocate(1, 157), Step::Work(2), Step::Question]);
    steps.extend([Step::Allocate(2, 282), Step::Join(2), Step::Join(1)]);
    steps.extend([Step::Allocate(1, 77), Step::Work(3), Step::Allocate(1, 225)]);
    let mut world = World::new(3);
    world.slow_copiers = true;
    run_in(world, &[], steps).unwrap();
}
