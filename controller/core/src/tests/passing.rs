//! Tests of a waiter that is served before an earlier one, because its restore frees host memory.

use std::collections::BTreeSet;

use affinode_proto::{event::EventKind, reason::Reason, state::State, wire::Phase};

use super::{
    super::{
        Effect, Input, Millis, ProcessId, Request,
        host_memory::{MemoryPlace, MemoryPool},
        input::CommandId,
        policy::Mode,
    },
    world::{Host, World, key},
};

/// Containers 1 and 0 are offloaded, with 500 and 100 bytes of host memory. Container 2 has 600
/// bytes of VRAM and needs 450 bytes of host memory for its offload, but 400 are free. Container 1
/// can therefore not be restored beside it, but container 0 can. Returns the processes of containers
/// 0 and 1.
fn blocked() -> (World, [ProcessId; 2]) {
    let mut world = World::new(3);
    world.host_total = Some(1_000);
    let first = world.running(1, 500);
    let small = world.running(0, 100);
    world.settle();
    assert_eq!([world.state(0), world.state(1)], [State::Offloaded; 2]);
    world.running(2, 600);
    // Later attempts to offload container 2 are 30 s apart.
    (0..2_000).for_each(|_| world.pass());
    assert_eq!(world.container(2).shown.reason.0, Reason::HostMemory);
    (world, [small, first])
}

/// Lets time pass until no call of the process waits. Returns this time.
fn wait_for(world: &mut World, id: ProcessId) -> Millis {
    let began = world.now;
    for _ in 0..1_000 {
        if !world.agents[&id].wants {
            break;
        }
        world.pass();
    }
    world.now - began
}

/// Lets 30 s pass, in which the container must stay offloaded.
fn stays_offloaded(world: &mut World, n: usize) {
    for _ in 0..500 {
        world.pass();
        assert_eq!(world.state(n), State::Offloaded);
    }
}

#[test]
fn restore_that_frees_host_memory_passes() {
    let (mut world, [small, first]) = blocked();
    world.call(first);
    world.call(small);
    let small_ms = wait_for(&mut world, small);
    assert!((5_000..7_000).contains(&small_ms), "{small_ms} ms: the first waiter comes first");
    // Container 2 is offloaded as soon as the restore has freed host memory.
    let first_ms = wait_for(&mut world, first);
    assert!(first_ms < 2_000, "{first_ms} ms");
}

/// No call waits for container 0. It is restored nevertheless, because its host memory is needed,
/// and stays resident until container 2 is offloaded.
#[test]
fn restore_without_a_call_frees_host_memory() {
    let (mut world, [_, first]) = blocked();
    world.call(first);
    let mut reasons = BTreeSet::new();
    let began = world.now;
    while world.agents[&first].wants && world.now - began < 60_000 {
        world.pass();
        reasons.insert(world.container(0).shown.reason.0.as_str());
    }
    assert!((5_000..8_000).contains(&(world.now - began)), "{} ms", world.now - began);
    // It must not take the host memory back at once.
    let restored_at = world.container(0).figures.restored_at.unwrap();
    assert!(world.container(0).usage.last_use < restored_at, "a relief is no use");
    while world.now < restored_at + 9_000 {
        world.pass();
        assert_ne!(world.state(0), State::Offloaded, "{} ms", world.now - restored_at);
    }
    assert!(reasons.contains(Reason::FreesHostMemory.as_str()), "{reasons:?}");
}

/// The restore of container 0 would not free enough host memory, or an operator has offloaded the
/// container. It must then stay offloaded.
#[test]
fn no_container_is_restored_in_vain() {
    for asked in [false, true] {
        let (mut world, [_, first]) = blocked();
        if asked {
            world.container_mut(0).cause = Reason::Requested;
        } else {
            world.host_total = Some(940);
        }
        world.call(first);
        stays_offloaded(&mut world, 0);
        assert!(world.agents[&first].wants, "{asked}");
    }
}

/// While the first waiter can be served by an offload in progress, no other waiter may take the
/// VRAM.
#[test]
fn no_waiter_passes_an_offload_in_progress() {
    let (mut world, [small, first]) = blocked();
    world.call(first);
    world.call(small);
    world.tick_after(6_000);
    world.host_total = Some(2_000);
    let small_ms = wait_for(&mut world, small);
    assert!(!world.agents[&first].wants, "the small waiter was served first");
    let first_ms = wait_for(&mut world, first);
    assert!(first_ms < 60 || small_ms < 60, "{small_ms} ms, {first_ms} ms");
}

