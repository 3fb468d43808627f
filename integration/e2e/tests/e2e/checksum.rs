//! Tests of the setting `checksum`, with which a restore verifies that the memory contents are
//! unchanged.

use affinode_e2e::{
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::Result;

use crate::offload::MANUAL;

/// The driver's error code `CUDA_ERROR_ECC_UNCORRECTABLE`.
const ECC_UNCORRECTABLE: i32 = 214;
const WORKER_MIB: u64 = 96;
const NO_COPIER: &str = "[copier]\nenabled = false\n";

fn start(world: &Testbed, id: &str, engine: &str, checksum: &str, spoilt: &str) -> Result<Worker> {
    let spec = Worker::spec(id, USUAL, WORKER_MIB)
        .annotation("affinode.io/engine", engine)
        .annotation("affinode.io/checksum", checksum)
        .env("AFFINODE_SIM_SPOIL_COPY", spoilt);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Changes a byte of the host copy while the process is offloaded. With `checksum`, every later
/// call of the process must fail, and an event must report the damage. Without `checksum`, the
/// process computes with wrong contents.
#[test]
fn corrupted_host_copy_is_never_used() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut checked = start(&world, "checked", "full", "true", "")?;
    let mut trusting = start(&world, "trusting", "full", "false", "")?;
    for worker in [&mut checked, &mut trusting] {
        let id = worker.running.id.clone();
        world.cli().move_out(&id)?;
        assert_eq!(worker.call("stray")?.result, 0, "{id}");
    }
    for command in ["sync", "verify", "touch"] {
        assert_eq!(checked.ask(command)?.result, ECC_UNCORRECTABLE, "{command}");
    }
    let row = until("an event about the damage", || {
        let row = world.cli().container("checked")?;
        Ok(row.filter(|row| row.processes.iter().any(|p| p.hazards == ["damaged-memory"])))
    })?;
    assert!(row.warnings.iter().any(|line| line.contains("restart it")), "{row:?}");
    let events = world.cli().events()?;
    assert_eq!(events.iter().filter(|event| event.kind == "damaged").count(), 1, "{events:?}");
    let said = world.cli().offload("checked")?;
    assert_eq!((said.done, said.reason.as_str()), (false, "damaged-memory"), "{said:?}");

    assert!(
        !trusting.verify()?,
        "without `checksum`, the restored memory does not contain the damage"
    );
    assert!(checked.ends(&world)?, "the program did not end after its standard input was closed");
    trusting.running.kill(&world)?;
    Ok(())
}

/// Corrupts a copy to the device during a restore. With `checksum`, the restore must repeat the
/// copy. Without `checksum`, the contents are wrong. The corrupted copy is the first large copy to
/// the device. It belongs to the restore, because the program itself computes its contents on the
/// device.
#[test]
fn a_copy_that_went_wrong_is_made_once_more() -> Result<()> {
    let world = TestbedConfig::default().config(&[MANUAL, NO_COPIER].concat()).world()?;
    for engine in ["copy", "full"] {
        let mut checked = start(&world, engine, engine, "true", "1")?;
        for _ in 0..2 {
            world.cli().move_out(engine)?;
            assert!(checked.verify()?, "{engine}");
        }
        let row = world.cli().known(engine)?;
        assert!(row.processes.iter().all(|process| process.hazards.is_empty()), "{row:?}");

        let id = format!("{engine}-trusting");
        let mut trusting = start(&world, &id, engine, "false", "1")?;
        world.cli().move_out(&id)?;
        assert!(!trusting.verify()?, "{engine}: without `checksum`, the copy was not damaged");
        for worker in [checked, trusting] {
            worker.running.kill(&world)?;
            worker.running.delete(&world)?;
        }
    }
    Ok(())
}

/// Offloads a worker repeatedly, with retained host copies and checksums. Before each offload, a
/// command allocates, changes or frees memory, or leaves the contents unchanged. After each
/// restore, the contents must be correct, and the controller must report no damage.
#[test]
fn unchanged_contents_are_reported() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ["copy", "full"] {
        let spec = Worker::spec(engine, USUAL, WORKER_MIB)
            .annotation("affinode.io/engine", engine)
            .annotation("affinode.io/retain-host-copy", "true")
            .annotation("affinode.io/checksum", "true");
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        for step in ["alloc 64 0", "touch", "set 0 7", "free", "sync"] {
            worker.call(step)?;
            world.cli().move_out(engine)?;
            let unchanged_bytes = world.cli().known(engine)?.process()?.unchanged_bytes;
            match step {
                // The step changes all words but those of the other allocation, of 64 MiB.
                "touch" => assert!(unchanged_bytes <= 64 * MIB, "{engine}: {unchanged_bytes}"),
                "sync" => assert_eq!(unchanged_bytes, WORKER_MIB * MIB, "{engine} after {step}"),
                _ => {}
            }
            assert!(worker.verify()?, "{engine} after {step}");
        }
        let row = world.cli().known(engine)?;
        assert!(row.processes.iter().all(|process| process.hazards.is_empty()), "{row:?}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}
