//! Tests of containers with prefaulted host memory.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Phase, ProcessFlags,
        counters::CounterSnapshot,
        message::{Action, Outcome},
    },
};

use super::{
    super::{
        Effect, GpuSample, Input, Millis, ProcessId, Survey,
        grant::{Grant, Stage},
        hints::Hint,
        input::{CommandId, Request, Work},
        policy::{Engine, KeepAlive, Mode, Policy},
        prefault,
    },
    world::{ENGINES, GPU, Host, MIN_PREFAULT_BYTES, World, key},
};

/// Number of the container whose engine is `full`.
const FAST: usize = 1;
const TIMEOUT_MS: Millis = 1_200;

impl World {
    /// Records an order to prefault host memory (`on` is true) or to release it (`on` is false). An
    /// order to prefault must be for a resident process without prefaulted memory. An order to
    /// release must be for a process with such memory.
    pub(super) fn told_to_prepare(&mut self, id: ProcessId, on: bool) {
        let agent = self.bench.agents.get_mut(&id).expect("it lives");
        let is_full = ENGINES[agent.container] == "full";
        assert!(is_full || self.two_gpus, "with `auto` no copier copies out");
        let needed = [Capabilities::PREFAULTS, Capabilities::USES_COPIER];
        assert!(needed.iter().all(|needed| agent.capabilities.contains(*needed)), "it cannot");
        assert!(
            agent.phase == Phase::Open || !on && !agent.phase.is_offloaded(),
            "{:?}",
            agent.phase
        );
        assert_ne!(std::mem::replace(&mut agent.prepared, on), on, "it knows");
        self.prepared.push((id, on));
    }
}

fn policy(world: &mut World, n: usize) -> &mut Policy {
    &mut world.container_mut(n).policy
}

/// Creates a process in container `n`, which is offloaded only if a test requests it.
fn staying(world: &mut World, n: usize, bytes: u64) -> ProcessId {
    let id = world.running(n, bytes);
    let policy = policy(world, n);
    (policy.mode, policy.prefault) = (Mode::Manual, true);
    (policy.idle_timeout_ms, policy.keep_alive) = (TIMEOUT_MS, KeepAlive::Fixed);
    id
}

/// Creates a process with prefaulted host memory.
fn prepared(world: &mut World) -> ProcessId {
    let id = staying(world, FAST, 600);
    rest(world);
    assert_eq!(world.prepared, [(id, true)]);
    world.prepared.clear();
    id
}

/// Advances the world by several times the idle timeout.
fn rest(world: &mut World) {
    (0..60).for_each(|_| world.tick());
}

/// NVML may not show the last allocation yet, or may count it for a copier. The bytes that the
/// agent can copy must therefore decide whether a process reaches the minimum for prefaulting. At
/// most the size of the GPU counts.
#[test]
fn swappable_bytes_count_beyond_nvml_sample() {
    let mut world = World::new(3);
    let id = staying(&mut world, FAST, 600);
    rest(&mut world);
    let process = world.process_mut(id);
    let swappable = process.memory.swap.swappable_bytes;
    process.memory.vram[0].bytes = swappable / 2;
    assert_eq!(prefault::may_prefault(&world.node.state, id), Some((GPU.into(), swappable)));
    world.process_mut(id).memory.swap.swappable_bytes = u64::MAX;
    let total = world.node.state.gpus.samples[0].total_bytes;
    assert_eq!(
        prefault::may_prefault(&world.node.state, id),
        Some((GPU.into(), total)),
        "at most the size of the GPU counts"
    );
}

/// The node uses no copiers, so the controller sends no order to prefault. The process must be
/// treated like a process that is not prefaulted: its work on the GPU counts as use, and its copy
/// out delays no waiter.
#[test]
fn refused_prefault_has_no_effect() {
    let mut world = World::new(3);
    world.node.state.settings.copiers = false;
    let id = staying(&mut world, FAST, 600);
    rest(&mut world);
    let process = world.process(id);
    assert!(process.prefault.ordered_for_idle.is_some() && !process.prefault.ordered);
    assert_eq!(world.prepared, [], "the process gets no order to end prefaulting either");
    let pid = world.agents[&id].pid;
    let work = Work { uuid: GPU.into(), pid, percent: 2, age_ms: 0 };
    world.feed(Input::Worked(vec![work]));
    world.tick();
    assert_eq!(world.state(FAST), State::Active, "it works");
    rest(&mut world);
    ask(&mut world, Request::Offload);
    assert!(!until_park(&mut world, id), "the process copies its memory itself");

    world.settle_all();
    world.node.state.settings.copiers = true;
    world.call(id);
    world.settle_all();
    rest(&mut world);
    assert_eq!(world.prepared, [(id, true)], "the next idle period");
}

