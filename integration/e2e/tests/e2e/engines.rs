//! Tests of the engines (methods of moving GPU memory) that copy memory in the library. They
//! offload and restore with and without the context, and cause faults.

use affinode_e2e::{
    cli::ContainerRow,
    container::{CLIENTS, Spec},
    containerd::STOCK,
    gpu::Gpu,
    suite,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};

use crate::offload::{EAGER, MANUAL, wait_gpu_empty, wait_vram_used};

const ENGINES: [&str; 2] = ["copy", "full"];
const WORKER_MIB: u64 = 300;
/// Upper limit of the VRAM of a context of the simulated GPU.
const CONTEXT_BYTES: u64 = 32 * MIB;

fn config(engine: &str) -> String {
    MANUAL.replace("[policy]", &format!("[policy]\nengine = \"{engine}\""))
}

fn worker(world: &Testbed, engine: &str, mib: u64) -> Result<Worker> {
    let spec = Worker::spec(engine, USUAL, mib).annotation("affinode.io/engine", engine);
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

fn row(world: &Testbed, id: &str) -> Result<ContainerRow> {
    world.cli().known(id)
}

/// Waits until NVML reports no more VRAM than this engine leaves in use: one context with the
/// engine `copy`, and nothing with the other engines.
fn wait_gone(world: &Testbed, engine: &str) -> Result<()> {
    if engine == "copy" {
        wait_vram_used(world, |used| used > 0 && used <= CONTEXT_BYTES).map(|_| ())
    } else {
        wait_gpu_empty(world)
    }
}

#[test]
fn copied_memory_survives_repeated_offloads() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ENGINES {
        let mut worker = worker(&world, engine, WORKER_MIB)?;
        for round in 1..=3 {
            world.cli().move_out(engine)?;
            wait_gone(&world, engine)?;
            let offloaded = row(&world, engine)?;
            assert_eq!(offloaded.state, "Offloaded");
            assert!(offloaded.offloaded_bytes >= WORKER_MIB * MIB, "{offloaded:?}");
            let process = offloaded.process()?;
            assert_eq!(process.copied_out_bytes, WORKER_MIB * MIB, "{offloaded:?}");
            let phase = if engine == "copy" { "CopiedOut" } else { "Checkpointed" };
            assert_eq!(process.phase, phase);
            // Changes that the program makes between two cycles must be kept, too.
            worker.call("touch")?;
            assert!(worker.verify()?, "{engine}, round {round}");
        }
        let resident =
            world.cli().wait_for(engine, "to have swappable memory after 3 restores", |row| {
                let swappable = row.processes.first().map(|process| process.swappable_bytes);
                row.restores == 3 && swappable == Some(WORKER_MIB * MIB)
            })?;
        assert_eq!(resident.engine, engine);
        assert!(resident.copyable_share.is_some_and(|share| share > 0.8), "{resident:?}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
        wait_gpu_empty(&world)?;
    }
    Ok(())
}

/// Checks that the default engine makes no driver checkpoint. The test uses the shipped
/// configuration, and a process that ends if the driver's checkpoint is called in it.
#[test]
fn default_engine_needs_no_checkpoint() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).default_engine().world()?;
    let spec = Worker::spec("first", USUAL, WORKER_MIB).env("AFFINODE_SIM_NO_CHECKPOINT", "1");
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    for round in 1..=3 {
        let offloaded = world.cli().wait_for_state("first", "Offloaded")?;
        assert_eq!((offloaded.engine.as_str(), offloaded.offloads), ("auto", round));
        assert_eq!(offloaded.process()?.phase, "CopiedOut");
        wait_gone(&world, "copy")?;
        worker.call("touch")?;
        assert!(worker.verify()?, "after round {round}");
    }
    Ok(())
}

/// Checks that a requested offload reads the process's counters again. The process may have
/// allocated memory since the controller's last sample.
#[test]
fn request_sees_memory_of_this_moment() -> Result<()> {
    let config = "[policy]\nmode = \"manual\"\n[timing]\nsample_interval = \"1m\"\n";
    let world = TestbedConfig::default().config(config).world()?;
    let spec = Worker::spec("new", USUAL, WORKER_MIB).annotation("affinode.io/engine", "copy");
    let mut worker = Worker::start_as(&world, spec)?;
    worker.wait_filled()?;
    let said = world.cli().offload("new")?;
    assert!(said.done, "{said:?}");
    assert!(worker.verify()?);
    Ok(())
}

