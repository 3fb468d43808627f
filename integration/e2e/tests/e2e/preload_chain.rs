//! Tests of Affinode's library together with another library that hooks the driver. Both must work.

use std::{fs, path::Path};

use affinode_e2e::{
    container::{CLIENTS, Spec},
    image::usual_layer,
    testbed::{Testbed, TestbedConfig},
    worker::Worker,
};
use anyhow::{Context, Result};

use crate::{
    libc::import,
    offload::{EAGER, wait_gpu_empty},
};

const OUT_OF_MEMORY: i32 = 2;
/// Name of an image that has its own `/etc/ld.so.preload`.
const LIMITED: &str = "localhost/affinode/limited:1";
/// VRAM that each program allocates, in MiB.
const HELD_MIB: u64 = 32;
/// VRAM limit that the other preloaded library enforces, in MiB.
const LIMIT_MIB: &str = "48";

fn limited(program: &str) -> Spec {
    Worker::spec(program, program, HELD_MIB).env("LIMIT_MIB", LIMIT_MIB)
}

/// Requires that the other library's VRAM limit applies before and after an offload, and that the
/// memory is unchanged.
fn both_do_their_work(world: &Testbed, spec: Spec) -> Result<()> {
    let id = spec.id.clone();
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let row = world.cli().wait_for_state(&id, "Offloaded")?;
    assert_eq!(row.processes.len(), 1, "{row:?}");
    wait_gpu_empty(world)?;
    let too_much = worker.ask("alloc 32")?;
    assert_eq!(
        too_much.result, OUT_OF_MEMORY,
        "{id}: the allocation beyond the other library's limit was not refused: {too_much:?}"
    );
    worker.call("alloc 8")?;
    worker.call("free")?;
    assert!(worker.verify()?);
    world.cli().wait_for(&id, "to be restored", |row| row.restores > 0)?;
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Mounts a list of libraries to preload at the container's `/etc/ld.so.preload`, as HAMi's device
/// plugin does. The list names the other library. Both libraries must work.
#[test]
fn a_library_that_the_host_preloads() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let list = world.dir().join("their-list");
    fs::write(&list, format!("{CLIENTS}/limiter.so"))?;
    for program in ["linked", "dlopen_dlsym", "proc_address_v1", "proc_address_v2"] {
        let mut spec = limited(program);
        spec.mounts.push((list.clone(), Path::new("/etc/ld.so.preload").into()));
        both_do_their_work(&world, spec).with_context(|| program.to_owned())?;
    }
    Ok(())
}

/// Runs an image whose own `/etc/ld.so.preload` names the other library that hooks the driver. Both
/// libraries must work.
#[test]
fn a_library_that_the_image_preloads() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    let mut layer = usual_layer()?;
    let list = format!("{CLIENTS}/limiter.so");
    layer.file("etc/ld.so.preload", 0o644, list.as_bytes())?;
    import(&world, LIMITED, &layer.finish()?)?;
    for program in ["linked", "dlopen_dlsym", "proc_address_v2"] {
        let spec = limited(program).image(LIMITED);
        both_do_their_work(&world, spec).with_context(|| program.to_owned())?;
    }
    Ok(())
}

/// Runs a program whose environment variable LD_PRELOAD names the other library that hooks the
/// driver. Both libraries must work.
#[test]
fn a_library_of_the_environment() -> Result<()> {
    let world = TestbedConfig::default().config(EAGER).world()?;
    for program in ["linked", "dlopen_dlsym", "proc_address_v2"] {
        let spec = limited(program).env("LD_PRELOAD", &format!("{CLIENTS}/limiter.so"));
        both_do_their_work(&world, spec).with_context(|| program.to_owned())?;
    }
    Ok(())
}
