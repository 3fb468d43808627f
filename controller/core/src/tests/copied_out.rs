//! Tests of containers whose memory the library copies out.

use affinode_proto::{
    state::State,
    wire::{Phase, ProcessFlags, message::Outcome},
};

use super::super::{copier_use, offload_level};
use super::{
    super::plan::OffloadMethod,
    world::{ENGINES, GPU, Host, TOTAL, World, key},
};

/// Offloads and restores containers whose memory the library copies. The VRAM in use and the
/// figures for users must match the offloaded amount.
#[test]
fn copied_memory_is_released_and_restored() {
    for (n, held, offloaded) in [(1, 0, 600), (2, 150, 450)] {
        let mut world = World::new(3);
        let id = world.running(n, 600);
        world.settle();
        assert_eq!((world.state(n), world.used()), (State::Offloaded, held), "{}", ENGINES[n]);
        let shown = (world.node.vram_bytes(&key(n)), world.node.offloaded_bytes(&key(n)));
        assert_eq!(shown, (held, offloaded));
        world.call(id);
        for _ in 0..10 {
            world.answer_question();
            world.work(id);
        }
        assert_eq!((world.state(n), world.used()), (State::Active, 600));
        assert!(world.journal.is_empty());
    }
}

#[test]
fn copy_in_without_vram_waits_and_loses_nothing() {
    let mut world = World::new(3);
    let id = world.running(2, 600);
    world.settle();
    world.call(id);
    world.answer_question();
    world.fail = Some(Outcome::DriverError);
    world.work(id);
    world.work(id);
    assert_eq!((world.state(2), world.fail), (State::Queued, None));
    world.settle();
    assert_eq!(world.container(2).figures.restores, 1, "restored at the second attempt");
}

#[test]
fn uncopyable_memory_is_checkpointed() {
    for auto in [false, true] {
        let n = 1;
        let mut world = World::new(3).with_auto(auto);
        let id = world.running(n, 600);
        world.work_until_closed(id);
        world.fail = Some(Outcome::DriverError);
        world.settle();
        assert_eq!(
            (world.state(n), world.agents[&id].phase),
            (State::Offloaded, Phase::Checkpointed)
        );
        assert_eq!((world.used(), world.agents[&id].copied_out), (0, false));
        let warnings = world.node.warnings(&key(n));
        assert!(warnings[0].contains("could not be copied"), "{warnings:?}");
    }
}

/// Before the first reading of its counters, a process may have memory that was imported from a
/// copier. Such memory must be copied out, because it could not be restored after a checkpoint.
#[test]
fn memory_is_copied_before_counters_are_read() {
    let mut world = World::new(3);
    let id = world.running(0, 600);
    let moves = |world: &World| {
        let process = world.process(id);
        offload_level::moves(&world.node.state, &key(0))(process)
    };
    assert_eq!(moves(&world), OffloadMethod::DriverCheckpoint, "there is no swappable memory");
    world.agents.get_mut(&id).unwrap().swappable = 450;
    world.hello(id);
    assert_eq!(moves(&world), OffloadMethod::CopyAndCheckpoint);
    world.tick();
    assert_eq!(
        moves(&world),
        OffloadMethod::DriverCheckpoint,
        "the counters show no imported memory"
    );

    let copied_out = world.running(2, 100);
    world.settle();
    assert_eq!(world.agents[&copied_out].phase, Phase::CopiedOut);
    world.restart(false);
    let (_, process) = world.node.state.registry.processes.of(&key(2)).next().unwrap();
    assert!(process.activity.counters.is_none());
    assert_eq!(
        offload_level::moves(&world.node.state, &key(2))(process),
        OffloadMethod::Copy,
        "the process is copied out already"
    );
}

/// The grant of a restore must include the local memory (stacks of GPU threads) that the contexts
/// allocate again.
#[test]
fn restore_needs_room_for_local_memory() {
    let mut world = World::new(3);
    world.local_memory = true;
    let id = world.running(2, 600);
    world.settle();
    let agent = &world.agents[&id];
    let (freed, left) = (agent.size - agent.on_device(), agent.on_device());
    assert_eq!((agent.phase, freed, left), (Phase::CopiedOut, 525, 75));
    assert_eq!(world.process(id).offloaded_vram_bytes(), freed);
    // The free VRAM suffices for the copied part, but not for the local memory.
    world.call(id);
    let mut returns = |others| {
        world.others = others;
        (0..20).any(|_| {
            world.tick();
            world.answer_question();
            world.work(id);
            world.agents[&id].phase == Phase::Open
        })
    };
    assert!(!returns(TOTAL - left - 500), "restored without room: it would fail");
    assert!(returns(0));
}

