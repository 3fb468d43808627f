//! Test of NVML readings that offloaded processes receive.

use affinode_proto::wire::message::{
    AgentMessage, ControllerMessage, GpuReading, UNKNOWN_UTILIZATION,
};

use super::{
    super::{Effect, Input, Millis, Node, ProcessId, input::GpuFigures},
    world::{Host, TOTAL, World},
};

fn asked(node: &mut Node, now: Millis, id: ProcessId) -> Vec<GpuReading> {
    let effects = node.handle(now, Input::Message(id, AgentMessage::AskReadings));
    let readings = effects.into_iter().map(|effect| match effect {
        Effect::Send(to, ControllerMessage::Reading(reading)) if to == id => reading,
        other => panic!("{other:?}"),
    });
    readings.collect()
}

#[test]
fn readings_are_sent_of_every_device() {
    let mut world = World::new(1);
    world.two_gpus = true;
    let id = world.running(0, 600);
    let mut gpus = world.gpus();
    gpus[0].figures = GpuFigures {
        reserved_bytes: 5,
        gpu_percent: Some(70),
        memory_percent: Some(20),
        temperature_c: Some(41),
        power_mw: None,
    };
    let used = gpus[0].used_bytes;
    world.feed(Input::Gpus(Ok(gpus)));
    let readings = asked(&mut world.bench.node, world.bench.now, id);
    assert_eq!(readings.len(), 2);
    let expected = GpuReading {
        uuid: [7; 16],
        total_bytes: TOTAL,
        free_bytes: TOTAL - used,
        reserved_bytes: 5,
        gpu_percent: 70,
        memory_percent: 20,
        temperature_c: 41,
        power_mw: UNKNOWN_UTILIZATION,
    };
    assert_eq!(readings[0], expected);
    assert_eq!(readings[1].uuid, [8; 16]);
}

#[test]
fn stale_or_failed_readings_are_not_sent() {
    let mut world = World::new(1);
    let id = world.running(0, 600);
    let gpus = world.gpus();
    world.feed(Input::Gpus(Ok(gpus.clone())));
    let now = world.now;
    assert_eq!(asked(&mut world.node, now + 5_000, id).len(), 1);
    assert_eq!(asked(&mut world.node, now + 5_001, id), []);
    world.now = now + 5_001;
    world.feed(Input::Gpus(Ok(gpus)));
    assert_eq!(asked(&mut world.node, now + 5_001, id).len(), 1);
    world.feed(Input::Gpus(Err("NVML is gone".into())));
    assert_eq!(asked(&mut world.node, now + 5_001, id), []);
    assert_eq!(asked(&mut world.node, now + 5_001, ProcessId(99)), []);
}

#[test]
fn what_no_offload_frees_is_unmovable() {
    let mut world = World::new(2);
    let uuid = world.gpus()[0].uuid.clone();
    let (first, _second) = (world.running(0, 300), world.running(1, 200));
    let others = 50;
    world.take_unmanaged(others);
    world.tick();
    let held = world.process(first).memory.vram_bytes();
    assert_eq!(world.node.unmovable_bytes(&uuid), others);
    world.pin(0, true);
    world.tick();
    assert_eq!(world.node.unmovable_bytes(&uuid), others + held, "an operator keeps it here");
    world.pin(0, false);
    world.tick();
    assert_eq!(world.node.unmovable_bytes(&uuid), others);
    assert_eq!(world.node.unmovable_bytes("GPU-of-no-node"), 0);
}
