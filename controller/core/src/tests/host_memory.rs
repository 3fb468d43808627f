//! Tests of offloads that together need more host memory than the node has.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::message::{Action, ControllerMessage, Outcome},
};

use super::{
    super::{
        Effect, Input, ProcessId, Request, Survey,
        harness::agent::Agent,
        host_memory::{HostNeed, HostPoolAllowance, MemoryPlace, MemoryPool, SurveyedMemory},
        input::CommandId,
    },
    world::{Host, World, key},
};

impl World {
    /// Host memory that offloaded memory of the containers uses, in bytes, besides pages that they kept
    /// before. Content on disk uses none.
    fn host_used(&self) -> u64 {
        let held = |a: &Agent| match a.disk_chunks {
            0 => (a.size - a.on_device() - a.local_memory_bytes()).saturating_sub(a.kept),
            _ => 0,
        };
        self.agents.values().map(held).sum()
    }

    /// The memory pools that a survey for an offload of these processes shows now.
    pub(super) fn host_pools(&self, processes: &[HostNeed]) -> SurveyedMemory {
        let Some(total) = self.host_total else { return SurveyedMemory::default() };
        let need_bytes = processes.iter().map(|need| need.bytes).sum();
        let free_bytes = total.saturating_sub(self.host_used());
        let pool = |place, free_bytes| MemoryPool { place, free_bytes, need_bytes };
        let node = pool(MemoryPlace::Node, free_bytes);
        let own = self.limit_bytes.map(|bytes| pool(MemoryPlace::Cgroup("/pod".into()), bytes));
        let kept_bytes: u64 = processes.iter().map(|need| need.kept_bytes).sum();
        let shared =
            self.host_pool_bytes.map(|bytes| pool(MemoryPlace::HostPool, bytes + kept_bytes));
        let host_pool = shared.map_or_else(Vec::new, |shared| vec![shared, node.clone()]);
        let allowance = |need: &HostNeed| HostPoolAllowance {
            pid: need.pid,
            bytes: need.copied_bytes,
            kept_bytes: need.kept_bytes,
        };
        SurveyedMemory {
            container: own.into_iter().chain([node]).collect(),
            host_pool,
            allowances: processes.iter().map(allowance).collect(),
        }
    }

    pub(super) fn assert_host_memory_suffices(&self) {
        if let Some(total) = self.host_total {
            assert!(self.host_used() <= total, "the kernel kills one of them");
        }
    }

    /// Requests the offload of a container as an operator would, after delivering new counters and
    /// samples.
    pub(super) fn ask_offload(&mut self, n: usize, id: ProcessId) {
        self.feed(Input::Gpus(Ok(self.gpus())));
        let page = self.agents[&id].page();
        self.feed(Input::Page(id, page));
        self.feed(Input::Command(CommandId(n as u64), key(n), Request::Offload));
    }

    /// Makes each agent execute its orders.
    pub(super) fn work_all(&mut self) {
        let ids: Vec<_> = self.agents.keys().copied().collect();
        for id in ids {
            while self.agents.get(&id).is_some_and(|agent| !agent.inbox.is_empty()) {
                self.work(id);
            }
        }
    }
}

fn count_off(world: &World) -> usize {
    (0..world.containers).filter(|n| world.state(*n) == State::Offloaded).count()
}

#[test]
fn idle_at_once_leave_as_host_memory_allows() {
    for (total, leave) in [(900, 3), (650, 2), (350, 1), (224, 0)] {
        let mut world = World::new(3);
        world.host_total = Some(total);
        for n in 0..3 {
            world.running(n, 300);
        }
        world.settle();
        assert_eq!(count_off(&world), leave, "of {total}");
        let stays = (0..3).filter(|n| world.state(*n) != State::Offloaded);
        for n in stays {
            let container = &world.container(n);
            assert_eq!(
                container.shown.reason.0,
                Reason::HostMemory,
                "{:?}",
                container.shown.reason
            );
        }
    }
}

/// Two offloads are requested at the same moment, and both readings arrive before a copy begins.
/// The same memory must not be promised to both.
#[test]
fn readings_of_one_moment_promise_memory_once() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let ids = [world.running(0, 300), world.running(2, 300)];
    for (n, id) in [0, 2].into_iter().zip(ids) {
        world.ask_offload(n, id);
    }
    assert_eq!(world.questions.len(), 2, "host memory is read for both offloads");
    while !world.questions.is_empty() {
        world.answer_question();
    }
    world.work_all();
    let waiting = [0, 2].into_iter().find(|n| world.state(*n) == State::Active).unwrap();
    let container = &world.container(waiting);
    assert!(container.shown.reason.1.contains("promised"), "{:?}", container.shown.reason);
    assert!(world.answers.is_empty(), "the request waits like its offload");
    world.settle();
    assert_eq!(count_off(&world), 1);
    let mut done: Vec<bool> = world.answers.iter().map(|(_, done)| *done).collect();
    done.sort_unstable();
    assert_eq!(done, [false, true], "the request is answered when the offload is decided");
}

