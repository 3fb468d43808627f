//! Processes of which only a part can be offloaded: the rest stays on the GPU with the context.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, Phase},
};

use super::{
    super::ProcessId,
    world::{ALL_CAPABILITIES, World, key},
};

/// A process with 600 bytes and managed memory in container `n`. The agent can copy 450 of them,
/// or none with the engine `checkpoint`.
fn with_managed(world: &mut World, n: usize) -> ProcessId {
    let id = world.running(n, 600);
    world.agents.get_mut(&id).unwrap().managed = true;
    world.tick();
    id
}

#[test]
fn managed_memory_stays_and_the_rest_leaves() {
    for auto in [false, true] {
        for n in [1, 2] {
            let mut world = World::new(3);
            world.auto = auto;
            world.announce(1);
            let id = with_managed(&mut world, n);
            for _ in 0..2 {
                world.settle();
                assert_eq!(world.state(n), State::Offloaded);
                assert_eq!((world.agents[&id].phase, world.used()), (Phase::CopiedOut, 150));
                world.call(id);
                world.settle_all();
            }
            assert_eq!(world.refused, Vec::<String>::new(), "the driver was asked for nothing");
        }
    }
}

#[test]
fn managed_memory_under_driver_engine_stays() {
    let mut world = World::new(3);
    let id = with_managed(&mut world, 0);
    world.settle();
    assert_eq!((world.state(0), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.refused, [Reason::ManagedMemory.to_string()]);
    assert_eq!(world.agents[&id].generation, 0, "its gate was never closed");
}

/// An older library would copy out, but refuses the lock of such a process.
#[test]
fn older_library_keeps_all_of_such_a_process() {
    let mut world = World::new(3);
    world.libraries = vec![Capabilities(ALL_CAPABILITIES.0 & !Capabilities::LEAVES_IN_PART.0)];
    let id = with_managed(&mut world, 2);
    world.settle();
    assert_eq!((world.state(2), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.refused, [Reason::ManagedMemory.to_string()]);
    assert_eq!(world.agents[&id].generation, 0, "its gate was never closed");
}

/// Nothing can be copied, so nothing leaves.
#[test]
fn process_with_managed_memory_alone_stays() {
    let mut world = World::new(3);
    let id = with_managed(&mut world, 2);
    world.agents.get_mut(&id).unwrap().swappable = 0;
    world.tick();
    world.settle();
    assert_eq!((world.state(2), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.refused, [Reason::ManagedMemory.to_string()]);
}

/// The rest cannot be freed, so it is promised to no waiter.
#[test]
fn rest_that_stays_is_no_room_for_waiters() {
    let mut world = World::new(3);
    let id = with_managed(&mut world, 2);
    let before = world.node.vram_freed_by(&key(2), true);
    assert_eq!(before.iter().map(|held| held.bytes).sum::<u64>(), 450);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    assert_eq!(world.node.vram_freed_by(&key(2), true), []);
}
