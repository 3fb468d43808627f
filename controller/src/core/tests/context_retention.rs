//! The engine `auto`: the context is checkpointed, or stays on the GPU.

use affinode_proto::{
    state::State,
    wire::{Phase, ProcessFlags},
};

use super::{
    super::{
        Input, ProcessId, Request,
        context_retention::Cost,
        input::CommandId,
        policy::{Engine, Mode},
    },
    world::{World, key},
};

/// Number of the container whose engine is `auto` here.
const AUTO: usize = 1;

impl World {
    /// Sets whether that container has the engine `auto`.
    pub(super) fn with_auto(mut self, auto: bool) -> World {
        self.auto = auto;
        (0..self.containers).for_each(|n| self.announce(n));
        self
    }
}

/// A world whose container `AUTO` is offloaded only by request or for a waiter.
fn auto() -> World {
    let mut world = World::new(3).with_auto(true);
    let policy = &mut world.node.containers.get_mut(&key(AUTO)).unwrap().policy;
    (policy.mode, policy.priority) = (Mode::Pressure, 0);
    world
}

/// Offloads the container by request. Returns the phase of its process.
fn leave(world: &mut World, id: ProcessId) -> Phase {
    world.tick();
    world.feed(Input::Command(CommandId(1), key(AUTO), Request::Offload));
    world.settle();
    assert_eq!(world.state(AUTO), State::Offloaded);
    world.agents[&id].phase
}

fn wait_resident(world: &mut World, id: ProcessId) {
    world.call(id);
    for _ in 0..20 {
        world.answer_question();
        world.work(id);
    }
    assert_eq!(world.state(AUTO), State::Active);
    assert!(!world.node.containers[&key(AUTO)].retain_context, "it is all here");
}

/// Sets the measured costs of offloads with and without the context.
fn costs(world: &mut World, deep_ms: u64, shallow_ms: u64) {
    let cost = |restore_ms| Some(Cost { out_ms: restore_ms, restore_ms });
    let costs = &mut world.node.containers.get_mut(&key(AUTO)).unwrap().costs;
    (costs.deep, costs.shallow) = (cost(deep_ms), cost(shallow_ms));
}

/// A world in which the container is offloaded and its context stayed on the GPU.
fn copied_out() -> (World, ProcessId) {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    costs(&mut world, 500, 50);
    assert_eq!(leave(&mut world, id), Phase::CopiedOut);
    (world, id)
}

#[test]
fn auto_tries_both_ways_and_takes_the_cheaper() {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    for (deep_ms, shallow_ms, later) in
        [(500, 50, Phase::CopiedOut), (500, 490, Phase::Checkpointed)]
    {
        world.node.containers.get_mut(&key(AUTO)).unwrap().costs = Default::default();
        assert_eq!(leave(&mut world, id), Phase::Checkpointed, "all of it first");
        wait_resident(&mut world, id);
        // As after a copier's restore.
        world.agents.get_mut(&id).unwrap().notes = ProcessFlags::IMPORTED;
        assert_eq!(leave(&mut world, id), Phase::CopiedOut, "then the other way");
        assert_eq!(world.used(), 100);
        wait_resident(&mut world, id);
        costs(&mut world, deep_ms, shallow_ms);
        assert_eq!(leave(&mut world, id), later);
        wait_resident(&mut world, id);
    }
}

#[test]
fn large_or_needed_context_is_evicted() {
    let mut world = auto();
    let large = world.running(AUTO, 600);
    costs(&mut world, 500, 50);
    assert_eq!(
        leave(&mut world, large),
        Phase::Checkpointed,
        "more than an eighth of the GPU would stay"
    );

    let mut world = auto();
    world.two_gpus = true;
    let id = world.running(AUTO, 400);
    costs(&mut world, 500, 50);
    assert_eq!(leave(&mut world, id), Phase::Checkpointed, "it may come back on the other one");

    let (mut world, id) = copied_out();
    let big = world.running(0, 500);
    world.allocate(big, 450);
    world.settle();
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (950, Phase::Checkpointed));
    assert_eq!(world.node.containers[&key(AUTO)].offloads, 1, "it is one absence");
    world.exit(big);
    assert_eq!(world.node.context_evicted_share, 0);
    let known = world.node.containers[&key(AUTO)].costs;
    wait_resident(&mut world, id);
    assert_eq!(world.node.containers[&key(AUTO)].costs, known, "it was neither way");
    assert!(world.node.context_evicted_share > 0, "it is remembered");
    // What so few absences cost others is not worth a small saving any more.
    world.node.context_evicted_share = 512;
    assert_eq!(leave(&mut world, id), Phase::Checkpointed);
}

#[test]
fn context_goes_if_others_wait_or_memory_stays() {
    let mut world = auto();
    world.running(AUTO, 200);
    costs(&mut world, 500, 50);
    world.node.containers.get_mut(&key(AUTO)).unwrap().policy.mode = Mode::Manual;
    let waits = world.running(2, 200);
    while world.agents[&waits].phase != Phase::CopiedOut {
        world.pass();
    }
    world.take_unmanaged(700);
    world.call(waits);
    world.settle();
    assert_eq!(world.state(2), State::Queued);
    world.feed(Input::Command(CommandId(1), key(AUTO), Request::Offload));
    assert!(!world.node.containers[&key(AUTO)].retain_context);

    let mut world = auto();
    let id = world.running(AUTO, 400);
    costs(&mut world, 500, 50);
    world.tick();
    world.node.processes.get_mut(&id).unwrap().copy_failed = true;
    assert_eq!(leave(&mut world, id), Phase::Checkpointed);
    assert!(!world.node.containers[&key(AUTO)].retain_context);
}

#[test]
fn contexts_of_offloads_in_progress_count() {
    const OTHER: usize = 2;
    let mut world = auto();
    let ids = [AUTO, OTHER].map(|n| world.running(n, 400));
    let (one, other) = (key(AUTO), key(OTHER));
    costs(&mut world, 500, 50);
    let known = world.node.containers[&one].costs;
    let container = world.node.containers.get_mut(&other).unwrap();
    (container.costs, container.policy.engine) = (known, Engine::Auto);
    container.policy.mode = Mode::Pressure;
    world.tick();
    for (n, key) in [(1, one), (2, other)] {
        world.feed(Input::Command(CommandId(n), key, Request::Offload));
    }
    world.settle();
    assert_eq!(ids.map(|id| world.agents[&id].phase), [Phase::CopiedOut, Phase::Checkpointed]);
}

#[test]
fn next_controller_keeps_retained_context() {
    let (mut world, _) = copied_out();
    world.restart(false);
    world.settle();
    let id = *world.agents.keys().next().unwrap();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
    wait_resident(&mut world, id);
}

#[test]
fn evicted_container_takes_its_context_along() {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    costs(&mut world, 500, 50);
    let big = world.running(0, 500);
    world.allocate(big, 150);
    world.settle();
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (650, Phase::Checkpointed));
}
