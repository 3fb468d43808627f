//! Tests of moves of content from the host pool to disk.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    state::State,
    wire::{Capabilities, ProcessFlags, copier::CHUNK_BYTES},
};

use super::{
    super::{Millis, ProcessId, prewake},
    world::{ALL_CAPABILITIES, Host as _, TOTAL, World, key},
};

/// Numbers of containers with the engine `auto`.
const AUTO: [usize; 3] = [2, 5, 8];
const MINUTE: Millis = 60_000;
const HOUR: Millis = 60 * MINUTE;
/// VRAM of each process, in bytes.
const VRAM_BYTES: u64 = 300;
/// The part of a process's VRAM that the library can copy, in bytes.
const COPIED_BYTES: u64 = 225;

/// A change of the test's node after which no content may move.
type Change = fn(&mut World, ProcessId);

/// Returns a node with a disk and this number of containers. Each was offloaded to the host pool, the
/// first one first, and has one process.
fn world(containers: usize) -> (World, Vec<ProcessId>) {
    let mut world = World::new(9);
    world.node.state.settings.disk = true;
    world.host_total = Some(100_000);
    (world.limit_bytes, world.host_pool_bytes) = (Some(COPIED_BYTES - 1), Some(10_000));
    let ids: Vec<ProcessId> = AUTO[..containers].iter().map(|n| offload(&mut world, *n)).collect();
    (world, ids)
}

/// Starts a process in the container, and waits until it is offloaded to the host pool.
fn offload(world: &mut World, n: usize) -> ProcessId {
    let id = world.running(n, VRAM_BYTES);
    world.agents.get_mut(&id).unwrap().notes = ProcessFlags::HOST_POOL;
    world.settle();
    assert_eq!((world.state(n), world.process(id).host_pool.was_used), (State::Offloaded, true));
    id
}

/// Advances the time until the container has been offloaded for this time.
fn wait_until(world: &mut World, n: usize, ms: Millis) {
    let age_ms = world.now - world.container(n).shown.since;
    world.tick_after(ms - age_ms);
}

/// Lets the process begin its disk step and end it at once.
fn store(world: &mut World, id: ProcessId, chunks: u32, has_failed: bool) {
    world.work(id);
    world.tick();
    world.agents.get_mut(&id).unwrap().end_disk_step(chunks, has_failed);
    world.tick();
}

fn kinds(world: &World) -> Vec<EventKind> {
    world.disk_events.iter().map(|(kind, _)| *kind).collect()
}

#[test]
fn content_moves_after_disk_after_only() {
    let (mut world, ids) = world(1);
    wait_until(&mut world, AUTO[0], HOUR - 1);
    assert_eq!(world.stored, []);
    world.tick_after(1);
    assert_eq!(world.stored, [(ids[0], CHUNK_BYTES)]);
    world.work(ids[0]);
    world.tick_after(20 * MINUTE);
    assert_eq!((kinds(&world), world.node.disk_bytes(&key(AUTO[0]))), (vec![], 0));
    world.agents.get_mut(&ids[0]).unwrap().end_disk_step(1, false);
    world.tick();
    assert_eq!(kinds(&world), [EventKind::StoredOnDisk]);
    assert!(world.disk_events[0].1.ends_with("to disk in 1200.1 s"), "{:?}", world.disk_events);
    assert_eq!(world.node.disk_bytes(&key(AUTO[0])), COPIED_BYTES);
    world.tick_after(9 * HOUR);
    assert_eq!((world.stored.len(), world.disk_events.len()), (1, 1), "all is on disk");
}

#[test]
fn longest_offloaded_is_stored_first() {
    let (mut world, ids) = world(2);
    wait_until(&mut world, AUTO[1], HOUR);
    world.work(ids[0]);
    world.tick_after(MINUTE);
    let order = |world: &World| world.stored.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    assert_eq!(order(&world), ids[..1], "one at a time");
    world.agents.get_mut(&ids[0]).unwrap().end_disk_step(1, false);
    world.tick();
    assert_eq!(order(&world), ids);
}

#[test]
fn content_of_a_waiting_container_stays() {
    let (mut world, ids) = world(1);
    world.take_unmanaged(TOTAL - world.used());
    world.call(ids[0]);
    world.tick_after(2 * HOUR);
    assert_eq!((world.state(AUTO[0]), world.stored.len()), (State::Queued, 0));
}

