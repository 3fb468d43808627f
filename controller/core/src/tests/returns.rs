//! Tests of offloads and restores, one case per test.

use affinode_proto::{
    reason::Reason,
    state::State,
    wire::{
        Hazards, Phase,
        message::{Action, AgentMessage, ControllerMessage, Outcome},
    },
};

use super::{
    super::{
        DeviceBytes, Input, ProcessId, Request,
        container::Offload,
        input::{CommandId, SwapStatus},
        offload,
    },
    world::{GPU, Host, World, key},
};

#[test]
fn idle_goes_out_and_a_call_brings_it_back() {
    let mut world = World::new(1);
    world.running(0, 600);
    world.tick();
    assert_eq!(world.state(0), State::Active);
    world.settle();
    assert_eq!((world.state(0), world.used()), (State::Offloaded, 0));
    assert_eq!(
        world.journal[&key(0)].processes[0].offloaded,
        [DeviceBytes { uuid: GPU.into(), bytes: 600 }]
    );
    let id = *world.agents.keys().next().unwrap();
    world.call(id);
    assert_eq!(world.state(0), State::Queued);
    for _ in 0..10 {
        world.answer_question();
        world.work(id);
    }
    assert_eq!((world.state(0), world.used()), (State::Active, 600));
    assert!(world.journal.is_empty());
}

#[test]
fn two_that_do_not_fit_together_take_turns() {
    let mut world = World::new(2);
    let first = world.running(0, 600);
    world.settle();
    world.running(1, 600);
    world.call(first);
    assert_eq!(world.state(0), State::Queued);
    world.settle();
    // The second container became idle. The first was restored and became idle again.
    assert_eq!(world.container(0).figures.restores, 1);
    assert_eq!((world.state(0), world.state(1)), (State::Offloaded, State::Offloaded));
}

/// A controller ends after it has restored the first of a container's two processes. Another
/// container, which makes its call first, needs the VRAM that this process holds. The next
/// controller must restore the second process all the same, so that both containers are served.
#[test]
fn partly_restored_container_goes_first() {
    let mut world = World::new(2);
    let (one, _other) = (world.running(0, 250), world.running(0, 250));
    world.settle();
    let large = world.running(1, 800);
    world.settle();
    world.call(one);
    while world.used() == 0 {
        world.agents.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| world.work(id));
        world.answer_question();
    }
    world.restart(false);
    world.call(large);
    world.call(one);
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "a call still waits");
    assert_eq!((world.state(0), world.state(1)), (State::Offloaded, State::Offloaded));
}

/// Two controllers end one after the other during a process's offload. The second controller knows
/// the process only from the journal, and must keep it in its own journal records.
#[test]
fn journal_survives_two_controllers() {
    let mut world = World::new(1);
    let ids = [world.running(0, 300), world.running(0, 300), world.running(0, 300)];
    while world.journal.is_empty() {
        world.tick();
        ids.into_iter().for_each(|id| world.work(id));
        world.answer_question();
    }
    // The first process is in its checkpoint. The next controller moves the others.
    let first = *ids.iter().find(|id| !world.agents[*id].inbox.is_empty()).unwrap();
    world.restart(true);
    for _ in 0..20 {
        world.tick();
        ids.into_iter().filter(|id| *id != first).for_each(|id| world.work(id));
        world.answer_question();
    }
    let pid = world.agents[&first].pid;
    let record = &world.journal[&key(0)];
    assert!(record.processes.iter().any(|process| process.pid == pid), "{record:?}");
    world.restart(false);
    ids.into_iter().for_each(|id| world.call(id));
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "a call still waits");
}

/// The VRAM of a container's two processes is unknown. They must be restored once the GPU has no
/// other users.
#[test]
fn unrecorded_container_restores_to_empty_gpu() {
    let mut world = World::new(2);
    let ids = [world.running(0, 300), world.running(0, 300)];
    world.running(1, 100);
    world.settle();
    world.journal.clear();
    world.restart(false);
    ids.into_iter().for_each(|id| world.call(id));
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "a call still waits");
}

/// The restore of an unregistered process of a container is running. Another process of the
/// container registers and later exits. The VRAM must stay promised to the unregistered process.
#[test]
fn promise_to_unregistered_process_is_kept() {
    let mut world = World::new(1);
    let unseen = (77, 1);
    let offloaded = vec![DeviceBytes { uuid: GPU.into(), bytes: 400 }];
    let recalled = Input::Recalled {
        key: key(0),
        identity: unseen,
        offloaded,
        to: None,
        restoring: true,
        host: Vec::new(),
    };
    world.feed(recalled);
    let deserted = |world: &World, lives| world.node.deserted(|_, _| lives).count();
    assert_eq!(deserted(&world, true), 0, "an unregistered process needs the container's socket");
    assert_eq!(deserted(&world, false), 1);
    world.join(0);
    let id = ProcessId(world.next);
    world.work(id);
    world.work(id);
    assert_eq!(world.node.state.admission.ledger.promised_bytes(GPU), 400);
    world.exit(id);
    assert_eq!(world.node.state.admission.ledger.promised_bytes(GPU), 400);
}

