//! Tests of a restore into VRAM that another container's copy out is still freeing.

use affinode_proto::{
    state::State,
    wire::{
        Capabilities, Phase,
        message::{Action, AgentMessage, Outcome},
    },
};

use super::{
    super::{
        DeviceBytes, GpuSample, Input, ProcessId, early_release,
        harness::agent::Asking,
        input::{CommandId, Request},
        measurements,
        process::OffloadedMemory,
    },
    world::{GPU, Host, OTHER_GPU, TOTAL, World, key},
};

/// Two containers with the engine `auto` and the same priority.
const HERE: usize = 2;
const THERE: usize = 8;
const BYTES: u64 = 700;

/// Container `HERE` is offloaded and called. Container `THERE` has its VRAM and is about to be
/// evicted for it. Returns the processes of both.
fn called(mut world: World) -> (World, ProcessId, ProcessId) {
    world.slow_copies = true;
    let here = world.running(HERE, BYTES);
    world.settle();
    assert_eq!(
        (world.state(HERE), world.agents[&here].phase),
        (State::Offloaded, Phase::CopiedOut)
    );
    let there = world.running(THERE, BYTES);
    // It is idle from now on, but is not offloaded without a waiter.
    world.auto_offload(false);
    world.pass();
    world.auto_offload(true);
    world.ordered.clear();
    world.call(here);
    (world, here, there)
}

/// Advances until the process has sent that it frees VRAM. The controller has not acted on it yet.
fn until_released(world: &mut World, id: ProcessId) {
    let is_releasing = |world: &World| {
        early_release::is_releasing(&world.node.state, &world.process(id).key.clone())
    };
    for _ in 0..200 {
        if is_releasing(world) {
            return;
        }
        world.answer_question();
        world.tick();
        world.work(id);
    }
    panic!("{id:?} does not free VRAM: {:?}", world.process(id).pending);
}

fn is_restoring(world: &World, id: ProcessId) -> bool {
    world.process(id).pending.is_some_and(|pending| pending.action.is_restore())
}

#[test]
fn waiter_is_restored_while_victim_frees() {
    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    let mut both = 0;
    while world.agents[&there].phase != Phase::CopiedOut {
        world.pass();
        both += usize::from(is_restoring(&world, here));
    }
    assert!(both > 0, "the restore began after the copy out: {:?}", world.ordered);
    (0..10).for_each(|_| world.pass());
    assert!(!world.agents[&here].wants);
    assert_eq!((world.restored_as_freed, world.state(THERE)), (1, State::Offloaded));
    assert_eq!(world.container(HERE).figures.restores, 1);
    world.call(there);
    world.settle_all();
    assert!(!world.agents[&there].wants);
}

/// A copy out that no container waits for frees nothing early, because a failure could then leave it
/// half done.
#[test]
fn nothing_is_freed_early_without_waiter() {
    let mut world = World::new(9);
    world.slow_copies = true;
    let id = world.running(HERE, BYTES);
    world.settle();
    let copies = world.ordered.iter().filter_map(|action| match action {
        Action::CopyOut { how, .. } => Some(how.release_early),
        _ => None,
    });
    assert_eq!(copies.collect::<Vec<_>>(), [false]);
    assert_eq!(world.agents[&id].phase, Phase::CopiedOut);
}

/// VRAM that is being freed must not be counted for the driver's restore, for a library that cannot
/// wait, or for an allocation.
#[test]
fn only_copies_in_await_vram() {
    let mut old = World::new(9);
    old.libraries =
        vec![Capabilities(super::world::ALL_CAPABILITIES.0 & !Capabilities::RELEASES_EARLY.0)];
    let (mut world, _, there) = called(old);
    world.settle();
    assert_eq!(world.agents[&there].phase, Phase::CopiedOut);
    assert!(!world.ordered.iter().any(|a| matches!(a, Action::RestoreAsFreed)));

    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    assert!(early_release::may_await(&world.node.state, &key(HERE)));
    world.process_mut(here).agent.phase = Phase::Checkpointed;
    assert!(!early_release::may_await(&world.node.state, &key(HERE)));
    world.process_mut(here).agent.phase = Phase::CopiedOut;
    world.process_mut(here).agent.capabilities.0 &= !Capabilities::RELEASES_EARLY.0;
    assert!(!early_release::may_await(&world.node.state, &key(HERE)));
    world.process_mut(here).agent.capabilities.0 |= Capabilities::RELEASES_EARLY.0;

    // The VRAM that a container itself is freeing is not counted for it.
    let free_for = |n: usize| {
        let samples = early_release::samples_for(&world.node.state, &key(n));
        TOTAL - samples[0].used_bytes
    };
    assert_eq!((free_for(THERE), free_for(HERE)), (125, 650));
    let needs = [DeviceBytes { uuid: GPU.into(), bytes: 1 }];
    let fits = |want| early_release::fits(&world.node.state, &key(HERE), &needs, want, |_| 0);
    assert!(fits(None) && !fits(Some((here, 1))), "an allocation cannot wait");
    let covers = |bytes| {
        let needs = [DeviceBytes { uuid: GPU.into(), bytes }];
        early_release::covers(&world.node.state, &key(HERE), &needs, |_| 0)
    };
    assert!(covers(650) && !covers(651), "it is neither free nor being freed");
}