/// A reading was made before the copy of another container ended, so it does not show all memory
/// that the copy uses. The promise for that copy must still be subtracted from the reading.
#[test]
fn old_reading_is_judged_with_what_it_missed() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let ids = [world.running(0, 300), world.running(2, 300)];
    for (n, id) in [0, 2].into_iter().zip(ids) {
        world.ask_offload(n, id);
    }
    // The reading of the second container is made now, and delivered after the first is offloaded.
    let Some(Effect::Survey { key: late, processes, .. }) = world.questions.pop_back() else {
        panic!("{:?}", world.questions)
    };
    let old = Survey { gpus: Ok(world.gpus()), host: Ok(world.host_pools(&processes)) };
    for _ in 0..8 {
        while !world.questions.is_empty() {
            world.answer_question();
        }
        world.now += 10;
        world.work_all();
    }
    assert_eq!(count_off(&world), 1);
    world.feed(Input::Surveyed(late.clone(), old));
    let container = &world.node.state.registry.containers[&late];
    assert_eq!(
        container.shown.state,
        State::Active,
        "the offload waits for a newer reading: {:?}",
        container.shown.reason
    );
    world.work_all();
    world.settle();
    assert_eq!(count_off(&world), 1);
}

/// Other processes allocate the host memory between the first survey and the copy. The offload must
/// be cancelled.
#[test]
fn memory_taken_before_the_copy_turns_it_back() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let id = world.running(2, 300);
    world.ask_offload(2, id);
    world.answer_question();
    world.host_total = Some(200);
    world.settle();
    assert_eq!((world.state(2), world.answers.pop()), (State::Idle, Some((CommandId(2), false))));
    assert!(world.refused.contains(&Reason::HostMemory.to_string()), "{:?}", world.refused);
}

/// The library cancels the copy out for lack of host memory. The next offload must copy again and
/// must not use a checkpoint instead.
#[test]
fn copy_that_turned_back_is_tried_again() {
    let mut world = World::new(3);
    let id = world.running(2, 300);
    world.host_total = Some(400);
    world.ask_offload(2, id);
    world.answer_question();
    while !matches!(
        world.agents[&id].inbox.front(),
        Some(ControllerMessage::Order { action: Action::CopyOut { .. }, .. })
    ) {
        world.work(id);
        world.answer_question();
    }
    world.fail = Some(Outcome::NoHostMemory);
    world.work(id);
    assert!(world.refused.contains(&Reason::HostMemory.to_string()), "{:?}", world.refused);
    world.work_all();
    assert_eq!(world.state(2), State::Active);
    world.settle();
    assert_eq!((world.state(2), world.agents[&id].copied_out), (State::Offloaded, true));
}

/// The promise of host memory must end when the container is deleted, when its processes exit, or
/// when the offload is cancelled.
#[test]
fn promise_ends_however_the_offload_ends() {
    type Ending = fn(&mut World, ProcessId);
    let endings: [(&str, Ending); 3] = [
        ("called", |world, id| world.call(id)),
        ("exited", |world, id| world.exit(id)),
        ("withdrawn", |world, _| world.feed(Input::Withdrawn(key(2)))),
    ];
    for (what, end) in endings {
        let mut world = World::new(3);
        let id = world.running(2, 300);
        world.host_total = Some(400);
        world.ask_offload(2, id);
        world.answer_question();
        assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 225, "{what}");
        end(&mut world, id);
        world.settle();
        world.feed(Input::Tick);
        assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 0, "{what}");
    }
}

impl World {
    /// Advances a container's process until the next message in its inbox is the order to copy out.
    pub(super) fn begin_copy(&mut self, n: usize, id: ProcessId) {
        self.ask_offload(n, id);
        self.answer_question();
        let copies = |message: Option<&ControllerMessage>| {
            matches!(message, Some(ControllerMessage::Order { action: Action::CopyOut { .. }, .. }))
        };
        while !copies(self.agents[&id].inbox.front()) {
            self.work(id);
            if !self.questions.is_empty() {
                self.answer_question();
            }
        }
    }

