//! Tests of the prefault of the host pool's memory for containers that may have to leave soon.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Capabilities, ProcessFlags,
        message::{Action, ControllerMessage},
    },
};

use super::{
    super::{
        Input, Millis, ProcessId, Settings,
        harness::agent::Agent,
        host_memory::HostPoolPrefault,
        input::Work,
        policy::{Engine, Mode, Policies, Policy},
    },
    world::{ALL_CAPABILITIES, GPU, Host as _, World, settings},
};

/// Numbers of containers with the engine `auto` and the same priority.
const OFFLOADED: usize = 2;
const RESIDENT: usize = 8;
/// Number of another container with the engine `auto`.
const OTHER: usize = 5;
/// Number of a container with the engine `full`.
const FULL: usize = 1;
const PREFAULTED: ProcessFlags = ProcessFlags::PREFAULTED_HOST_POOL;
const VRAM_BYTES: u64 = 600;
/// Memory of each process that the library can copy, in the simulated world.
const COPIED_BYTES: u64 = 450;

/// One container is offloaded, and another one is resident. VRAM suffices for one of them. Both have
/// the default policy.
struct Contended {
    world: World,
    offloaded: ProcessId,
    resident: ProcessId,
}

impl Contended {
    fn new(prepare: impl FnOnce(&mut World)) -> Contended {
        Contended::new_of(VRAM_BYTES, prepare)
    }

    /// `resident_bytes`: VRAM of the resident container.
    fn new_of(resident_bytes: u64, prepare: impl FnOnce(&mut World)) -> Contended {
        let mut world = World::new(9);
        (world.host_total, world.host_pool_bytes) = (Some(10_000), Some(COPIED_BYTES));
        prepare(&mut world);
        let offloaded = world.running(OFFLOADED, VRAM_BYTES);
        world.settle();
        assert_eq!(world.state(OFFLOADED), State::Offloaded);
        let policies = Policies::default();
        world.feed(Input::Reconfigured(Box::new(Settings { policies, ..settings() })));
        world.allowed.clear();
        let resident = world.running(RESIDENT, resident_bytes);
        Contended { world, offloaded, resident }
    }

    /// Lets this time pass without a call.
    fn rest(&mut self, ms: Millis) {
        let ends = self.world.now + ms;
        while self.world.now < ends {
            self.world.pass();
        }
    }

    /// Amounts of the host pool that the resident process was permitted to use, in their order.
    fn permitted(&self) -> Vec<u64> {
        let own = self.world.allowed.iter().filter(|(id, _)| *id == self.resident);
        own.map(|(_, bytes)| *bytes).collect()
    }

    fn agent(&mut self) -> &mut Agent {
        self.world.agents.get_mut(&self.resident).unwrap()
    }

    fn policy(&mut self) -> &mut Policy {
        &mut self.world.container_mut(RESIDENT).policy
    }

    fn is_filling(&self) -> bool {
        let prefault = self.world.container(RESIDENT).host_pool_prefault;
        matches!(prefault, HostPoolPrefault::Filling { .. })
    }

    fn kept_bytes(&self) -> u64 {
        self.world.agents[&self.resident].kept
    }
}

#[test]
fn contended_container_is_prefaulted_once() {
    let mut pair = Contended::new(|_| {});
    pair.rest(400);
    assert_eq!(pair.permitted(), [], "it was just used");
    pair.rest(2_000);
    assert_eq!(pair.permitted(), [COPIED_BYTES, 0], "permitted until the pages are there");
    assert_eq!(pair.kept_bytes(), COPIED_BYTES);
    pair.rest(60_000);
    assert_eq!(pair.permitted().len(), 2, "the pages stay");
    // The eviction uses the pages. They suffice although the pool is full now.
    pair.world.host_pool_bytes = Some(0);
    pair.world.call(pair.offloaded);
    pair.world.settle();
    assert_eq!(pair.world.state(RESIDENT), State::Offloaded);
    assert_eq!(pair.permitted(), [COPIED_BYTES, 0, COPIED_BYTES, 0]);
}

/// A library keeps the pages of an offload for a moment after the restore. The prefault keeps them
/// from then on. While the library frees them, no prefault begins.
#[test]
fn pages_of_the_last_offload_are_kept() {
    for (kept_bytes, permitted) in [(COPIED_BYTES, 2), (COPIED_BYTES / 2, 0), (0, 2)] {
        let mut pair = Contended::new(|_| {});
        let agent = pair.world.agents.get_mut(&pair.resident).unwrap();
        (agent.kept, agent.notes) = (kept_bytes, ProcessFlags::HOST_POOL);
        pair.rest(3_000);
        assert_eq!(pair.permitted().len(), permitted, "{kept_bytes} bytes are kept");
    }
}

