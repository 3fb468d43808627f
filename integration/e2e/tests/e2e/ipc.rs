//! Tests of CUDA's legacy IPC with swappable memory (which the library can move). With every
//! engine, processes can open each other's memory. Shared memory stays resident. A process that has
//! only shared memory is not offloaded.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};

use crate::offload::MANUAL;

const SHARED_MIB: u64 = 16;
const SEED: u32 = 7;

fn program(id: &str, engine: &str, arguments: &[&str]) -> Spec {
    let program = format!("{CLIENTS}/ipc");
    Spec::gpu(id, &[&[&*program], arguments].concat()).annotation("affinode.io/engine", engine)
}

/// Describes a container whose program exports this much memory, with the configured engine.
pub fn giver(id: &str, mib: u64) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/ipc"), "--mib", &mib.to_string()])
}

/// Starts a container whose program allocates and fills memory that it can export.
fn exporter(world: &Testbed, id: &str, engine: &str) -> Result<Worker> {
    let (mib, seed) = (SHARED_MIB.to_string(), SEED.to_string());
    let spec = program(id, engine, &["--mib", &mib, "--seed", &seed]);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Starts a container whose program imports memory of another container and has no memory of its
/// own. It runs in the network namespace of the other container, like a container of the same pod.
/// It loads the driver as CUDA's runtime does.
fn importer(world: &Testbed, id: &str, engine: &str, beside: &Worker) -> Result<Worker> {
    let network = format!("network:/proc/{}/ns/net", beside.running.pid(world)?);
    let spec = program(id, engine, &["--by-name", "11000"]).flags(&["--with-ns", &network]);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn handle(worker: &mut Worker) -> Result<String> {
    worker.call("handle 0")?.handle.context("the reply has no handle")
}

fn open(worker: &mut Worker, handle: &str) -> Result<(i32, bool)> {
    let answer = worker.ask(&format!("open {handle} {SHARED_MIB} {SEED}"))?;
    Ok((answer.result, answer.ok == Some(true)))
}

fn result(worker: &mut Worker, command: &str) -> Result<i32> {
    Ok(worker.ask(command)?.result)
}

fn free_bytes(worker: &mut Worker) -> Result<u64> {
    worker.call("meminfo")?.free_bytes.context("the reply has no number of bytes")
}

/// Requires that the container's offload is refused because of shared memory.
fn stays(world: &Testbed, id: &str) -> Result<()> {
    until(&format!("{id} to be registered"), || {
        let row = world.cli().container(id)?;
        Ok(row.filter(|row| !row.processes.is_empty()))
    })?;
    let said = world.cli().offload(id)?;
    assert_eq!((said.done, said.reason.as_str()), (false, "shared-memory"), "{id}: {said:?}");
    Ok(())
}

const OWN_MIB: u64 = 32;

/// Offloads the container. Requires that all memory except shared memory is offloaded.
fn leaves_in_part(world: &Testbed, id: &str) -> Result<()> {
    world.cli().move_out(id)?;
    let row = world.cli().known(id)?;
    let process = row.process()?;
    assert_eq!((&*row.state, &*process.phase), ("Offloaded", "CopiedOut"), "{row:?}");
    assert_eq!(process.copied_out_bytes, OWN_MIB * MIB, "{row:?}");
    assert_eq!(row.staying_reasons, ["shared-memory"], "{row:?}");
    assert!(row.staying_bytes > 0, "{row:?}");
    Ok(())
}

/// Shares memory between an exporter and an importer, and offloads the exporter. The importer then
/// reads, writes, closes and opens the memory. When the exporter makes another handle, this call
/// must restore the exporter.
#[test]
fn sharing_processes_leave_in_part() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for (out, back) in [("copy", "copy"), ("full", "auto")] {
        let mut giver = exporter(&world, "giver", out)?;
        let mut taker = importer(&world, "taker", back, &giver)?;
        for worker in [&mut giver, &mut taker] {
            assert_eq!(result(worker, &format!("more {OWN_MIB}"))?, 0);
        }
        let shared = handle(&mut giver)?;
        assert_eq!(open(&mut taker, &shared)?, (0, true), "{out}, {back}");
        for round in 0..2 {
            leaves_in_part(&world, "giver")?;
            taker.call("touch")?;
            taker.call("sync")?;
            assert!(taker.verify()?, "{out}, {back}, {round}");
            assert_eq!(result(&mut taker, "close")?, 0);
            assert_eq!(
                open(&mut taker, &shared)?.0,
                0,
                "{out}, {back}: the memory of an offloaded exporter cannot be opened"
            );
            assert!(taker.verify()?, "{out}, {back}, {round}");
            leaves_in_part(&world, "taker")?;
            assert_eq!(world.cli().known("giver")?.state, "Offloaded", "the exporter was woken");
            assert_eq!(
                handle(&mut giver)?,
                shared,
                "{out}: the handle of the restored exporter has changed"
            );
            giver.call("touched")?;
            assert!(
                giver.verify()?,
                "{out}, {back}: the exporter does not read what the importer wrote"
            );
            for worker in [&mut giver, &mut taker] {
                assert_eq!(worker.call("verifymore")?.ok, Some(true), "{out}, {back}, {round}");
            }
            assert!(taker.verify()?, "{out}, {back}, {round}");
        }
        remove(&world, &taker)?;
        remove(&world, &giver)?;
    }
    Ok(())
}

fn remove(world: &Testbed, worker: &Worker) -> Result<()> {
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Shares memory between an exporter and an importer with several pairs of engines. The engine
/// `checkpoint` comes first, because it uses the driver's own memory. It shows the behaviour that
/// the other engines must match.
#[test]
fn memory_is_shared_whoever_carries_it() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for (out, back) in [
        ("checkpoint", "checkpoint"),
        ("full", "checkpoint"),
        ("copy", "full"),
        ("checkpoint", "full"),
    ] {
        let mut giver = exporter(&world, "giver", out)?;
        let mut taker = importer(&world, "taker", back, &giver)?;
        let swappable = if out == "checkpoint" { 0 } else { SHARED_MIB * MIB };
        until("the engine to apply", || {
            let row = world.cli().known("giver")?;
            Ok(row.processes.first().filter(|row| row.swappable_bytes == swappable).map(drop))
        })?;
        assert_eq!(
            giver.call("capable")?.ok,
            Some(true),
            "{out}: the memory is not reported as capable of legacy IPC"
        );
        let shared = handle(&mut giver)?;
        assert_eq!(handle(&mut giver)?, shared, "{out}: a second call returns another handle");
        let inside = giver.call(&format!("handle {}", 3 * MIB + 5))?.handle;
        assert_eq!(
            inside.as_deref(),
            Some(&*shared),
            "{out}: an address inside the memory has another handle"
        );
        until("shared memory not to count as copyable", || {
            let row = world.cli().known("giver")?;
            Ok(row.processes.first().filter(|row| row.swappable_bytes == 0).map(drop))
        })?;
        assert_eq!(open(&mut giver, &shared)?.0, 201, "{out}: a process opened its own handle");

        let free = free_bytes(&mut taker)?;
        for time in 0..2 {
            assert_eq!(open(&mut taker, &shared)?, (0, true), "{out}, {back}, {time}");
        }
        assert!(
            free - free_bytes(&mut taker)? < MIB,
            "{out}, {back}: the import takes VRAM of its own"
        );
        assert!(taker.verify()? && taker.call("facts")?.ok == Some(true), "{out}, {back}");
        taker.call("touch")?;
        taker.call("sync")?;
        giver.call("touched")?;
        assert!(
            giver.verify()?,
            "{out}, {back}: the exporter does not read what the importer wrote"
        );
        giver.call("touch")?;
        giver.call("sync")?;
        taker.call("touched")?;
        assert!(
            taker.verify()?,
            "{out}, {back}: the importer does not read what the exporter wrote"
        );

        for command in ["handle 0", "free", "inner"] {
            assert_eq!(
                result(&mut taker, command)?,
                1,
                "{out}, {back}: the command `{command}` succeeded on imported memory"
            );
        }
        assert_eq!(
            result(&mut giver, "close")?,
            1,
            "{out}: a process closed memory that it had not imported"
        );
        stays(&world, "giver")?;
        stays(&world, "taker")?;
        taker.call("close")?;
        assert!(taker.verify()?, "{out}, {back}: the first of two closes has ended the import");
        assert_eq!(
            taker.call("busyclose")?.ok,
            Some(true),
            "{out}, {back}: the close did not wait for running work"
        );
        assert_eq!(result(&mut taker, "close")?, 1, "{out}, {back}: a third close succeeded");
        assert!(
            result(&mut taker, "verify")? != 0,
            "{out}, {back}: closed memory can still be read"
        );
        giver.call("free")?;
        assert!(
            free_bytes(&mut taker)? >= free + (SHARED_MIB - 1) * MIB,
            "{out}, {back}: the shared memory was not freed"
        );
        assert_eq!(
            open(&mut taker, &shared)?.0,
            1,
            "{out}, {back}: the handle of freed memory can be opened"
        );
        remove(&world, &taker)?;
        remove(&world, &giver)?;
    }
    Ok(())
}

/// Checks how a process without swappable memory opens IPC handles. It must recognise Affinode's
/// handles. The driver must reject all other invalid handles.
#[test]
fn invalid_handle_opens_nothing() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut giver = exporter(&world, "giver", "full")?;
    let mut taker = importer(&world, "taker", "checkpoint", &giver)?;
    let shared = handle(&mut giver)?;
    for flags in [0, 2, 3] {
        assert_eq!(result(&mut taker, &format!("flags {shared} {flags}"))?, 1, "{flags}");
    }
    // Changes bytes in each part of the handle: the owner, the magic word, the exporter's socket,
    // the memory. Each change must be detected.
    for at in (0..64).step_by(5).chain([8, 24, 40, 48, 56]) {
        let (before, after) = (&shared[..2 * at], &shared[2 * at + 2..]);
        let byte = u8::from_str_radix(&shared[2 * at..2 * at + 2], 16)? ^ 0x10;
        let other = format!("{before}{byte:02x}{after}");
        assert_eq!(open(&mut taker, &other)?.0, 1, "byte {at}");
    }
    assert_eq!(open(&mut taker, &shared)?, (0, true));
    assert!(taker.verify()?);

    // The exporter's socket does not exist in another network namespace.
    let mut stranger = Worker::start_as(&world, program("stranger", "full", &[]))?;
    stranger.wait_filled()?;
    assert_eq!(open(&mut stranger, &shared)?.0, 1);
    Ok(())
}

