//! Tests of the two levels of the engine `auto`: first the context is kept, and then it is evicted
//! when another container needs its VRAM.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Phase,
        message::{Action, Outcome},
    },
};

use super::{
    super::{
        Input, ProcessId, Request,
        container::Offload,
        input::CommandId,
        offload, offload_level,
        plan::OffloadMethod,
        policy::{Engine, Mode},
        processes::wants,
    },
    world::{Host, World, key},
};

/// Number of the container with the engine `auto` in these tests.
const AUTO: usize = 1;
/// Number of the container with the engine `copy` in these tests.
const COPY: usize = 2;

impl World {
    /// Sets whether the container with the engine `full` gets the engine `auto` instead.
    pub(super) fn with_auto(mut self, auto: bool) -> World {
        self.auto = auto;
        (0..self.containers).for_each(|n| self.announce(n));
        self
    }
}

/// Creates a world in which any container may be evicted for any other container.
fn auto() -> World {
    let mut world = World::new(3).with_auto(true);
    for container in world.node.state.registry.containers.values_mut() {
        container.policy.priority = 0;
    }
    world.container_mut(COPY).policy.engine = Engine::Copy;
    world
}

/// A world in which the container `AUTO` is offloaded to the first level. Of its 400 bytes, 300 are
/// in host memory and 100 stay on the GPU.
fn copied_out() -> (World, ProcessId) {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    world.settle();
    assert_eq!((world.state(AUTO), world.used()), (State::Offloaded, 100));
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    (world, id)
}

fn is_checkpoint(action: &Action) -> bool {
    matches!(
        action,
        Action::Lock { .. }
            | Action::Unlock
            | Action::Checkpoint { .. }
            | Action::RestoreOnGpu { .. }
    )
}

/// Adds a container that needs all VRAM except 50 bytes. Returns its process.
fn crowd(world: &mut World) -> ProcessId {
    let big = world.running(0, 500);
    world.allocate(big, 450);
    world.settle();
    big
}

#[test]
fn first_level_orders_no_checkpoint() {
    for engine in [AUTO, COPY] {
        let mut world = auto();
        let id = world.running(engine, 400);
        for _ in 0..3 {
            world.settle();
            assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
            world.call(id);
            world.settle_all();
        }
        let of_driver: Vec<_> = world.ordered.iter().filter(|a| is_checkpoint(a)).collect();
        assert!(of_driver.is_empty(), "{of_driver:?}");
        assert!(world.ordered.iter().any(|action| matches!(action, Action::CopyOut { .. })));
    }
}

#[test]
fn waiter_gets_contexts_that_it_needs() {
    for (wanted, phase) in [(100, Phase::CopiedOut), (450, Phase::Checkpointed)] {
        let (mut world, id) = copied_out();
        let big = world.running(0, 500);
        world.allocate(big, wanted);
        world.settle();
        assert_eq!((world.agents[&big].size, world.agents[&id].phase), (500 + wanted, phase));
        assert_eq!(world.container(AUTO).figures.offloads, 1, "both levels count as one offload");
        world.exit(big);
        world.call(id);
        world.settle_all();
        world.settle();
        assert_eq!(
            world.agents[&id].phase,
            Phase::CopiedOut,
            "the next offload begins at the first level"
        );
    }
}

#[test]
fn engine_copy_never_gives_up_its_context() {
    let mut world = auto();
    let id = world.running(COPY, 400);
    let void = world.running(COPY, 0);
    world.settle();
    let big = crowd(&mut world);
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (500, Phase::CopiedOut));
    assert_eq!(
        world.agents[&void].phase,
        Phase::CopiedOut,
        "both processes are offloaded together"
    );
}

