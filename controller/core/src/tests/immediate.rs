//! Tests of the restore policy `immediate`, in which a restore does not wait until other containers
//! are idle.

use affinode_proto::{state::State, wire::Phase};

use super::super::{immediate, offload_level};
use super::{
    super::ProcessId,
    world::{Host, World, key},
};

/// A world with an offloaded container of policy `immediate` and priority 0.
fn asker(size: u64) -> (World, ProcessId) {
    let mut world = World::new(3);
    world.immediate = vec![0];
    world.announce(0);
    let id = world.running(0, size);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    (world, id)
}

/// Lets time pass while the processes `busy` are in use and `asker` waits. Returns whether `asker`
/// was restored.
fn while_in_use(world: &mut World, busy: &[ProcessId], asker: ProcessId, ticks: usize) -> bool {
    for _ in 0..ticks {
        busy.iter().for_each(|id| world.call(*id));
        world.call(asker);
        world.tick();
        while !world.questions.is_empty() {
            world.answer_question();
        }
        for id in world.agents.keys().copied().collect::<Vec<_>>() {
            while world.agents.get(&id).is_some_and(|agent| !agent.inbox.is_empty()) {
                world.work(id);
            }
        }
        if world.agents[&asker].phase == Phase::Open {
            return true;
        }
    }
    false
}

#[test]
fn container_in_use_is_offloaded_not_ended() {
    let (mut world, asker) = asker(600);
    let busy = world.running(2, 700);
    assert!(while_in_use(&mut world, &[busy], asker, 20));
    assert_eq!((world.agents[&busy].on_device() < 700, world.ended.len()), (true, 0));
    // The evicted container must be restored when the waiter no longer needs the VRAM.
    world.settle();
    assert!(!world.agents[&busy].wants, "a call of the busy process still waits");
}

/// A container in use that was just restored must not be evicted before it has had its turn, although
/// its minimum residency is 0 here.
#[test]
fn container_in_use_keeps_its_turn() {
    const BUSY: usize = 6; // Of the engine `checkpoint`, so that its restore takes time.
    let (mut world, asker) = asker(600);
    world.announce(BUSY);
    let busy = world.running(BUSY, 700);
    world.settle();
    assert_eq!(world.agents[&busy].phase, Phase::Checkpointed);
    assert!(while_in_use(&mut world, &[], busy, 20));
    let delay_ms = offload_level::expected_delay_ms(&world.node.state, &key(BUSY), false);
    assert!(delay_ms > 100, "a restore of {delay_ms} ms");
    let restored_at = world.container(BUSY).figures.restored_at.unwrap();
    assert!(while_in_use(&mut world, &[busy], asker, 200));
    let stayed_ms = world.now - restored_at;
    assert!(stayed_ms >= 10 * delay_ms, "evicted after {stayed_ms} ms");
}

#[test]
fn queue_policy_waits_for_containers_in_use() {
    let (mut world, asker) = asker(600);
    (world.immediate, world.container_mut(0).policy.restore) =
        (Vec::new(), super::super::policy::Restore::Queue);
    let busy = world.running(2, 700);
    assert!(!while_in_use(&mut world, &[busy], asker, 100));
    assert_eq!(world.agents[&busy].phase, Phase::Open);
}

#[test]
fn latest_immovable_processes_end_as_needed() {
    let (mut world, asker) = asker(500);
    let sizes = [(2, 100), (2, 200), (2, 300), (2, 10)];
    let pids: Vec<u32> = sizes
        .into_iter()
        .map(|(container, size)| {
            let id = world.running(container, size);
            world.agents.get_mut(&id).unwrap().fixed = true;
            world.now += 1_000;
            world.agents[&id].pid
        })
        .collect();
    assert!(while_in_use(&mut world, &[], asker, 200));
    // The last process, with 10 bytes, must be spared: the end of the process before it, with 300
    // bytes, suffices.
    let asked: Vec<u32> = world.ended.iter().filter(|(_, force)| !force).map(|e| e.0).collect();
    assert_eq!(asked, [pids[2]]);
}

/// Creates a process that cannot be offloaded and ignores SIGTERM. Returns its pid.
fn stubborn(world: &mut World) -> u32 {
    let mut id = world.running(2, 700);
    while world.agents[&id].pid % 2 == 1 {
        world.exit(id);
        id = world.running(2, 700);
    }
    world.agents.get_mut(&id).unwrap().fixed = true;
    world.agents[&id].pid
}

/// A process was ordered to end and ignores SIGTERM. It must not be killed if the waiter exits, or
/// if the priority of the process's container becomes higher than the waiter's.
#[test]
fn ended_process_survives_without_urgent_waiter() {
    for gone in [true, false] {
        let (mut world, asker) = asker(600);
        let pid = stubborn(&mut world);
        for _ in 0..100 {
            if world.ended.is_empty() {
                while_in_use(&mut world, &[], asker, 1);
            }
        }
        assert_eq!(world.ended, [(pid, false)]);
        match gone {
            true => world.exit(asker),
            false => world.container_mut(2).policy.priority = 5,
        }
        world.settle();
        assert_eq!(world.ended, [(pid, false)], "gone: {gone}");
    }
}

