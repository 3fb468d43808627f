//! Tests of allocations that found no VRAM and wait for it.

use super::world::{Host, World, key};

/// Advances the world until no allocation waits. Returns whether this succeeded.
fn until_served(world: &mut World) -> bool {
    (0..8).any(|_| {
        world.settle();
        world.agents.values().all(|agent| agent.asking.is_none())
    })
}

#[test]
fn allocation_waits_for_eviction_of_neighbour() {
    let mut world = World::new(2);
    world.running(0, 600);
    let newcomer = world.running(1, 100);
    world.allocate(newcomer, 900);
    assert_eq!(world.agents[&newcomer].asking.map(|a| a.bytes), Some(900));
    assert!(until_served(&mut world));
    assert_eq!(world.agents[&newcomer].size, 1_000);
    assert_eq!(world.container(0).figures.offloads, 1);
}

#[test]
fn conflicting_allocations_take_turns() {
    let mut world = World::new(2);
    let first = world.running(0, 400);
    let second = world.running(1, 400);
    world.allocate(first, 400);
    world.allocate(second, 400);
    assert!(world.agents.values().all(|agent| agent.asking.is_some()));
    assert!(until_served(&mut world));
    assert_eq!((world.agents[&first].size, world.agents[&second].size), (800, 800));
}

#[test]
fn allocation_that_never_fits_fails_at_once() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    world.tick();
    world.allocate(id, 500);
    while !world.agents[&id].inbox.is_empty() {
        world.work(id);
    }
    assert!(world.agents[&id].asking.is_none());
    assert_eq!(world.agents[&id].size, 600);
}

#[test]
fn higher_priority_allocation_passes_restore() {
    let mut world = World::new(2);
    let low = world.running(0, 700);
    world.settle();
    let high = world.running(1, 600);
    world.call(low);
    // After this wait, the restore is first in the queue.
    world.now += 60_000;
    world.others = 200;
    world.allocate(high, 300);
    assert_eq!(world.node.state.admission.queue.in_order(world.now), [key(0), key(1)]);
    world.others = 0;
    for _ in 0..4 {
        // The container is in use, apart from the waiting allocation.
        world.agents.get_mut(&high).unwrap().calls += 1;
        world.tick();
        while !world.questions.is_empty() {
            world.answer_question();
        }
        for id in [low, high] {
            while !world.agents[&id].inbox.is_empty() {
                world.work(id);
            }
        }
    }
    assert_eq!(world.agents[&high].size, 900);
}
