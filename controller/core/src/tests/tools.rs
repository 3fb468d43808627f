//! Tests of processes that contain a tool, such as a profiler. The memory that can be copied is
//! offloaded, and the CUDA context stays.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{Capabilities, Hazards, Phase, message::Outcome},
};

use super::{
    super::{ProcessId, measurements, needs, offload_check, offload_level, plan::OffloadMethod},
    world::{Host, World, key},
};

/// Creates a process with 600 bytes of VRAM and a tool in container `n`. The agent can copy 450 of
/// the bytes, or none with the engine `checkpoint`.
fn with_tool(world: &mut World, n: usize) -> ProcessId {
    let id = world.running(n, 600);
    world.agents.get_mut(&id).unwrap().tools = true;
    world.tick();
    id
}

#[test]
fn process_with_tool_is_copied_and_keeps_context() {
    for auto in [false, true] {
        for n in [1, 2] {
            let mut world = World::new(3);
            world.auto = auto;
            world.announce(1);
            let id = with_tool(&mut world, n);
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
fn client_of_mps_is_copied_if_its_library_can() {
    for (n, can, outcome) in
        [(1, true, Ok(())), (1, false, Err(Reason::Mps)), (0, true, Err(Reason::Mps))]
    {
        let mut world = World::new(3);
        let id = world.running(n, 600);
        world.tick();
        measurements::learn_hazards(&mut world.node.state, id, Hazards::MPS);
        if !can {
            world.process_mut(id).agent.capabilities.0 &= !Capabilities::COPIES_UNDER_MPS.0;
        }
        let checked = offload_check::check_offload(&world.node.state, &key(n), true);
        assert_eq!(checked.map_err(|(reason, _)| reason), outcome, "{n}, {can}");
    }
}

#[test]
fn process_with_tool_under_driver_engine_stays() {
    let mut world = World::new(3);
    let id = with_tool(&mut world, 0);
    world.settle();
    assert_eq!((world.state(0), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert_eq!(world.refused, [Reason::Tools.to_string()]);
    assert_eq!(world.agents[&id].generation, 0, "the gate was never closed");
}

#[test]
fn video_library_has_a_reason_of_its_own() {
    let mut world = World::new(3);
    let id = world.running(0, 600);
    measurements::learn_hazards(
        &mut world.node.state,
        id,
        Hazards(Hazards::VIDEO.0 | Hazards::TOOLS.0),
    );
    let refused = offload_check::check_offload(&world.node.state, &key(0), true)
        .map_err(|(reason, _)| reason);
    assert_eq!(refused, Err(Reason::Video));
}

/// A tool is loaded in a process between the survey and the checkpoint. The agent must refuse the
/// checkpoint, and the offload must be undone. With an engine that copies, the next offload must
/// succeed without a checkpoint.
#[test]
fn tool_in_mid_offload_turns_the_process_back() {
    for (n, after) in [(0, State::Idle), (1, State::Offloaded)] {
        let mut world = World::new(3);
        let id = world.running(n, 600);
        world.work_until_closed(id);
        world.agents.get_mut(&id).unwrap().tools = true;
        let order = |world: &World| world.process(id).pending;
        while order(&world).is_none() {
            world.answer_question();
        }
        world.settle_all();
        assert_eq!(world.state(n), after);
        let copied_out = after == State::Offloaded;
        assert_eq!(
            world.agents[&id].phase,
            if copied_out { Phase::CopiedOut } else { Phase::Open }
        );
    }
}

/// A copy out leaves a CUDA context on the GPU, which cannot be freed because of a tool. The VRAM
/// of this context must not be promised to another container.
#[test]
fn context_of_a_tool_is_no_room_for_waiters() {
    let mut world = World::new(3);
    let id = with_tool(&mut world, 1);
    let before = needs::vram_freed_by(&world.node.state, &key(1), true);
    assert_eq!(before.iter().map(|held| held.bytes).sum::<u64>(), 450);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
    assert_eq!(needs::vram_freed_by(&world.node.state, &key(1), true), []);
}

#[test]
fn copy_that_failed_leaves_a_process_with_tool() {
    let mut world = World::new(3);
    let id = with_tool(&mut world, 1);
    world.work_until_closed(id);
    world.fail = Some(Outcome::DriverError);
    world.settle_all();
    let process = world.process(id);
    assert_ne!(offload_level::moves(&world.node.state, &key(1))(process), OffloadMethod::Copy);
    assert_eq!((world.state(1), world.agents[&id].phase), (State::Idle, Phase::Open));
    assert!(world.refused.contains(&Reason::Tools.to_string()), "{:?}", world.refused);
}
