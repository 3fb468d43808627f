//! Tests of copies out that are cancelled because their offload was given up.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, Phase,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::{
    super::{Input, ProcessId, Request, input::CommandId},
    world::{ALL_CAPABILITIES, Host, World, key},
};

/// Begins a copy out of container 2 and returns its process.
fn copying(world: &mut World) -> ProcessId {
    let id = world.running(2, 300);
    world.begin_copy(2, id);
    id
}

/// Delivers the readings that are taken during a copy out, with a call that waits at the gate.
fn call_waits(world: &mut World, id: ProcessId) {
    world.agents.get_mut(&id).unwrap().wants = true;
    world.read_levels(2, id, u64::MAX, 0);
}

/// Lets the agent report that it has cancelled its copy out.
fn cancels(world: &mut World, id: ProcessId) {
    world.fail = Some(Outcome::GivenUp);
    world.work(id);
    world.work_all();
}

#[test]
fn call_during_copy_out_cancels_it() {
    let mut world = World::new(3);
    let id = copying(&mut world);
    world.read_levels(2, id, u64::MAX, 0);
    assert_eq!(world.given_up, [], "no call waits");
    call_waits(&mut world, id);
    assert_eq!(world.given_up, [id]);
    cancels(&mut world, id);
    let container = world.container(2);
    assert_eq!((container.shown.state, container.figures.offloads), (State::Active, 0));
    assert_eq!(container.shown.reason.0, Reason::WokenMeanwhile);
    assert_eq!(world.refused, [""; 0], "a call is no failure");
    assert!(world.journal.is_empty());
    world.settle();
    assert_eq!(world.state(2), State::Offloaded, "the next idle period leads to an offload");
}

/// If a waiting container needs the VRAM, the copy out must be completed. The called container is
/// restored later.
#[test]
fn copy_out_for_a_waiter_is_completed() {
    let mut world = World::new(3);
    let waiter = world.running(1, 800);
    world.settle();
    let id = copying(&mut world);
    world.call(waiter);
    assert_eq!(world.state(1), State::Queued);
    call_waits(&mut world, id);
    assert_eq!(world.given_up, []);
    world.settle();
    assert_eq!(world.container(1).figures.restores, 1);
}

#[test]
fn request_to_restore_cancels_the_copy_out() {
    let mut world = World::new(3);
    let id = copying(&mut world);
    world.feed(Input::Command(CommandId(9), key(2), Request::Restore));
    world.read_levels(2, id, u64::MAX, 0);
    assert_eq!(world.given_up, [id]);
    cancels(&mut world, id);
    assert_eq!(world.state(2), State::Active);
    assert!(world.answers.contains(&(CommandId(9), true)), "{:?}", world.answers);
}

#[test]
fn forced_offload_is_not_cancelled() {
    let mut world = World::new(3);
    let id = copying(&mut world);
    world.container_mut(2).goal.offload_mut().unwrap().forced = true;
    call_waits(&mut world, id);
    assert_eq!(world.given_up, []);
}

/// A hostile library reports that it has cancelled its copy out, although the controller did not order this. The
/// offload must count as failed, so that it is not repeated at once, again and again.
#[test]
fn cancellation_without_order_is_a_failure() {
    let mut world = World::new(3);
    let id = copying(&mut world);
    cancels(&mut world, id);
    assert_eq!(world.state(2), State::Active);
    assert_eq!(world.refused, [Reason::Busy.to_string()]);
    assert!(world.container(2).offload_failures.not_before() > 0);
}

/// A call comes while host memory is short. The copy must be cancelled for lack of host memory, so
/// that its pages are freed at once.
#[test]
fn short_host_memory_comes_first() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let id = copying(&mut world);
    world.agents.get_mut(&id).unwrap().wants = true;
    world.read_levels(2, id, 99, 100);
    assert_eq!((&world.turned_back[..], &world.given_up[..]), (&[id][..], &[][..]));
}

/// One of two processes is copied out already. The copy of the other one must be completed: no call
/// could continue before both are restored.
#[test]
fn partly_copied_container_goes_on() {
    let mut world = World::new(3);
    let first = world.running(2, 300);
    world.join(2);
    let second = *world.agents.keys().next_back().unwrap();
    world.allocate(second, 100);
    world.ask_offload(2, first);
    let copies = |world: &World, id: ProcessId| {
        let order = world.agents[&id].inbox.front();
        matches!(order, Some(ControllerMessage::Order { action: Action::CopyOut { .. }, .. }))
    };
    for _ in 0..20 {
        for id in [first, second] {
            if !copies(&world, id) {
                world.work(id);
            }
        }
        if !world.questions.is_empty() {
            world.answer_question();
        }
    }
    assert!(copies(&world, first) && copies(&world, second));
    world.work(first);
    assert_eq!(world.agents[&first].phase, Phase::CopiedOut);
    call_waits(&mut world, second);
    assert_eq!(world.given_up, []);
}

#[test]
fn older_library_is_not_told() {
    let mut world = World::new(3);
    world.libraries = vec![Capabilities(ALL_CAPABILITIES.0 & !Capabilities::GIVES_UP_COPIES.0)];
    let id = copying(&mut world);
    call_waits(&mut world, id);
    assert_eq!(world.given_up, []);
}
