//! Tests of the decision how much memory the host pool keeps ready.

use affinode_proto::{state::State, wire::ProcessFlags};

use super::{
    super::{Input, ProcessId, ReadySizes, host_pool_ready::ReadyLimits},
    world::{Host as _, World},
};

/// Number of a container with the engine `auto`.
const AUTO: usize = 2;
/// Number of a container with the engine `checkpoint`.
const CHECKPOINT: usize = 0;
const LIMITS: ReadyLimits = ReadyLimits { max_bytes: 1_000, min_bytes: 50, unit_bytes: 100 };

fn world() -> World {
    let mut world = World::new(3);
    world.host_total = Some(10_000);
    world.host_pool_bytes = Some(5_000);
    limit(&mut world, LIMITS);
    world
}

fn limit(world: &mut World, ready: ReadyLimits) {
    let mut settings = world.node.state.settings.clone();
    settings.ready = ready;
    world.feed(Input::Reconfigured(Box::new(settings)));
}

fn sizes(wanted: &[u64]) -> ReadySizes {
    let mut sizes = ReadySizes::default();
    sizes.iter_mut().zip(wanted).for_each(|(to, bytes)| *to = *bytes);
    sizes
}

/// Ticks until the delay between two orders is over. Returns the sizes that are wanted then.
/// Calls of the process keep its container in use meanwhile.
fn wanted(world: &mut World, used_by: ProcessId) -> ReadySizes {
    for _ in 0..200 {
        world.call(used_by);
        world.tick();
    }
    world.kept_ready.last().copied().unwrap_or_default()
}

#[test]
fn pages_are_kept_for_a_resident_process() {
    let mut world = world();
    let id = world.running(AUTO, 200);
    assert_eq!(wanted(&mut world, id), sizes(&[200]), "150 bytes can be copied");
    let orders = world.kept_ready.len();
    wanted(&mut world, id);
    assert_eq!(world.kept_ready.len(), orders, "an unchanged size is not ordered again");
    limit(&mut world, ReadyLimits { max_bytes: 120, ..LIMITS });
    assert_eq!(wanted(&mut world, id), sizes(&[120]));
    limit(&mut world, ReadyLimits { max_bytes: 0, ..LIMITS });
    assert_eq!(wanted(&mut world, id), sizes(&[]));
}

#[test]
fn no_pages_are_kept_for_an_offloaded_process() {
    let mut world = world();
    let id = world.running(AUTO, 200);
    assert_eq!(wanted(&mut world, id), sizes(&[200]));
    // Pages that an offload takes must not be replaced while it copies.
    world.begin_copy(AUTO, id);
    assert_eq!(world.kept_ready.last(), Some(&sizes(&[])));
    world.settle();
    world.tick();
    assert_eq!(world.state(AUTO), State::Offloaded);
    assert_eq!(world.kept_ready.last(), Some(&sizes(&[])));
}

#[test]
fn small_and_checkpointed_processes_need_no_pages() {
    let mut world = world();
    let small = world.running(AUTO, 60);
    assert_eq!(wanted(&mut world, small), sizes(&[]), "45 bytes can be copied");
    let checkpointed = world.running(CHECKPOINT, 200);
    assert_eq!(wanted(&mut world, checkpointed), sizes(&[]));
}

#[test]
fn own_pages_in_the_pool_suffice() {
    let mut world = world();
    let id = world.running(AUTO, 200);
    let agent = world.agents.get_mut(&id).unwrap();
    (agent.kept, agent.notes) = (150, ProcessFlags::HOST_POOL);
    assert_eq!(wanted(&mut world, id), sizes(&[]));
}

/// The surveys count ready pages as free memory of the node. An offload to the container's own
/// memory that needs them must free them first.
#[test]
fn ready_pages_yield_to_other_offloads() {
    for (ready_bytes, yields) in [(9_500, true), (100, false)] {
        let mut world = world();
        world.host_pool_bytes = None;
        world.ready_bytes = ready_bytes;
        let kept = world.running(AUTO, 200);
        assert_eq!(wanted(&mut world, kept), sizes(&[200]));
        let id = world.running(CHECKPOINT, 600);
        let before = world.kept_ready.len();
        world.ask_offload(CHECKPOINT, id);
        world.answer_question();
        let freed = world.kept_ready.get(before) == Some(&sizes(&[]));
        assert_eq!(freed, yields, "{:?}", world.kept_ready);
        while world.state(CHECKPOINT) != State::Offloaded {
            world.work(id);
            if !world.questions.is_empty() {
                world.answer_question();
            }
        }
        assert_eq!(wanted(&mut world, kept), sizes(&[200]), "the offload is over");
    }
}
