//! Tests of NVML utilisation, which shows work that runs without a CUDA call in progress.

use affinode_proto::{reason::Reason, state::State, wire::Phase};

use super::{
    super::{
        Input, ProcessId,
        hints::Hint,
        input::{CommandId, Request, Work},
    },
    world::{GPU, Host, World, key},
};

fn work(world: &World, id: ProcessId) -> Work {
    Work { uuid: GPU.into(), pid: world.agents[&id].pid, percent: 70, age_ms: 0 }
}

fn pass(world: &mut World, ticks: usize, work: impl Fn(&World) -> Vec<Work>) {
    for _ in 0..ticks {
        let work = work(world);
        world.feed(Input::Worked(work));
        world.tick();
        while !world.questions.is_empty() {
            world.answer_question();
        }
        for id in world.agents.keys().copied().collect::<Vec<_>>() {
            while !world.agents[&id].inbox.is_empty() {
                world.work(id);
            }
        }
    }
}

#[test]
fn working_container_stays_with_reason() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    pass(&mut world, 100, |world| vec![work(world, id)]);
    let container = &world.container(0);
    assert_eq!((container.shown.state, container.figures.offloads), (State::Active, 0));
    assert_eq!(container.shown.reason, (Reason::GpuBusy, "process 1001, 70 %".to_owned()));
    // The container must stay resident even after its own hint that it is idle.
    world.feed(Input::Hinted(key(0), Hint::Idle, "it".into()));
    pass(&mut world, 3, |world| vec![work(world, id)]);
    assert_eq!(world.state(0), State::Active);
    pass(&mut world, 10, |_| Vec::new());
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
}

#[test]
fn utilization_is_shown_per_process_until_stale() {
    let mut world = World::new(2);
    let id = world.running(0, 300);
    world.running(1, 300);
    let shares = |world: &World| -> Vec<Option<u32>> {
        world
            .node
            .state
            .registry
            .processes
            .values()
            .map(|p| world.node.utilization_percent(p))
            .collect()
    };
    assert_eq!(shares(&world), [None, None]);
    pass(&mut world, 2, |world| vec![work(world, id)]);
    assert_eq!(shares(&world), [Some(70), Some(0)]);
    let told = world.now;
    while world.now < told + 6_000 {
        world.tick();
    }
    assert_eq!(shares(&world), [None, None], "the samples are too old");
}

/// An operator requests the offload of a container whose work runs on the GPU. The container must
/// be offloaded, because the driver waits for the end of the work when it locks the process.
#[test]
fn operator_request_offloads_working_container() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    pass(&mut world, 3, |world| vec![work(world, id)]);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    pass(&mut world, 3, |world| vec![work(world, id)]);
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
}

#[test]
fn stale_utilization_sample_expires() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    pass(&mut world, 3, |world| vec![work(world, id)]);
    world.settle();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
}

/// Three kinds of work must not keep a container resident: work on a GPU where its process has no
/// VRAM, work of another pid, and work of an earlier process with the same pid.
#[test]
fn work_of_others_keeps_no_container() {
    let cases: [fn(&mut Work); 3] = [
        |work| work.uuid = "GPU-other".into(),
        |work| work.pid += 1,
        |work| work.age_ms = 1_000_000,
    ];
    for change in cases {
        let mut world = World::new(1);
        world.now = 900_000;
        let id = world.running(0, 600);
        pass(&mut world, 30, |world| {
            let mut work = work(world, id);
            change(&mut work);
            vec![work]
        });
        assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    }
}

#[test]
fn working_container_without_calls_is_no_victim() {
    let mut world = World::new(2);
    let waiter = world.running(0, 600);
    world.settle();
    let worker = world.running(1, 600);
    // Lower the container's priority, because a priority above the waiter's would already prevent
    // the eviction.
    world.container_mut(1).policy.priority = 0;
    world.call(waiter);
    pass(&mut world, 300, |world| vec![work(world, worker)]);
    assert_eq!((world.agents[&worker].phase, world.state(0)), (Phase::Open, State::Queued));
    pass(&mut world, 300, |_| Vec::new());
    assert_eq!(world.container(0).figures.restores, 1);
}

/// NVML shows work in the first sample after a restore, which began before the end of the restore.
/// The next waiter must not wait until this sample is forgotten. Later samples count.
#[test]
fn sample_that_began_before_a_restore_is_ignored() {
    for (age_after_ms, is_ignored) in [(900, true), (1_100, false)] {
        let mut world = World::new(1);
        let id = world.running(0, 600);
        pass(&mut world, 30, |_| Vec::new());
        assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
        world.call(id);
        pass(&mut world, 2, |_| Vec::new());
        let restored_at = world.container(0).figures.restored_at.unwrap();
        world.now = restored_at + age_after_ms;
        let sample = vec![work(&world, id)];
        world.feed(Input::Worked(sample));
        let shown = world.node.utilization_percent(world.process(id));
        assert_eq!(shown, Some(if is_ignored { 0 } else { 70 }), "{age_after_ms} ms");
    }
}