/// Checks that the default engine makes no driver checkpoint. The test program itself overwrites
/// the driver's checkpoint functions with traps, so the simulated GPU needs no support for this
/// test.
#[test]
fn default_engine_calls_no_checkpoint() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut rows = suite::Rows::default();
    suite::default_makes_no_call(&world, &mut rows)?;
    assert_eq!(rows.missed(), Vec::<String>::new());
    Ok(())
}

/// Checks that the context of an idle container is checkpointed when another container needs VRAM.
/// The contents must stay unchanged.
#[test]
fn waiter_gets_the_context_of_an_idle_container() -> Result<()> {
    const IDLE: [&str; 2] = ["one", "two"];
    const VRAM_MIB: u64 = 1024;
    // The container fits only if the context of one of the two others is checkpointed. Such a
    // context takes 8 MiB, because its local memory was copied out.
    const SECOND_MIB: u64 = VRAM_MIB - 30;
    let gpu = Gpu::Simulated { vram_bytes: VRAM_MIB * MIB };
    let world = TestbedConfig::default().gpu(gpu).config(MANUAL).default_engine().world()?;
    let mut idle = Vec::new();
    for id in IDLE {
        let worker = Worker::start(&world, id, 300)?;
        world.cli().move_out(id)?;
        assert_eq!(row(&world, id)?.process()?.phase, "CopiedOut");
        idle.push(worker);
    }
    let large = Worker::spec("large", USUAL, SECOND_MIB);
    let mut large = Worker::start_as(&world, large.annotation("affinode.io/on-oom", "wait"))?;
    large.wait_filled()?;
    // Only as many contexts as necessary may be checkpointed.
    let mut gone = 0;
    for id in IDLE {
        let row = world.cli().wait_for_state(id, "Offloaded")?;
        gone += usize::from(row.process()?.phase == "Checkpointed");
    }
    assert_eq!(gone, 1);
    assert!(large.verify()?);
    large.running.kill(&world)?;
    large.running.delete(&world)?;
    for worker in &mut idle {
        assert!(worker.verify()?);
    }
    Ok(())
}

/// Tests a program that maps memory itself, and changes the mappings as an allocator does. The
/// library must copy memory that is completely mapped at one address. With a checkpoint, the driver
/// moves all other memory. Without a checkpoint, that memory stays on the GPU with the context.
#[test]
fn application_mapped_memory_is_copied() -> Result<()> {
    const PIECE_MIB: u64 = 4;
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ENGINES {
        let mut worker = Worker::start_as(&world, Worker::segments(engine, engine, 64))?;
        worker.wait_filled()?;
        for (change, left_mib, undo) in [
            ("touch", 0, "properties"),
            ("swap", 0, "swap"),
            ("release", 0, "retain"),
            ("replace", 0, "streamsync"),
            ("readonly", PIECE_MIB, "writable"),
            ("alias", PIECE_MIB, "unalias"),
        ] {
            assert_eq!(worker.call(change)?.ok, Some(true), "{engine}, {change}");
            world.cli().move_out(engine)?;
            let offloaded = row(&world, engine)?;
            let copied_out = (64 - left_mib) * MIB;
            assert_eq!(
                offloaded.process()?.copied_out_bytes,
                copied_out,
                "{change}: {offloaded:?}"
            );
            assert_eq!(worker.call(undo)?.ok, Some(true), "{engine}, {undo}");
            assert!(worker.verify()?, "{engine}, {change}");
        }
        // After its export the piece can no longer be offloaded, so the context stays as well. The
        // piece that was mapped twice is not copied until the program sets its access again.
        assert_eq!(worker.call("export")?.ok, Some(true), "{engine}");
        for _ in 0..2 {
            world.cli().move_out(engine)?;
            let offloaded = row(&world, engine)?;
            let process = offloaded.process()?;
            assert_eq!(process.phase, "CopiedOut", "{engine}: {offloaded:?}");
            let copied_out = (64 - 2 * PIECE_MIB) * MIB;
            assert_eq!(process.copied_out_bytes, copied_out, "{engine}: {offloaded:?}");
            assert!(worker.verify()?, "{engine}, exported");
        }
        ends_clean(&world, worker)?;
    }
    Ok(())
}

