//! Tests of waiters that cannot be served, and of processes that do not end what they began. The other
//! containers of the GPU must not wait for them.

use std::collections::BTreeSet;

use affinode_proto::{
    state::State,
    wire::{
        Phase,
        message::{Action, AgentMessage, ControllerMessage},
    },
};

use super::{
    super::{Effect, Input, Millis, ProcessId},
    world::{Host as _, TOTAL, World, key},
};

const HOUR: Millis = 3_600_000;

/// Lets the world go on until no call of the process waits, but at most this time. Returns the passed
/// time.
fn wait_for(world: &mut World, id: ProcessId, most_ms: Millis) -> Millis {
    let began = world.now;
    while world.agents[&id].wants && world.now - began < most_ms {
        world.pass();
    }
    world.now - began
}

/// Lets the world go on without these processes: they neither execute orders nor report.
fn pass_without(world: &mut World, silent: &BTreeSet<ProcessId>) {
    let ids: Vec<ProcessId> = world.agents.keys().copied().collect();
    for id in ids.into_iter().filter(|id| !silent.contains(id)) {
        while world.agents.get(&id).is_some_and(|agent| !agent.inbox.is_empty()) {
            world.work(id);
        }
        if world.agents.get(&id).is_some_and(|agent| agent.wants) {
            world.call(id);
        }
    }
    while world.is_asked() {
        world.answer_question();
    }
    world.tick();
}

/// Orders to pause allocations that these messages contain.
fn holds(inbox: impl IntoIterator<Item = ControllerMessage>) -> usize {
    let is_hold = |message: &ControllerMessage| {
        matches!(message, ControllerMessage::Order { action: Action::HoldAllocations { .. }, .. })
    };
    inbox.into_iter().filter(is_hold).count()
}

/// The first waiter needs more VRAM than all offloads could free. Neither are others evicted for it,
/// nor do they wait behind it.
#[test]
fn hopeless_waiter_blocks_no_other() {
    let mut world = World::new(3);
    let large = world.running(0, 800);
    world.settle();
    world.take_unmanaged(300);
    let small = world.running(2, 100);
    world.settle();
    world.call(large);
    world.tick_after(40_000);
    world.call(small);
    assert!(wait_for(&mut world, small, 10_000) < 1_000, "it waits behind the large one");
    let container = world.container_mut(2);
    container.policy.idle_timeout_ms = HOUR;
    let offloads = container.figures.offloads;
    (0..2_000).for_each(|_| world.pass());
    assert_eq!(world.state(0), State::Queued);
    assert_eq!(world.container(2).figures.offloads, offloads, "it was evicted in vain");
    world.take_unmanaged(0);
    assert!(wait_for(&mut world, large, 10_000) < 5_000, "the large one fits now");
}

/// A waiter fits only without the margin that a restore needs. It can never be served, so it evicts no
/// other.
#[test]
fn margin_counts_for_a_hopeless_waiter() {
    let mut world = World::new(3);
    let large = world.running(0, 800);
    world.settle();
    world.take_unmanaged(190);
    let small = world.running(2, 100);
    world.settle();
    world.call(small);
    assert!(wait_for(&mut world, small, 10_000) < 1_000);
    let container = world.container_mut(2);
    container.policy.idle_timeout_ms = HOUR;
    let offloads = container.figures.offloads;
    world.call(large);
    (0..600).for_each(|_| world.pass());
    assert_eq!(world.container(2).figures.offloads, offloads, "it was evicted in vain");
    world.take_unmanaged(0);
    assert!(wait_for(&mut world, large, 10_000) < 5_000, "the large one fits now");
}

/// The victim of the first waiter has left, and no sample of the GPU shows it yet. The first waiter
/// keeps its place before a smaller one, whether the victim was offloaded or has ended.
#[test]
fn first_waiter_keeps_its_place_at_a_release() {
    for ends in [false, true] {
        let mut world = World::new(9);
        let [first, second] = [(0, 700), (3, 500)].map(|(n, bytes)| {
            let id = world.running(n, bytes);
            world.settle();
            id
        });
        let victim = world.running(6, 450);
        world.container_mut(6).policy.idle_timeout_ms = HOUR;
        (0..600).for_each(|_| world.pass());
        for n in [0, 3, 6] {
            world.container_mut(n).policy.priority = 0;
        }
        world.call(first);
        world.call(second);
        let is_resident = |world: &World, id: ProcessId| world.agents[&id].phase == Phase::Open;
        assert!(!is_resident(&world, first) && !is_resident(&world, second));
        if ends {
            world.exit(victim);
        }
        let began = world.now;
        while world.agents[&first].wants && world.now - began < 60_000 {
            world.pass();
            assert!(!is_resident(&world, second) || is_resident(&world, first), "it was overtaken");
        }
        assert!(is_resident(&world, first));
    }
}

