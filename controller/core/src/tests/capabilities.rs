//! Tests with libraries that lack capabilities. They must receive only orders that they can carry
//! out.

use affinode_proto::wire::{
    Capabilities, Phase,
    message::{Action, ControllerMessage, CopyOptions},
};

use super::{
    super::{
        Input, ProcessId, copier_use,
        input::{CommandId, Request},
        policy::Mode,
    },
    world::{ALL_CAPABILITIES, Host, World, key},
};

/// Number of the container whose engine is `full`.
const FULL: usize = 1;

/// Offloads a process whose library has these capabilities, under each policy that needs a
/// capability. Returns the options in the order to copy out.
fn copy_options_of(capabilities: Capabilities) -> CopyOptions {
    let mut world = World::new(3);
    (world.libraries, world.all_options, world.prepare) = (vec![capabilities], true, true);
    world.announce(FULL);
    let id = leaves_prefaulted(&mut world);
    let options = until_copy_out(&mut world, id);
    world.settle_all();
    assert_eq!(world.agents[&id].phase, Phase::Checkpointed);
    options
}

/// Advances the world until the process is ordered to copy out. Returns the options in that order.
fn until_copy_out(world: &mut World, id: ProcessId) -> CopyOptions {
    for _ in 0..100 {
        if let Some(options) = ordered_copy(world, id) {
            return options;
        }
        if world.is_asked() { world.answer_question() } else { world.work(id) }
    }
    panic!("the process gets no order to copy out");
}

/// Creates a process whose host memory counts as prefaulted, and requests the offload of its
/// container. Returns the process.
fn leaves_prefaulted(world: &mut World) -> ProcessId {
    let id = world.running(FULL, 600);
    world.container_mut(FULL).policy.mode = Mode::Manual;
    (0..2).for_each(|_| world.tick());
    world.process_mut(id).prefault.ordered = true;
    world.feed(Input::Command(CommandId(1), key(FULL), Request::Offload));
    id
}

fn ordered_copy(world: &World, id: ProcessId) -> Option<CopyOptions> {
    world.agents[&id].inbox.iter().find_map(|message| match message {
        ControllerMessage::Order { action: Action::CopyOut { how, .. }, .. } => Some(*how),
        _ => None,
    })
}

#[test]
fn copy_options_are_within_capabilities() {
    let none = CopyOptions::default();
    let cases = [
        (Capabilities::default(), none),
        (Capabilities::USES_COPIER, none),
        (Capabilities::RETAINS_HOST_COPY, CopyOptions { keep: true, ..none }),
        (Capabilities::PREFAULTS, CopyOptions { then_checkpoint: true, ..none }),
        (Capabilities::CHECKS, CopyOptions { check: true, ..none }),
        (
            ALL_CAPABILITIES,
            CopyOptions {
                keep: true,
                then_checkpoint: true,
                check: true,
                host_pool: false,
                release_early: false,
            },
        ),
    ];
    for (capabilities, expected) in cases {
        assert_eq!(copy_options_of(capabilities), expected, "{capabilities:?}");
        assert!(capabilities.contains(expected.requires()));
    }
}

/// Grants must not wait for a copy out that needs no VRAM. A library that can export memory to a
/// copier may need VRAM during the copy out, but the library of this process cannot.
#[test]
fn incapable_library_keeps_no_gpu_from_the_queue() {
    let mut world = World::new(3);
    world.libraries = vec![Capabilities::USES_COPIER];
    let waiter = world.running(0, 100);
    world.settle_all();
    let id = leaves_prefaulted(&mut world);
    let options = until_copy_out(&mut world, id);
    assert!(!options.then_checkpoint);
    world.call(waiter);
    world.tick();
    assert!(
        !world.node.state.admission.grants.is_empty(),
        "the waiter is served during the copy out"
    );
}

#[test]
fn library_without_copiers_gets_none() {
    for (capabilities, gets) in [(ALL_CAPABILITIES, true), (Capabilities::PREFAULTS, false)] {
        let mut world = World::new(3);
        world.libraries = vec![capabilities];
        let id = world.running(FULL, 600);
        world.tick();
        let memory = &mut world.process_mut(id).memory;
        memory.set_offloaded_vram(Some(memory.vram.clone()));
        assert_eq!(
            copier_use::offloads_through_copier(&world.node.state, id).is_some(),
            gets,
            "{capabilities:?}"
        );
    }
}