#[test]
fn deadlock_by_host_memory_is_named() {
    let (mut world, [_, first]) = blocked();
    world.container_mut(0).policy.mode = Mode::Manual;
    world.call(first);
    world.settle();
    assert!(world.agents[&first].wants, "no restore can free host memory");
    world.now += 3_600_000;
    world.feed(Input::Gpus(Ok(world.gpus())));
    let effects = world.bench.node.handle(world.bench.now, Input::Tick);
    let text = |effect: Effect| match effect {
        Effect::Publish(event) if event.kind == EventKind::NoProgress => Some(event.text),
        _ => None,
    };
    let texts: Vec<String> = effects.into_iter().filter_map(text).collect();
    assert_eq!(texts.len(), 1);
    let warnings = |world: &World| world.node.warnings(&key(1));
    assert!(warnings(&world)[0].contains(" of VRAM, but "), "{:?}", warnings(&world));
    // The warning stays while the offload is tried again.
    world.settle();
    assert_eq!(warnings(&world).len(), 1);
    let expected_detail = ": the node has 0 MiB of free host memory, but the offload needs 0 MiB";
    assert!(warnings(&world)[0].ends_with(expected_detail), "{:?}", warnings(&world));
    let expected = "cannot be offloaded for lack of host memory";
    assert!(texts[0].contains(expected), "{texts:?}");
}

/// An offload that lacked host memory is tried again as soon as a process with host memory exits.
#[test]
fn exit_permits_a_refused_offload() {
    let (mut world, [_, first]) = blocked();
    world.exit(first);
    (0..20).for_each(|_| world.pass());
    assert_eq!(world.state(2), State::Offloaded);
}

#[test]
fn restored_container_stays_for_a_while() {
    for immediate in [false, true] {
        let mut world = World::new(3);
        if immediate {
            world.immediate.push(1);
            world.announce(1);
        }
        let waiter = world.running(1, 800);
        world.settle();
        world.running(0, 300);
        let until = world.now + 10_000;
        world.container_mut(0).resident_until = until;
        world.call(waiter);
        while world.now + 60 < until {
            assert_ne!(world.state(0), State::Offloaded, "{immediate}, {} ms", until - world.now);
            world.pass();
        }
        world.settle();
        assert!(!world.agents[&waiter].wants, "{immediate}");
    }
}

/// After 30 s, a waiter evicts also containers that do not free enough together. While host memory
/// is short, this would take the host memory that another offload lacks.
#[test]
fn no_vain_eviction_while_memory_is_short() {
    let mut world = World::new(3);
    let first = world.running(1, 500);
    world.settle();
    world.container_mut(0).policy.mode = Mode::Pressure;
    world.running(0, 100);
    world.host_total = Some(800);
    world.running(2, 600);
    world.settle();
    assert_eq!(world.container(2).shown.reason.0, Reason::HostMemory);
    world.call(first);
    for _ in 0..1_000 {
        world.pass();
        assert_ne!(world.state(0), State::Offloaded);
    }
}

/// The first waiter does not fit even after the restore and the offload.
#[test]
fn restore_that_makes_no_room_is_not_ordered() {
    let mut world = World::new(3);
    world.host_total = Some(890);
    let first = world.running(1, 650);
    world.running(0, 40);
    world.settle();
    world.running(2, 300);
    world.take_unmanaged(300);
    world.settle();
    assert_eq!(world.container(2).shown.reason.0, Reason::HostMemory);
    world.call(first);
    stays_offloaded(&mut world, 0);
}

/// Two containers could free the host memory. Only one may be restored.
#[test]
fn one_container_is_restored_for_host_memory() {
    let mut world = World::new(4);
    world.host_total = Some(1_100);
    let first = world.running(1, 500);
    world.running(0, 100);
    world.running(3, 100);
    world.settle();
    world.running(2, 600);
    (0..2_000).for_each(|_| world.pass());
    world.call(first);
    while world.agents[&first].wants {
        world.pass();
        let off = [0, 3].map(|n| world.state(n) == State::Offloaded);
        assert_ne!(off, [false; 2]);
        assert!(world.now < 500_000, "the first waiter is not served");
    }
}

/// No waiter is blocked any more before the relief has begun.
#[test]
fn relief_that_is_not_needed_is_withdrawn() {
    let mut world = World::new(1);
    world.running(0, 100);
    world.settle();
    let container = world.container_mut(0);
    container.goal.become_resident();
    container.cause = Reason::FreesHostMemory;
    world.tick();
    assert!(world.node.state.admission.queue.is_empty());
    world.settle();
    assert_eq!((world.state(0), world.container(0).figures.restores), (State::Offloaded, 0));
    assert!(world.container(0).goal.is_offloaded());
}