/// While a container is called again and again, it need not leave.
#[test]
fn container_in_use_is_not_prefaulted() {
    let mut pair = Contended::new(|_| {});
    for _ in 0..100 {
        pair.world.call(pair.resident);
        pair.rest(100);
    }
    assert_eq!(pair.permitted(), []);
}

#[test]
fn nothing_is_prefaulted_without_contention() {
    let mut world = World::new(9);
    (world.host_total, world.host_pool_bytes) = (Some(10_000), Some(10_000));
    world.running(OFFLOADED, VRAM_BYTES / 2);
    world.settle();
    let policies = Policies::default();
    world.feed(Input::Reconfigured(Box::new(Settings { policies, ..settings() })));
    world.allowed.clear();
    world.running(RESIDENT, VRAM_BYTES / 2);
    world.settle();
    assert_eq!((world.state(OFFLOADED), &world.allowed[..]), (State::Offloaded, &[][..]));
}

/// NVML shows the registration of memory as work of the process. It must not count as use.
#[test]
fn prefault_is_no_use_of_the_gpu() {
    let mut pair = Contended::new(|_| {});
    pair.world.prefaults = false;
    pair.rest(2_000);
    assert_eq!(pair.permitted(), [COPIED_BYTES], "the prefault is in progress");
    let last_use = pair.world.container(RESIDENT).usage.last_use;
    let pid = pair.world.agents[&pair.resident].pid;
    let work = |pair: &mut Contended| {
        let work = Work { pid, uuid: GPU.into(), percent: 2, age_ms: 0 };
        pair.world.feed(Input::Worked(vec![work]));
        pair.world.container(RESIDENT).usage.last_use
    };
    assert_eq!(work(&mut pair), last_use);
    pair.agent().notes = PREFAULTED;
    let agent = pair.world.agents.get_mut(&pair.resident).unwrap();
    (agent.kept, agent.notes) = (COPIED_BYTES, ProcessFlags::HOST_POOL);
    pair.rest(100);
    assert_eq!(pair.permitted(), [COPIED_BYTES, 0], "it is over");
    assert_eq!(work(&mut pair), last_use, "the sample can be older than its end");
    pair.rest(5_000);
    assert!(work(&mut pair) > last_use, "other work counts");
}

/// Work that a call has begun during the prefault counts as use.
#[test]
fn call_during_a_prefault_begins_a_use() {
    let mut pair = Contended::new(|_| {});
    pair.world.prefaults = false;
    while !pair.is_filling() {
        pair.rest(60);
    }
    pair.agent().notes = PREFAULTED;
    pair.world.call(pair.resident);
    pair.rest(1_000);
    let pid = pair.agent().pid;
    let work = Work { pid, uuid: GPU.into(), percent: 90, age_ms: 0 };
    pair.world.feed(Input::Worked(vec![work]));
    assert_eq!(pair.world.container(RESIDENT).usage.last_use, pair.world.now);
}

/// What is prefaulted must leave enough memory for the offload of the largest other container.
#[test]
fn prefault_leaves_memory_for_others() {
    for (spare_bytes, permitted) in [(74, 0), (75, 2)] {
        let mut pair = Contended::new(|world| {
            world.host_pool_bytes = Some(COPIED_BYTES + spare_bytes);
        });
        let other = pair.world.running(FULL, 100);
        for _ in 0..30 {
            pair.world.call(other);
            pair.rest(100);
        }
        assert_eq!(pair.permitted().len(), permitted, "{spare_bytes} bytes for the other one");
    }
}

/// A container that is larger than the host pool cannot use it, with or without the prefault.
#[test]
fn prefault_leaves_no_memory_in_vain() {
    const SMALL_BYTES: u64 = 120;
    let mut pair = Contended::new_of(SMALL_BYTES, |_| {});
    pair.world.host_pool_bytes = Some(SMALL_BYTES);
    let large = pair.world.running(FULL, 400);
    for _ in 0..30 {
        pair.world.call(large);
        pair.rest(100);
    }
    assert_eq!(pair.permitted().len(), 2);
}

