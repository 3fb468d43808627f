//! Tests with CRI-O, which does not use shims. One runtime handler uses `affinode-runtime`, and its
//! pods are offloaded, woken and killed. Pods of a handler without Affinode run at the same time.

use std::{collections::HashMap, fs};

use affinode_e2e::{
    artifacts::Artifacts,
    cri::{self, Cri},
    crio::{AFFINODE, Crio, CrioPrograms, OWN},
    image,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    offload::{MANUAL, wait_gpu_empty},
    podman::{conmon_has_none_of_our_processes, folders, pids, wait_forgotten},
    recovery::shoot_controller,
};

const WORKER_MIB: u64 = 64;

/// Runs a test with a CRI-O that has Affinode as one of its runtime handlers.
fn with_crio(case: impl FnOnce(&Testbed, &Crio<'_>) -> Result<()>) -> Result<()> {
    let Some(programs) = CrioPrograms::find(&Artifacts::find()?) else {
        affinode_test_notes::skip("crio", "no CRI-O: `cargo xtask deps` builds it with Go");
        return Ok(());
    };
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let crio = Crio::start(&world, &programs);
    crio.and_then(|crio| case(&world, &crio)).inspect_err(|_| world.show_logs())
}

/// A pod that contains one GPU container.
struct GpuPod {
    pod_id: String,
    id: String,
    worker: Worker,
}

impl GpuPod {
    fn run(world: &Testbed, cri: &Cri, name: &str) -> Result<Self> {
        let mut config = cri::pod(name, &world.cgroup_parent(), world.dir());
        config.annotations = HashMap::from([("affinode.io/idle-timeout".into(), "300ms".into())]);
        let pod_id = cri.run_pod(&config, AFFINODE)?;
        let (container, lines) = cri::gpu_container(world, "trainer", WORKER_MIB)?;
        let id = cri.run_container(&pod_id, &container, &config)?;
        let mut worker = Worker::over(lines, &id);
        worker.wait_filled()?;
        Ok(Self { pod_id, id, worker })
    }
}

#[test]
fn crio_pod_is_offloaded_and_woken() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        let mut pod = GpuPod::run(world, &cri, "job")?;
        let row = world.cli().move_out(&pod.id).and_then(|_| world.cli().known(&pod.id))?;
        let names = [&row.pod_namespace, &row.pod, &row.container, &row.image];
        ensure!(names == ["team", "job", "trainer", image::PLAIN], "unexpected names: {row:?}");
        let shown = (row.name.as_str(), row.namespace.as_str());
        ensure!(shown == ("team/job/trainer", "cri-o"), "unexpected name: {row:?}");
        ensure!(row.idle_timeout_ms == 300, "expected the pod's annotation: {row:?}");
        ensure!(row.offloaded_bytes >= WORKER_MIB * MIB, "expected {WORKER_MIB} MiB: {row:?}");
        wait_gpu_empty(world)?;
        conmon_has_none_of_our_processes(world)?;
        let said = cri.exec(&pod.id, &["/bin/sh", "-c", "cat /proc/self/maps; exit 3"])?;
        let maps = String::from_utf8_lossy(&said.stdout);
        ensure!(
            maps.contains("affinode_preload") && said.exit_code == 3,
            "expected `affinode_preload` and exit status 3: {said:?}"
        );
        ensure!(world.cli().known(&pod.id)?.restores == 0, "the exec has woken the container");
        ensure!(pod.worker.verify()?, "the memory of the program has changed");
        world.cli().wait_for(&pod.id, "to have returned once", |row| row.restores == 1)?;

        cri.remove_container(&pod.id)?;
        cri.remove_pod(&pod.pod_id)?;
        until("conmon to end", || Ok(pids(world, "conmon")?.is_empty().then_some(())))
    })
}

/// Ends an offloaded container with SIGTERM or SIGKILL. It must end as any other container. The
/// controller must forget it before it is removed.
#[test]
fn crio_offloaded_container_can_be_ended() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        for expected in [Signal::SIGTERM, Signal::SIGKILL] {
            let pod = GpuPod::run(world, &cri, "job")?;
            world.cli().move_out(&pod.id)?;
            match expected {
                Signal::SIGTERM => cri.stop_container(&pod.id, 30)?,
                signal => {
                    let pid = world.cli().known(&pod.id)?.process()?.pid;
                    kill(Pid::from_raw(pid), signal)?;
                }
            }
            let code = cri.exit_code(&pod.id)?;
            ensure!(code == 128 + expected as i32, "{expected}: the exit status is {code}");
            wait_forgotten(world, &pod.id)?;
            wait_gpu_empty(world)?;
            ensure!(folders(world)? == 0, "{expected}: the container's folder was not removed");
            cri.remove_pod(&pod.pod_id)?;
        }
        Ok(())
    })
}

