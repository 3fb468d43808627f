//! Tests of prewakes: restores that incoming connections cause before a CUDA call.

use affinode_proto::{reason::Reason, state::State, wire::Phase};

use super::{
    super::{
        Input, ProcessId,
        input::{CommandId, Request},
    },
    world::{Host, World, key},
};

/// Creates a world with an offloaded container whose connections were read once.
fn listening() -> (World, ProcessId) {
    let mut world = World::new(2);
    let id = world.running(0, 600);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    count(&mut world, 100);
    (world, id)
}

fn count(world: &mut World, count: u64) {
    world.feed(Input::Connections(key(0), Some(count)));
}

/// Delivers pending messages for so short a time that no container becomes idle.
fn arrive(world: &mut World) {
    for _ in 0..40 {
        while !world.questions.is_empty() {
            world.answer_question();
        }
        for id in world.agents.keys().copied().collect::<Vec<_>>() {
            world.work(id);
        }
    }
}

/// Reports a connection that no call follows. Returns whether the connection caused a restore.
fn knocks_in_vain(world: &mut World, id: ProcessId) -> bool {
    let before = world.container(0).connections.accepted.unwrap_or(0);
    count(world, before);
    count(world, before + 1);
    arrive(world);
    let came = world.agents[&id].phase == Phase::Open;
    world.settle();
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    came
}

#[test]
fn connection_prewakes_container() {
    let (mut world, id) = listening();
    count(&mut world, 100);
    arrive(&mut world);
    assert_eq!(world.state(0), State::Offloaded, "no new connection arrived");
    count(&mut world, 101);
    arrive(&mut world);
    assert_eq!(world.agents[&id].phase, Phase::Open);
    // The container stays resident for the expected call, longer than its idle timeout.
    world.settle();
    assert_eq!(world.container(0).shown.reason.0, Reason::Connection);
    world.call(id);
    world.tick();
    assert_eq!(world.node.prewakes(), (1, 1));
}

#[test]
fn connections_without_calls_stop_prewaking() {
    let (mut world, id) = listening();
    assert_eq!(
        [(); 6].map(|()| knocks_in_vain(&mut world, id)),
        [true, true, true, true, false, false]
    );
    assert_eq!(world.node.prewakes(), (4, 0));
    // These connections are counted although they cause no prewake. After as many connections that
    // were each followed by a call, connections must cause prewakes again.
    for _ in 0..6 {
        count(&mut world, 900);
        count(&mut world, 901);
        world.call(id);
        world.settle();
        assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
        world.now += 60_000;
    }
    assert!(knocks_in_vain(&mut world, id));
}

#[test]
fn connection_evicts_no_container() {
    let (mut world, id) = listening();
    let other = world.running(1, 600);
    count(&mut world, 101);
    arrive(&mut world);
    assert_eq!(
        (world.agents[&id].phase, world.agents[&other].phase),
        (Phase::Checkpointed, Phase::Open)
    );
}

#[test]
fn requested_offload_ignores_connections() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    arrive(&mut world);
    count(&mut world, 1);
    count(&mut world, 2);
    arrive(&mut world);
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
}

#[test]
fn missing_own_network_is_warned_once() {
    let (mut world, _) = listening();
    (0..3).for_each(|_| world.feed(Input::Connections(key(0), None)));
    let told = &world.container(0).warnings;
    assert_eq!(told.iter().filter(|line| line.contains("wake_on")).count(), 1, "{told:?}");
}
