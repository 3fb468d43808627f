//! Tests of restores on another GPU if the container's own GPU is full.

use affinode_proto::{
    state::State,
    wire::{
        Phase, ProcessFlags,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::{
    super::{
        Input, ProcessId, Request, grants,
        input::{CommandId, SwapStatus},
        policy::Engine,
    },
    world::{GPU, Host, World, key},
};

/// Number of the container whose engine is `copy` here.
const COPY: usize = 2;

/// A world with two GPUs. A process with 600 bytes was offloaded from the first GPU, where other
/// processes now use 600 bytes.
fn oversubscribed(container: usize) -> (World, ProcessId) {
    let mut world = World::new(3);
    world.two_gpus = true;
    if container == COPY {
        let container = world.container_mut(COPY);
        container.policy.engine = Engine::Copy;
    }
    // The number of the first process is odd, so it is on the first GPU.
    let id = world.running(container, 600);
    assert_eq!(world.agents[&id].gpu, 0);
    world.feed(Input::Command(CommandId(1), key(container), Request::Offload));
    world.settle();
    assert_eq!(world.state(container), State::Offloaded);
    world.take_unmanaged(600);
    world.tick();
    (world, id)
}

/// Calls the process, and advances the world until it is restored but not idle again.
fn wait_resident(world: &mut World, id: ProcessId) {
    world.call(id);
    for _ in 0..1_000 {
        if world.agents[&id].phase == Phase::Open {
            return;
        }
        world.pass();
    }
    panic!("{id:?} is not restored");
}

#[test]
fn full_gpu_restores_on_the_other() {
    for container in [0, 1] {
        let (mut world, id) = oversubscribed(container);
        wait_resident(&mut world, id);
        assert_eq!(world.agents[&id].gpu, 1, "{container}");
        assert_eq!((world.used_on(0), world.used_on(1)), (600, 600));
        // The process is now on the second GPU, and its next restore is on that GPU.
        world.settle_all();
        assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
        world.take_unmanaged(0);
        wait_resident(&mut world, id);
        assert_eq!((world.used_on(0), world.used_on(1)), (0, 600));
    }
}

#[test]
fn restore_prefers_own_gpu() {
    let (mut world, id) = oversubscribed(0);
    world.others = 300;
    world.tick();
    wait_resident(&mut world, id);
    assert_eq!(world.agents[&id].gpu, 0);
}

#[test]
fn immovable_process_waits_for_own_gpu() {
    for reason in ["policy", "library", "mig", "room", "copied_out"] {
        let (mut world, id) = oversubscribed(if reason == "copied_out" { COPY } else { 0 });
        match reason {
            "policy" => {
                world.container_mut(0).policy.allow_gpu_migration = false;
            }
            "library" => world.agents.get_mut(&id).unwrap().notes = ProcessFlags::default(),
            "room" => {
                let other = world.running(1, 500);
                let other = world.agents.get_mut(&other).unwrap();
                assert_eq!(other.gpu, 1);
                other.fixed = true;
            }
            "mig" => world.mig = true,
            _ => assert_eq!(world.agents[&id].phase, Phase::CopiedOut),
        }
        world.tick();
        world.call(id);
        for _ in 0..20 {
            world.tick();
            while !world.questions.is_empty() {
                world.answer_question();
            }
            world.work(id);
        }
        assert!(world.agents[&id].phase.is_offloaded(), "{reason}");
        world.take_unmanaged(0);
        wait_resident(&mut world, id);
        assert_eq!(world.agents[&id].gpu, 0, "{reason}");
    }
}

/// A migration fails. It must not be tried again, and the container must wait for VRAM of its own
/// GPU.
#[test]
fn failed_migration_waits_for_own_gpu() {
    for fail in [Outcome::Busy, Outcome::DriverError] {
        let (mut world, id) = oversubscribed(0);
        world.fail = Some(fail);
        world.call(id);
        world.settle();
        assert!(world.fail.is_none(), "no migration was tried");
        assert_eq!((world.agents[&id].phase, world.agents[&id].gpu), (Phase::Checkpointed, 0));
        assert_eq!(world.state(0), State::Queued);
        world.take_unmanaged(0);
        wait_resident(&mut world, id);
        assert_eq!(world.agents[&id].gpu, 0);
    }
}

/// The controller ends after it has ordered a migration. The agent has not executed the order yet,
/// has executed it, or has found no VRAM for the copy in. The next controller must prove VRAM on
/// the GPU where the process is now.
#[test]
fn next_controller_knows_target_gpu() {
    for (container, carried_out, fails) in [(0, false, false), (0, true, false), (1, false, true)] {
        let (mut world, id) = oversubscribed(container);
        world.call(id);
        let sent = |world: &World| {
            let mut recorded = world.journal.values().flat_map(|record| &record.processes);
            recorded.any(|process| process.to.is_some())
        };
        for _ in 0..100 {
            if !sent(&world) {
                world.tick();
                world.answer_question();
            }
        }
        assert!(sent(&world), "it is not written where");
        if carried_out {
            for _ in 0..100 {
                if world.agents[&id].phase == Phase::Checkpointed {
                    world.work(id);
                }
            }
        }
        world.fail = fails.then_some(Outcome::DriverError);
        world.restart(!carried_out);
        if fails {
            world.work(id);
            let agent = &world.agents[&id];
            assert_eq!((agent.phase, agent.gpu), (Phase::CopiedOut, 1));
        }
        wait_resident(&mut world, id);
        assert_eq!(world.agents[&id].gpu, 1, "{carried_out}");
    }
}

/// The migration becomes impossible after VRAM of the other GPU was promised and proven. No restore
/// on the process's own GPU must be ordered, because the proof does not cover that GPU.
#[test]
fn impossible_migration_needs_a_new_proof() {
    let (mut world, id) = oversubscribed(0);
    world.call(id);
    assert!(world.process(id).memory.target_gpu().is_some());
    world.agents.get_mut(&id).unwrap().notes = ProcessFlags::default();
    world.tick();
    for _ in 0..20 {
        world.pass();
    }
    assert_eq!((world.agents[&id].phase, world.agents[&id].gpu), (Phase::Checkpointed, 0));
    assert!(world.process(id).memory.target_gpu().is_none());
    world.take_unmanaged(0);
    wait_resident(&mut world, id);
    assert_eq!(world.agents[&id].gpu, 0);
}

/// A world with two GPUs. A process of container 1 was ordered to restore on the second GPU.
/// Returns the world, the process and the number of the order.
fn sent() -> (World, ProcessId, u64) {
    let (mut world, id) = oversubscribed(1);
    world.call(id);
    world.answer_question();
    let order =
        world.agents.get_mut(&id).unwrap().inbox.drain(..).find_map(|message| match message {
            ControllerMessage::Order { order, action: Action::RestoreOnGpu { .. }, .. } => {
                Some(order)
            }
            _ => None,
        });
    (world, id, order.expect("the order was sent"))
}

fn needs_room_on(world: &World, id: ProcessId) -> String {
    world.process(id).vram_to_restore().unwrap().remove(0).uuid
}

/// A process restores itself on its own GPU before it reads the order to migrate. The late order
/// must not move it.
#[test]
fn late_order_moves_no_process() {
    for outcome in [Outcome::Late, Outcome::WrongPhase] {
        let (mut world, id, order) = sent();
        let swap =
            SwapStatus { swappable_bytes: 450, copied_out_bytes: 450, ..SwapStatus::default() };
        world.feed(Input::Message(id, swap.report(order, outcome, Phase::CopiedOut, 0)));
        assert_eq!(needs_room_on(&world, id), GPU, "{outcome:?}");
    }
}

/// The connection breaks during a migration, and the grant ends before the process registers again.
/// Its next registration must show the target GPU.
#[test]
fn target_gpu_is_known_at_registration() {
    let (mut world, id, _) = sent();
    world.feed(Input::Detached(id));
    grants::abort_grant(&mut world.node.state, &key(1));
    let agent = world.agents.get_mut(&id).unwrap();
    (agent.phase, agent.gpu) = (Phase::CopiedOut, 1);
    let id = world.reconnect(id, false);
    assert_ne!(needs_room_on(&world, id), GPU);
    wait_resident(&mut world, id);
    assert_eq!(world.agents[&id].gpu, 1);
}
