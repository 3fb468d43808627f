//! Tests of offloads that copy to the node's host pool.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        ProcessFlags,
        message::{Action, Outcome},
    },
};

use super::{
    super::{
        CommandId, Input, ProcessId, Request,
        host_memory::{MemoryPlace, MemoryPool},
        policy::Engine,
    },
    world::{Host as _, World, key},
};

/// Number of a container with the engine `auto`.
const AUTO: usize = 2;
const VRAM_BYTES: u64 = 300;
/// Memory of the process that the library can copy, in the simulated world.
const COPIED_BYTES: u64 = 225;

/// Returns a world with one container, memory below the container's limit, and a host pool.
fn world(limit_bytes: u64, host_pool_bytes: Option<u64>) -> (World, ProcessId) {
    let mut world = World::new(3);
    world.host_total = Some(10_000);
    world.limit_bytes = Some(limit_bytes);
    world.host_pool_bytes = host_pool_bytes;
    let id = world.running(AUTO, VRAM_BYTES);
    (world, id)
}

/// Returns for each copy out whether it was to the host pool.
fn copies(world: &World) -> Vec<bool> {
    let to_pool = |action: &Action| match action {
        Action::CopyOut { how, .. } => Some(how.host_pool),
        _ => None,
    };
    world.ordered.iter().filter_map(to_pool).collect()
}

#[test]
fn limit_below_vram_does_not_keep_a_container() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![true]));
    let allowed: Vec<bool> =
        world.allowed.iter().map(|(_, bytes)| *bytes == COPIED_BYTES).collect();
    assert_eq!(allowed, [true, false], "permitted for the offload only");
    assert!(world.allowed.iter().all(|(process, _)| *process == id), "{:?}", world.allowed);
    assert_eq!(world.allowed[1].1, 0);
    world.call(id);
    world.settle();
    assert_eq!(world.allowed.len() % 2, 0, "{:?}", world.allowed);
}

/// An offload may be requested before the first sample of the process's VRAM.
#[test]
fn vram_without_a_sample_can_use_the_pool() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    let page = world.agents[&id].page();
    world.feed(Input::Page(id, page));
    assert_eq!(world.node.state.registry.processes.get(&id).unwrap().vram_bytes(), 0);
    world.feed(Input::Command(CommandId(1), key(AUTO), Request::Offload));
    world.answer_question();
    assert_eq!(world.state(AUTO), State::Closing, "{:?}", world.container(AUTO).shown.reason);
}

/// A copy that is retained in the pool is not charged to the container. The next offload must still
/// use the pool, because the container's limit has no room for the content.
#[test]
fn retained_copy_in_the_pool_permits_the_next() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    let agent = world.agents.get_mut(&id).unwrap();
    (agent.kept, agent.notes) = (COPIED_BYTES, ProcessFlags::HOST_POOL);
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![true]));
    assert_eq!(world.allowed, [(id, COPIED_BYTES), (id, 0)]);
}

/// The memory of the pool that a container has from its last offload must suffice for its next one,
/// although the pool is full. Its next connection has a new file, in which nothing is kept.
#[test]
fn own_memory_in_a_full_pool_is_used_again() {
    let (mut world, mut id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    world.settle();
    for is_same_connection in [true, false] {
        assert_eq!(world.state(AUTO), State::Offloaded);
        world.host_pool_bytes = Some(0);
        if !is_same_connection {
            id = world.reconnect(id, false);
        }
        let agent = world.agents.get_mut(&id).unwrap();
        (agent.kept, agent.notes) = (COPIED_BYTES, ProcessFlags::HOST_POOL);
        world.call(id);
        world.settle();
    }
    assert_eq!(world.state(AUTO), State::Idle);
    assert_eq!(
        copies(&world),
        [true, true],
        "to the pool, and after the new connection not at all"
    );
}

/// If the host pool was started again, the process has a new file, in which nothing is kept. The
/// permission must then be for the whole content, although the process reports kept memory.
#[test]
fn nothing_is_kept_in_a_new_file() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    world.settle();
    let agent = world.agents.get_mut(&id).unwrap();
    (agent.kept, agent.notes) = (COPIED_BYTES, ProcessFlags::HOST_POOL);
    world.feed(Input::HostPoolConnected(id));
    world.host_pool_bytes = Some(COPIED_BYTES - 1);
    world.call(id);
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Idle, vec![true]));
}

