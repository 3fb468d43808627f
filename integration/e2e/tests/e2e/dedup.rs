//! Tests of `dedup`: equal contents of containers in one namespace are stored once in host memory
//! while the containers are offloaded.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{FileExt, MetadataExt},
};

use affinode_e2e::{
    container::{CLIENTS, SEES_ITS_CGROUP, Spec},
    processes::sealed_files,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::{USUAL, Worker},
};
use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{offload::MANUAL, recovery::shoot_controller};

/// VRAM of a worker in MiB. It has two chunks of 128 MiB, which can be shared, and a partial chunk,
/// which is never shared.
const WORKER_MIB: u64 = 288;
const SHARED_MIB: u64 = 256;
const CHUNK_MIB: u64 = 128;

fn world() -> Result<Testbed> {
    TestbedConfig::default().config(&MANUAL.replace("[timing]", "dedup = true\n[timing]")).world()
}

fn spec(id: &str, seed: u32, dedup: &str) -> Spec {
    let program = format!("{CLIENTS}/{USUAL}");
    let (mib, seed) = (WORKER_MIB.to_string(), seed.to_string());
    Spec::gpu(id, &[&program, "--mib", &mib, "--seed", &seed])
        .annotation("affinode.io/engine", "full")
        .annotation("affinode.io/dedup", dedup)
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Starts two containers with the same contents. Their namespace permits dedup to share the
/// contents.
fn twins(world: &Testbed) -> Result<[Worker; 2]> {
    Ok([start(world, spec("one", 7, "true"))?, start(world, spec("other", 7, "true"))?])
}

fn pid(world: &Testbed, id: &str) -> Result<i32> {
    Ok(world.cli().registered(id)?.process()?.pid)
}

/// Returns the size in bytes of the part of a process's memory file that is not shared.
fn own_bytes(pid: i32) -> Result<u64> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        if fs::read_link(&path)?.to_string_lossy().contains("memfd:affinode-copied-out") {
            return Ok(fs::metadata(&path)?.blocks() * 512);
        }
    }
    Ok(0)
}

/// Offloads the containers. Waits until they share all contents that can be shared.
fn wait_together(world: &Testbed, ids: &[&str]) -> Result<()> {
    for id in ids {
        if world.cli().known(id)?.state != "Offloaded" {
            world.cli().move_out(id)?;
        }
    }
    until("the content to be stored once", || {
        let mut inodes = BTreeSet::new();
        for id in ids {
            let pid = pid(world, id)?;
            let sealed = sealed_files(pid)?;
            if sealed.len() as u64 * CHUNK_MIB != SHARED_MIB || own_bytes(pid)? > CHUNK_MIB * MIB {
                return Ok(None);
            }
            inodes.extend(sealed);
        }
        Ok((inodes.len() as u64 * CHUNK_MIB == SHARED_MIB).then_some(()))
    })?;
    until("the change to be shown", || {
        let gpu = world.cli().gpu()?;
        let stored = gpu.copier_stored_bytes == SHARED_MIB * MIB;
        Ok((stored && gpu.copier_shared_bytes >= ids.len() as u64 * SHARED_MIB * MIB).then_some(()))
    })
}

/// Waits until the copier with this pid has ended. If the controller has just started and has not
/// read the GPU yet, the wait continues.
fn wait_gone(world: &Testbed, copier: i32) -> Result<()> {
    until("the copier to end", || {
        let gpus = world.cli().ps()?.gpus;
        Ok(gpus.first().is_some_and(|gpu| gpu.copier_pid != copier).then_some(()))
    })
}

#[test]
fn equal_contents_are_stored_once() -> Result<()> {
    let world = world()?;
    let [mut one, mut other] = twins(&world)?;
    // These containers have the same contents, but belong to another namespace, so they must not
    // share contents with the first two.
    let elsewhere = "io.kubernetes.cri.sandbox-namespace";
    let mut strangers = [
        start(&world, spec("third", 7, "false"))?,
        start(&world, spec("fourth", 7, "true").annotation(elsewhere, "ml"))?,
    ];
    for id in ["third", "fourth"] {
        world.cli().move_out(id)?;
    }
    assert_eq!(world.cli().registered("fourth")?.pod_namespace, "ml");
    for round in 0..2 {
        wait_together(&world, &["one", "other"])?;
        for id in ["third", "fourth"] {
            assert_eq!(sealed_files(pid(&world, id)?)?.len(), 0, "{id}");
        }
        // A change by one process does not affect the other.
        one.call("touch")?;
        assert!(one.verify()?, "round {round}");
        let inodes = sealed_files(pid(&world, "other")?)?;
        assert_eq!(
            inodes.len() as u64 * CHUNK_MIB,
            SHARED_MIB,
            "the other container no longer shares the contents"
        );
        other.call("touch")?;
        assert!(other.verify()? && one.verify()?, "round {round}");
    }
    for stranger in &mut strangers {
        assert!(stranger.verify()?);
    }
    Ok(())
}

#[test]
fn killed_member_keeps_shared_contents() -> Result<()> {
    let world = world()?;
    let [one, mut other] = twins(&world)?;
    wait_together(&world, &["one", "other"])?;
    let mut third = start(&world, spec("third", 7, "true"))?;
    wait_together(&world, &["one", "other", "third"])?;
    one.running.kill(&world)?;
    assert!(other.verify()? && third.verify()?);
    Ok(())
}

