//! Tests of a GPU that NVML can no longer read, while it can read the other GPUs of the node.

use affinode_proto::{reason::Reason, state::State, wire::Phase};

use super::{
    super::{Effect, ProcessId},
    nvml::LOST,
    world::{GPU, Host, World, key},
};

/// A world with two GPUs and three processes: the first two belong to container 0 and use one GPU
/// each, the third belongs to container 1 and uses the second GPU.
fn offloaded() -> (World, [ProcessId; 3]) {
    let mut world = World::new(2);
    world.two_gpus = true;
    let (first, second) = (world.running(0, 300), world.running(0, 300));
    world.next += 1;
    let third = world.running(1, 300);
    assert_eq!([first, second, third].map(|id| world.agents[&id].gpu), [0, 1, 1]);
    world.settle();
    assert_eq!([world.state(0), world.state(1)], [State::Offloaded; 2]);
    (world, [first, second, third])
}

fn reason(world: &World, n: usize) -> (Reason, String) {
    world.node.state.registry.containers[&key(n)].shown.reason.clone()
}

/// Calls both containers, and waits until container 1 is resident.
fn call_both(world: &mut World, [first, _, third]: [ProcessId; 3]) {
    world.call(first);
    world.call(third);
    for _ in 0..1_000 {
        if world.agents[&third].phase == Phase::Open {
            return;
        }
        world.pass();
    }
    panic!("the container of the other GPU is not restored");
}

#[test]
fn waiter_for_a_lost_gpu_delays_no_other() {
    let (mut world, ids) = offloaded();
    world.nvml.unreadable = Some(0);
    call_both(&mut world, ids);
    assert_eq!(world.state(0), State::Queued);
    assert_eq!(reason(&world, 0), (Reason::VramUnknown, LOST.to_owned()));
    assert_eq!(world.node.gpu_error().as_deref(), Some(LOST));
    world.nvml.unreadable = None;
    world.settle_all();
    assert!(!world.agents[&ids[0]].wants, "the container is restored on the GPU that is back");
    assert_eq!(world.node.gpu_error(), None);
}

#[test]
fn gpu_that_is_not_listed_delays_no_other() {
    let (mut world, ids) = offloaded();
    world.nvml.unlisted = Some(0);
    call_both(&mut world, ids);
    assert_eq!(world.state(0), State::Queued);
    let why = format!("NVML does not list the GPU {GPU}");
    assert_eq!(reason(&world, 0), (Reason::VramUnknown, why));
}

#[test]
fn old_sample_of_a_lost_gpu_proves_nothing() {
    let (mut world, [first, ..]) = offloaded();
    world.call(first);
    while !matches!(world.questions.front(), Some(Effect::Prove { .. })) {
        world.pass();
    }
    world.nvml.unreadable = Some(0);
    world.answer_question();
    assert!(world.node.gpus().iter().all(|gpu| gpu.uuid != GPU));
    world.settle();
    assert_eq!(world.state(0), State::Queued);
}

#[test]
fn resident_container_of_a_lost_gpu_stays() {
    let mut world = World::new(2);
    world.two_gpus = true;
    let (first, second) = (world.running(0, 300), world.running(1, 300));
    world.tick();
    world.nvml.unreadable = Some(0);
    world.settle();
    assert_eq!([world.state(0), world.state(1)], [State::Idle, State::Offloaded]);
    assert_eq!(reason(&world, 0), (Reason::VramUnknown, LOST.to_owned()));
    assert_eq!(world.process(first).memory.vram_bytes(), 300, "it is what NVML showed last");
    assert_eq!(world.process(second).memory.vram_bytes(), 0);
}

/// The journal was lost, so nothing shows which GPU the process needs. A process that is only copied out
/// loses nothing if its restore fails, so it does not wait for a GPU that may never be back.
#[test]
fn unknown_need_waits_for_an_unread_gpu() {
    for phase in [Phase::Checkpointed, Phase::CopiedOut] {
        let (mut world, [_, _, third]) = offloaded();
        let waits = phase == Phase::Checkpointed;
        world.agents.get_mut(&third).unwrap().phase = phase;
        let process = world.process_mut(third);
        process.agent.phase = phase;
        process.memory.set_offloaded_vram(None);
        world.nvml.unreadable = Some(0);
        world.call(third);
        (0..200).for_each(|_| world.pass());
        assert_eq!(world.agents[&third].wants, waits, "{phase:?}: {:?}", reason(&world, 1));
        if waits {
            assert_eq!(reason(&world, 1), (Reason::VramUnknown, LOST.to_owned()));
        }
        world.nvml.unreadable = None;
        world.settle_all();
        assert!(!world.agents[&third].wants);
    }
}