/// A retained host copy must reduce the host memory that an offload needs, because the container is
/// charged for the copy already. If the counters report a larger copy than the agent can make, only
/// the swappable bytes count.
#[test]
fn retained_copy_needs_no_more_host_memory() {
    let mut world = World::new(3);
    let id = world.running(2, 600);
    world.tick();
    let mut process = world.process(id).clone();
    process.memory.swap.swappable_bytes = 450;
    let mut need = |kept_bytes, phase, moves| {
        process.activity.counters.as_mut().unwrap().kept_bytes = kept_bytes;
        process.agent.phase = phase;
        process.host_need_bytes(moves)
    };
    assert_eq!(need(0, Phase::Open, OffloadMethod::Copy), 450, "the rest stays on the GPU");
    assert_eq!(need(100, Phase::Open, OffloadMethod::CopyAndCheckpoint), 500);
    assert_eq!(need(u64::MAX, Phase::Locked, OffloadMethod::Copy), 0);
    assert_eq!(
        need(100, Phase::CopiedOut, OffloadMethod::CopyAndCheckpoint),
        600,
        "what is in use is not kept"
    );
    assert_eq!(
        need(100, Phase::Open, OffloadMethod::DriverCheckpoint),
        600,
        "the driver has no use for it"
    );
}

#[test]
fn process_without_usable_copier_gets_none() {
    let mut world = World::new(3);
    let id = world.running(1, 600);
    world.settle();
    assert_eq!(
        copier_use::offloads_through_copier(&world.node.state, id),
        Some((GPU.to_owned(), 450))
    );
    for (notes, serves) in [(ProcessFlags::NO_COPIER, false), (ProcessFlags::IPC_REFUSED, true)] {
        world.agents.get_mut(&id).unwrap().notes = notes;
        world.tick();
        assert_eq!(
            copier_use::offloads_through_copier(&world.node.state, id).is_some(),
            serves,
            "{notes:?}"
        );
    }
}

/// A controller ends during a restore, after the driver has restored the context and before the
/// copy in has ended. The next controller has no record and must complete the restore.
#[test]
fn locked_copied_out_process_restores_unrecorded() {
    let mut world = World::new(3);
    let id = world.running(1, 600);
    world.settle();
    world.journal.clear();
    let agent = world.agents.get_mut(&id).unwrap();
    assert_eq!((agent.phase, agent.copied_out), (Phase::Checkpointed, true));
    agent.phase = Phase::Locked;
    world.restart(false);
    let id = *world.agents.keys().next().unwrap();
    world.call(id);
    let turns = (0..20).take_while(|_| {
        world.tick();
        world.answer_question();
        world.work(id);
        world.agents[&id].phase != Phase::Open
    });
    assert!(turns.count() < 20 && !world.agents[&id].copied_out);
}

#[test]
fn retained_context_is_evicted_for_waiter() {
    let mut world = World::new(3).with_auto(true);
    world.container_mut(1).policy.priority = 0;
    let copied_out = world.running(1, 100);
    world.settle();
    assert_eq!((world.agents[&copied_out].phase, world.used()), (Phase::CopiedOut, 25));
    let big = world.running(0, 500);
    world.allocate(big, 490);
    world.settle();
    assert_eq!(
        (world.agents[&big].size, world.agents[&copied_out].phase),
        (990, Phase::Checkpointed)
    );
    assert_eq!(world.container(1).figures.offloads, 1);
    world.call(copied_out);
    world.settle();
    assert_eq!(world.container(1).figures.restores, 1);
}

#[test]
fn context_is_evicted_if_copy_frees_too_little() {
    let mut world = World::new(3).with_auto(true);
    world.container_mut(1).policy.priority = 0;
    let copies_out = world.running(1, 400);
    let big = world.running(0, 500);
    world.allocate(big, 450);
    world.settle();
    assert_eq!(
        (world.agents[&big].size, world.agents[&copies_out].phase),
        (950, Phase::Checkpointed)
    );
    assert_eq!(world.container(1).figures.offloads, 1);
}