#[test]
fn full_pool_leaves_the_containers_memory() {
    let (mut world, _) = world(COPIED_BYTES, Some(COPIED_BYTES - 1));
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![false]));
    assert_eq!(world.allowed, [], "no process may use the pool");
}

#[test]
fn container_stays_if_neither_suffices() {
    let (mut world, _) = world(COPIED_BYTES - 1, Some(COPIED_BYTES - 1));
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Idle, vec![]));
    let (reason, detail) = world.container(AUTO).shown.reason.clone();
    assert_eq!(reason, Reason::CgroupMemory);
    assert!(detail.starts_with("/pod has"), "{detail}");
}

/// The memory of the pool must be promised once. The second container has a memory limit that is
/// too low, so it must wait until the first offload is over.
#[test]
fn pool_memory_is_promised_once() {
    let (mut world, first) = world(COPIED_BYTES - 1, Some(2 * COPIED_BYTES - 1));
    let other =
        MemoryPool { place: MemoryPlace::HostPool, free_bytes: 0, need_bytes: COPIED_BYTES };
    let now = world.now;
    world.node.state.host_ledger.recall(&key(0), vec![other], now);
    world.ask_offload(AUTO, first);
    world.answer_question();
    let (reason, detail) = world.container(AUTO).shown.reason.clone();
    assert_eq!((world.state(AUTO), reason), (State::Active, Reason::HostMemory));
    assert!(detail.contains("the host pool has"), "{detail}");
    world.node.state.host_ledger.recall(&key(0), Vec::new(), now);
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![true]));
}

/// A process that gets no memory of the pool reports it. The next copies use the container's own
/// memory, so that the container does not stay on the GPU.
#[test]
fn copy_without_the_pool_follows_a_failed_one() {
    let (mut world, id) = world(COPIED_BYTES, Some(COPIED_BYTES));
    world.begin_copy(AUTO, id);
    world.fail = Some(Outcome::NoHostMemory);
    world.work(id);
    assert_eq!(world.container(AUTO).shown.reason.0, Reason::HostMemory);
    assert_eq!(world.left_host_pool, [id], "its connection may have failed");
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![true, false]));
}

/// Another container of the pod may fill the pod's memory. That does not concern a copy to the
/// host pool, but a shortage of the node does.
#[test]
fn own_limits_cancel_no_copy_to_the_pool() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    world.begin_copy(AUTO, id);
    world.agents.get_mut(&id).unwrap().filling = 100;
    let page = world.agents[&id].page();
    world.feed(Input::Page(id, page));
    let level = |place, free_bytes| MemoryPool { place, free_bytes, need_bytes: 0 };
    for (pod, node, cancelled) in [(0, 100, false), (0, 99, true)] {
        let pools =
            vec![level(MemoryPlace::Cgroup("/pod".into()), pod), level(MemoryPlace::Node, node)];
        world.feed(Input::HostLevels(vec![(key(AUTO), pools)]));
        assert_eq!(!world.turned_back.is_empty(), cancelled, "{pod} {node}");
    }
}

/// Content with contexts prefers the container's own memory, which a copier can read. With a disk it
/// must be in the host pool, from which it can move on.
#[test]
fn node_with_a_disk_prefers_the_pool() {
    for (disk, disk_after_ms, to_pool) in [(false, 1, false), (true, 0, false), (true, 1, true)] {
        let (mut world, _) = world(10_000, Some(10_000));
        world.node.state.settings.disk = disk;
        let policy = &mut world.container_mut(AUTO).policy;
        (policy.engine, policy.disk_after_ms) = (Engine::Full, disk_after_ms);
        world.settle();
        assert_eq!(world.state(AUTO), State::Offloaded);
        assert_eq!(copies(&world), [to_pool], "disk: {disk}, disk_after: {disk_after_ms}");
    }
}

/// The pages of a copy that was given up stay, and must suffice for the next copy although the pool is
/// full.
#[test]
fn pages_of_a_given_up_copy_are_used_again() {
    let (mut world, id) = world(COPIED_BYTES - 1, Some(COPIED_BYTES));
    world.begin_copy(AUTO, id);
    world.fail = Some(Outcome::GivenUp);
    world.work(id);
    let agent = world.agents.get_mut(&id).unwrap();
    (agent.kept, agent.notes) = (COPIED_BYTES, ProcessFlags::HOST_POOL);
    world.host_pool_bytes = Some(0);
    world.settle();
    assert_eq!((world.state(AUTO), copies(&world)), (State::Offloaded, vec![true, true]));
}