/// The counters of an offloaded process show a waiting call before its message arrives.
#[test]
fn waiting_call_in_the_counters_counts() {
    let (mut world, ids) = world(1);
    world.agents.get_mut(&ids[0]).unwrap().wants = true;
    wait_until(&mut world, AUTO[0], HOUR);
    assert_eq!(world.stored, []);
}

#[test]
fn content_moves_only_where_it_may() {
    let cases: [(&str, Change); 7] = [
        ("no disk", |world, _| world.node.state.settings.disk = false),
        ("never", |world, _| world.container_mut(AUTO[0]).policy.disk_after_ms = 0),
        ("old library", |world, id| {
            let without = ALL_CAPABILITIES.0 & !Capabilities::STORES_ON_DISK.0;
            world.process_mut(id).agent.capabilities = Capabilities(without);
        }),
        ("own memory", |world, id| world.process_mut(id).host_pool.was_used = false),
        ("not in the pool", |world, id| {
            world.agents.get_mut(&id).unwrap().notes = ProcessFlags::default();
        }),
        ("lost pool", |world, id| {
            world.agents.get_mut(&id).unwrap().notes.0 |= ProcessFlags::HOST_POOL_LOST.0;
        }),
        ("all zero", |world, id| {
            world.process_mut(id).memory.swap.zero_bytes = COPIED_BYTES;
        }),
    ];
    for (case, change) in cases {
        let (mut world, ids) = world(1);
        change(&mut world, ids[0]);
        world.tick_after(2 * HOUR);
        assert_eq!((world.stored.len(), world.disk_events.len()), (0, 0), "{case}");
    }
}

/// A restore from disk has all its VRAM at its begin, and then waits for the disk. A container whose
/// content is in memory must not wait for it.
#[test]
fn restore_from_disk_delays_no_other_restore() {
    for chunks in [0, 1] {
        let (mut world, ids) = world(2);
        wait_until(&mut world, AUTO[0], HOUR);
        store(&mut world, ids[0], chunks, chunks == 0);
        world.call(ids[0]);
        while world.state(AUTO[0]) != State::Restoring {
            world.work(ids[1]);
            world.answer_question();
        }
        // The library maps all VRAM, and its report is missing while it reads from the disk.
        world.agents.get_mut(&ids[0]).unwrap().copied_out = false;
        world.call(ids[1]);
        for _ in 0..20 {
            world.tick();
            world.work(ids[1]);
            world.answer_question();
        }
        let found = (world.state(AUTO[0]), world.container(AUTO[1]).figures.restores);
        assert_eq!(found, (State::Restoring, u64::from(chunks)), "{chunks} chunks on disk");
        world.agents.get_mut(&ids[0]).unwrap().copied_out = true;
        world.settle_all();
        assert_eq!(world.container(AUTO[0]).figures.restores, 1);
    }
}

/// The context of a process can be larger than its content. It does not show that the restore has its
/// VRAM.
#[test]
fn context_is_not_the_vram_of_a_restore() {
    let (mut world, ids) = world(2);
    wait_until(&mut world, AUTO[0], HOUR);
    store(&mut world, ids[0], 1, false);
    world.call(ids[0]);
    while world.state(AUTO[0]) != State::Restoring {
        world.work(ids[1]);
        world.answer_question();
    }
    let context_bytes = VRAM_BYTES - COPIED_BYTES;
    world.process_mut(ids[0]).memory.swap.copied_out_bytes = context_bytes / 2;
    world.call(ids[1]);
    for _ in 0..20 {
        world.tick();
        world.work(ids[1]);
        world.answer_question();
    }
    let found = (world.state(AUTO[0]), world.container(AUTO[1]).figures.restores);
    assert_eq!(found, (State::Restoring, 0));
}