/// After a controller's end, the two processes of a container register one after the other. When
/// the late process registers, VRAM has been promised and proven free for the early process. The
/// next controller must not use this proof for the late process.
#[test]
fn late_registration_waits_for_own_proof() {
    let mut world = World::new(1);
    let (early, late) = (world.running(0, 300), world.running(0, 300));
    world.settle();
    let busy =
        ControllerMessage::Order { order: 0, action: Action::ReleaseAllocations, decided_ms: 0 };
    world.agents.get_mut(&late).unwrap().inbox.push_back(busy);
    world.restart(true);
    world.call(early);
    while world.state(0) != State::Restoring {
        world.answer_question();
        world.work(early);
    }
    world.work(late);
    // Unmanaged processes take VRAM that was proven free in addition to the promise, so the late
    // process does not fit.
    world.others = 600;
    world.settle();
    assert_eq!(world.state(0), State::Queued);
    world.others = 0;
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "a call still waits");
    assert_eq!(world.state(0), State::Offloaded);
}

/// A process uses managed memory, so it can never be offloaded. The controller checks this again
/// and again, but must publish the reason only once.
#[test]
fn unsafe_process_is_refused_once() {
    let mut world = World::new(1);
    let id = world.running(0, 300);
    let hazards = Hazards::MANAGED_MEMORY;
    world.feed(Input::Message(id, AgentMessage::Notice { hazards }));
    for _ in 0..10 {
        world.call(id);
        world.settle();
    }
    assert_eq!(world.refused, ["managed-memory"]);
    assert_eq!(world.state(0), State::Idle);
}

/// An agent reports a hazard and then refuses the order to lock. The hazard must be shown as the
/// reason.
#[test]
fn hazard_during_offload_is_the_reason() {
    let known = [Hazards::MANAGED_MEMORY, Hazards::default()].map(|hazards| {
        let mut world = World::new(1);
        let id = world.running(0, 300);
        while world.agents[&id].phase != Phase::Closed {
            world.tick();
            world.answer_question();
            world.work(id);
        }
        world.feed(Input::Message(id, AgentMessage::Notice { hazards }));
        world.fail = Some(Outcome::Unsupported);
        world.settle();
        assert_eq!(world.fail, None, "the lock was refused");
        world.process(id).agent.hazards.words().collect::<Vec<_>>()
    });
    assert_eq!(known, [["managed-memory"], ["driver-too-old"]]);
}

#[test]
fn process_on_mig_gpu_stays() {
    let mut world = World::new(1);
    world.mig = true;
    world.running(0, 300);
    world.settle();
    assert_eq!((world.state(0), world.refused), (State::Idle, vec!["mig".to_owned()]));
}

/// A process has memory on a GPU in MIG mode, but no reading has shown it yet. The survey before
/// the offload shows it, so the process must stay resident.
#[test]
fn new_process_on_mig_gpu_stays() {
    let mut world = World::new(1);
    world.mig = true;
    let id = world.running(0, 300);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    assert_eq!(world.questions.len(), 1, "a survey");
    world.settle();
    assert!(world.agents[&id].phase == Phase::Open && world.refused.contains(&"mig".to_owned()));
    assert_eq!(world.container(0).figures.offloads, 0);
}

#[test]
fn unmanaged_process_delays_restore() {
    let mut world = World::new(1);
    world.running(0, 600);
    world.settle();
    world.others = 900;
    let id = *world.agents.keys().next().unwrap();
    world.call(id);
    world.settle();
    assert_eq!(world.state(0), State::Queued);
    world.others = 0;
    world.settle();
    assert_eq!(world.container(0).figures.restores, 1);
}

#[test]
fn a_request_is_answered_when_it_is_done() {
    let mut world = World::new(1);
    world.running(0, 10);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    for _ in 0..10 {
        world.answer_question();
        world.work(ProcessId(1));
    }
    assert_eq!(
        (world.state(0), world.answers.clone()),
        (State::Offloaded, vec![(CommandId(1), true)])
    );
    world.feed(Input::Command(CommandId(2), key(0), Request::Restore));
    for _ in 0..10 {
        world.answer_question();
        world.work(ProcessId(1));
    }
    assert_eq!((world.state(0), world.answers.len()), (State::Active, 2));
}

