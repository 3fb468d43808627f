//! Tests of containers that hold a GPU but make no progress.

use affinode_proto::event::EventKind;

use super::{
    super::{
        Effect, Input, Millis, ProcessId,
        input::Work,
        policy::{Mode, NoProgressAction},
    },
    world::{Host, World, key},
};

const HOUR_MS: Millis = 3_600_000;

/// Lets time pass without progress, and returns the texts of the events about it.
fn pass_time(world: &mut World, ms: Millis) -> Vec<String> {
    world.now += ms;
    world.feed(Input::Gpus(Ok(world.gpus())));
    let ids: Vec<ProcessId> = world.agents.keys().copied().collect();
    for id in ids {
        let counters = world.agents[&id].page();
        world.feed(Input::Page(id, counters));
    }
    let effects = world.bench.node.handle(world.bench.now, Input::Tick);
    let text = |effect: Effect| match effect {
        Effect::Publish(event) if event.kind == EventKind::NoProgress => Some(event.text),
        Effect::End { identity, by_force } => {
            world.ended.push((identity.pid, by_force));
            None
        }
        _ => None,
    };
    effects.into_iter().filter_map(text).collect()
}

/// Creates a process with VRAM whose counters have been read.
fn running(world: &mut World) -> ProcessId {
    let id = world.running(0, 600);
    world.tick();
    id
}

fn is_without_progress(world: &World) -> bool {
    world.node.no_progress_ms(&key(0)).is_some()
}

#[test]
fn call_that_never_ends_is_reported_once() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.agents.get_mut(&id).unwrap().inflight = 1;
    let pid = world.agents[&id].pid;
    assert_eq!(pass_time(&mut world, HOUR_MS / 2), Vec::<String>::new());
    let expected = format!(
        "no progress for 1h: a CUDA call of process {pid} is in progress, and no other call has begun"
    );
    assert_eq!(pass_time(&mut world, HOUR_MS / 2), [expected]);
    assert_eq!(pass_time(&mut world, HOUR_MS), Vec::<String>::new(), "reported already");
    assert_eq!(world.node.no_progress_ms(&key(0)), Some(2 * HOUR_MS));
    assert!(world.node.warnings(&key(0))[0].starts_with("no progress for 2h: "));
    // Another thread makes a call.
    world.agents.get_mut(&id).unwrap().calls += 1;
    pass_time(&mut world, 60);
    assert!(!is_without_progress(&world) && world.node.warnings(&key(0)).is_empty());
    assert_eq!(pass_time(&mut world, HOUR_MS).len(), 1, "reported again");
    assert_eq!(world.ended, [], "the policy only reports");
}

#[test]
fn work_without_calls_is_reported() {
    let mut world = World::new(1);
    let id = running(&mut world);
    let (pid, uuid) = (world.agents[&id].pid, world.gpus()[0].uuid.clone());
    world.now += HOUR_MS;
    world.feed(Input::Worked(vec![Work { pid, uuid, percent: 100, age_ms: 0 }]));
    let told = pass_time(&mut world, 60);
    let expected = format!(
        "no progress for 1h: work of process {pid} uses 100 % of the GPU's time, and no CUDA call has begun"
    );
    assert_eq!(told, [expected]);
}

#[test]
fn idle_container_is_not_without_progress() {
    let mut world = World::new(1);
    world.container_mut(0).policy.mode = Mode::Off;
    running(&mut world);
    assert_eq!(pass_time(&mut world, 5 * HOUR_MS), Vec::<String>::new());
    assert!(!is_without_progress(&world));
}

#[test]
fn time_away_from_the_gpu_does_not_count() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.settle_all();
    world.now += 3 * HOUR_MS;
    world.call(id);
    world.settle();
    world.agents.get_mut(&id).unwrap().inflight = 1;
    assert_eq!(pass_time(&mut world, 60), Vec::<String>::new());
}

#[test]
fn container_ends_if_its_policy_says_so() {
    let mut world = World::new(1);
    let id = running(&mut world);
    let pid = world.agents[&id].pid;
    world.container_mut(0).policy.on_no_progress = NoProgressAction::End;
    world.agents.get_mut(&id).unwrap().inflight = 1;
    pass_time(&mut world, HOUR_MS);
    assert_eq!(world.ended, [(pid, false)]);
    pass_time(&mut world, 4_999);
    assert_eq!(world.ended, [(pid, false)], "it has 5 s to end");
    pass_time(&mut world, 1);
    assert_eq!(world.ended, [(pid, false), (pid, true)]);
    pass_time(&mut world, HOUR_MS);
    assert_eq!(world.ended.len(), 2, "it is killed once");
}

#[test]
fn progress_withdraws_the_order_to_end() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.container_mut(0).policy.on_no_progress = NoProgressAction::End;
    world.agents.get_mut(&id).unwrap().inflight = 1;
    pass_time(&mut world, HOUR_MS);
    world.agents.get_mut(&id).unwrap().calls += 1;
    pass_time(&mut world, 60);
    assert!(world.process(id).termination.is_none());
    pass_time(&mut world, 10_000);
    assert_eq!(world.ended.len(), 1, "it is not killed");
}

/// Without the counters, the controller cannot see whether the process makes calls.
#[test]
fn container_with_unknown_progress_is_not_ended() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.container_mut(0).policy.on_no_progress = NoProgressAction::End;
    world.feed(Input::BadPage(id, "the file is too short".into()));
    let (pid, uuid) = (world.agents[&id].pid, world.gpus()[0].uuid.clone());
    world.now += HOUR_MS;
    world.feed(Input::Worked(vec![Work { pid, uuid, percent: 100, age_ms: 0 }]));
    assert_eq!(pass_time(&mut world, 60), Vec::<String>::new());
    assert_eq!(world.ended, []);
}

#[test]
fn reload_to_report_withdraws_the_order() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.container_mut(0).policy.on_no_progress = NoProgressAction::End;
    world.agents.get_mut(&id).unwrap().inflight = 1;
    pass_time(&mut world, HOUR_MS);
    assert_eq!(world.ended.len(), 1);
    world.container_mut(0).policy.on_no_progress = NoProgressAction::Report;
    pass_time(&mut world, 5_000);
    assert!(world.process(id).termination.is_none());
    assert_eq!(world.ended.len(), 1, "it is not killed");
}

#[test]
fn waiter_without_hope_is_reported() {
    let mut world = World::new(1);
    let id = running(&mut world);
    world.container_mut(0).policy.on_no_progress = NoProgressAction::End;
    world.settle_all();
    world.take_unmanaged(700);
    world.call(id);
    world.settle();
    let told = pass_time(&mut world, HOUR_MS);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("but no offload can free"), "{told:?}");
    assert_eq!(world.ended, [], "a waiter is never ended");
    world.take_unmanaged(0);
    pass_time(&mut world, 60);
    assert!(!is_without_progress(&world));
}