/// An operator keeps a container on the GPU. Its own VRAM counts once when its allocation waits.
#[test]
fn allocation_of_a_pinned_container_is_served() {
    let mut world = World::new(2);
    let pinned = world.running(0, 400);
    world.pin(0, true);
    let idle = world.running(1, 550);
    let policy = &mut world.container_mut(1).policy;
    (policy.idle_timeout_ms, policy.priority) = (HOUR, 0);
    (0..600).for_each(|_| world.pass());
    assert_eq!(world.agents[&idle].phase, Phase::Open);
    // The neighbour may leave a second later, when the reason of the pinned container is shown again.
    world.container_mut(1).resident_until = world.now + 1_000;
    world.allocate(pinned, 300);
    (0..600).for_each(|_| world.pass());
    assert_ne!(world.agents[&idle].phase, Phase::Open, "the idle neighbour was not evicted");
}

/// The process that is evicted for a waiter never reports. Then the next one is evicted.
#[test]
fn silent_victim_does_not_stop_evictions() {
    let mut world = World::new(3);
    let waiter = world.running(0, 300);
    world.settle();
    for n in [1, 2] {
        world.running(n, 400);
        let policy = &mut world.container_mut(n).policy;
        (policy.idle_timeout_ms, policy.priority) = (HOUR, 0);
    }
    world.take_unmanaged(TOTAL - world.used());
    (0..300).for_each(|_| world.pass());
    world.call(waiter);
    let (began, mut silent) = (world.now, BTreeSet::new());
    while world.agents[&waiter].wants && world.now - began < 120_000 {
        let is_ordered = |id: &ProcessId| {
            let moves = |message: &ControllerMessage| {
                let ControllerMessage::Order { action, .. } = message else { return false };
                matches!(action, Action::CopyOut { .. } | Action::Checkpoint { .. })
            };
            world.agents[id].inbox.iter().any(moves)
        };
        if silent.is_empty() {
            silent.extend(world.agents.keys().copied().filter(is_ordered));
        }
        pass_without(&mut world, &silent);
    }
    assert_eq!(silent.len(), 1, "one process was evicted first");
    assert!((20_000..40_000).contains(&(world.now - began)), "{} ms", world.now - began);
}

/// A process repeats the message that its allocation waits, before it is answered. Each message could
/// end the container's grant and begin another one, for which all others pause their allocations.
#[test]
fn repeated_allocation_waits_delay_no_wake() {
    // Whether the first process repeats its message, and which ticket the repeating one uses.
    for (is_first, is_new_ticket) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut world = World::new(2);
        let victim = world.running(0, 300);
        world.settle();
        let [first, second] = [(); 2].map(|()| {
            world.join(1);
            ProcessId(world.next)
        });
        let want =
            |ticket| AgentMessage::AllocWait { ticket, bytes: 10, uuid: [7; 16], attempts: 0 };
        world.feed(Input::Message(first, want(1)));
        let (mut ticket, mut held, mut waits_ms) = (1, 0, Vec::new());
        while world.now < 60_000 {
            let called = world.now;
            world.call(victim);
            while world.agents[&victim].wants && world.now - called < 60_000 {
                for _ in 0..4 {
                    ticket += u64::from(is_new_ticket);
                    let from = if is_first { first } else { second };
                    world.feed(Input::Message(from, want(ticket)));
                }
                let told = world.agents[&victim].inbox.iter().copied();
                held += holds(told);
                pass_without(&mut world, &BTreeSet::from([first, second]));
            }
            waits_ms.push(world.now - called);
            world.settle();
        }
        let longest = waits_ms.iter().max().unwrap();
        let case = format!("{is_first}, {is_new_ticket}: {longest} ms, {held} holds");
        println!("{case}");
        assert!(*longest <= 10_500, "{case}");
        assert!(held <= 200, "{case}");
    }
}