/// The controller could not attach the process to its copier. The process must not count as
/// prefaulted.
#[test]
fn unattached_process_is_not_prefaulted() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    world.feed(Input::NotAttached(id));
    assert!(!world.process(id).prefault.ordered);
    assert_eq!(world.prepared, [(id, false)], "the process releases its prefaulted memory");

    let mut world = World::new(3);
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    assert!(until_park(&mut world, id));
    world.feed(Input::NotAttached(id));
    assert_eq!(world.prepared, [], "the offload uses the prefaulted memory");
}

/// NVML shows work of a process while a copier registers its memory. This work must not count as
/// use of the container.
#[test]
fn nvml_work_of_prefaulting_is_no_use() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    for _ in 0..20 {
        let pid = world.agents[&id].pid;
        let work = Work { uuid: GPU.into(), pid, percent: 2, age_ms: 0 };
        world.feed(Input::Worked(vec![work]));
        world.tick();
    }
    assert_eq!((world.prepared.len(), world.state(FAST)), (0, State::Idle));
}

/// Advances the world until the process is ordered to copy out. Returns whether the order allows a
/// copier to copy during the checkpoint.
fn until_park(world: &mut World, id: ProcessId) -> bool {
    for _ in 0..100 {
        let pending = world.node.state.registry.processes.get(&id).and_then(|p| p.pending);
        if let Some(Action::CopyOut { how, .. }) = pending.map(|pending| pending.action) {
            return how.then_checkpoint;
        }
        if world.questions.is_empty() { world.work(id) } else { world.answer_question() }
    }
    panic!("the process is not offloaded");
}

/// Some memory cannot be exported to the copier. The library first copies it, part by part, to
/// other memory of the GPU. While this may need VRAM, no VRAM must be promised.
#[test]
fn no_vram_is_promised_during_memory_export() {
    let mut world = World::new(3);
    let waiter = world.running(0, 100);
    world.settle_all();
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    assert!(until_park(&mut world, id));
    world.call(waiter);
    world.tick();
    assert!(world.node.state.admission.grants.is_empty() && world.state(0) == State::Queued);
    world.work(id);
    world.tick();
    assert!(!world.node.state.admission.grants.is_empty(), "the process has reported its copy");
}

#[test]
fn no_memory_is_exported_while_vram_is_promised() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    let grant = Grant::new(Stage::Granted, [GPU.to_owned()].into(), world.now);
    world.node.state.admission.grants.insert(key(0), grant);
    assert!(!until_park(&mut world, id));
}

#[test]
fn uncopied_process_needs_only_the_rest() {
    let mut world = World::new(3);
    let id = staying(&mut world, FAST, 600);
    ask(&mut world, Request::Offload);
    world.settle_all();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    let process = |world: &World| world.process(id).clone();
    let (all, swappable) =
        (process(&world).offloaded_vram_bytes(), process(&world).memory.swap.swappable_bytes);
    for (notes, needs) in
        [(ProcessFlags::EXPORTED_TO_COPIER, all - swappable), (ProcessFlags::default(), all)]
    {
        let page = CounterSnapshot { notes, ..world.agents[&id].page() };
        world.feed(Input::Page(id, page));
        assert_eq!(process(&world).offloaded_vram_bytes(), needs);
    }
}

fn ask(world: &mut World, request: Request) {
    world.feed(Input::Command(CommandId(1), key(FAST), request));
}

#[test]
fn prefault_is_ordered_once_at_half_idle_timeout() {
    for mode in [Mode::Manual, Mode::Pressure, Mode::Eager, Mode::Auto] {
        let mut world = World::new(3);
        let id = staying(&mut world, FAST, 600);
        policy(&mut world, FAST).mode = mode;
        world.tick();
        let called = world.container(FAST).usage.last_use;
        assert_eq!(called, world.now);
        while world.prepared.is_empty() {
            world.tick();
        }
        assert_eq!((world.now - called, world.state(FAST)), (TIMEOUT_MS / 2, State::Active));
        rest(&mut world);
        assert_eq!(world.prepared, [(id, true)], "{mode:?}");
    }
}