#[test]
fn call_during_close_undoes_offload() {
    let mut world = World::new(1);
    world.running(0, 10);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    world.answer_question();
    world.work(ProcessId(1));
    world.call(ProcessId(1));
    for _ in 0..10 {
        world.work(ProcessId(1));
        world.answer_question();
    }
    assert_eq!(
        (world.state(0), world.answers.clone()),
        (State::Active, vec![(CommandId(1), false)])
    );
    assert_eq!(world.agents[&ProcessId(1)].phase, Phase::Open);
}

/// A process claims in its registration that it is offloaded, but no record confirms this. The
/// controller must reject the claim, because the claim would reserve a whole GPU. The restore of
/// another container must still succeed.
#[test]
fn false_offloaded_phase_is_rejected() {
    let mut world = World::new(2);
    world.feed(Input::Started(1));
    let honest = world.running(0, 500);
    world.join(1);
    let liar = world.agents.last_entry().unwrap();
    let id = *liar.key();
    liar.into_mut().phase = Phase::Checkpointed;
    world.hello(id);
    assert_eq!(world.state(1), State::Active);
    assert!(world.node.state.admission.queue.is_empty());
    world.settle();
    assert_eq!(world.state(0), State::Offloaded);
    world.call(honest);
    world.settle();
    assert!(!world.agents[&honest].wants, "a call still waits");
}

/// An operator pins a container, or turns auto-offload off. No policy and no waiter may then cause
/// an offload.
#[test]
fn pin_and_auto_offload_off_keep_containers() {
    let mut world = World::new(2);
    let first = world.running(0, 600);
    world.pin(0, true);
    world.settle();
    assert_eq!(world.state(0), State::Idle);
    assert_eq!(world.container(0).shown.reason.0, Reason::Pinned);
    world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
    assert_eq!(
        world.answers.last(),
        Some(&(CommandId(1), false)),
        "an operator cannot offload it either"
    );

    world.pin(0, false);
    world.auto_offload(false);
    world.settle();
    assert_eq!(world.container(0).shown.reason.0, Reason::AutoOff);
    world.feed(Input::Command(CommandId(2), key(0), Request::Offload));
    world.settle();
    assert_eq!(world.state(0), State::Offloaded, "an operator can offload the container");
    // The VRAM is in use. While auto-offload is off, no container must be evicted for this waiter.
    let second = world.running(1, 600);
    world.call(first);
    world.settle();
    assert_eq!((world.state(0), world.agents[&second].phase), (State::Queued, Phase::Open));
    world.auto_offload(true);
    world.settle();
    assert!(!world.agents[&first].wants, "a call still waits");
}

/// The controller is stopped during the first of a container's two restores. Processes of other
/// containers receive no message and resume their allocations. One of them allocates VRAM that was
/// proven free for the second restore. The controller must prove the VRAM again.
#[test]
fn stopped_controller_distrusts_its_proofs() {
    let mut world = World::new(1);
    let ids = [world.running(0, 300), world.running(0, 300)];
    world.settle();
    ids.into_iter().for_each(|id| world.call(id));
    while world.state(0) != State::Restoring {
        world.answer_question();
    }
    let restores = |message: &ControllerMessage| match message {
        ControllerMessage::Order { order, action: Action::Restore, .. } => Some(*order),
        _ => None,
    };
    let (id, order) = ids
        .into_iter()
        .find_map(|id| Some((id, world.agents[&id].inbox.iter().find_map(restores)?)))
        .unwrap();
    let agent = world.agents.get_mut(&id).unwrap();
    agent.inbox.clear();
    agent.phase = Phase::Locked;
    world.now += 6_000;
    world.others = 600;
    let report = SwapStatus::default().report(order, Outcome::Done, Phase::Locked, 0);
    world.feed(Input::Message(id, report));
    world.settle();
    assert_eq!(world.state(0), State::Queued);
    world.others = 0;
    world.settle();
    assert!(world.agents.values().all(|agent| !agent.wants), "a call still waits");
}

/// A process is stopped before it reads the order to restore, and other processes resume their
/// allocations meanwhile. When the process continues, it must not execute this old order. It must
/// be restored by a second order.
#[test]
fn stopped_process_restores_by_second_order() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    world.settle();
    world.call(id);
    while world.state(0) != State::Restoring {
        world.answer_question();
        world
            .agents
            .get_mut(&id)
            .unwrap()
            .inbox
            .retain(|m| matches!(m, ControllerMessage::Order { .. }));
    }
    for _ in 0..300 {
        world.tick();
    }
    world.others = 600;
    world.work(id);
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    world.others = 0;
    world.settle();
    assert!(!world.agents[&id].wants, "a call still waits");
}

