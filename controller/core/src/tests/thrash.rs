//! Tests that containers move only a limited number of times, for any sequence of calls.

use affinode_proto::wire::message::Outcome;
use proptest::prelude::*;

use super::{
    super::{
        Input, Millis, ProcessId, Settings,
        policy::{Policies, Policy},
    },
    world::{Host, World, settings},
};

const RESIDENCY_MS: Millis = 5_000;

/// Sets a lower number of cases than usual, because each case is slow. PROPTEST_CASES overrides it.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(64);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Creates a world with three offloaded containers, each of which needs the VRAM of the others.
fn oversubscribed() -> (World, Vec<ProcessId>) {
    let mut world = World::new(3);
    let running = |n| {
        let id = world.running(n, 600);
        world.settle();
        id
    };
    let ids = (0..3).map(running).collect();
    let usual = settings();
    let node = Policy { minimum_residency_ms: RESIDENCY_MS, ..usual.policies.node };
    let policies = Policies { node, ..usual.policies };
    world.feed(Input::Reconfigured(Box::new(Settings { policies, ..usual })));
    (world, ids)
}

/// Runs a tick, and delivers all messages that it causes.
fn pass(world: &mut World) {
    world.tick();
    loop {
        while !world.questions.is_empty() {
            world.answer_question();
        }
        let busy = |(_, agent): &(_, &super::super::harness::agent::Agent)| !agent.inbox.is_empty();
        let Some(id) = world.agents.iter().find(busy).map(|(id, _)| *id) else { break };
        world.work(id);
    }
}

proptest! {
    #![proptest_config(config())]

    /// For any sequence of calls, a restored container must stay resident for its minimum
    /// residency. This limits the number of its restores.
    #[test]
    fn container_moves_at_most_once_per_residency(
        calls in proptest::collection::vec((0_usize..3, 0_usize..60), 1..40),
    ) {
        let (mut world, ids) = oversubscribed();
        let began = world.now;
        let before: Vec<u64> = (0..3).map(|n| world.container(n).figures.restores).collect();
        for (called, ticks) in calls {
            world.call(ids[called]);
            for _ in 0..=ticks {
                let resident = |world: &World, n| {
                    let c = &world.container(n);
                    (c.goal.is_resident(), c.figures.restored_at)
                };
                let were: Vec<_> = (0..3).map(|n| resident(&world, n)).collect();
                pass(&mut world);
                for (n, (was_resident, became_resident)) in were.into_iter().enumerate() {
                    let leaves = was_resident && !resident(&world, n).0;
                    let became_resident = became_resident.filter(|t| *t >= began && leaves);
                    let stayed_ms = became_resident.map_or(RESIDENCY_MS, |t| world.now - t);
                    prop_assert!(stayed_ms >= RESIDENCY_MS, "{n} stayed for {stayed_ms} ms");
                }
            }
        }
        for (n, before) in before.into_iter().enumerate() {
            let restores = world.container(n).figures.restores - before;
            prop_assert!(restores <= (world.now - began) / RESIDENCY_MS + 1, "{n}: {restores}");
        }
    }

    /// After each failed offload, the time until the next attempt must double, even if calls and
    /// requests arrive meanwhile.
    #[test]
    fn failed_offloads_are_retried_less_often(
        calls in proptest::collection::vec((0_usize..2, 1_usize..60), 60),
    ) {
        let mut world = World::new(2);
        let other = world.running(1, 600);
        world.settle();
        let ids = [world.running(0, 600), other];
        let began = world.now;
        for (called, ticks) in calls {
            world.call(ids[called]);
            for _ in 0..ticks {
                world.fail = Some(Outcome::DriverError);
                pass(&mut world);
            }
        }
        let failures = world.container(0).offload_failures.in_a_row;
        // The first delay is the idle timeout, at least 1 s. It doubles with each failure, up to 64
        // s in this test.
        let least_ms = |failures: u32| -> Millis {
            (1..failures).map(|n| 1_000_u64 << n.min(6)).sum()
        };
        prop_assert!(failures > 0);
        prop_assert!(least_ms(failures) <= world.now - began, "{failures} failures");
    }
}
