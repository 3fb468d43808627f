//! Tests of processes that are offloaded in part: some of their memory stays on the GPU.

use affinode_e2e::{
    cli::ContainerRow,
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed, TestbedConfig},
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::offload::MANUAL;

/// Memory of the test program in MiB, in addition to the managed memory that it allocates.
const PLAIN_MIB: u64 = 64;

/// Offloads a container that is named after its engine. Requires that its plain memory is copied out,
/// and that the rest stays for this reason.
fn leaves_in_part(world: &Testbed, engine: &str, reason: &str) -> Result<ContainerRow> {
    world.cli().move_out(engine)?;
    let offloaded = world.cli().known(engine)?;
    let process = offloaded.process()?;
    assert_eq!(process.phase, "CopiedOut", "{engine}: {offloaded:?}");
    assert_eq!(process.copied_out_bytes, PLAIN_MIB * MIB, "{engine}: {offloaded:?}");
    assert_eq!(process.hazards, [reason], "{engine}: {offloaded:?}");
    assert_eq!(offloaded.staying_reasons, [reason], "{engine}: {offloaded:?}");
    Ok(offloaded)
}

/// Offloads a program with managed memory (CUDA's `cuMemAllocManaged`). This memory must stay on
/// the GPU with the context, and all other memory must be offloaded. The program `hazards` checks
/// the contents of both kinds of memory.
#[test]
fn managed_memory_stays_and_the_rest_leaves() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["copy", "full", "auto"] {
        let (program, mib) = (format!("{CLIENTS}/hazards"), PLAIN_MIB.to_string());
        let spec = Spec::gpu(engine, &[&program, "managed", &mib]);
        let spec = spec.annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.expect("ready")?;
        for round in 0..2 {
            let offloaded = leaves_in_part(&world, engine, "managed-memory")?;
            let process = offloaded.process()?;
            assert_eq!(offloaded.staying_bytes, process.vram_bytes, "{engine}: {offloaded:?}");
            assert_eq!(worker.call("verify")?.ok, Some(true), "{engine}, {round}");
        }
        worker.running.kill(&world)?;
    }
    Ok(())
}

/// Offloads a client of MPS. Its memory must leave, and its context must stay: no function of the
/// driver's checkpoint may be called.
#[test]
fn mps_client_leaves_and_keeps_its_context() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let pipes = world.dir().join("mps");
    std::fs::create_dir_all(&pipes)?;
    std::fs::write(pipes.join("control"), "")?;
    let mount = format!("type=bind,src={},dst=/mps,options=rbind:ro", pipes.display());
    let client = |id: &str| {
        let spec = Worker::spec(id, USUAL, PLAIN_MIB).annotation("affinode.io/engine", id);
        spec.env("CUDA_MPS_PIPE_DIRECTORY", "/mps").flags(&["--mount", &mount])
    };
    for engine in ["copy", "full", "auto"] {
        let spec = client(engine).env("AFFINODE_SIM_NO_CHECKPOINT", "1");
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        for round in 0..2 {
            leaves_in_part(&world, engine, "mps")?;
            assert!(worker.verify()?, "{engine}, {round}: the memory has changed");
        }
        worker.running.kill(&world)?;
    }
    let mut worker = Worker::start_as(&world, client("checkpoint"))?;
    worker.wait_filled()?;
    let refused = world.cli().offload("checkpoint")?;
    assert_eq!((refused.done, &*refused.reason), (false, "mps"), "{refused:?}");
    assert!(worker.verify()?, "the memory of a process that stays has changed");
    Ok(())
}
