//! Test of processes that were found to call the driver without the library's hooks.

use affinode_proto::{
    event::EventKind,
    reason::Reason,
    wire::{Hazards, message::AgentMessage},
};

use super::super::{Effect, Input, offload_check, offload_level, plan::OffloadMethod};
use super::world::{World, key};

#[test]
fn hidden_way_is_told_once_and_bars_checkpoints() {
    // The engines of these containers are checkpoint, full and copy.
    for (n, moves) in
        [(0, OffloadMethod::DriverCheckpoint), (1, OffloadMethod::Copy), (2, OffloadMethod::Copy)]
    {
        let mut world = World::new(3);
        let id = world.running(n, 600);
        world.tick();
        let told = |world: &mut World| {
            let hazards = Hazards::HIDDEN_WAY;
            let notice = Input::Message(id, AgentMessage::Notice { hazards });
            let effects = world.bench.node.handle(world.bench.now, notice);
            let is_told = |effect: &&Effect| matches!(effect, Effect::Publish(event) if event.kind == EventKind::HiddenWay);
            effects.iter().filter(is_told).count()
        };
        assert_eq!((told(&mut world), told(&mut world)), (1, 0));
        let process = world.process(id);
        assert_eq!(offload_level::moves(&world.node.state, &key(n))(process), moves);
        let refused = offload_check::check_offload(&world.node.state, &key(n), true)
            .map_err(|(reason, _)| reason);
        let wanted = if moves == OffloadMethod::Copy { Ok(()) } else { Err(Reason::HiddenWay) };
        assert_eq!(refused, wanted);
    }
}