/// The first waiter needs VRAM for its restore and for an allocation, and two containers leave for it.
/// Its restore begins as soon as the VRAM for it alone is being freed.
#[test]
fn restore_begins_before_room_for_an_allocation() {
    let mut world = World::new(9);
    world.slow_copies = true;
    let here = world.running(HERE, 400);
    world.settle();
    assert_eq!(world.agents[&here].phase, Phase::CopiedOut);
    let others = [5, THERE].map(|n| world.running(n, 400));
    world.auto_offload(false);
    world.pass();
    world.auto_offload(true);
    for n in [HERE, 5, THERE] {
        world.container_mut(n).policy.priority = 0;
    }
    // The allocation waited already when the container was offloaded. No call waits at the gate.
    let agent = world.agents.get_mut(&here).unwrap();
    agent.tickets += 1;
    agent.asking = Some(Asking { bytes: 350, attempts: 0, goes_ahead: false });
    world.ask(here);
    let mut both = 0;
    for _ in 0..400 {
        world.pass();
        let leave = others.iter().any(|id| world.agents[id].phase != Phase::CopiedOut);
        both += usize::from(is_restoring(&world, here) && leave);
    }
    assert!(both > 0, "the restore began after both had left: {:?}", world.ordered);
    assert!(world.restored_as_freed == 1 && world.agents[&here].asking.is_none());
    assert_eq!(world.agents[&here].size, 750);
    world.settle_all();
}

/// The VRAM that is being freed suffices for the restore of the waiter, but not for its allocation too.
/// A restore alone would take VRAM in vain.
#[test]
fn restore_alone_needs_room_for_the_allocation() {
    let mut world = World::new(9);
    world.slow_copies = true;
    let here = world.running(HERE, 400);
    world.settle();
    let stays = world.running(5, 400);
    let there = world.running(THERE, 400);
    world.auto_offload(false);
    world.pass();
    let agent = world.agents.get_mut(&here).unwrap();
    agent.tickets += 1;
    agent.asking = Some(Asking { bytes: 350, attempts: 0, goes_ahead: false });
    world.ask(here);
    world.feed(Input::Command(CommandId(1), key(THERE), Request::Offload));
    until_released(&mut world, there);
    for _ in 0..200 {
        world.pass();
        assert!(!is_restoring(&world, here), "restored in vain: {:?}", world.ordered);
    }
    assert_eq!(world.agents[&there].phase, Phase::CopiedOut);
    assert_eq!(world.agents[&stays].phase, Phase::Open);
}

/// VRAM that the sample shows as free already must not be counted a second time.
#[test]
fn freed_vram_is_counted_once() {
    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    // Both containers keep a quarter of their VRAM, so 525 bytes are freed for 525 bytes. With this
    // much of other programs, the waiter fits only if a part is counted twice.
    world.others = TOTAL - 2 * (BYTES - 525) - 525 + 20;
    let mut shown = 0;
    while world.agents[&there].phase != Phase::CopiedOut {
        world.pass();
        assert!(!is_restoring(&world, here), "restored without room");
        let samples = early_release::samples_for(&world.node.state, &key(HERE));
        let shows_both = |gpu: &&GpuSample| gpu.processes.len() == 2;
        for gpu in samples.iter().filter(shows_both) {
            shown += 1;
            let free = gpu.total_bytes.saturating_sub(gpu.used_bytes);
            assert!(free <= 525 - 20, "{free} bytes are counted as free");
        }
    }
    assert!(shown > 0 && world.restored_as_freed == 0, "{shown}");
}

/// The survey for another container shows how much VRAM is free. It must also show how much the
/// victim still holds.
#[test]
fn survey_counts_freed_vram_once() {
    let (mut world, _, there) = called(World::new(9));
    until_released(&mut world, there);
    let free = |world: &World| {
        let samples = early_release::samples_for(&world.node.state, &key(HERE));
        TOTAL - samples[0].used_bytes
    };
    assert_eq!(free(&world), 650);
    world.work(there);
    let gpus = world.gpus();
    assert!(TOTAL - gpus[0].used_bytes > 125, "no VRAM was freed");
    measurements::take_survey(&mut world.node.state, &key(HERE), &gpus);
    assert_eq!(free(&world), 650);
}