/// Memory that was freed for others is not taken again at once.
#[test]
fn freed_memory_is_not_taken_again_soon() {
    let mut pair = Contended::new(|_| {});
    pair.rest(3_000);
    (pair.agent().kept, pair.agent().notes) = (0, ProcessFlags::HOST_POOL);
    pair.rest(20_000);
    assert_eq!(pair.permitted().len(), 2);
    pair.rest(20_000);
    assert_eq!(pair.permitted().len(), 4, "but later");
}

#[test]
fn memory_is_freed_when_contention_ends() {
    let mut pair = Contended::new(|_| {});
    pair.rest(3_000);
    assert_eq!(pair.kept_bytes(), COPIED_BYTES);
    pair.world.exit(pair.offloaded);
    pair.rest(1_000);
    assert_eq!(pair.kept_bytes(), 0);
}

/// A process that does not prefault, or is slow, must not keep the memory promised. It is told to free
/// what it has.
#[test]
fn permission_ends_if_the_process_is_slow() {
    for (has_begun, waits_ms) in [(false, 2_000), (true, 9_000)] {
        let mut pair = Contended::new(|_| {});
        pair.world.prefaults = false;
        while !pair.is_filling() {
            pair.rest(60);
        }
        if has_begun {
            pair.agent().notes = PREFAULTED;
        }
        pair.rest(waits_ms);
        assert_eq!(pair.permitted(), [COPIED_BYTES], "{has_begun}");
        pair.rest(3_000);
        assert_eq!(pair.permitted(), [COPIED_BYTES, 0], "{has_begun}");
        assert_eq!(pair.agent().notes, ProcessFlags::default(), "{has_begun}: freed");
    }
}

/// The promise of a prefault must not delay the offload of another container.
#[test]
fn prefault_gives_way_to_an_offload() {
    let mut pair = Contended::new(|world| world.host_total = Some(COPIED_BYTES + 600));
    pair.world.prefaults = false;
    while !pair.is_filling() {
        pair.rest(60);
    }
    let other = pair.world.running(FULL, 200);
    pair.world.ask_offload(FULL, other);
    pair.rest(500);
    assert_eq!(pair.world.state(FULL), State::Offloaded);
    assert!(!pair.is_filling());
    assert_eq!(pair.permitted(), [COPIED_BYTES, 0]);
}

/// Prefaulted memory must not drive the offload of another container to its own memory. It is freed,
/// and the offload waits until then.
#[test]
fn prefaulted_memory_gives_way_to_an_offload() {
    let mut pair = Contended::new(|_| {});
    pair.rest(3_000);
    assert_eq!(pair.kept_bytes(), COPIED_BYTES);
    pair.world.host_pool_bytes = Some(10);
    let other = pair.world.running(OTHER, 200);
    pair.world.ask_offload(OTHER, other);
    pair.world.answer_question();
    assert_eq!(pair.world.container(OTHER).shown.reason.0, Reason::HostMemory, "it waits");
    pair.world.work(pair.resident);
    assert_eq!(pair.kept_bytes(), 0, "freed");
    pair.world.host_pool_bytes = Some(COPIED_BYTES);
    pair.world.ordered.clear();
    pair.rest(1_000);
    assert_eq!(pair.world.state(OTHER), State::Offloaded);
    let is_in_pool =
        |action: &Action| matches!(action, Action::CopyOut { how, .. } if how.host_pool);
    assert!(pair.world.ordered.iter().any(is_in_pool));
}

/// If the memory of all prefaults does not suffice for an offload, they keep it.
#[test]
fn prefaulted_memory_is_not_freed_in_vain() {
    for (has_bytes, left_bytes) in [(100, 100), (COPIED_BYTES, 0)] {
        let mut pair = Contended::new(|_| {});
        pair.rest(3_000);
        pair.agent().kept = has_bytes;
        pair.rest(100);
        pair.world.host_pool_bytes = Some(10);
        let other = pair.world.running(OTHER, 200);
        pair.world.ask_offload(OTHER, other);
        pair.world.answer_question();
        pair.world.work(pair.resident);
        assert_eq!(pair.kept_bytes(), left_bytes, "of {has_bytes} bytes");
    }
}

/// A prefaulted container that is to be offloaded too needs its memory itself.
#[test]
fn prefault_of_another_victim_is_not_ended() {
    let mut pair = Contended::new(|_| {});
    pair.rest(3_000);
    pair.world.host_pool_bytes = Some(10);
    let other = pair.world.running(OTHER, 200);
    pair.world.ask_offload(OTHER, other);
    pair.world.ask_offload(RESIDENT, pair.resident);
    assert!(!pair.world.container(RESIDENT).goal.is_resident());
    // The survey of the other one is answered first.
    pair.world.answer_question();
    let frees = |message: &ControllerMessage| *message == ControllerMessage::FreeHostMemory;
    assert!(!pair.agent().inbox.iter().any(frees));
}

