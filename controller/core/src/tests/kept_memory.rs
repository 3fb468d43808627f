//! Tests of offloads that need the host memory that other containers keep.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, ProcessFlags, message::ControllerMessage},
};

use super::{
    super::ProcessId,
    world::{ALL_CAPABILITIES, Host, World},
};

/// Two containers run. The process of container 1 keeps host memory, so that the node has too
/// little free memory for an offload of container 2. Returns the two processes.
fn short_of_memory(world: &mut World) -> (ProcessId, ProcessId) {
    let (keeper, id) = (world.running(1, 300), world.running(2, 300));
    // The test is about the offload of container 2 alone.
    world.pin(1, true);
    world.host_total = Some(200);
    keeps(world, keeper, 250);
    (keeper, id)
}

/// Delivers counters in which a process keeps host memory.
fn keeps(world: &mut World, id: ProcessId, bytes: u64) {
    world.agents.get_mut(&id).unwrap().kept = bytes;
    let page = world.agents[&id].page();
    world.feed(super::super::Input::Page(id, page));
}

/// Number of requests to free host memory that wait in the inbox of a process.
fn requests(world: &World, id: ProcessId) -> usize {
    let inbox = world.agents[&id].inbox.iter();
    inbox.filter(|message| **message == ControllerMessage::FreeHostMemory).count()
}

#[test]
fn kept_memory_is_freed_for_an_offload() {
    let mut world = World::new(3);
    let (keeper, id) = short_of_memory(&mut world);
    world.ask_offload(2, id);
    world.answer_question();
    assert_eq!((requests(&world, keeper), &world.refused[..]), (1, &[][..]));
    assert_eq!(world.container(2).shown.reason.0, Reason::HostMemory, "the reason of the wait");
    keeps(&mut world, keeper, 0);
    world.host_total = Some(450);
    world.tick();
    world.settle();
    assert_eq!((world.state(2), &world.refused[..]), (State::Offloaded, &[][..]));
}

/// A process says that it keeps memory but frees none. Each offload of another container may wait
/// for it only once in a while, and is then refused.
#[test]
fn memory_that_is_not_freed_delays_once() {
    let mut world = World::new(3);
    let (keeper, id) = short_of_memory(&mut world);
    world.ask_offload(2, id);
    world.answer_question();
    for _ in 0..4 {
        world.tick_after(1_000);
        keeps(&mut world, keeper, 250);
        while !world.questions.is_empty() {
            world.answer_question();
        }
    }
    assert_eq!(world.refused, [Reason::HostMemory.to_string()]);
    assert_eq!(requests(&world, keeper), 1);
    world.ask_offload(2, id);
    world.answer_question();
    assert_eq!(world.refused.len(), 2, "the next offload does not wait");
    assert_eq!(requests(&world, keeper), 1);
}

/// Another container is being restored, which will free host memory. The offload must wait for it.
#[test]
fn memory_of_a_restore_is_awaited() {
    let mut world = World::new(3);
    let restored = world.running(1, 300);
    world.settle();
    assert_eq!(world.state(1), State::Offloaded);
    let id = world.running(2, 300);
    world.call(restored);
    let restores = |world: &World| {
        let mut inbox = world.agents[&restored].inbox.iter();
        inbox.any(|message| matches!(message, ControllerMessage::Order { action, .. } if action.is_restore()))
    };
    for _ in 0..100 {
        if !restores(&world) {
            world.work(id);
            world.answer_question();
        }
    }
    assert!(restores(&world));
    world.host_total = Some(450);
    world.ask_offload(2, id);
    world.answer_question();
    assert_eq!(world.refused, [""; 0]);
    world.pin(1, true);
    world.settle();
    assert_eq!((world.state(2), &world.refused[..]), (State::Offloaded, &[][..]));
}

/// If the kept memory does not suffice, or a library cannot free it, no process is asked.
#[test]
fn no_process_is_asked_in_vain() {
    let incapable = Capabilities(ALL_CAPABILITIES.0 & !Capabilities::FREES_HOST_MEMORY.0);
    for (kept, capabilities) in [(20, ALL_CAPABILITIES), (250, incapable)] {
        let mut world = World::new(3);
        world.libraries = vec![capabilities];
        let (keeper, id) = short_of_memory(&mut world);
        keeps(&mut world, keeper, kept);
        world.ask_offload(2, id);
        world.answer_question();
        assert_eq!(requests(&world, keeper), 0);
        assert_eq!(world.refused, [Reason::HostMemory.to_string()]);
    }
}

/// A memory cgroup is short. Only processes below this cgroup are asked to free memory, and only if
/// it is not memory of the host pool.
#[test]
fn memory_of_the_same_cgroup_is_freed() {
    let pool = ProcessFlags::HOST_POOL;
    let own = ProcessFlags::default();
    for (cgroup, notes, asked) in [
        ("/pod/c1", own, 1),
        ("/pod", own, 1),
        ("/pod/c1", pool, 0),
        ("/podium/c1", own, 0),
        ("", own, 0),
    ] {
        let mut world = World::new(3);
        let (keeper, id) = short_of_memory(&mut world);
        world.agents.get_mut(&keeper).unwrap().notes = notes;
        world.process_mut(keeper).identity.memory_cgroup = cgroup.into();
        keeps(&mut world, keeper, 250);
        (world.host_total, world.limit_bytes) = (Some(10_000), Some(200));
        world.ask_offload(2, id);
        world.answer_question();
        assert_eq!(requests(&world, keeper), asked, "{cgroup} {notes:?}");
        let refused = [Reason::CgroupMemory.to_string()];
        assert_eq!(world.refused, refused[asked..], "{cgroup} {notes:?}");
    }
}