#[test]
fn contents_differing_in_a_byte_stay_separate() -> Result<()> {
    let world = world()?;
    let [mut one, mut other] = twins(&world)?;
    // This container's contents differ in one byte, behind the samples that dedup compares first.
    let mut odd = start(&world, spec("odd", 7, "true"))?;
    odd.call(&format!("poke {}", CHUNK_MIB * MIB - 1))?;
    world.cli().move_out("odd")?;
    wait_together(&world, &["one", "other"])?;
    until("the second chunk of the third container to be shared", || {
        Ok((sealed_files(pid(&world, "odd")?)?.len() == 1).then_some(()))
    })?;
    assert!(one.verify()? && other.verify()?);
    assert!(!odd.verify()?, "the byte that the program has changed was lost");
    Ok(())
}

/// Checks that retained host copies, prefaulted memory and checksums work with dedup as they do
/// without it.
#[test]
fn dedup_with_retained_copies_and_digests() -> Result<()> {
    let world = world()?;
    let kept = spec("one", 7, "true")
        .annotation("affinode.io/retain-host-copy", "true")
        .annotation("affinode.io/checksum", "true")
        .flags(&SEES_ITS_CGROUP);
    let mut one = start(&world, kept)?;
    let ready = spec("other", 7, "true").prepared().annotation("affinode.io/checksum", "true");
    let mut other = start(&world, ready)?;
    for round in 0..3 {
        until("prefaulted host memory", || {
            Ok((world.cli().gpu()?.copier_prefaulted == 1).then_some(()))
        })?;
        wait_together(&world, &["one", "other"])?;
        // The end of the memory differs both from the retained copy and from the shared contents.
        for worker in [&mut one, &mut other] {
            assert!(worker.verify()?, "round {round}");
            worker.call("touch")?;
        }
    }
    assert!(one.verify()? && other.verify()?);
    Ok(())
}

/// Kills the copier, stops the copier or kills the controller, at two moments: directly after the
/// offload, and while only a part of the contents is shared. Both containers must return with
/// unchanged contents.
#[test]
fn faults_beside_it_cost_nobody_a_byte() -> Result<()> {
    let world = world()?;
    let [mut one, mut other] = twins(&world)?;
    for round in 0..9 {
        for id in ["one", "other"] {
            world.cli().move_out(id)?;
        }
        // A copier that ends during a registration is restarted only after a while. This step
        // therefore waits until the copier has registered memory.
        until("a copier to register the memory, or the containers to share a part of it", || {
            let held = world.cli().gpu()?.copier_registered > 0;
            let together = !sealed_files(pid(&world, "one")?)?.is_empty();
            Ok((if round % 2 == 0 { held } else { together }).then_some(()))
        })?;
        let copier = Pid::from_raw(world.cli().gpu()?.copier_pid);
        match round % 3 {
            0 => kill(copier, Signal::SIGKILL)?,
            1 => kill(copier, Signal::SIGSTOP)?,
            _ => shoot_controller(&world)?,
        }
        for worker in [&mut one, &mut other] {
            worker.call("touch")?;
            assert!(worker.verify()?, "round {round}");
        }
        // The copier may have ended already.
        let _ = kill(copier, Signal::SIGKILL);
        wait_gone(&world, copier.as_raw())?;
    }
    Ok(())
}

/// Ends the copier, the controller and one of the processes, one after the other. The shared
/// contents must survive each end.
#[test]
fn contents_survive_copier_and_controller_death() -> Result<()> {
    let world = world()?;
    let [mut one, mut other] = twins(&world)?;
    for controller_too in [false, true, false] {
        wait_together(&world, &["one", "other"])?;
        let copier = world.cli().gpu()?.copier_pid;
        if controller_too {
            shoot_controller(&world)?;
        } else {
            kill(Pid::from_raw(copier), Signal::SIGKILL)?;
        }
        wait_gone(&world, copier)?;
        for worker in [&mut one, &mut other] {
            worker.call("touch")?;
            assert!(worker.verify()?);
        }
    }
    Ok(())
}

/// Checks that no process can change shared contents. The test tries to write as root to the sealed
/// files that store these contents. The writes must fail, even for the process that created the
/// files.
#[test]
fn a_sealed_file_is_read_alone() -> Result<()> {
    let world = world()?;
    let [mut one, mut other] = twins(&world)?;
    wait_together(&world, &["one", "other"])?;
    let pid = pid(&world, "one")?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let shared: Vec<&str> =
        maps.lines().filter(|line| line.contains("memfd:affinode-shared")).collect();
    assert!(!shared.is_empty(), "no shared file is mapped: {maps}");
    for line in shared {
        assert_eq!(line.split_whitespace().nth(1), Some("r--s"), "{line}");
        let range = line.split_whitespace().next().context("cannot find the mapping's range")?;
        // root tries another path to the file. The seal applies to every process.
        let file =
            fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/map_files/{range}"))?;
        let refused = file.write_at(&[1], 0).map_err(|error| error.raw_os_error());
        assert_eq!(refused, Err(Some(Errno::EPERM as i32)));
    }
    assert!(one.verify()? && other.verify()?);
    Ok(())
}