/// An offload often begins during the prefault of its container. The pages that are allocated already
/// use up the host pool, and must not count as used by others.
#[test]
fn prefault_in_progress_delays_no_own_offload() {
    let mut pair = Contended::new(|_| {});
    pair.world.prefaults = false;
    while !pair.is_filling() {
        pair.rest(60);
    }
    pair.world.host_pool_bytes = Some(50);
    pair.world.ordered.clear();
    pair.world.ask_offload(RESIDENT, pair.resident);
    pair.world.settle();
    assert_eq!(pair.world.state(RESIDENT), State::Offloaded);
    let to_pool = |action: &Action| match action {
        Action::CopyOut { how, .. } => Some(how.host_pool),
        _ => None,
    };
    assert_eq!(pair.world.ordered.iter().filter_map(to_pool).collect::<Vec<_>>(), [true]);
}

/// A program that only polls may have a kernel that runs on. Readings during the prefault would hide
/// this work.
#[test]
fn container_with_running_work_is_not_prefaulted() {
    let mut pair = Contended::new(|_| {});
    pair.rest(100);
    for _ in 0..4 {
        let (pid, uuid) = (pair.agent().pid, GPU.to_owned());
        pair.world.feed(Input::Worked(vec![Work { pid, uuid, percent: 100, age_ms: 0 }]));
        pair.rest(900);
    }
    assert_eq!(pair.permitted(), []);
    pair.rest(10_000);
    assert_eq!(pair.permitted(), [COPIED_BYTES, 0], "the work has ended");
}

/// An offload that is given up before the copy leaves the memory prefaulted. It must be freed when
/// no container needs it.
#[test]
fn memory_of_no_known_prefault_is_freed() {
    let mut pair = Contended::new(|_| {});
    pair.rest(3_000);
    pair.world.container_mut(RESIDENT).host_pool_prefault = HostPoolPrefault::Off { not_before: 0 };
    pair.rest(1_000);
    assert_eq!((pair.kept_bytes(), pair.agent().notes.intersects(PREFAULTED)), (0, false));
}

/// Memory is freed if the program has freed device memory, or if the container may not leave any more.
#[test]
fn useless_memory_is_freed() {
    let changes: [fn(&mut Contended); 3] = [
        |pair| pair.agent().kept = 10 << 30,
        |pair| pair.world.pin(RESIDENT, true),
        |pair| pair.world.container_mut(RESIDENT).policy.mode = Mode::Manual,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut pair = Contended::new(|_| {});
        pair.rest(3_000);
        assert_eq!(pair.kept_bytes(), COPIED_BYTES);
        change(&mut pair);
        pair.rest(1_000);
        assert_eq!(pair.kept_bytes(), 0, "{n}");
    }
}

/// Containers that may not be evicted, or would not use the memory, get none.
#[test]
fn container_that_stays_is_not_prefaulted() {
    let cases: [fn(&mut Contended); 7] = [
        |pair| pair.world.pin(RESIDENT, true),
        |pair| pair.world.auto_offload(false),
        |pair| pair.policy().mode = Mode::Manual,
        |pair| pair.policy().retain_host_copy = true,
        |pair| pair.policy().prefault = true,
        |pair| pair.policy().engine = Engine::Full,
        |pair| pair.agent().notes = ProcessFlags::HOST_POOL_LOST,
    ];
    for (n, case) in cases.into_iter().enumerate() {
        let mut pair = Contended::new(|_| {});
        case(&mut pair);
        pair.rest(3_000);
        assert_eq!((pair.permitted().len(), pair.kept_bytes()), (0, 0), "{n}");
    }
}

#[test]
fn older_library_is_not_ordered_to_prefault() {
    let older = ALL_CAPABILITIES.0 & !Capabilities::PREFAULTS_HOST_POOL.0;
    let mut pair = Contended::new(|world| world.libraries = vec![Capabilities(older)]);
    pair.rest(3_000);
    assert_eq!(pair.permitted(), []);
    let inbox = &pair.world.agents[&pair.resident].inbox;
    assert!(!inbox.contains(&ControllerMessage::PrefaultHostPool));
}