/// Makes a program free its memory and end. Requires that none of that memory is still in use or
/// listed as copyable.
fn ends_clean(world: &Testbed, mut worker: Worker) -> Result<()> {
    let id = worker.running.id.clone();
    assert!(worker.ends_with_nothing_left(world)?, "{id}: VRAM of the program is still in use");
    world.cli().wait_for(&id, "to have no copied allocation", |row| {
        row.processes.first().is_some_and(|process| process.swappable_bytes == 0)
    })?;
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Checks when the library creates memory that other devices on the bus may access. Such memory
/// takes longer to map and unmap, so the library must create it only if the container has another
/// device.
#[test]
fn peer_access_with_other_devices() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let card = ["--mount", "type=bind,src=/dev/null,dst=/dev/card,options=bind"];
    for (id, flags, reached) in [("alone", &[][..], false), ("beside", &card[..], true)] {
        let argv = [&*format!("{CLIENTS}/ipc"), "--mib", "8"];
        let spec = Spec::gpu(id, &argv).annotation("affinode.io/engine", "copy").flags(flags);
        let mut worker = Worker::start_as(&world, spec)?;
        worker.wait_filled()?;
        world.cli().wait_for(id, "to have its memory swappable", |row| {
            row.processes.first().is_some_and(|process| process.swappable_bytes == 8 * MIB)
        })?;
        assert_eq!(worker.call("reached")?.ok, Some(reached), "{id}");
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

/// Tests a program that allocates from a stream-ordered pool. The pool's memory must be copied,
/// except unused memory. The unused memory must not prevent the offload.
#[test]
fn memory_in_the_order_of_streams_is_copied_too() -> Result<()> {
    const ALL_MIB: u64 = 64;
    let world = TestbedConfig::default().config(MANUAL).world()?;
    // Without Affinode, the driver itself must meet the program's expectations.
    let mut bare = Worker::start_as(&world, Worker::pools("bare", "copy", ALL_MIB).runtime(STOCK))?;
    bare.wait_filled()?;
    for turn in Worker::POOL_TURNS {
        let answer = bare.call(turn)?;
        assert_eq!(answer.ok, Some(true), "bare: {answer:?}");
        assert!(bare.verify()?, "bare, {turn}");
    }
    bare.running.kill(&world)?;
    bare.running.delete(&world)?;
    for engine in ENGINES {
        let mut worker = Worker::start_as(&world, Worker::pools(engine, engine, ALL_MIB))?;
        worker.wait_filled()?;
        for turn in Worker::POOL_TURNS {
            let answer = worker.call(turn)?;
            assert_eq!(answer.ok, Some(true), "{engine}: {answer:?}");
            world.cli().move_out(engine)?;
            wait_gone(&world, engine)?;
            let offloaded = row(&world, engine)?;
            assert_eq!(
                offloaded.process()?.copied_out_bytes,
                ALL_MIB * MIB,
                "{turn}: {offloaded:?}"
            );
            assert!(worker.verify()?, "{engine}, {turn}");
        }
        assert_eq!(worker.call("drop")?.ok, Some(true), "{engine}");
        ends_clean(&world, worker)?;
    }
    Ok(())
}

/// Offloads three processes: one whose allocation is too small for a copy, a larger one, and one
/// with the engine `checkpoint` by annotation. The library may copy memory only of the larger
/// process.
#[test]
fn annotation_overrides_configured_engine() -> Result<()> {
    let eager = EAGER.replace("[policy]", "[policy]\nengine = \"full\"");
    let world = TestbedConfig::default().config(&eager).world()?;
    let mut small = Worker::start(&world, "small", 1)?;
    let mut big = Worker::start(&world, "big", 64)?;
    let mut other = worker(&world, "checkpoint", 64)?;
    for (worker, id, swappable) in
        [(&mut small, "small", 0), (&mut big, "big", 64 * MIB), (&mut other, "checkpoint", 0)]
    {
        let offloaded = world.cli().wait_for_state(id, "Offloaded")?;
        assert_eq!(offloaded.process()?.swappable_bytes, swappable, "{offloaded:?}");
        assert!(worker.verify()?, "{id}");
    }
    Ok(())
}

/// Makes CUDA calls on swappable memory (which the library can move). The calls must have the same
/// results and guarantees as on memory that the driver itself allocates.
#[test]
fn carried_memory_is_as_the_drivers_own() -> Result<()> {
    let world = TestbedConfig::default().config(&config("copy")).world()?;
    for (program, arguments) in [
        ("memory_check", &[][..]),
        ("api_check", &["memory", "pointers", "streams", "vmm", "share", "ipc"]),
    ] {
        let path = format!("{CLIENTS}/{program}");
        let argv: Vec<&str> = [path.as_str()].iter().chain(arguments).copied().collect();
        // The library must keep the driver's guarantees from the first call on, even if the
        // controller starts slowly.
        let output = Spec::gpu(&program.replace('_', "-"), &argv).run(&world)?;
        let wrong: Vec<&str> =
            output.lines().filter(|line| line.contains("\"ok\":false")).collect();
        assert!(wrong.is_empty(), "{program}: {wrong:#?}");
        assert!(output.contains("\"command\":\"done\""), "{output}");
    }
    Ok(())
}

/// Kills the controller with SIGKILL while a container is offloaded, with each engine. The next
/// controller must restore the container with unchanged contents.
#[test]
fn next_controller_restores_copied_out_process() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    for engine in ENGINES {
        let mut worker = worker(&world, engine, 64)?;
        world.cli().move_out(engine)?;
        let controller = world.controller()?.context("no controller is running")?;
        kill(controller.pid, Signal::SIGKILL)?;
        until("another controller", || {
            Ok(world.controller()?.filter(|next| next.pid != controller.pid))
        })?;
        let known = world.cli().wait_for(engine, "to be known as offloaded", |row| {
            row.state == "Offloaded" && !row.processes.is_empty()
        })?;
        assert_eq!(known.process()?.copied_out_bytes, 64 * MIB, "{known:?}");
        wait_gone(&world, engine)?;
        assert!(worker.verify()?, "{engine}");
        world.cli().wait_for(engine, "to have one restore", |row| row.restores == 1)?;
        worker.running.kill(&world)?;
        worker.running.delete(&world)?;
    }
    Ok(())
}

#[test]
fn copied_out_process_restores_itself() -> Result<()> {
    for engine in ENGINES {
        let world = TestbedConfig::default().config(MANUAL).world()?;
        let mut worker = worker(&world, engine, 64)?;
        world.cli().move_out(engine)?;
        let controller = world.controller()?.context("no controller is running")?;
        kill(controller.pid, Signal::SIGSTOP)?;
        assert!(worker.verify()?, "{engine}");
        kill(controller.pid, Signal::SIGCONT)?;
        until("the controller to list it as resident", || {
            Ok(Some(row(&world, engine)?)
                .filter(|row| row.state == "Active" || row.state == "Idle"))
        })?;
        assert!(worker.verify()?, "{engine}");
    }
    Ok(())
}

/// Lets an unmanaged process allocate the VRAM that an offload has freed. The container's restore
/// fails and must be tried again, and no contents may be lost.
#[test]
fn a_return_without_room_waits_and_loses_nothing() -> Result<()> {
    let world = TestbedConfig::default()
        .gpu(Gpu::Simulated { vram_bytes: 1024 * MIB })
        .config(MANUAL)
        .world()?;
    let mut copied_out = worker(&world, "copy", 600)?;
    world.cli().move_out("copy")?;
    let spec = Worker::spec("greedy", USUAL, 700).annotation("affinode.io/inject", "false");
    let mut greedy = Worker::start_as(&world, spec)?;
    greedy.wait_filled()?;

    copied_out.send("verify")?;
    until("the wake to wait for VRAM", || {
        Ok(Some(row(&world, "copy")?).filter(|row| row.reason == "waiting-for-vram"))
    })?;
    // Until now, the controller delayed the restore until NVML reported enough free VRAM. The
    // restore must wait as well when no controller runs.
    let controller = world.controller()?.context("no controller is running")?;
    kill(controller.pid, Signal::SIGSTOP)?;
    assert!(!copied_out.has_answer()?);
    greedy.running.kill(&world)?;
    greedy.running.delete(&world)?;
    assert_eq!(copied_out.expect("verify")?.ok, Some(true));
    kill(controller.pid, Signal::SIGCONT)?;
    Ok(())
}

/// Makes five CUDA calls that end an application whose context is checkpointed. With Affinode, they
/// must wait while the process is copied out.
#[test]
fn crashing_calls_are_held_while_copied_out() -> Result<()> {
    for engine in ENGINES {
        let world = TestbedConfig::default().config(&config(engine)).world()?;
        for call in ["ctx-sync", "stream-query", "event-sync"] {
            let spec = Spec::gpu(call, &[&format!("{CLIENTS}/crashers"), call]);
            let mut worker = Worker::start_as(&world, spec)?;
            worker.expect("ready")?;
            for _ in 0..2 {
                world.cli().move_out(call)?;
                assert_eq!(worker.call("go")?.ok, Some(true), "{call}, {engine}");
            }
            worker.running.kill(&world)?;
            worker.running.delete(&world)?;
        }
    }
    Ok(())
}

/// Forks a child while the process is copied out. The child inherits neither the GPU memory nor the
/// library's table of this memory. It must not affect the parent.
#[test]
fn child_of_copied_process_changes_nothing() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = worker(&world, "copy", 64)?;
    world.cli().move_out("copy")?;
    worker.call("fork")?;
    worker.call("orphan")?;
    assert!(worker.verify()?);
    world.cli().move_out("copy")?;
    assert!(worker.verify()?);
    Ok(())
}