/// Processes of one container register one after the other, and none of them pauses its allocations
/// when ordered. The restore of another container must be delayed by the first process only, not
/// again by each further process.
#[test]
fn container_that_never_holds_delays_once() {
    let mut world = World::new(2);
    let victim = world.running(0, 300);
    world.settle();
    let mut waits_ms = Vec::new();
    for _ in 0..5 {
        world.join(1);
        let called = world.now;
        while world.agents[&victim].phase != Phase::Open {
            world.call(victim);
            world.tick();
            for _ in 0..20 {
                world.answer_question();
                world.work(victim);
            }
        }
        waits_ms.push(world.now - called);
        world.feed(Input::Command(CommandId(1), key(0), Request::Offload));
        for _ in 0..20 {
            world.answer_question();
            world.work(victim);
        }
        assert_eq!(world.state(0), State::Offloaded);
    }
    assert!(
        (800..1_000).contains(&waits_ms[0]),
        "the first grant waits for the container: {waits_ms:?}"
    );
    assert!(waits_ms[1..].iter().all(|wait| *wait < 500), "{waits_ms:?}");
}

/// A container repeatedly receives a grant of VRAM, but its process always reconnects before the
/// restore. During each grant, all other processes pause their allocations. The time between two
/// grants must therefore become longer with every grant.
#[test]
fn wasted_grants_delay_others_less_each_time() {
    let mut world = World::new(2);
    world.running(1, 100);
    let mut id = world.running(0, 300);
    world.settle();
    let mut turns = 0;
    for _ in 0..200 {
        world.call(id);
        world.tick();
        while !world.questions.is_empty() {
            world.answer_question();
        }
        let ids: Vec<ProcessId> =
            world.agents.keys().copied().filter(|other| *other != id).collect();
        for other in ids {
            while !world.agents[&other].inbox.is_empty() {
                world.work(other);
            }
        }
        while !world.questions.is_empty() {
            world.answer_question();
        }
        if world.state(0) == State::Restoring {
            turns += 1;
            id = world.reconnect(id, false);
        }
    }
    // The test ran for 12 seconds, and the container had to wait for 0.5, 1, 2 and 4 seconds
    // between its grants.
    assert!((2..8).contains(&turns), "{turns} turns");
}

/// The driver hangs in the checkpoint of a process, and the other process of the container makes a
/// CUDA call. The gate of the calling process must open, but only after about a minute, when the
/// checkpoint counts as hanging.
#[test]
fn sibling_of_a_hanging_checkpoint_opens_late() {
    let mut world = World::new(1);
    let (hangs, called) = (world.running(0, 100), world.running(0, 100));
    let takes_away = |world: &World| world.process(hangs).may_leave(world.now);
    while !takes_away(&world) {
        world.tick();
        world.answer_question();
        if world.agents[&hangs].inbox.is_empty() || !takes_away(&world) {
            world.work(called);
        }
        if !takes_away(&world) {
            world.work(hangs);
        }
    }
    world.call(called);
    let began = world.now;
    while world.agents[&called].phase != Phase::Open {
        world.tick();
        world.work(called);
        assert!(world.now < began + 61_000, "the sibling's gate does not open");
    }
    assert!(world.now >= began + 59_000, "the sibling's gate opened during the checkpoint");
}

/// A process starts in an offloaded container, so it must pause its allocations. The controller
/// ends this pause while it evicts the container's CUDA context. If the eviction then fails, the
/// process must pause its allocations again.
#[test]
fn newcomer_pauses_again_if_an_eviction_fails() {
    let mut world = World::new(3);
    let offloaded = world.running(2, 600);
    world.settle();
    assert_eq!(world.agents[&offloaded].phase, Phase::CopiedOut);
    world.take_unmanaged(800);
    world.join(2);
    let newcomer = ProcessId(world.next);
    (0..5).for_each(|_| world.pass());
    assert!(world.agents[&newcomer].held, "its sibling needs the VRAM");
    offload::evict(&mut world.bench.node.state, &key(2), Offload::deep(world.bench.now));
    while world.process(newcomer).holds.for_siblings {
        world.tick();
        world.answer_question();
    }
    // A call of the newcomer is inside the driver, so its gate cannot close.
    world.fail = Some(Outcome::Busy);
    while world.fail.is_some() {
        world.work(newcomer);
    }
    (0..5).for_each(|_| world.work(newcomer));
    let agent = &world.agents[&newcomer];
    assert_eq!(
        (agent.phase, agent.held),
        (Phase::Open, true),
        "the newcomer must not take that VRAM"
    );
}