/// A process takes its VRAM and never reports that it is restored. The promise of this VRAM must end,
/// and with it the pauses for the restore.
#[test]
fn restore_without_a_report_keeps_nothing() {
    let mut world = World::new(3);
    let (stuck, other) = (world.running(0, 450), world.running(2, 300));
    world.settle();
    world.call(stuck);
    let is_ordered = |world: &World| {
        let restores = |message: &ControllerMessage| matches!(message, ControllerMessage::Order { action, .. } if action.is_restore());
        world.agents[&stuck].inbox.iter().any(restores)
    };
    while !is_ordered(&world) {
        if !world.agents[&stuck].inbox.is_empty() {
            world.work(stuck);
        }
        world.answer_question();
    }
    let phase = world.agents[&stuck].phase;
    world.agents.get_mut(&stuck).unwrap().phase = Phase::Open;
    let silent = BTreeSet::from([stuck]);
    let began = world.now;
    world.call(other);
    while world.agents[&other].wants && world.now - began < 60_000 {
        pass_without(&mut world, &silent);
    }
    let waited_ms = world.now - began;
    assert!(waited_ms < 15_000, "{waited_ms} ms, {phase:?}");
    assert!(world.node.state.is_settled(), "copiers and offloads still wait for the grant");
    world.join(1);
    let newcomer = ProcessId(world.next);
    let told = world.agents[&newcomer].inbox.iter().copied();
    assert_eq!(holds(told), 0, "a new process waits for the grant");
}

/// The context of a waiter is evicted for an earlier waiter. It keeps its place before later waiters,
/// unless its restores have failed: each attempt pauses the allocations of the others.
#[test]
fn evicted_context_keeps_the_place() {
    type Change = fn(&mut World);
    let cases: [(Change, usize); 4] = [
        (|_| {}, 1),
        (|world| world.container_mut(1).restore_failures.in_a_row = 1, 1),
        (|world| world.container_mut(1).restore_failures.in_a_row = 2, 2),
        (|world| world.container_mut(1).shown.state = State::Lost, 2),
    ];
    for (change, place) in cases {
        let mut world = World::new(3);
        let ids = [0, 1, 2].map(|n| {
            let id = world.running(n, 200);
            world.container_mut(n).policy.priority = 0;
            world.settle();
            id
        });
        world.take_unmanaged(TOTAL - world.used());
        for id in ids {
            world.call(id);
            world.tick_after(1_000);
        }
        let order = |world: &World| world.node.state.admission.queue.in_order(world.now);
        assert_eq!(order(&world), [0, 1, 2].map(key));
        world.node.state.admission.queue.leave(&key(1));
        change(&mut world);
        super::super::grants::enqueue(&mut world.node.state, &key(1));
        assert_eq!(order(&world).iter().position(|other| *other == key(1)), Some(place));
    }
}

/// The counters of a queued container show its waiting calls. They must not end the eviction of its
/// context, which waits for the reading of host memory.
#[test]
fn counters_do_not_end_a_context_eviction() {
    let mut world = World::new(9);
    let first = world.running(2, 600);
    world.settle();
    let second = world.running(5, 500);
    world.settle();
    assert_eq!(world.agents[&second].phase, Phase::CopiedOut);
    world.take_unmanaged(TOTAL - world.used() - 10);
    for id in [second, first] {
        world.container_mut(if id == first { 2 } else { 5 }).policy.priority = 0;
        world.call(id);
    }
    world.node.state.admission.queue.leave(&key(5));
    let offload = super::super::container::Offload::deep(world.now);
    super::super::offload::evict(&mut world.node.state, &key(5), offload);
    assert!(world.container(5).goal.is_requested());
    let page = world.agents[&second].page();
    assert!(page.waiters > 0);
    world.feed(Input::Page(second, page));
    assert!(!world.container(5).goal.is_resident(), "the eviction was ended");
}

/// After a restart of the controller, a call waits for the gates of a resident container, and a process
/// has restored itself. The container is not restored, but nothing of this may be left.
#[test]
fn resident_container_needs_no_restore() {
    let mut world = World::new(1);
    let id = world.running(0, 300);
    assert_eq!(world.state(0), State::Active);
    world.container_mut(0).wake_began = Some(world.now);
    let process = world.node.state.registry.processes.get_mut(&id).unwrap();
    process.memory.set_offloaded_vram(Some(process.memory.vram.clone()));
    super::super::restore::finish_restore(&mut world.node.state, &key(0));
    assert_eq!(world.container(0).wake_began, None);
    assert_eq!(world.process(id).memory.offloaded, None);
    let effects = std::mem::take(&mut world.node.state.output.effects);
    assert!(effects.contains(&Effect::Journal(key(0), None)), "{effects:?}");
}

/// A new controller finds an offload in progress. Its VRAM counts as being freed, as for an offload of
/// its own.
#[test]
fn recalled_offload_is_expected_to_end() {
    let mut world = World::new(1);
    world.running(0, 300);
    world.settle();
    assert_eq!(world.state(0), State::Offloaded);
    world.restart(false);
    (0..20).for_each(|_| world.pass());
    let offload = world.container(0).goal.offload().expect("it is still offloaded");
    assert!(offload.requested_at.is_some());
}