/// Stops CRI-O and kills the controller while a container is offloaded. Later kills the keeper (the
/// process that keeps the controller alive) and the controller, and the next container must start a
/// controller. Each time the offloaded container must stay offloaded, and its memory must be
/// unchanged after the restore.
#[test]
fn crio_pod_outlives_crio_and_the_controller() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        let mut pod = GpuPod::run(world, &cri, "job")?;
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            world.cli().move_out(&pod.id)?;
            crio.stop(signal)?;
            shoot_controller(world)?;
            crio.run()?;
            let row = world.cli().wait_for_state(&pod.id, "Offloaded")?;
            ensure!(row.name == "team/job/trainer", "expected the same name: {row:?}");
            wait_gpu_empty(world)?;
            let said = crio.cri()?.exec(&pod.id, &["/bin/echo", "here"])?;
            ensure!(said.stdout == b"here\n", "expected `here`: {said:?}");
            ensure!(pod.worker.verify()?, "the memory of the program has changed");
        }
        // The next container starts a controller although its keeper is dead.
        world.cli().move_out(&pod.id)?;
        let keepers = pids(world, "affinode-runtime")?;
        ensure!(keepers.len() == 1, "expected one keeper, found {keepers:?}");
        kill(keepers[0], Signal::SIGKILL)?;
        kill(world.controller()?.context("no controller is running")?.pid, Signal::SIGKILL)?;
        let cri = crio.cri()?;
        let other = GpuPod::run(world, &cri, "other")?;
        world.cli().registered(&other.id)?;
        world.cli().wait_for_state(&pod.id, "Offloaded")?;
        ensure!(pod.worker.verify()?, "the memory of the program has changed");
        for pod in [pod, other] {
            cri.remove_pod(&pod.pod_id)?;
            wait_forgotten(world, &pod.id)?;
        }
        Ok(())
    })
}

/// Kills conmon, the container's monitor, while the container is offloaded. The container must stay
/// offloaded and return with unchanged memory, and its pod can then be removed.
#[test]
fn crio_pod_without_its_monitor_is_removed() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        let mut pod = GpuPod::run(world, &cri, "job")?;
        world.cli().move_out(&pod.id)?;
        for monitor in pids(world, "conmon")? {
            kill(monitor, Signal::SIGKILL)?;
        }
        world.cli().wait_for_state(&pod.id, "Offloaded")?;
        ensure!(pod.worker.verify()?, "the memory of the program has changed");
        cri.remove_pod(&pod.pod_id)?;
        wait_forgotten(world, &pod.id)?;
        wait_gpu_empty(world)
    })
}

/// Checks that the original runtime runs a container without a GPU, without changes to the
/// container.
#[test]
fn crio_plain_container_is_untouched() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        for handler in [OWN, AFFINODE] {
            let name = format!("plain-{handler}");
            let pod = cri::pod(&name, &world.cgroup_parent(), world.dir());
            let pod_id = cri.run_pod(&pod, handler)?;
            let script = "echo said; echo told >&2; exit 7";
            let argv = ["/bin/sh", "-c", script].map(str::to_owned);
            let id =
                cri.run_container(&pod_id, &cri::container(&name, image::PLAIN, &argv), &pod)?;
            ensure!(cri.exit_code(&id)? == 7, "{handler}: expected exit status 7");
            let log = fs::read_to_string(world.dir().join(format!("{name}.log")))?;
            let lines = ["stdout F said\n", "stderr F told\n"];
            ensure!(lines.iter().all(|line| log.contains(line)), "{handler}: {log}");
            let [written, read] = crio.specs(&id)?;
            ensure!(written == read, "{handler}: the spec has changed");
            cri.remove_pod(&pod_id)?;
        }
        ensure!(world.controller()?.is_none(), "a controller runs without any GPU container");
        let pod = GpuPod::run(world, &cri, "gpu")?;
        let [written, read] = crio.specs(&pod.id)?;
        ensure!(written != read, "the spec of a container with a GPU was not changed");
        Ok(())
    })
}

/// Starts a container that its runtime cannot create, while another container runs. Nothing of the
/// failed container must remain.
#[test]
fn crio_container_that_fails_leaves_nothing() -> Result<()> {
    with_crio(|world, crio| {
        let cri = crio.cri()?;
        let other = GpuPod::run(world, &cri, "other")?;
        ensure!(folders(world)? == 1, "the other container has no folder of its own");
        let pod = cri::pod("job", &world.cgroup_parent(), world.dir());
        let pod_id = cri.run_pod(&pod, AFFINODE)?;
        let (mut container, _) = cri::gpu_container(world, "failing", WORKER_MIB)?;
        container.command = vec!["/no/such/program".into()];
        let Err(error) = cri.run_container(&pod_id, &container, &pod) else {
            bail!("a container without a program was started");
        };
        ensure!(format!("{error:#}").contains("/no/such/program"), "{error:#}");
        until("the container's folder to be removed", || Ok((folders(world)? == 1).then_some(())))?;
        world.cli().known(&other.id).map(|_| ())
    })
}