/// Prefaulting must begin earlier if the learned idle time is shorter, or after a hint that the
/// container is idle.
#[test]
fn shorter_keep_alive_is_prefaulted_sooner() {
    let mut world = World::new(3);
    let id = staying(&mut world, FAST, 600);
    (0..3).for_each(|_| world.tick());
    world.feed(Input::Hinted(key(FAST), Hint::Idle, "it".into()));
    assert_eq!(world.prepared, [(id, true)]);
}

/// Removes this capability from the library of the process.
fn lacks(world: &mut World, id: ProcessId, capability: Capabilities) {
    let agent = world.agents.get_mut(&id).unwrap();
    agent.capabilities = Capabilities(agent.capabilities.0 & !capability.0);
    world.process_mut(id).agent.capabilities = agent.capabilities;
}

#[test]
fn only_copier_offloads_are_prefaulted() {
    type Change = fn(&mut World, ProcessId);
    let cases: [(&str, Change); 14] = [
        ("without the policy", |world, _| policy(world, FAST).prefault = false),
        ("checkpoint", |world, _| policy(world, FAST).engine = Engine::Checkpoint),
        ("auto", |world, _| policy(world, FAST).engine = Engine::Auto),
        ("copy", |world, _| policy(world, FAST).engine = Engine::Copy),
        ("park, with memory of a copier's making", |world, id| {
            policy(world, FAST).engine = Engine::Copy;
            world.agents.get_mut(&id).unwrap().notes = ProcessFlags::IMPORTED;
        }),
        ("an allocation waits", |world, id| {
            world.running(2, 200);
            policy(world, 2).mode = Mode::Manual;
            world.allocate(id, 300);
        }),
        ("off", |world, _| policy(world, FAST).mode = Mode::Off),
        ("pinned", |world, _| world.pin(FAST, true)),
        ("too small", |world, _| policy(world, FAST).minimum_vram_bytes = 601),
        ("hazard", |world, id| world.agents.get_mut(&id).unwrap().fixed = true),
        ("a library that cannot", |world, id| lacks(world, id, Capabilities::PREFAULTS)),
        ("a library without copiers", |world, id| lacks(world, id, Capabilities::USES_COPIER)),
        ("no copier", |world, id| {
            world.agents.get_mut(&id).unwrap().notes = ProcessFlags::NO_COPIER
        }),
        ("too little to copy", |world, id| {
            world.agents.get_mut(&id).unwrap().swappable = MIN_PREFAULT_BYTES - 1
        }),
    ];
    for (name, change) in cases {
        let mut world = World::new(3);
        let id = staying(&mut world, FAST, 600);
        change(&mut world, id);
        rest(&mut world);
        assert_eq!(world.prepared, [], "{name}");
    }
    let mut world = World::new(3);
    let id = staying(&mut world, FAST, 600);
    world.agents.get_mut(&id).unwrap().swappable = MIN_PREFAULT_BYTES;
    rest(&mut world);
    assert_eq!(world.prepared, [(id, true)]);
}

#[test]
fn process_on_two_gpus_is_not_prefaulted() {
    for (second, told) in [(0, true), (200, false)] {
        let mut world = World::new(3);
        let id = staying(&mut world, FAST, 600);
        let pid = world.agents[&id].pid;
        world.tick();
        for _ in 0..60 {
            world.now += 60;
            let mut gpus = world.gpus();
            let processes = if second > 0 { vec![(pid, second)] } else { Vec::new() };
            gpus.push(GpuSample { uuid: "GPU-2".into(), processes, ..gpus[0].clone() });
            world.feed(Input::Gpus(Ok(gpus)));
            world.feed(Input::Tick);
        }
        assert_eq!(!world.prepared.is_empty(), told);
    }
}

