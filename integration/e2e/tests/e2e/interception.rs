//! Tests that Affinode intercepts CUDA calls: they are counted, and they wait while the process is
//! offloaded. This must work in whatever way a program finds the driver.

use affinode_e2e::{
    container::{CLIENTS, Spec},
    testbed::TestbedConfig,
    worker::Worker,
};
use anyhow::Result;

use crate::offload::{EAGER, wait_gpu_empty};

fn cycle(spec: Spec, first: &[&str]) -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let id = spec.id.clone();
    let mut worker = Worker::start_as(&world, spec)?;
    for command in first {
        worker.expect(command)?;
    }
    let row = world.cli().wait_for_state(&id, "Offloaded")?;
    assert_eq!(row.processes.len(), 1, "{row:?}");
    wait_gpu_empty(&world)?;
    // A call on the default stream wakes the process, which then computes with the correct
    // contents.
    worker.call("touch")?;
    worker.call("sync")?;
    assert!(worker.verify()?);
    world.cli().wait_for(&id, "to be restored", |row| row.restores > 0)?;
    Ok(())
}

fn way(program: &str) -> Result<()> {
    cycle(Worker::spec("way", program, 32), &["open", "fill"])
}

#[test]
fn linked() -> Result<()> {
    way("linked")
}

#[test]
fn dlopen_and_dlsym() -> Result<()> {
    way("dlopen_dlsym")
}

#[test]
fn get_proc_address_of_cuda_11() -> Result<()> {
    way("proc_address_v1")
}

#[test]
fn get_proc_address_of_cuda_12() -> Result<()> {
    way("proc_address_v2")
}

#[test]
fn per_thread_default_stream() -> Result<()> {
    way("ptds")
}

#[test]
fn forked_before_use() -> Result<()> {
    cycle(Worker::spec("way", "fork_then_use", 32), &["parent", "open", "fill"])
}

#[test]
fn python_with_ctypes() -> Result<()> {
    if !std::path::Path::new("/usr/bin/python3").exists() {
        affinode_test_notes::skip("python3", "no /usr/bin/python3 on this machine");
        return Ok(());
    }
    let program = format!("{CLIENTS}/ctypes_worker.py");
    cycle(Spec::gpu("way", &["/usr/bin/python3", &program, "--mib", "4"]), &["open"])
}

/// Makes calls from eight threads at the same time, repeatedly. All threads must wait while the
/// process is offloaded, and no thread may compute with wrong contents.
#[test]
fn many_threads() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let program = format!("{CLIENTS}/threads");
    let pauses = ["--threads", "8", "--mib", "2", "--rounds", "4", "--period-ms", "2000"];
    let mut worker = Worker::start_as(
        &world,
        Spec::gpu("threads", &[&[program.as_str()], &pauses[..]].concat()),
    )?;
    worker.expect("open")?;
    for _ in 0..8 {
        worker.expect("fill")?;
    }
    for _ in 0..4 * 8 {
        assert_eq!(worker.expect("round")?.ok, Some(true));
    }
    assert_eq!(worker.expect("done")?.ok, Some(true));
    world
        .cli()
        .wait_for_event("a return", |event| event.from == "Restoring" && event.to == "Active")?;
    Ok(())
}

/// Forks a child while the parent is offloaded. The child must neither affect nor wake the parent.
#[test]
fn child_forked_while_offloaded() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut worker = Worker::start(&world, "parent", 32)?;
    world.cli().wait_for_state("parent", "Offloaded")?;
    worker.call("fork")?;
    assert!(worker.verify()?);
    Ok(())
}