#[test]
fn process_that_ignores_end_is_killed() {
    let (mut world, asker) = asker(600);
    let pid = stubborn(&mut world);
    let asked = world.now;
    assert!(while_in_use(&mut world, &[], asker, 200));
    assert_eq!(world.ended, [(pid, false), (pid, true)]);
    assert!(world.now - asked >= 5_000);
}

/// A process must not be ended in four cases: its end does not free enough VRAM, its priority is
/// above the waiter's, no call of the waiter waits, or its container is pinned.
#[test]
fn protected_processes_are_not_ended() {
    let fixed = |world: &mut World, container, size| {
        let id = world.running(container, size);
        world.agents.get_mut(&id).unwrap().fixed = true;
        id
    };
    let (mut world, waiter) = asker(600);
    fixed(&mut world, 2, 300);
    world.others = 500;
    assert!(!while_in_use(&mut world, &[], waiter, 200), "there is no free VRAM");
    assert_eq!(world.ended, []);

    let (mut world, waiter) = asker(600);
    fixed(&mut world, 1, 700);
    assert!(!while_in_use(&mut world, &[], waiter, 200), "the process has a higher priority");
    assert_eq!(world.ended, []);

    let (mut world, waiter) = asker(600);
    fixed(&mut world, 2, 700);
    world.pin(2, true);
    assert!(!while_in_use(&mut world, &[], waiter, 200), "the container is pinned");
    assert_eq!(world.ended, []);

    let (mut world, _) = asker(600);
    fixed(&mut world, 2, 700);
    let command = super::super::CommandId(1);
    let request = super::super::Request::Restore;
    world.feed(super::super::Input::Command(command, key(0), request));
    world.settle();
    assert_eq!((world.state(0), world.ended.len()), (State::Queued, 0), "no call waits");
}

/// An urgent container (policy `immediate`, with a waiting call) must be served before containers
/// that wait longer, but after containers of higher priority.
#[test]
fn it_goes_before_others_of_its_priority() {
    let mut world = World::new(3);
    world.immediate = vec![0];
    world.announce(0);
    let ids = [world.running(0, 300), world.running(1, 300), world.running(2, 300)];
    world.settle();
    world.others = 1_000;
    world.call(ids[2]);
    world.now += 60_000;
    world.call(ids[1]);
    world.call(ids[0]);
    assert_eq!(world.node.state.admission.queue.in_order(world.now)[0], key(2));
    let turns = |world: &World| {
        let mut turns = Vec::new();
        immediate::escalates_to_termination(&world.node.state, &mut turns);
        turns
    };
    assert_eq!(turns(&world), [key(0), key(2), key(1)]);
    // The waiter that has aged is served before the waiter of higher priority. Check the order
    // again without the aged waiter:
    world.node.state.admission.queue.leave(&key(2));
    assert_eq!(turns(&world), [key(1), key(0)]);
}

/// A process must be ended if its calls never end and forced offloads fail repeatedly. It must not
/// be ended if its calls end too late only sometimes.
#[test]
fn busy_process_is_forced_thrice_before_its_end() {
    let busy = affinode_proto::wire::message::Outcome::Busy;
    let (mut world, waiter) = asker(600);
    let other = world.running(2, 700);
    for _ in 0..2 {
        world.fail = Some(busy);
        assert!(!while_in_use(&mut world, &[other], waiter, 2), "the container could not be moved");
    }
    assert!(while_in_use(&mut world, &[other], waiter, 20));
    assert!(world.agents[&other].on_device() < 700);
    assert_eq!((world.fail, world.ended.len()), (None, 0));

    let (mut world, waiter) = asker(600);
    let other = world.running(2, 700);
    let resident = (0..200).any(|_| {
        world.fail = Some(busy);
        while_in_use(&mut world, &[], waiter, 1)
    });
    assert!(resident && !world.agents.contains_key(&other));
}

/// An operator requests a restore during a forced offload. The container must not count as
/// immovable because of this.
#[test]
fn restore_request_in_offload_ends_no_process() {
    let (mut world, asker) = asker(600);
    let other = world.running(2, 700);
    world.call(asker);
    while world.state(2) != State::Closing {
        world.answer_question();
        world.tick();
    }
    let command = super::super::CommandId(1);
    let request = super::super::Request::Restore;
    world.feed(super::super::Input::Command(command, key(2), request));
    assert!(while_in_use(&mut world, &[other], asker, 40));
    assert_eq!(world.ended, []);
}

#[test]
fn call_before_close_keeps_forced_offload() {
    let (mut world, waiter) = asker(600);
    let busy = world.running(2, 700);
    world.call(waiter);
    let goal = |world: &World| world.container(2).goal.clone();
    // Advance until the offload begins, without a reply to its survey of host memory.
    while goal(&world).is_resident() {
        world.call(busy);
        world.tick();
    }
    world.call(busy);
    world.tick();
    assert!(goal(&world).is_requested());
    assert!(while_in_use(&mut world, &[busy], waiter, 20));
}