#[test]
fn no_prefault_during_offload_or_restore() {
    // After an idle hint, the container is offloaded at once.
    let mut world = World::new(3);
    staying(&mut world, FAST, 600);
    policy(&mut world, FAST).mode = Mode::Eager;
    (0..3).for_each(|_| world.tick());
    world.feed(Input::Hinted(key(FAST), Hint::Idle, "it".into()));
    assert_eq!(world.questions.len(), 1);
    world.settle();
    assert_eq!((world.state(FAST), &world.prepared[..]), (State::Offloaded, &[][..]));

    // Changes during an offload take effect only after the restore.
    let mut world = World::new(3);
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    policy(&mut world, FAST).prefault = false;
    world.tick();
    assert_eq!(world.prepared, []);
    world.call(id);
    world.tick();
    assert_eq!(world.prepared, [(id, false)]);

    // One process of the container is still behind its gate.
    let mut world = World::new(3);
    let first = staying(&mut world, FAST, 300);
    let second = world.running(FAST, 300);
    world.agents.get_mut(&second).unwrap().phase = Phase::Closed;
    world.hello(second);
    rest(&mut world);
    assert_eq!(world.prepared, []);
    while !world.agents[&second].inbox.is_empty() {
        world.work(second);
    }
    world.tick();
    assert_eq!(world.prepared, [(first, true), (second, true)]);
}

#[test]
fn call_ends_prefault_until_next_idle_period() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    world.call(id);
    world.tick();
    assert_eq!(world.prepared, [(id, false)]);
    rest(&mut world);
    assert_eq!(world.prepared, [(id, false), (id, true)]);
}

#[test]
fn prefault_ends_with_policy_or_hazard() {
    let changes: [fn(&mut World, ProcessId); 4] = [
        |world, _| policy(world, FAST).prefault = false,
        |world, _| policy(world, FAST).mode = Mode::Off,
        |world, _| policy(world, FAST).engine = Engine::Checkpoint,
        |world, id| world.agents.get_mut(&id).unwrap().fixed = true,
    ];
    for change in changes {
        let mut world = World::new(3);
        let id = prepared(&mut world);
        let before = policy(&mut world, FAST).clone();
        change(&mut world, id);
        world.tick();
        assert_eq!(world.prepared, [(id, false)]);
        *policy(&mut world, FAST) = before;
        rest(&mut world);
        assert_eq!(world.prepared.len(), 1, "prefaulting is ordered once per idle period");
    }
}

#[test]
fn unreadable_gpus_revoke_no_prefault() {
    let mut world = World::new(3);
    prepared(&mut world);
    world.feed(Input::Gpus(Err("busy".into())));
    world.feed(Input::Tick);
    world.feed(Input::Gpus(Ok(Vec::new())));
    world.feed(Input::Tick);
    rest(&mut world);
    assert_eq!(world.prepared, []);

    let mut world = World::new(3);
    staying(&mut world, FAST, 600);
    world.tick();
    world.now += TIMEOUT_MS;
    world.feed(Input::Gpus(Err("busy".into())));
    world.feed(Input::Tick);
    assert_eq!(world.prepared, [], "the container may not be moved now");
    world.tick();
    assert_eq!(world.prepared.len(), 1);
}

#[test]
fn an_offload_that_finds_no_host_memory_ends_it() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    assert_eq!(world.prepared, [], "it leaves");
    let host = Err((Reason::HostMemory, String::new()));
    world.feed(Input::Surveyed(key(FAST), Survey { gpus: Ok(world.gpus()), host }));
    assert_eq!((world.state(FAST), &world.prepared[..]), (State::Idle, &[(id, false)][..]));
    rest(&mut world);
    assert_eq!(world.prepared.len(), 1, "prefaulting is ordered once per idle period");
}

#[test]
fn failed_or_undone_offload_ends_prefault() {
    for fails in [true, false] {
        let mut world = World::new(3);
        let id = prepared(&mut world);
        ask(&mut world, Request::Offload);
        world.work_until_closed(id);
        assert_eq!(world.prepared, [], "it leaves");
        if fails {
            world.fail = Some(Outcome::DriverError);
            world.answer_question();
            world.work(id);
            assert_eq!(world.agents[&id].phase, Phase::Closed);
        } else {
            world.call(id);
        }
        (0..4).for_each(|_| world.pass());
        assert_eq!(
            (world.agents[&id].phase, &world.prepared[..]),
            (Phase::Open, &[(id, false)][..])
        );
    }
}