/// No call waits for the first waiter: an operator has requested its restore.
#[test]
fn requested_restore_is_not_blocked_for_ever() {
    let (mut world, _) = blocked();
    world.feed(Input::Command(CommandId(7), key(1), Request::Restore));
    (0..400).for_each(|_| world.pass());
    assert_eq!(world.answers, [(CommandId(7), true)]);
}

/// A copied-out container holds VRAM with its context, and lacks host memory for its second level.
#[test]
fn context_without_host_memory_is_relieved() {
    let mut world = World::new(3);
    let first = world.running(1, 860);
    world.running(0, 60);
    world.settle();
    let held = world.running(2, 400);
    world.settle();
    assert_eq!((world.state(2), world.agents[&held].phase), (State::Offloaded, Phase::CopiedOut));
    // 860, 60 and 300 bytes are in use, and the context needs 100.
    world.host_total = Some(1_260);
    world.call(first);
    world.settle();
    assert!(!world.agents[&first].wants);
}

/// The container whose restore would free host memory has lost its connection, so it cannot be
/// restored. It must not prevent the restore of another one.
#[test]
fn disconnected_container_prevents_no_relief() {
    let mut world = World::new(4);
    world.host_total = Some(1_150);
    let first = world.running(1, 500);
    let cut = world.running(0, 100);
    world.running(3, 150);
    world.settle();
    world.running(2, 600);
    (0..2_000).for_each(|_| world.pass());
    assert_eq!(world.container(2).shown.reason.0, Reason::HostMemory);
    world.feed(Input::Detached(cut));
    world.agents.get_mut(&cut).unwrap().known_as = None;
    let known = world.agents.remove(&cut).unwrap();
    world.call(first);
    let first_ms = wait_for(&mut world, first);
    assert!(first_ms < 8_000, "{first_ms} ms");
    assert_eq!(known.container, 0);
}

/// A container that the waiter may not evict lacks host memory. No other container may be restored
/// for it.
#[test]
fn protected_holder_causes_no_relief() {
    let protections: [fn(&mut World); 3] = [
        |world| world.pin(2, true),
        |world| world.container_mut(2).policy.priority = 5,
        |world| world.container_mut(2).policy.mode = Mode::Manual,
    ];
    for protect in protections {
        let (mut world, [_, first]) = blocked();
        protect(&mut world);
        world.call(first);
        stays_offloaded(&mut world, 0);
    }
}

/// Zero pages of container 0 were not stored, so its restore frees too little host memory.
#[test]
fn pages_that_were_not_stored_are_not_freed() {
    let (mut world, [small, first]) = blocked();
    world.process_mut(small).memory.swap.zero_bytes = 60;
    world.call(first);
    stays_offloaded(&mut world, 0);
}

/// Host memory was freed, but not in the place where the offload lacked it.
#[test]
fn memory_elsewhere_permits_no_refused_offload() {
    let (mut world, [_, first]) = blocked();
    let place = MemoryPlace::Cgroup("/elsewhere".into());
    let pool = MemoryPool { place, free_bytes: 0, need_bytes: 1 };
    world.container_mut(2).short_of = vec![pool];
    let not_before = world.container(2).offload_failures.not_before();
    world.exit(first);
    assert_eq!(world.container(2).offload_failures.not_before(), not_before);
}

/// Two containers lack host memory, and two others could be restored. One restore suffices.
#[test]
fn two_holders_cause_one_relief() {
    let mut world = World::new(5);
    let first = world.running(1, 400);
    world.running(0, 100);
    world.running(3, 100);
    world.settle();
    world.host_total = Some(800);
    world.running(2, 350);
    world.running(4, 350);
    (0..2_000).for_each(|_| world.pass());
    for n in [2, 4] {
        assert_eq!(world.container(n).shown.reason.0, Reason::HostMemory, "container {n}");
    }
    world.call(first);
    while world.agents[&first].wants {
        world.pass();
        assert_ne!([0, 3].map(|n| world.state(n) == State::Offloaded), [false; 2]);
        assert!(world.now < 500_000, "the first waiter is not served");
    }
}

/// The restores do not help, because the container on the GPU always lacks host memory again.
#[test]
fn restores_in_vain_become_rarer() {
    let (mut world, [_, first]) = blocked();
    world.call(first);
    let mut restores = Vec::new();
    for _ in 0..10_000 {
        // The restore frees host memory, and another program takes it at once.
        let is_off = world.state(0) == State::Offloaded;
        world.host_total = Some(if is_off { 1_000 } else { 900 });
        world.pass();
        let count = world.container(0).figures.restores;
        if count as usize > restores.len() {
            restores.push(world.now);
        }
    }
    let pauses: Vec<Millis> = restores.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(restores.len() <= 5 && restores.len() > 1, "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause >= 20_000) && pauses.is_sorted(), "{pauses:?}");
}
