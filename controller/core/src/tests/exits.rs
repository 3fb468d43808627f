//! Tests of processes that exit during an offload or a restore. Their driver shuts down first.

use affinode_proto::{
    state::State,
    wire::{
        Phase,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::super::{Input, ProcessId, input::SwapStatus};
use super::world::{Host, World};

/// Error `CUDA_ERROR_DEINITIALIZED`, which the driver returns after the process has called `exit`.
const ENDED: u32 = 4;

/// Advances the world until the process receives an order that `wanted` accepts. By then the driver
/// of the process has shut down.
fn ends_at(world: &mut World, id: ProcessId, wanted: fn(&Action) -> bool) {
    for _ in 0..1_000 {
        if let Some(ControllerMessage::Order { order, action, .. }) =
            world.agents[&id].inbox.front().cloned()
            && wanted(&action)
        {
            let agent = world.agents.get_mut(&id).unwrap();
            agent.inbox.pop_front();
            agent.phase = Phase::Open;
            let swap = SwapStatus { swappable_bytes: agent.swappable, ..SwapStatus::default() };
            let report = swap.report(order, Outcome::DriverError, Phase::Open, ENDED);
            return world.feed(Input::Message(id, report));
        }
        world.tick();
        world.work(id);
        world.answer_question();
    }
    panic!("the process does not receive the order");
}

#[test]
fn driver_ended_on_way_out_is_no_refusal() {
    for wanted in [
        |action: &Action| matches!(action, Action::Lock { .. }),
        |action: &Action| matches!(action, Action::Checkpoint { .. }),
    ] {
        let mut world = World::new(1);
        let id = world.running(0, 300);
        ends_at(&mut world, id, wanted);
        assert_eq!(world.refused, [""; 0]);
        assert_eq!(world.state(0), State::Active);
        world.exit(id);
        assert_eq!((world.state(0), world.journal.len()), (State::Unregistered, 0));
    }
}

#[test]
fn driver_end_during_restore_is_no_refusal() {
    let mut world = World::new(1);
    let id = world.running(0, 300);
    world.settle();
    assert_eq!(world.state(0), State::Offloaded);
    world.call(id);
    ends_at(&mut world, id, |action| *action == Action::Restore);
    assert_eq!(world.refused, [""; 0]);
    assert_eq!(world.state(0), State::Active);
    world.exit(id);
    assert_eq!((world.state(0), world.journal.len()), (State::Unregistered, 0));
}

/// A process exits during its checkpoint, and its driver reports that it has shut down. The other
/// process of the container must be restored, in whatever phase it is.
#[test]
fn driver_end_restores_sibling_process() {
    let mut world = World::new(1);
    let ids = [world.running(0, 200), world.running(0, 200)];
    for _ in 0..200 {
        if ids.iter().any(|id| world.agents[id].phase == Phase::Checkpointed) {
            break;
        }
        world.tick();
        ids.into_iter().for_each(|id| world.work(id));
        world.answer_question();
    }
    let last = *ids.iter().find(|id| world.agents[*id].phase != Phase::Checkpointed).unwrap();
    ends_at(&mut world, last, |action| matches!(action, Action::Checkpoint { .. }));
    world.exit(last);
    world.settle_all();
    assert_eq!(world.refused, [""; 0]);
    assert!(world.agents.values().all(|agent| !agent.wants));
}