/// Sends garbage to the exporter's socket from another process of the network namespace. Such
/// processes can neither block a process that imports memory nor get the exporter's memory.
#[test]
fn garbage_on_an_exporters_socket_harms_nobody() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut giver = exporter(&world, "giver", "full")?;
    let mut taker = importer(&world, "taker", "full", &giver)?;
    let mut bad = importer(&world, "bad", "checkpoint", &giver)?;
    let shared = handle(&mut giver)?;
    let descriptors = |worker: &Worker| -> Result<usize> {
        Ok(affinode_e2e::processes::descriptors(worker.running.pid(&world)?)?.len())
    };
    let before = descriptors(&giver)?;
    bad.send(&format!("attack {shared}"))?;
    assert_eq!(open(&mut taker, &shared)?, (0, true), "beside it");
    assert_eq!(bad.expect("attack")?.ok, Some(true));
    taker.call("close")?;
    assert_eq!(open(&mut taker, &shared)?, (0, true), "after it");
    assert!(taker.verify()? && giver.verify()?);
    until("all descriptors to be closed again", || {
        Ok((descriptors(&giver)? == before).then_some(()))
    })?;
    stays(&world, "giver")
}

/// Ends the process that exported the memory. The process that imported the memory must keep it,
/// and only the handle must become invalid.
#[test]
fn imported_memory_outlives_its_exporter() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut giver = exporter(&world, "giver", "full")?;
    // The process `other` keeps the network namespace alive.
    let mut other = importer(&world, "other", "full", &giver)?;
    let mut taker = importer(&world, "taker", "checkpoint", &other)?;
    let shared = handle(&mut giver)?;
    assert_eq!(
        result(&mut giver, "fork")?,
        3,
        "the forked child did not get the result CUDA_ERROR_NOT_INITIALIZED"
    );
    assert_eq!(open(&mut taker, &shared)?, (0, true));
    remove(&world, &giver)?;
    assert!(taker.verify()?);
    assert_eq!(open(&mut other, &shared)?.0, 1, "the handle of an ended exporter can be opened");
    stays(&world, "taker")?;
    taker.call("close")?;
    Ok(())
}

/// Destroys a context. Memory that was imported into this context must be closed, and memory that
/// was imported into other contexts must stay open.
#[test]
fn context_end_closes_its_imports() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut giver = exporter(&world, "giver", "full")?;
    let mut taker = importer(&world, "taker", "checkpoint", &giver)?;
    let shared = handle(&mut giver)?;
    for round in 0..3 {
        assert_eq!(open(&mut taker, &shared)?, (0, true), "round {round}");
        assert!(taker.verify()?, "round {round}");
        taker.call("reset")?;
    }
    let free = free_bytes(&mut taker)?;
    giver.call("free")?;
    until("the memory to be free, which others may hold for a moment", || {
        let is_free = free_bytes(&mut taker)? >= free + (SHARED_MIB - 1) * MIB;
        Ok(is_free.then_some(()))
    })
}