/// Requests an offload while a kernel runs. The offload must wait for the kernel or fail, because
/// memory in use must never be copied.
#[test]
fn memory_in_use_by_a_kernel_is_not_copied() -> Result<()> {
    let config = MANUAL.replace("[timing]", "[timing]\nlock_timeout = \"200ms\"");
    let world = TestbedConfig::default().config(&config).world()?;
    let mut worker = worker(&world, "copy", 64)?;
    world.cli().wait_resident("copy")?;
    // The kernel runs for 8 s, so the first attempt to offload fails. The command repeats the
    // attempt until the offload succeeds.
    worker.call("spin 8000")?;
    worker.call("touch")?;
    world.cli().move_out("copy")?;
    world.cli().wait_for_event("an offload to be refused as busy", |event| {
        event.kind == "refused" && event.reason == "busy"
    })?;
    assert_eq!(row(&world, "copy")?.process()?.copied_out_bytes, 64 * MIB);
    assert!(worker.verify()?);
    Ok(())
}

/// Measures how long offloads and restores take, and passes these costs to `affinode simulate`. The
/// simulation must use exactly the measured costs.
#[test]
fn simulation_uses_measured_costs() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let measured = suite::calibrate(&world, "checkpoint")?;
    let file = world.dir().join("calibration.toml");
    measured.write(&file, "checkpoint", "simulated GPU")?;
    let simulated = world.cli().output(&[
        "simulate",
        "--processes=2",
        "--days=1",
        "--policy=static",
        "--output=json",
        &format!("--calibration={}", file.display()),
    ])?;
    let answer: serde_json::Value = serde_json::from_slice(&simulated.stdout)
        .with_context(|| String::from_utf8_lossy(&simulated.stderr).into_owned())?;
    let taken = &answer["calibration"]["checkpoint"];
    for (name, value) in
        serde_json::to_value(measured)?.as_object().context("the calibration has no fields")?
    {
        assert_eq!(taken[name].as_f64(), value.as_f64(), "{name} in {answer}");
    }
    Ok(())
}