/// A container that is called every night must be restored before the call. The restore takes longer
/// if its content is on disk.
#[test]
fn content_on_disk_is_restored_earlier() {
    const CONTENT_BYTES: u64 = 80 * CHUNK_BYTES;
    let (mut world, ids) = world(1);
    let state = &mut world.node.state;
    let container = state.registry.containers.get_mut(&key(AUTO[0])).unwrap();
    container.policy.prewake = true;
    (0..5).for_each(|_| container.usage.history.returned(24 * HOUR));
    let process = state.registry.processes.get_mut(&ids[0]).unwrap();
    process.memory.swap.copied_out_bytes = CONTENT_BYTES;
    process.memory.offloaded.as_mut().unwrap().vram[0].bytes = CONTENT_BYTES;
    let in_memory = prewake::prewake_at(state, &key(AUTO[0])).unwrap();
    let process = state.registry.processes.get_mut(&ids[0]).unwrap();
    process.activity.counters.as_mut().unwrap().disk_chunks = 80;
    assert_eq!(process.disk_bytes(), CONTENT_BYTES);
    let on_disk = prewake::prewake_at(state, &key(AUTO[0])).unwrap();
    assert_eq!(in_memory - on_disk, CONTENT_BYTES / 500_000);

    // Pauses of 40 s are too short for a lead of 26 s.
    let container = state.registry.containers.get_mut(&key(AUTO[0])).unwrap();
    (0..20).for_each(|_| container.usage.history.returned(40_000));
    let begins_ms = container.usage.last_use + 40_000 - 2_000 - 5_000;
    assert_eq!(prewake::prewake_at(state, &key(AUTO[0])), Some(begins_ms));
}

/// Content of a container that is expected back soon would be read back as soon as it is on disk.
#[test]
fn content_needed_soon_stays_in_memory() {
    for (pause_ms, stored) in [(70 * MINUTE, 0), (90 * MINUTE, 1)] {
        let (mut world, _) = world(1);
        let container = world.node.state.registry.containers.get_mut(&key(AUTO[0])).unwrap();
        container.policy.prewake = true;
        (0..5).for_each(|_| container.usage.history.returned(pause_ms));
        wait_until(&mut world, AUTO[0], HOUR);
        assert_eq!(world.stored.len(), stored, "{pause_ms}");
    }
}

#[test]
fn failed_step_pauses_its_container() {
    let (mut world, ids) = world(1);
    wait_until(&mut world, AUTO[0], HOUR);
    store(&mut world, ids[0], 0, true);
    assert_eq!((kinds(&world), &world.stopped[..]), (vec![EventKind::DiskFailed], &ids[..]));
    assert!(world.disk_events[0].1.contains("memory.disk_max_mib"), "{:?}", world.disk_events);
    world.tick_after(HOUR - 60);
    assert_eq!(world.stored.len(), 1);
    world.tick();
    assert_eq!(world.stored.len(), 2);
    // The flag of the first failure says nothing about the second step.
    world.tick();
    assert_eq!(world.disk_events.len(), 1);
    store(&mut world, ids[0], 1, false);
    assert_eq!(kinds(&world), [EventKind::DiskFailed, EventKind::StoredOnDisk]);
}

#[test]
fn silent_process_ends_the_step() {
    let (mut world, ids) = world(1);
    wait_until(&mut world, AUTO[0], HOUR);
    world.tick_after(9_999);
    assert_eq!(world.disk_events, []);
    world.tick_after(1);
    assert_eq!((kinds(&world), &world.stopped[..]), (vec![EventKind::DiskFailed], &ids[..]));
}

#[test]
fn two_failures_in_a_row_pause_the_node() {
    let (mut world, ids) = world(3);
    wait_until(&mut world, AUTO[2], HOUR);
    store(&mut world, ids[0], 0, true);
    assert_eq!(world.stored.len(), 2, "one failure pauses only its container");
    store(&mut world, ids[1], 0, true);
    world.tick_after(10 * MINUTE - 60);
    assert_eq!(world.stored.len(), 2);
    world.tick();
    assert_eq!(world.stored.last(), Some(&(ids[2], CHUNK_BYTES)));
}

