//! Tests of containers that are used in bursts and need the same VRAM. With the default policy each
//! gets its turn in the pauses of the others.

use super::{
    super::{Input, Millis, ProcessId, Settings, policy::Policies},
    world::{Host, World, settings},
};

/// Length of a burst of calls and of the pause after it, in milliseconds.
const BURST_MS: Millis = 1_000;
const PAUSE_MS: Millis = 5_000;

/// What the program of a container does.
#[derive(Clone, Copy)]
enum Program {
    PausesUntil(Millis),
    CallsSince(Millis),
    WorksUntil(Millis),
}

/// Creates a world with `count` offloaded containers of the same priority, with the default policy.
/// VRAM suffices for one of them.
fn crowd(count: usize) -> (World, Vec<ProcessId>) {
    let mut world = World::new(2 * count);
    let running = |n| {
        let id = world.running(2 * n, 600);
        world.settle();
        id
    };
    let ids = (0..count).map(running).collect();
    let policies = Policies::default();
    world.feed(Input::Reconfigured(Box::new(Settings { policies, ..settings() })));
    (world, ids)
}

/// Runs the programs for this time. Returns how long the first call of each burst waited, also of
/// the bursts that still wait at the end.
fn waits_ms(world: &mut World, ids: &[ProcessId], pause_ms: Millis, run_ms: Millis) -> Vec<Millis> {
    let ends = world.now + run_ms;
    let mut waits = Vec::new();
    let mut programs: Vec<Program> =
        (0..).map(|n| Program::PausesUntil(world.now + n * BURST_MS)).take(ids.len()).collect();
    while world.now < ends {
        for (id, program) in ids.iter().zip(&mut programs) {
            let now = world.now;
            *program = match *program {
                Program::PausesUntil(t) if now >= t => {
                    world.call(*id);
                    Program::CallsSince(now)
                }
                Program::CallsSince(t) if !world.agents[id].wants => {
                    waits.push(now - t);
                    Program::WorksUntil(now + BURST_MS)
                }
                Program::WorksUntil(t) if now >= t => Program::PausesUntil(now + pause_ms),
                Program::WorksUntil(t) => {
                    world.call(*id);
                    Program::WorksUntil(t)
                }
                other => other,
            };
        }
        world.pass();
    }
    waits.extend(programs.iter().filter_map(|program| match program {
        Program::CallsSince(t) => Some(world.now - t),
        _ => None,
    }));
    waits
}

#[test]
fn containers_with_short_pauses_take_turns() {
    let (mut world, ids) = crowd(3);
    let waits = waits_ms(&mut world, &ids, PAUSE_MS, 300_000);
    let longest = waits.iter().copied().max().unwrap();
    // Each of the two others works, and is then unused for the shortest time.
    assert!(longest < 2 * (BURST_MS + 1_000), "a burst waited for {longest} ms");
    assert!(waits.len() > 100, "{} bursts", waits.len());
}

#[test]
fn container_with_pauses_below_a_second_stays() {
    let (mut world, ids) = crowd(2);
    waits_ms(&mut world, &ids[..1], 600, 20_000);
    let before = world.container(0).figures.offloads;
    world.call(ids[1]);
    waits_ms(&mut world, &ids[..1], 600, 60_000);
    assert_eq!(world.container(0).figures.offloads, before);
    assert!(world.agents[&ids[1]].wants, "the other container got the VRAM of one in use");
}
