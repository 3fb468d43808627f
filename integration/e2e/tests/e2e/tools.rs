//! Tests of programs that call the driver without its public functions, and of calls that need no
//! GPU.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed, TestbedConfig},
    worker::Worker,
};
use anyhow::Result;

use crate::offload::MANUAL;

fn start(world: &Testbed, program: &str, id: &str, engine: &str) -> Result<Worker> {
    let program = format!("{CLIENTS}/{program}");
    let spec = Spec::gpu(id, &[&program, "64"]).annotation("affinode.io/engine", engine);
    let mut worker = Worker::start_as(world, spec)?;
    worker.expect("ready")?;
    Ok(worker)
}

/// Offloads a program that looks up the driver's functions as CUDA's runtime does. It makes
/// hundreds of look-ups, for both variants of the default stream, and checks that the private table
/// is the driver's own. The look-ups must also work while the program is offloaded.
#[test]
fn runtime_with_private_table_is_moved() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["checkpoint", "copy", "full"] {
        let mut worker = start(&world, "runtime", engine, engine)?;
        for _ in 0..2 {
            world.cli().move_out(engine)?;
            let row = world.cli().known(engine)?;
            assert_eq!(row.process()?.hazards, Vec::<String>::new(), "{engine}");
            let phase = if engine == "copy" { "CopiedOut" } else { "Checkpointed" };
            assert_eq!(row.process()?.phase, phase, "{engine}");
            assert_eq!(
                worker.call("check")?.ok,
                Some(true),
                "{engine}: the look-ups failed while the process was offloaded"
            );
            worker.call("touch")?;
            assert!(worker.verify()?, "{engine}");
            worker.call("check")?;
        }
        worker.running.kill(&world)?;
    }
    Ok(())
}

#[test]
fn device_queries_while_offloaded_wake_nothing() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["checkpoint", "copy"] {
        let mut worker = start(&world, "tools", engine, engine)?;
        worker.call("devices")?;
        world.cli().move_out(engine)?;
        let before = world.cli().known(engine)?;
        worker.call("devices")?;
        let after = world.cli().known(engine)?;
        assert_eq!((&*after.state, after.restores), ("Offloaded", 0), "{engine}: {after:?}");
        assert_eq!(
            after.process()?.calls,
            before.process()?.calls,
            "{engine}: the calls were counted as use of the GPU"
        );
        assert!(worker.verify()?, "{engine}: the memory has changed");
        worker.running.kill(&world)?;
    }
    Ok(())
}

/// Checks that a container becomes idle after its profile has ended, although a thread of the
/// profiler still runs.
#[test]
fn profile_that_ended_leaves_container_idle() -> Result<()> {
    let world = TestbedConfig::default().config(crate::offload::EAGER).world()?;
    // A thread of the profiler waits for GPU work several times a second, both during the profile
    // and after it.
    let argv = [&format!("{CLIENTS}/tools"), "64"];
    let spec = Spec::gpu("profiled", &argv).annotation("affinode.io/engine", "copy");
    let mut worker = Worker::start_as(&world, spec.env("CUPTI_WAITS", "1"))?;
    worker.expect("ready")?;
    for _ in 0..2 {
        worker.call("begin")?;
        worker.call("end")?;
        let row = world.cli().wait_for_state("profiled", "Offloaded")?;
        assert_eq!(row.process()?.phase, "CopiedOut");
        assert_eq!(row.process()?.hazards, ["tools"]);
        // The profiler uses the context, so the context's local memory stays on the GPU.
        assert_eq!(row.offloaded_bytes, 64 * MIB, "{row:?}");
        assert!(worker.verify()?);
    }
    Ok(())
}