#[test]
fn restore_ends_the_step_without_failure() {
    let (mut world, ids) = world(1);
    wait_until(&mut world, AUTO[0], HOUR);
    world.work(ids[0]);
    world.tick();
    world.call(ids[0]);
    world.settle();
    assert_eq!((world.state(AUTO[0]), world.agents[&ids[0]].calls > 1), (State::Offloaded, true));
    assert_eq!(world.disk_events, []);
    wait_until(&mut world, AUTO[0], HOUR - 1);
    assert_eq!(world.stored.len(), 1);
    world.tick_after(1);
    store(&mut world, ids[0], 1, false);
    assert_eq!(kinds(&world), [EventKind::StoredOnDisk], "the next offload is stored");
    world.call(ids[0]);
    world.settle();
    assert_eq!(world.node.disk_bytes(&key(AUTO[0])), 0);
    world.tick_after(2 * HOUR);
    assert_eq!(world.stored.len(), 3, "content that was on disk is stored again");
}

#[test]
fn exit_ends_the_step_without_failure() {
    let (mut world, ids) = world(2);
    wait_until(&mut world, AUTO[1], HOUR);
    world.exit(ids[0]);
    world.tick();
    assert_eq!(world.stored.last(), Some(&(ids[1], CHUNK_BYTES)));
    assert_eq!(world.disk_events, []);
}

/// The counters of a process can be false. The other containers must get their turn.
#[test]
fn false_counters_do_not_keep_the_disk() {
    let (mut world, ids) = world(2);
    wait_until(&mut world, AUTO[1], HOUR);
    world.work(ids[0]);
    world.agents.get_mut(&ids[0]).unwrap().disk_chunks = u32::MAX;
    world.tick_after(HOUR - 60);
    assert_eq!(world.node.disk_bytes(&key(AUTO[0])), COPIED_BYTES, "limited to the content");
    assert_eq!(world.stored.len(), 1);
    world.tick();
    assert_eq!(kinds(&world), [EventKind::DiskFailed]);
    assert_eq!(world.stored.last(), Some(&(ids[1], CHUNK_BYTES)));
}

/// A process claims to have stored its content, and then claims that nothing is on disk.
#[test]
fn withdrawn_claim_gives_others_a_turn() {
    let (mut world, ids) = world(2);
    wait_until(&mut world, AUTO[1], HOUR);
    store(&mut world, ids[0], 1, false);
    world.agents.get_mut(&ids[0]).unwrap().disk_chunks = 0;
    store(&mut world, ids[1], 1, false);
    world.tick();
    let order: Vec<ProcessId> = world.stored.iter().map(|(id, _)| *id).collect();
    assert_eq!((order, kinds(&world)), (ids, vec![EventKind::StoredOnDisk; 2]));
}

/// The first two containers are offloaded. The third one has the rest of the GPU's VRAM and is idle,
/// but its offload lacks host memory. `free_bytes`: free host memory.
fn full(free_bytes: u64) -> (World, Vec<ProcessId>) {
    const LARGE_BYTES: u64 = 600;
    let (mut world, mut ids) = world(2);
    world.limit_bytes = Some(LARGE_BYTES);
    world.host_total = Some(2 * COPIED_BYTES + free_bytes);
    ids.push(world.running(AUTO[2], LARGE_BYTES));
    AUTO.iter().for_each(|n| world.container_mut(*n).policy.priority = 0);
    world.take_unmanaged(TOTAL - world.used());
    (0..500).for_each(|_| world.pass());
    assert_eq!(world.container(AUTO[2]).shown.reason.0, Reason::HostMemory);
    (world, ids)
}

/// Lets time pass, and stores content on disk as ordered, until no call of the process waits. Returns
/// the passed time.
fn store_until_woken(world: &mut World, id: ProcessId) -> Millis {
    let (began, mut stored) = (world.now, world.stored.len());
    while world.agents[&id].wants && world.now - began < 2 * MINUTE {
        world.pass();
        for (id, _) in world.stored.split_off(stored) {
            world.agents.get_mut(&id).unwrap().begin_disk_step();
            world.pass();
            world.agents.get_mut(&id).unwrap().end_disk_step(1, false);
            world.stored.push((id, CHUNK_BYTES));
            stored = world.stored.len();
        }
    }
    world.now - began
}

