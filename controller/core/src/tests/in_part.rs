//! Tests of processes whose memory can be offloaded only in part. The other memory stays on the GPU
//! with the CUDA context.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, Hazards, Phase},
};

use super::super::needs;
use super::{
    super::ProcessId,
    world::{ALL_CAPABILITIES, Host, World, key},
};

/// Hazards of allocations that stay on the GPU, each with the reason that users see.
const KINDS: [(Hazards, Reason); 2] = [
    (Hazards::MANAGED_MEMORY, Reason::ManagedMemory),
    (Hazards::SHARED_MEMORY, Reason::SharedMemory),
];

/// Creates a process with 600 bytes of VRAM and these hazards in container `n`. The agent can copy
/// 450 of the bytes, or none with the engine `checkpoint`.
fn with_rest(world: &mut World, n: usize, hazards: Hazards) -> ProcessId {
    let id = world.running(n, 600);
    world.agents.get_mut(&id).unwrap().in_part = hazards;
    world.tick();
    id
}

/// Asserts that the whole process stays resident and that its gate was never closed.
fn stays_whole(mut world: World, n: usize, id: ProcessId, reason: Reason) {
    world.settle();
    assert_eq!((world.state(n), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.refused, [reason.to_string()]);
    assert_eq!(world.agents[&id].generation, 0);
}

/// Returns the bytes that stay on the GPU, and the hazards that keep them there, as users see them.
fn shown(world: &World, n: usize) -> (u64, Vec<&'static str>) {
    let (bytes, hazards) = world.node.staying(&key(n));
    (bytes, hazards.words().collect())
}

#[test]
fn memory_that_stays_lets_the_rest_leave() {
    for (hazards, reason) in KINDS {
        for (auto, n) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            let mut world = World::new(3);
            world.auto = auto;
            world.announce(1);
            let id = with_rest(&mut world, n, hazards);
            for _ in 0..2 {
                world.settle();
                assert_eq!(world.state(n), State::Offloaded);
                assert_eq!((world.agents[&id].phase, world.used()), (Phase::CopiedOut, 150));
                assert_eq!(shown(&world, n), (150, vec![reason.as_str()]));
                world.call(id);
                while world.state(n) != State::Active {
                    world.answer_question();
                    world.work(id);
                }
                assert_eq!(shown(&world, n), (0, vec![]), "the process is resident");
                world.settle_all();
            }
            assert_eq!(world.refused, Vec::<String>::new(), "the driver was asked for nothing");
        }
    }
}

#[test]
fn driver_engine_keeps_all_of_such_a_process() {
    for (hazards, reason) in KINDS {
        let mut world = World::new(3);
        let id = with_rest(&mut world, 0, hazards);
        stays_whole(world, 0, id, reason);
    }
}

/// A process has memory that must stay on the GPU, and its library lacks `LEAVES_IN_PART`. The
/// whole process must stay resident.
#[test]
fn older_library_keeps_all_of_such_a_process() {
    for (hazards, reason) in KINDS {
        let mut world = World::new(3);
        world.libraries = vec![Capabilities(ALL_CAPABILITIES.0 & !Capabilities::LEAVES_IN_PART.0)];
        let id = with_rest(&mut world, 2, hazards);
        stays_whole(world, 2, id, reason);
    }
}

#[test]
fn process_with_nothing_to_copy_stays() {
    for (hazards, reason) in KINDS {
        let mut world = World::new(3);
        let id = with_rest(&mut world, 2, hazards);
        world.agents.get_mut(&id).unwrap().swappable = 0;
        world.tick();
        stays_whole(world, 2, id, reason);
    }
}

/// Another device can access the memory of this process, and no allocation is known to be
/// unaffected. The whole process must stay resident.
#[test]
fn process_that_another_device_reaches_stays() {
    let mut world = World::new(3);
    let id = with_rest(&mut world, 2, Hazards(Hazards::DIRECT_ACCESS.0 | Hazards::SHARED_MEMORY.0));
    stays_whole(world, 2, id, Reason::DirectAccess);
}

/// A process shares memory for the first time after its offload has begun. The agent refuses the
/// checkpoint, and the next offload must only copy.
#[test]
fn sharing_before_the_gate_closes_is_respected() {
    for (n, after) in [(0, State::Idle), (1, State::Offloaded)] {
        let mut world = World::new(3);
        let id = world.running(n, 600);
        world.work_until_closed(id);
        world.agents.get_mut(&id).unwrap().in_part = Hazards::SHARED_MEMORY;
        world.settle_all();
        assert_eq!(world.state(n), after);
        let copied_out = after == State::Offloaded;
        let phase = if copied_out { Phase::CopiedOut } else { Phase::Open };
        assert_eq!(world.agents[&id].phase, phase);
    }
}

/// The memory that stays on the GPU cannot be freed. It must not be promised to another container.
#[test]
fn rest_that_stays_is_no_room_for_waiters() {
    let mut world = World::new(3);
    let id = with_rest(&mut world, 2, Hazards::SHARED_MEMORY);
    let before = needs::vram_freed_by(&world.node.state, &key(2), true);
    assert_eq!(before.iter().map(|held| held.bytes).sum::<u64>(), 450);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    assert_eq!(needs::vram_freed_by(&world.node.state, &key(2), true), []);
}