/// The driver refuses the checkpoint of a context (second level). The container must stay copied
/// out (first level) and be restored from there. The waiter must get the VRAM that the copy freed.
#[test]
fn failed_second_level_keeps_the_first() {
    let (mut world, id) = copied_out();
    let big = world.running(0, 500);
    world.fail = Some(Outcome::DriverError);
    world.allocate(big, 450);
    for _ in 0..10 {
        world.pass();
        assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    }
    assert_eq!((world.fail, world.state(AUTO)), (None, State::Offloaded));
    assert_eq!(world.container(AUTO).figures.restores, 0);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed, "tried again after a while");
    assert_eq!(world.agents[&big].size, 950);
}

/// A waiter needs the memory and the context of a resident container. One offload must free both.
#[test]
fn resident_victim_gives_up_both_levels_at_once() {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    let big = crowd(&mut world);
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (950, Phase::Checkpointed));
}

#[test]
fn context_alone_stays_until_it_is_needed() {
    let mut world = auto();
    let id = world.running(AUTO, 100);
    world.agents.get_mut(&id).unwrap().swappable = 0;
    world.settle();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.container(AUTO).shown.reason.0, Reason::NothingToCopy);
    let big = crowd(&mut world);
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (950, Phase::Checkpointed));
}

#[test]
fn request_checkpoints_what_cannot_be_copied() {
    for (n, state) in [(AUTO, State::Offloaded), (COPY, State::Idle)] {
        let mut world = auto();
        let id = world.running(n, 100);
        world.agents.get_mut(&id).unwrap().swappable = 0;
        world.settle();
        world.feed(Input::Command(CommandId(1), key(n), Request::Offload));
        world.settle();
        assert_eq!(world.state(n), state);
    }
}

/// Offloads a process that may be restored on another GPU. Its context must be checkpointed too,
/// because a context that is kept could not move to that GPU.
#[test]
fn process_that_may_migrate_leaves_whole() {
    let mut world = auto();
    world.two_gpus = true;
    let id = world.running(AUTO, 400);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
}

#[test]
fn failed_copy_falls_back_to_the_checkpoint() {
    for (n, method) in [(AUTO, OffloadMethod::DriverCheckpoint), (COPY, OffloadMethod::Copy)] {
        let mut world = auto();
        let id = world.running(n, 400);
        world.tick();
        world.process_mut(id).failed_moves.copy = true;
        let process = world.process(id);
        assert_eq!(offload_level::moves(&world.node.state, &key(n))(process), method);
    }
}

/// A container was offloaded by request, and another container waits for VRAM. The context of the
/// offloaded container must be evicted, because that container is not in use.
#[test]
fn context_of_a_manual_container_is_evicted() {
    let mut world = auto();
    let policy = &mut world.container_mut(AUTO).policy;
    policy.mode = Mode::Manual;
    let id = world.running(AUTO, 400);
    world.tick();
    world.feed(Input::Command(CommandId(1), key(AUTO), Request::Offload));
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    let big = crowd(&mut world);
    assert_eq!((world.agents[&big].size, world.agents[&id].phase), (950, Phase::Checkpointed));
}

#[test]
fn next_controller_keeps_first_level() {
    let (mut world, _) = copied_out();
    world.restart(false);
    world.settle();
    let id = *world.agents.keys().next().unwrap();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
    world.call(id);
    world.settle_all();
    assert_eq!(world.container(AUTO).figures.restores, 1);
}

/// Two containers differ only in how they are restored. The container that is restored by a copy
/// must be evicted first, because its restore is faster.
#[test]
fn cheap_restore_is_evicted_before_a_slow_one() {
    let mut world = auto();
    let slow = world.running(0, 300);
    let fast = world.running(AUTO, 300);
    for n in [0, AUTO] {
        let policy = &mut world.container_mut(n).policy;
        policy.mode = Mode::Pressure;
    }
    world.container_mut(0).policy.engine = Engine::Checkpoint;
    let waiter = world.running(COPY, 300);
    world.allocate(waiter, 200);
    world.settle();
    assert_eq!(world.agents[&slow].phase, Phase::Open);
    assert!(world.agents[&fast].phase.is_offloaded());
}