/// In several offloads in a row, the copier did not copy the memory of a process, and they had to
/// be undone. The process must not be prefaulted any more, because further offloads would have to
/// be undone too.
#[test]
fn repeatedly_uncopied_process_is_not_prefaulted() {
    let mut world = World::new(3);
    let id = staying(&mut world, FAST, 600);
    let mut leaves = |copied: bool| {
        rest(&mut world);
        let was_prepared = world.process(id).prefault.ordered;
        ask(&mut world, Request::Offload);
        while world.agents[&id].phase != Phase::CopiedOut {
            world.tick();
            world.answer_question();
            world.work(id);
        }
        world.fail = (!copied).then_some(Outcome::NotCopied);
        world.settle_all();
        assert_eq!(world.fail, None);
        assert_eq!(world.agents[&id].phase == Phase::Checkpointed, copied, "else it is restored");
        world.call(id);
        world.settle_all();
        assert_eq!(world.agents[&id].phase, Phase::Open);
        was_prepared
    };
    let all = [false, false, true, false, false, false, true].map(&mut leaves);
    assert_eq!(all, [true, true, true, true, true, true, false]);
}

#[test]
fn prefault_lasts_until_restore() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    ask(&mut world, Request::Offload);
    world.settle();
    assert_eq!((world.state(FAST), world.prepared.len()), (State::Offloaded, 0));
    world.call(id);
    for _ in 0..10 {
        world.answer_question();
        world.work(id);
    }
    assert_eq!((world.state(FAST), world.agents[&id].phase), (State::Active, Phase::Open));
    assert!(!world.process(id).prefault.ordered);
    assert_eq!(world.prepared, []);
    rest(&mut world);
    assert_eq!(world.prepared, [(id, true)]);
}

#[test]
fn it_ends_with_the_connection() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    world.feed(Input::Detached(id));
    assert!(!world.process(id).prefault.ordered);
    let id = world.reconnect(id, false);
    while !world.agents[&id].inbox.is_empty() {
        world.work(id);
    }
    rest(&mut world);
    assert_eq!(world.prepared, [], "prefaulting is ordered once per idle period");
    world.call(id);
    rest(&mut world);
    assert_eq!(world.prepared, [(id, true)]);
}

/// Host memory that is prefaulted already must be subtracted from the host memory that an offload
/// needs, even if the policy retains no host copy after a restore.
#[test]
fn prefaulted_memory_is_not_needed_twice() {
    for (kept, need) in [(0, 600), (450, 150)] {
        let mut world = World::new(3);
        let id = prepared(&mut world);
        assert!(!policy(&mut world, FAST).retain_host_copy);
        world.agents.get_mut(&id).unwrap().kept = kept;
        world.tick();
        ask(&mut world, Request::Offload);
        while world.agents[&id].phase != Phase::Closed {
            let Some(Effect::Survey { processes, .. }) = world.questions.front() else { panic!() };
            let needs = processes.iter().map(|need| (need.pid, need.bytes));
            assert!(needs.eq([(world.agents[&id].pid, need)]));
            world.answer_question();
            (0..2).for_each(|_| world.work(id));
        }
        let Some(Effect::Survey { processes, .. }) = world.questions.front() else { panic!() };
        assert_eq!(processes[0].bytes, need, "the second survey");
    }
}

#[test]
fn is_leaving_only_during_offload() {
    let mut world = World::new(3);
    let id = prepared(&mut world);
    assert_eq!(prefault::may_prefault(&world.node.state, id), Some((GPU.to_owned(), 450)));
    assert!(!world.node.state.is_leaving(id));
    ask(&mut world, Request::Offload);
    assert!(world.node.state.is_leaving(id));
    world.answer_question();
    world.now += 19_000;
    world.feed(Input::Page(id, world.agents[&id].page()));
    assert!(world.node.state.is_leaving(id));
    world.now += 1_000;
    world.feed(Input::Page(id, world.agents[&id].page()));
    assert!(!world.node.state.is_leaving(id), "the offload no longer counts as freeing VRAM soon");
    world.settle();
    ask(&mut world, Request::Offload);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    assert!(!world.node.state.is_leaving(id));
}

#[test]
fn first_checkpointed_process_is_not_leaving() {
    let mut world = World::new(3);
    let first = staying(&mut world, FAST, 300);
    let second = world.running(FAST, 300);
    world.tick();
    ask(&mut world, Request::Offload);
    while world.agents[&first].phase != Phase::Checkpointed {
        world.tick();
        world.answer_question();
        [first, second].into_iter().for_each(|id| world.work(id));
    }
    assert_eq!(world.agents[&second].phase, Phase::CopiedOut);
    assert_eq!([first, second].map(|id| world.node.state.is_leaving(id)), [false, true]);
}
