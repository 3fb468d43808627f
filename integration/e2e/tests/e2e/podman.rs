//! Tests with the machine's Podman, which does not use shims. Containers of the runtime
//! `affinode-runtime` are offloaded, woken and killed, while containers of Podman's own runtime
//! run.

use std::{fs, path::Path};

use affinode_e2e::{
    image,
    podman::{AFFINODE, OWN, Podman, PodmanPrograms},
    processes,
    testbed::{MIB, Testbed, TestbedConfig, is_controller},
    wait::until,
};
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    offload::{MANUAL, wait_gpu_empty},
    recovery::shoot_controller,
};

const WORKER_MIB: u64 = 64;

/// Finds Podman's programs. If this machine has none, records the test as skipped and returns
/// `None`.
fn programs() -> Option<PodmanPrograms> {
    let found = PodmanPrograms::find();
    if found.is_none() {
        affinode_test_notes::skip("podman", "no Podman: `cargo xtask deps` installs it with apt");
    }
    found
}

/// Runs a test with a Podman that has Affinode as one of its runtimes.
fn with_podman(
    case: impl FnOnce(&Testbed, &Podman<'_>, &PodmanPrograms) -> Result<()>,
) -> Result<()> {
    let Some(programs) = programs() else { return Ok(()) };
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let podman = Podman::new(&world, programs.clone());
    let outcome = podman.and_then(|podman| case(&world, &podman, &programs));
    outcome.inspect_err(|_| world.show_logs())
}

pub fn pids(world: &Testbed, program: &str) -> Result<Vec<Pid>> {
    let mut found = processes::named(program, world.keeper().pid())?;
    // conmon's command line contains the name of the runtime, too. Only the first word is therefore
    // compared.
    found.retain(|process| {
        let first = process.command.split(' ').next().unwrap_or_default();
        first.rsplit('/').next() == Some(program)
    });
    Ok(found.into_iter().map(|process| process.pid).collect())
}

/// Checks that no long-running process of Affinode descends from conmon, the container's monitor.
/// conmon adopts orphaned processes below it, and newer versions of conmon end only after these
/// processes.
pub fn conmon_has_none_of_our_processes(world: &Testbed) -> Result<()> {
    for monitor in pids(world, "conmon")? {
        let ours = processes::named("affinode-", monitor.as_raw())?;
        let kept = ours.iter().find(|process| process.command.contains("followed"));
        ensure!(
            kept.is_none() && !ours.iter().any(is_controller),
            "processes of Affinode are descendants of conmon: {ours:?}"
        );
    }
    Ok(())
}

pub fn wait_forgotten(world: &Testbed, id: &str) -> Result<()> {
    until("the container to be forgotten", || {
        Ok(world.cli().container(id)?.is_none().then_some(()))
    })
}

/// Number of entries in the folder in which Affinode creates a folder for each container.
pub fn folders(world: &Testbed) -> Result<usize> {
    let folder = world.cli().run_dir().join("containers");
    Ok(if folder.exists() { fs::read_dir(folder)?.count() } else { 0 })
}

#[test]
fn podman_container_is_offloaded_and_woken() -> Result<()> {
    with_podman(|world, podman, _| {
        let priority = "--annotation=affinode.io/priority=7";
        let (id, mut worker) = podman.worker("trainer", WORKER_MIB, &[priority])?;
        let row = world.cli().move_out(&id).and_then(|_| world.cli().known(&id))?;
        ensure!(row.name == "podman/trainer", "expected the name podman/trainer: {row:?}");
        ensure!(
            row.offloaded_bytes >= WORKER_MIB * MIB,
            "expected {WORKER_MIB} MiB offloaded: {row:?}"
        );
        wait_gpu_empty(world)?;
        conmon_has_none_of_our_processes(world)?;
        world.cli().run(&["pin", "podman/trainer"])?;
        let said = podman.run(&["exec", "trainer", "/bin/sh", "-c", "cat /proc/self/maps"])?;
        ensure!(said.contains("affinode_preload"), "expected `affinode_preload` in: {said}");
        let said = podman.run(&["exec", "--tty", "trainer", "tty"])?;
        ensure!(said.starts_with("/dev/pts/"), "expected a terminal, got {said}");
        ensure!(worker.verify()?, "the memory of the program has changed");
        world.cli().wait_for(&id, "to have returned once", |row| row.restores == 1)?;

        podman.run(&["restart", "--time=1", "trainer"])?;
        worker.wait_filled()?;
        let row = world.cli().wait_for(&id, "to be registered", |row| !row.processes.is_empty())?;
        ensure!(row.restores == 0, "the new process already has restores: {row:?}");
        podman.run(&["kill", "trainer"])?;
        podman.run(&["wait", "trainer"])?;
        let state = podman.inspect("trainer", "{{.State.Status}} {{.State.ExitCode}}")?;
        ensure!(state == "exited 137", "expected `exited 137`, got `{state}`");
        // The container is removed from the controller although `podman rm` has not been run.
        wait_forgotten(world, &id)?;
        wait_gpu_empty(world)?;
        ensure!(folders(world)? == 0, "the container's folder was not removed");
        until("conmon to end", || Ok(pids(world, "conmon")?.is_empty().then_some(())))?;
        podman.run(&["start", "trainer"])?;
        worker.wait_filled()?;
        world.cli().move_out(&id)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        podman.run(&["rm", "--force", "--time=0", "trainer"])?;
        wait_forgotten(world, &id)
    })
}

/// Kills the controller, and then also the keeper, which starts controllers. The next container
/// must start both again.
#[test]
fn podman_container_outlives_the_controller() -> Result<()> {
    with_podman(|world, podman, _| {
        let (id, mut worker) = podman.worker("trainer", WORKER_MIB, &[])?;
        world.cli().move_out(&id)?;
        shoot_controller(world)?;
        let row = world.cli().wait_for_state(&id, "Offloaded")?;
        ensure!(row.name == "podman/trainer", "expected the name podman/trainer: {row:?}");
        wait_gpu_empty(world)?;
        ensure!(worker.verify()?, "the memory of the program has changed");

        world.cli().move_out(&id)?;
        let keepers = pids(world, "affinode-runtime")?;
        ensure!(keepers.len() == 1, "expected one keeper, found {keepers:?}");
        kill(keepers[0], Signal::SIGKILL)?;
        let controller = world.controller()?.context("no controller is running")?;
        kill(controller.pid, Signal::SIGKILL)?;
        let (other, _other) = podman.worker("other", WORKER_MIB, &["--read-only"])?;
        world.cli().registered(&other)?;
        let row = world.cli().wait_for_state(&id, "Offloaded")?;
        ensure!(row.name == "podman/trainer", "expected the name podman/trainer: {row:?}");
        ensure!(worker.verify()?, "the memory of the program has changed");
        shoot_controller(world)?;
        // The next controller must not list a container that ended while no controller ran.
        world.cli().registered(&id)?;
        podman.run(&["rm", "--force", "--time=0", "trainer", "other"])?;
        wait_forgotten(world, &id)?;
        wait_forgotten(world, &other)
    })
}

/// Checks that the original runtime runs some containers without changes: containers without a GPU,
/// and containers that are not managed.
#[test]
fn podman_plain_container_is_untouched() -> Result<()> {
    with_podman(|world, podman, _| {
        for runtime in [AFFINODE, OWN] {
            let said = podman.output(runtime, &["--tty"], &["tty"])?;
            ensure!(said.starts_with("/dev/pts/"), "{runtime}: {said}");
            let [runtime, cgroup] = podman.flags(runtime);
            let program = ["/bin/sh", "-c", "echo said; echo told >&2; exit 7"];
            let first = ["run", "--rm", "--network=none", &runtime, &cgroup, image::PLAIN];
            let ended = podman.execute(&[&first[..], &program].concat())?;
            ensure!(ended.code == 7, "{runtime}: {ended:?}");
            ensure!(
                ended.stdout == "said\n" && ended.stderr == "told\n",
                "unexpected output: {ended:?}"
            );
        }
        let created = |name: &str, flags: &[&str]| {
            let [runtime, cgroup] = podman.flags(AFFINODE);
            let first = ["create", "--network=none", "--name", name, &runtime, &cgroup];
            podman.run(&[&first, flags, &[image::PLAIN, "true"]].concat())?;
            podman.run(&["start", "--attach", name])?;
            Ok::<bool, anyhow::Error>(
                podman.spec(name)? == fs::read_to_string(podman.given_spec())?,
            )
        };
        ensure!(created("plain", &[])?, "the spec of a container without a GPU has changed");
        let gpu = "--env=NVIDIA_VISIBLE_DEVICES=all";
        ensure!(!created("gpu", &[gpu])?, "the spec of a container with a GPU was not changed");
        // A volume hides /etc. The reason why the container is not managed is in the log that
        // Podman reads.
        let volume = format!("--volume={}:/etc", world.dir().join("affinode").display());
        ensure!(created("covered", &[gpu, &volume])?, "the spec has changed");
        let pid_file = podman.inspect("covered", "{{.ConmonPidFile}}")?;
        let log = fs::read_to_string(Path::new(&pid_file).with_file_name("oci-log"))?;
        ensure!(
            log.contains("runs unmanaged") && log.contains("the container has a volume at /etc"),
            "expected `runs unmanaged` and `the container has a volume at /etc` in: {log}"
        );
        Ok(())
    })
}

/// Creates a second container with an id that is in use. The runtime must refuse this, and the
/// first container must keep its folder.
#[test]
fn podman_container_survives_a_second_create() -> Result<()> {
    with_podman(|world, podman, _| {
        let (id, mut worker) = podman.worker("trainer", WORKER_MIB, &[])?;
        world.cli().move_out(&id)?;
        let spec = podman.inspect("trainer", "{{.OCIConfigPath}}")?;
        let bundle = Path::new(&spec).parent().context("the path of the spec has no folder")?;
        let mut create = world.keeper().command(&podman.runtime());
        let refused = create.arg("create").arg("--bundle").arg(bundle).arg(&id).output()?;
        ensure!(!refused.status.success(), "the command succeeded: {refused:?}");
        let said = podman.run(&["exec", "trainer", "/bin/sh", "-c", "ls /.affinode/run"])?;
        ensure!(said.contains("agent.sock"), "expected `agent.sock` in: {said}");
        shoot_controller(world)?;
        world.cli().wait_for_state(&id, "Offloaded")?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        Ok(())
    })
}

/// Runs a container whose root user is mapped to another user of the machine. The container must be
/// offloaded and restored with unchanged memory.
#[test]
fn podman_container_has_users_of_its_own() -> Result<()> {
    with_podman(|world, podman, _| {
        let users = ["--uidmap=0:200000:65536", "--gidmap=0:200000:65536"];
        let (id, mut worker) = podman.worker("trainer", WORKER_MIB, &users)?;
        let map = podman.run(&["exec", "trainer", "/bin/sh", "-c", "cat /proc/self/uid_map"])?;
        let words: Vec<&str> = map.split_whitespace().collect();
        ensure!(words == ["0", "200000", "65536"], "unexpected user mapping: {map}");
        world.cli().move_out(&id)?;
        wait_gpu_empty(world)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        world.cli().wait_for(&id, "to have returned once", |row| row.restores == 1)?;
        Ok(())
    })
}

/// Starts a container that its runtime cannot create. Nothing of this container must remain.
#[test]
fn podman_container_that_fails_leaves_nothing() -> Result<()> {
    with_podman(|world, podman, _| {
        let [runtime, cgroup] = podman.flags(AFFINODE);
        let gpu = "--env=NVIDIA_VISIBLE_DEVICES=all";
        let first = ["run", "--network=none", gpu, &runtime, &cgroup, image::PLAIN];
        let failed = podman.execute(&[&first[..], &["/no/such/program"]].concat())?;
        ensure!(
            failed.code == 127 && failed.stderr.contains("/no/such/program"),
            "expected exit status 127 and the name of the program: {failed:?}"
        );
        until("the container's folder to be removed", || Ok((folders(world)? == 0).then_some(())))
    })
}

/// Checks that a container keeps the OCI runtime with which it was created. Podman must be able to
/// start it again after its end.
#[test]
fn podman_container_keeps_its_own_runtime() -> Result<()> {
    with_podman(|world, podman, programs| {
        podman.write_runtime(&programs.runc)?;
        let (id, mut worker) = podman.worker("trainer", WORKER_MIB, &["--restart=on-failure"])?;
        world.cli().move_out(&id)?;
        podman.write_runtime(&programs.crun)?;
        ensure!(podman.run(&["exec", "trainer", "/bin/sh", "-c", "echo here"])? == "here");
        ensure!(worker.verify()?, "the memory of the program has changed");
        // Podman starts the container again as its restart policy says, now with crun.
        let first = podman.inspect("trainer", "{{.State.Pid}}")?.parse()?;
        kill(Pid::from_raw(first), Signal::SIGKILL)?;
        worker.wait_filled()?;
        world.cli().wait_for(&id, "to be another process", |row| {
            row.restores == 0 && !row.processes.is_empty()
        })?;
        world.cli().move_out(&id)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        podman.run(&["rm", "--force", "--time=0", "trainer"])?;
        wait_forgotten(world, &id)
    })
}