/// Host memory is full of content of containers that all wait. One of them is idle on the GPU. None
/// could ever be restored without a move to disk.
#[test]
fn content_moves_if_no_waiter_gets_a_turn() {
    let (mut world, ids) = full(300);
    world.call(ids[0]);
    world.tick_after(100);
    world.call(ids[1]);
    let wait_ms = store_until_woken(&mut world, ids[0]);
    assert!((5_000..10_000).contains(&wait_ms), "{wait_ms} ms");
    assert_eq!(world.stored, [(ids[1], CHUNK_BYTES)], "the first waiter's content stays in memory");
    let wait_ms = store_until_woken(&mut world, ids[1]);
    assert!(wait_ms < 10_000, "{wait_ms} ms");
    assert_eq!(world.container(AUTO[2]).figures.offloads, 1);
}

#[test]
fn content_without_a_call_moves_first() {
    let (mut world, ids) = full(300);
    world.call(ids[0]);
    let wait_ms = store_until_woken(&mut world, ids[0]);
    assert!((5_000..10_000).contains(&wait_ms), "{wait_ms} ms");
    assert_eq!(world.stored, [(ids[1], CHUNK_BYTES)]);
    assert_eq!(world.state(AUTO[1]), State::Offloaded);
}

/// The content of the other containers does not suffice, so that of the first waiter moves too.
#[test]
fn content_of_the_first_waiter_moves_last() {
    let (mut world, ids) = full(100);
    world.call(ids[0]);
    let wait_ms = store_until_woken(&mut world, ids[0]);
    assert!((5_000..20_000).contains(&wait_ms), "{wait_ms} ms");
    assert_eq!(world.stored, [(ids[1], CHUNK_BYTES), (ids[0], CHUNK_BYTES)]);
}

#[test]
fn content_moves_only_if_it_helps() {
    let cases: [(&str, u64, Change); 4] = [
        ("what may move does not suffice", 100, |world, _| {
            world.container_mut(AUTO[1]).policy.disk_after_ms = 0;
        }),
        ("never", 300, |world, _| {
            AUTO.iter().for_each(|n| world.container_mut(*n).policy.disk_after_ms = 0);
        }),
        ("no disk", 300, |world, _| world.node.state.settings.disk = false),
        ("the holder has a higher priority", 300, |world, _| {
            world.container_mut(AUTO[2]).policy.priority = 100;
        }),
    ];
    for (case, free_bytes, change) in cases {
        let (mut world, ids) = full(free_bytes);
        change(&mut world, ids[0]);
        world.call(ids[0]);
        assert_eq!(store_until_woken(&mut world, ids[0]), 2 * MINUTE, "{case}");
        assert_eq!(world.stored, [], "{case}");
    }
}

/// A step for another waiter ends without a failure when the container itself gets its turn.
#[test]
fn turn_of_a_waiter_ends_its_step() {
    let (mut world, ids) = full(300);
    world.call(ids[0]);
    world.tick_after(100);
    world.call(ids[1]);
    while world.stored.is_empty() {
        world.pass();
    }
    world.agents.get_mut(&ids[1]).unwrap().begin_disk_step();
    world.tick_after(MINUTE / 2);
    assert_eq!((world.state(AUTO[1]), world.stopped.len()), (State::Queued, 0), "it goes on");
    world.exit(ids[2]);
    let wait_ms = store_until_woken(&mut world, ids[1]);
    assert!(wait_ms < 5_000, "{wait_ms} ms");
    assert_eq!(world.disk_events, []);
}

/// Host memory has room for the content of one container, and the GPU for the other. They take turns
/// through the disk, again and again.
#[test]
fn two_containers_take_turns_through_the_disk() {
    let (mut world, _) = world(0);
    (world.host_total, world.limit_bytes) = (Some(600), Some(100));
    let ids = [AUTO[0], AUTO[2]].map(|n| {
        let id = world.running(n, 600);
        world.agents.get_mut(&id).unwrap().notes = ProcessFlags::HOST_POOL;
        (0..200).for_each(|_| world.pass());
        id
    });
    assert_eq!([world.state(AUTO[0]), world.state(AUTO[2])], [State::Offloaded, State::Idle]);
    for turn in 0..6 {
        world.call(ids[turn % 2]);
        let wait_ms = store_until_woken(&mut world, ids[turn % 2]);
        assert!((5_000..20_000).contains(&wait_ms), "turn {turn}: {wait_ms} ms");
    }
    assert_eq!(world.stored.len(), 6);
}