/// Offloads and restores a container with several processes. The processes must be copied at the
/// same time. No gate may open before all processes are restored.
#[test]
fn processes_of_a_container_are_copied_at_once() {
    let mut world = auto();
    let ids = [world.running(AUTO, 200), world.running(AUTO, 200), world.running(AUTO, 200)];
    let is_ordered = |world: &World, wanted: fn(&Action) -> bool| {
        let pending = |id| world.node.state.registry.processes.get(id).unwrap().pending;
        ids.iter().filter(|id| pending(id).is_some_and(|p| wanted(&p.action))).count()
    };
    let mut most = 0;
    for _ in 0..200 {
        world.pass();
        most = most.max(is_ordered(&world, |action| matches!(action, Action::CopyOut { .. })));
    }
    assert_eq!((most, world.state(AUTO)), (3, State::Offloaded));
    world.call(ids[1]);
    let mut most = 0;
    while world.state(AUTO) != State::Active {
        world.answer_question();
        most = most.max(is_ordered(&world, |action| action.is_restore()));
        ids.iter().for_each(|id| world.work(*id));
    }
    assert_eq!(most, 3);
}

/// Two processes of a container are copied back into VRAM. The copy of the first process finds no
/// VRAM. The promise must stay until the copy of the second process, which still allocates VRAM,
/// has ended.
#[test]
fn promise_lasts_while_other_copies_run() {
    let mut world = auto();
    let ids = [world.running(AUTO, 200), world.running(AUTO, 200)];
    world.settle();
    world.call(ids[0]);
    let restores = |world: &World, id: &ProcessId| {
        let pending = world.node.state.registry.processes.get(id).unwrap().pending;
        pending.is_some_and(|order| order.action.is_restore())
    };
    while !ids.iter().all(|id| restores(&world, id)) {
        world.answer_question();
    }
    world.fail = Some(Outcome::DriverError);
    for (id, promised) in [(ids[0], 300), (ids[1], 0)] {
        while restores(&world, &id) {
            world.work(id);
        }
        assert_eq!(world.node.state.admission.ledger.promised_to(&key(AUTO)), promised);
        assert_eq!(world.node.state.admission.grants.contains_key(&key(AUTO)), promised > 0);
    }
    assert_eq!((world.state(AUTO), world.agents[&ids[0]].phase), (State::Queued, Phase::CopiedOut));
    world.settle_all();
    assert_eq!(world.container(AUTO).figures.restores, 1);
}

/// When the controller decides whether a GPU is oversubscribed, an offloaded container must count
/// with the VRAM that it needs again.
#[test]
fn copied_out_memory_is_wanted_again() {
    let (world, id) = copied_out();
    let wanted = wants(world.process(id));
    assert_eq!(wanted.iter().map(|device| device.bytes).sum::<u64>(), 400);
}

/// A call arrives before the survey of an eviction. The eviction is cancelled. The next offload,
/// for which no container waits, must keep the context.
#[test]
fn eviction_given_up_for_a_call_is_forgotten() {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    offload::evict(&mut world.bench.node.state, &key(AUTO), Offload::deep(world.bench.now));
    world.call(id);
    world.settle();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
}