    /// Delivers counters of a process, and readings of the free host memory of its pod and of the
    /// node.
    pub(super) fn read_levels(
        &mut self,
        n: usize,
        id: ProcessId,
        pod_free_bytes: u64,
        filling: u64,
    ) {
        self.agents.get_mut(&id).unwrap().filling = filling;
        let page = self.agents[&id].page();
        self.feed(Input::Page(id, page));
        let level = |place, free_bytes| MemoryPool { place, free_bytes, need_bytes: 0 };
        let levels = vec![
            level(MemoryPlace::Cgroup("/pod".into()), pod_free_bytes),
            level(MemoryPlace::Node, u64::MAX),
        ];
        self.feed(Input::HostLevels(vec![(key(n), levels)]));
    }
}

/// Another container of the pod allocates memory that was promised to a copy out. Only the
/// controller can see that, and it must cancel the copy.
#[test]
fn copy_without_room_in_the_pod_is_turned_back() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let id = world.running(2, 300);
    world.begin_copy(2, id);
    let copies = world.node.copies_in_progress();
    assert_eq!(copies.len(), 1, "free memory is read for one copy");
    assert_eq!((&copies[0].key, copies[0].processes[0].0), (&key(2), id));
    for (free, filling) in [(300, 300), (100, 100), (0, 0)] {
        world.read_levels(2, id, free, filling);
        assert!(world.turned_back.is_empty(), "{free} are enough for {filling}");
    }
    world.read_levels(2, id, 99, 100);
    assert_eq!(world.turned_back, [id]);
    world.fail = Some(Outcome::NoHostMemory);
    world.work(id);
    assert!(world.refused.contains(&Reason::CgroupMemory.to_string()), "{:?}", world.refused);
    let container = &world.container(2);
    assert!(container.shown.reason.1.contains("/pod"), "{:?}", container.shown.reason);
    assert_eq!(container.short_of.len(), 1, "the pool is known for a relief");
    assert!(world.node.copies_in_progress().is_empty());
    // The container is resident, so free memory has no effect. Its next offload succeeds.
    world.read_levels(2, id, 0, 100);
    assert_eq!(world.turned_back, [id], "a resident process is not cancelled");
    world.settle();
    assert_eq!(
        (world.state(2), world.answers.pop()),
        (State::Offloaded, Some((CommandId(2), false)))
    );
}

/// Two copies out fail: the first because the controller finds too little memory in the pod, the
/// second because the library finds too little host memory. The second failure must be shown with
/// its own reason.
#[test]
fn later_copy_fails_for_its_own_reason() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let id = world.running(2, 300);
    world.begin_copy(2, id);
    world.read_levels(2, id, 99, 100);
    world.fail = Some(Outcome::NoHostMemory);
    world.work(id);
    world.work_all();
    world.refused.clear();
    world.begin_copy(2, id);
    world.fail = Some(Outcome::NoHostMemory);
    world.work(id);
    assert_eq!(world.refused, [Reason::HostMemory.to_string()]);
}

/// The controller is killed while a process copies out. The next controller knows the process only
/// from the journal and must promise host memory for it again.
#[test]
fn new_controller_repeats_promises_in_progress() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let ids = [world.running(0, 300), world.running(2, 300)];
    world.begin_copy(2, ids[1]);
    world.restart(true);
    assert!(world.agents[&ids[1]].orphaned, "the process is still copying");
    assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 300);
    world.work(ids[0]);
    world.ask_offload(0, ids[0]);
    world.answer_question();
    let container = &world.container(0);
    assert!(container.shown.reason.1.contains("promised"), "{:?}", container.shown.reason);
    world.settle();
    assert_eq!(count_off(&world), 1);
    assert!(world.node.state.host_ledger.is_empty());
}

/// The offload ended before the controller's restart, so NVML shows no VRAM of the process. The
/// next controller must promise no host memory for it.
#[test]
fn offloaded_before_restart_promises_nothing() {
    let mut world = World::new(3);
    world.host_total = Some(700);
    let ids = [world.running(0, 300), world.running(2, 300)];
    world.ask_offload(0, ids[0]);
    world.settle();
    assert_eq!(count_off(&world), 2);
    // The agent still executes an order, so it cannot send Hello yet.
    world.agents.get_mut(&ids[0]).unwrap().inbox.push_back(ControllerMessage::Order {
        order: 0,
        action: Action::ReleaseAllocations,
        decided_ms: 0,
    });
    world.restart(true);
    assert!(world.agents[&ids[0]].orphaned);
    assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 0);
}

/// A process that the journal names exits without having registered. The promise of host memory to
/// this process must end.
#[test]
fn recalled_promise_ends_with_its_process() {
    let mut world = World::new(3);
    world.host_total = Some(400);
    let id = world.running(2, 300);
    world.begin_copy(2, id);
    world.restart(true);
    assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 300);
    world.agents.remove(&id);
    let gpus = Ok(world.gpus());
    world.feed(Input::Gpus(gpus));
    assert_eq!(world.node.state.host_ledger.promised_node_bytes(), 0);
}