/// A proof that does not show the VRAM of each process proves nothing while VRAM is being freed.
#[test]
fn proof_without_processes_needs_free_vram() {
    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    let mut proofs = 0;
    loop {
        world.tick();
        world.work(there);
        if world.agents[&there].phase == Phase::CopiedOut {
            break; // All VRAM is free, so the next proof grants it.
        }
        let mut gpus = world.gpus();
        gpus.iter_mut().for_each(|gpu| gpu.processes.clear());
        let grants = world.node.state.admission.grants.iter();
        let proving = grants.filter_map(|(key, grant)| match grant.stage {
            super::super::grant::Stage::Proving(number) => Some((key.clone(), number)),
            _ => None,
        });
        for (key, number) in proving.collect::<Vec<_>>() {
            proofs += 1;
            world.feed(Input::Proven(key, number, Ok(gpus.clone())));
        }
        assert!(!is_restoring(&world, here));
    }
    assert!(proofs > 0);
}

/// A process reports that it frees VRAM, and does not. The waiter's copy in fails after some seconds,
/// and nothing is lost.
#[test]
fn waiter_survives_a_false_report() {
    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    // The agent of the victim handles nothing from now on.
    let stuck = std::mem::take(&mut world.agents.get_mut(&there).unwrap().inbox);
    (0..400).for_each(|_| world.pass());
    assert_eq!(world.restored_as_freed, 1, "the report is believed once: {:?}", world.ordered);
    assert_eq!((world.state(HERE), world.agents[&here].phase), (State::Queued, Phase::CopiedOut));
    world.agents.get_mut(&there).unwrap().inbox = stuck;
    world.settle_all();
    assert!(!world.agents[&here].wants);
}

/// The message has no effect unless a copy out that frees VRAM early is in progress.
#[test]
fn unexpected_report_of_release_is_ignored() {
    let mut world = World::new(9);
    let id = world.running(HERE, BYTES);
    world.feed(Input::Message(id, AgentMessage::Releasing));
    assert!(!early_release::is_in_progress(&world.node.state));
    world.work_until_closed(id);
    while !matches!(world.process(id).pending.map(|p| p.action), Some(Action::CopyOut { .. })) {
        world.tick();
        world.answer_question();
    }
    world.feed(Input::Message(id, AgentMessage::Releasing));
    assert!(!early_release::is_in_progress(&world.node.state));
}

/// The driver fails when the victim has freed half of its memory, or host memory becomes short. The
/// waiter must not take the freed VRAM for which the victim waits, because the victim could not be
/// evicted.
#[test]
fn partly_failed_victim_returns() {
    // Also with a library that cannot wait for VRAM, so that no restore is tried before, and with so
    // little VRAM that the victim's context must leave too.
    let cases = [(true, 0), (false, 0), (true, 120), (false, 120)];
    for outcome in [Outcome::DriverError, Outcome::NoHostMemory] {
        for (can_wait, others) in cases {
            let (mut world, here, there) = called(World::new(9));
            world.others = others;
            if !can_wait {
                let agent = world.agents.get_mut(&here).unwrap();
                agent.capabilities.0 &= !Capabilities::RELEASES_EARLY.0;
                world.hello(here);
            }
            until_released(&mut world, there);
            world.fail = Some(outcome);
            while world.fail.is_some() {
                world.pass();
            }
            assert!(world.agents[&there].partly_out && world.process(there).is_partly_out());
            world.settle_all();
            let served = !world.agents[&here].wants && !world.agents[&there].partly_out;
            let states = [HERE, THERE].map(|n| world.state(n));
            assert!(served, "{outcome:?} {can_wait} {others}: {states:?}");
        }
    }
}

/// A copy out frees VRAM early only if the waiter needs VRAM of the same GPU.
#[test]
fn waiter_of_another_gpu_frees_nothing_early() {
    let (world, _, there) = called(World::new(9));
    let victim = world.process(there);
    assert!(!early_release::is_useful(&world.node.state, &key(THERE), victim), "it is not leaving");
    let mut process = victim.clone();
    let mut useful = |world: &mut World, uuid: &str| {
        let vram = vec![DeviceBytes { uuid: uuid.into(), bytes: BYTES }];
        process.memory.offloaded = Some(OffloadedMemory::of(vram));
        world.process_mut(there).memory.offloaded = process.memory.offloaded.clone();
        early_release::is_useful(&world.node.state, &key(THERE), &process)
    };
    let mut world = world;
    assert!(useful(&mut world, GPU));
    assert!(!useful(&mut world, OTHER_GPU));
}

/// Another program checkpoints the waiter after its restore into freed VRAM was decided. The driver's
/// restore cannot wait for VRAM, so the grant must end.
#[test]
fn checkpointed_waiter_gets_a_new_grant() {
    let (mut world, here, there) = called(World::new(9));
    until_released(&mut world, there);
    while !is_restoring(&world, here) {
        world.answer_question();
        world.tick();
    }
    let order = world.process(here).pending.unwrap();
    assert_eq!(order.action, Action::RestoreAsFreed);
    let agent = world.agents.get_mut(&here).unwrap();
    agent.inbox.clear();
    agent.phase = Phase::Checkpointed;
    world.report(here, order.order, Outcome::WrongPhase, 0);
    // The model panics if the order is sent again, because it does not fit the phase.
    world.settle_all();
    assert!(!world.agents[&here].wants);
    assert_eq!(world.restored_as_freed, 0);
}