/// Host memory suffices for the copy, but not for the contexts. The containers with `full` and with
/// `auto`, whose contexts a waiter needs, must then be offloaded without their contexts.
#[test]
fn contexts_stay_while_host_memory_is_short() {
    for engine in [Engine::Full, Engine::Auto] {
        let mut world = auto();
        world.container_mut(AUTO).policy.engine = engine;
        let id = world.running(AUTO, 400);
        world.host_total = Some(350);
        if engine == Engine::Auto {
            world.tick();
            offload::evict(&mut world.bench.node.state, &key(AUTO), Offload::deep(world.bench.now));
        }
        world.settle();
        let found = (world.state(AUTO), world.agents[&id].phase);
        assert_eq!(found, (State::Offloaded, Phase::CopiedOut), "{engine:?}");
        assert_eq!(world.refused, [""; 0], "{engine:?}");
        // Nothing happens until a call.
        let offloads = world.container(AUTO).figures.offloads;
        let orders = world.ordered.len();
        world.settle();
        assert_eq!(
            (world.container(AUTO).figures.offloads, world.ordered.len()),
            (offloads, orders)
        );
        assert!(world.questions.is_empty());
        world.host_total = None;
        world.call(id);
        world.settle_all();
        assert_eq!(world.container(AUTO).figures.restores, 1, "{engine:?}");
        let phase = if engine == Engine::Full { Phase::Checkpointed } else { Phase::CopiedOut };
        assert_eq!(world.agents[&id].phase, phase, "the next offload is complete again");
    }
}

/// The process still has the pages of its last offload, so that the copy needs no more memory. The
/// contexts need some, which is missing.
#[test]
fn contexts_stay_if_the_copy_needs_no_memory() {
    let mut world = auto();
    world.container_mut(AUTO).policy.engine = Engine::Full;
    let id = world.running(AUTO, 400);
    world.agents.get_mut(&id).unwrap().kept = 300;
    world.host_total = Some(50);
    world.ask_offload(AUTO, id);
    world.settle();
    let found = (world.state(AUTO), world.agents[&id].phase);
    assert_eq!(found, (State::Offloaded, Phase::CopiedOut));
    assert_eq!(world.refused, [""; 0]);
}

/// Host memory becomes short after the copy, before the checkpoint. The container must stay copied
/// out.
#[test]
fn copied_out_stays_so_without_host_memory() {
    let mut world = auto();
    world.container_mut(AUTO).policy.engine = Engine::Full;
    let id = world.running(AUTO, 400);
    world.host_total = Some(450);
    world.ask_offload(AUTO, id);
    while world.agents[&id].phase != Phase::CopiedOut {
        world.answer_question();
        world.work(id);
    }
    world.host_total = Some(320);
    world.settle();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
    assert_eq!((&world.refused[..], world.answers.pop()), (&[][..], Some((CommandId(1), true))));
    let orders = world.ordered.len();
    world.settle();
    assert_eq!(world.ordered.len(), orders);
}

/// A copied-out container with `full` is to give up its context too, and the driver refuses this. The
/// container must stay copied out.
#[test]
fn failed_eviction_of_context_is_not_repeated() {
    let mut world = auto();
    world.container_mut(AUTO).policy.engine = Engine::Full;
    let id = world.running(AUTO, 400);
    world.host_total = Some(350);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    world.host_total = None;
    world.fail = Some(Outcome::DriverError);
    offload::evict(&mut world.bench.node.state, &key(AUTO), Offload::deep(world.bench.now));
    world.settle();
    assert!(world.fail.is_none(), "the checkpoint was tried");
    let found = (world.state(AUTO), world.agents[&id].phase);
    assert_eq!(found, (State::Offloaded, Phase::CopiedOut));
    assert_eq!(world.container(AUTO).figures.restores, 0);
}

/// The context of a copied-out container is to be evicted, and host memory is short. The eviction is
/// refused, although a copy of the rest would need less.
#[test]
fn context_eviction_is_refused_without_memory() {
    let mut world = auto();
    let id = world.running(AUTO, 400);
    world.agents.get_mut(&id).unwrap().swappable = 40;
    world.settle();
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
    world.host_total = Some(100);
    offload::evict(&mut world.bench.node.state, &key(AUTO), Offload::deep(world.bench.now));
    world.settle();
    assert_eq!(world.refused, [Reason::HostMemory.to_string()]);
    assert_eq!((world.state(AUTO), world.agents[&id].phase), (State::Offloaded, Phase::CopiedOut));
}
