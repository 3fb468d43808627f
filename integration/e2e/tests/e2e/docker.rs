//! Tests with a real dockerd. Containers of Affinode's runtime are offloaded, woken and killed,
//! while containers of Docker's own runtime run.

use affinode_e2e::{
    artifacts::Artifacts,
    containerd::AFFINODE,
    docker::{Docker, DockerPrograms},
    image, nvidia_hook,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};

use crate::{
    offload::{MANUAL, wait_gpu_empty},
    recovery::shoot_controller,
};

const WORKER_MIB: u64 = 64;

/// A program that exits with 0 if its output is a terminal and its input is one below `/dev/pts`,
/// and with 1 if not. Tests read its exit status, because Docker can lose the last output of a
/// terminal (<https://github.com/moby/moby/issues/43121>).
const HAS_TERMINAL: [&str; 3] = ["/bin/sh", "-c", "test -t 1 && tty | grep -q ^/dev/pts/"];

/// Finds Docker's programs. If this machine has none, records the test as skipped and returns
/// `None`.
pub fn programs() -> Result<Option<DockerPrograms>> {
    let found = DockerPrograms::find(&Artifacts::find()?);
    if found.is_none() {
        affinode_test_notes::skip("docker", "no dockerd: `cargo xtask deps` fetches one with apt");
    }
    Ok(found)
}

/// Runs a test with a dockerd of this configuration. Affinode's programs are in the PATH of the
/// testbed.
fn with_docker(config: &str, case: impl FnOnce(&Testbed, &Docker<'_>) -> Result<()>) -> Result<()> {
    let Some(programs) = programs()? else { return Ok(()) };
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let outcome = Docker::start(&world, programs, config).and_then(|docker| case(&world, &docker));
    outcome.inspect_err(|_| world.show_logs())
}

fn affinode(docker: &Docker<'_>, more: &[&str]) -> Result<Vec<String>> {
    let mut flags = vec![format!("--runtime={AFFINODE}")];
    flags.extend(docker.gpu_flags()?);
    flags.extend(more.iter().map(|&flag| flag.to_owned()));
    Ok(flags)
}

#[test]
fn docker_container_is_offloaded_and_woken() -> Result<()> {
    with_docker("{}", |world, docker| {
        let project = "--label=com.docker.compose.project=shop";
        let flags = affinode(docker, &[project, "--annotation=affinode.io/priority=7"])?;
        let (id, mut worker) = docker.worker("trainer", WORKER_MIB, &flags)?;
        let row = world.cli().move_out(&id).and_then(|_| world.cli().known(&id))?;
        ensure!(
            row.name == "moby/shop/trainer" && row.image == image::PLAIN,
            "unexpected name or image: {row:?}"
        );
        ensure!(
            row.offloaded_bytes >= WORKER_MIB * MIB,
            "expected {WORKER_MIB} MiB offloaded: {row:?}"
        );
        wait_gpu_empty(world)?;
        // Commands accept the name that users see.
        world.cli().run(&["pin", "moby/shop/trainer"])?;
        // A program of `docker exec` also loads the library, and gets a terminal if one was
        // requested.
        let loaded = "grep -q affinode_preload /proc/self/maps";
        docker.run(&["exec", "trainer", "/bin/sh", "-c", loaded])?;
        docker.run(&[&["exec", "--tty", "trainer"], &HAS_TERMINAL[..]].concat())?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        world.cli().wait_for(&id, "to have returned once", |row| row.restores == 1)?;
        // Docker's other runtime and its own options still work.
        for runtime in ["runc", AFFINODE] {
            let exit_seven = ["/bin/sh", "-c", "exit 7"];
            for (terminal, argv, code) in [
                ("--tty=true", HAS_TERMINAL, 0),
                ("--tty=false", HAS_TERMINAL, 1),
                ("--tty=false", exit_seven, 7),
            ] {
                let ended = docker
                    .command(&["run", "--rm", "--network=none", "--runtime", runtime, terminal])
                    .arg(image::PLAIN)
                    .args(argv)
                    .output()?;
                ensure!(ended.status.code() == Some(code), "{runtime} {terminal}: {ended:?}");
            }
        }
        docker.run(&["restart", "--time=1", "trainer"])?;
        worker.wait_filled()?;
        ensure!(world.cli().registered(&id)?.restores == 0, "the new process already has restores");
        docker.run(&["kill", "trainer"])?;
        let state = docker.inspect("trainer", "{{.State.Status}} {{.State.ExitCode}}")?;
        ensure!(state == "exited 137", "expected `exited 137`, got `{state}`");
        docker.run(&["rm", "trainer"])?;
        until("the container to be forgotten", || {
            Ok(world.cli().container(&id)?.is_none().then_some(()))
        })?;
        wait_gpu_empty(world)
    })
}

/// Kills the controller, the shim and dockerd in turn. The container must end only when its shim is
/// killed, as with the stock shim.
#[test]
fn docker_container_outlives_its_daemons() -> Result<()> {
    with_docker(r#"{"live-restore": true}"#, |world, docker| {
        let (id, mut worker) =
            docker.worker("trainer", WORKER_MIB, &affinode(docker, &["--restart=on-failure"])?)?;
        world.cli().move_out(&id)?;
        shoot_controller(world)?;
        let row = world.cli().wait_for_state(&id, "Offloaded")?;
        ensure!(row.name == "moby/trainer", "expected the name moby/trainer: {row:?}");
        docker.stop(Signal::SIGKILL)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        world.cli().move_out(&id)?;
        docker.launch()?;
        let running = docker.inspect("trainer", "{{.State.Status}} {{.RestartCount}}")?;
        ensure!(running == "running 0", "expected `running 0`, got `{running}`");
        ensure!(worker.verify()?, "the memory of the program has changed");

        let shim = world
            .shims()?
            .into_iter()
            .find(|shim| shim.command.contains("affinode-v1") && shim.command.contains(&id));
        kill(shim.context("the container has no shim")?.pid, Signal::SIGKILL)?;
        // Docker notices the container's end and starts it again, as its restart policy says.
        worker.wait_filled()?;
        until("Docker to know of the restart", || {
            let count = docker.inspect("trainer", "{{.State.Status}} {{.RestartCount}}")?;
            Ok((count == "running 1").then_some(()))
        })?;
        world.cli().registered(&id)?;
        world.cli().move_out(&id)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        docker.run(&["rm", "--force", "trainer"]).map(|_| ())
    })
}

/// Checks that a memory limit below the container's VRAM prevents the driver's checkpoint, until
/// `docker update` raises the limit.
#[test]
fn docker_update_raises_the_memory_limit() -> Result<()> {
    with_docker("{}", |world, docker| {
        let engine = "--annotation=affinode.io/engine=checkpoint";
        let flags = affinode(docker, &["--memory=96m", "--memory-swap=96m", engine])?;
        let (id, mut worker) = docker.worker("trainer", 256, &flags)?;
        let said = world.cli().offload(&id)?;
        ensure!(
            !said.done && said.reason == "cgroup-memory",
            "expected a refusal for cgroup-memory, got {said:?}"
        );
        docker.run(&["update", "--memory=2g", "--memory-swap=2g", "trainer"])?;
        world.cli().move_out(&id)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        Ok(())
    })
}

/// Runs a container with containerd's image store, so that its root filesystem is a snapshot
/// instead of a folder of dockerd. The container must be offloaded and restored with unchanged
/// memory.
#[test]
fn docker_image_store_of_containerd_works() -> Result<()> {
    with_docker(r#"{"features": {"containerd-snapshotter": true}}"#, |world, docker| {
        ensure!(docker.run(&["info", "--format={{.Driver}}"])? == "overlayfs");
        let (id, mut worker) = docker.worker("trainer", WORKER_MIB, &affinode(docker, &[])?)?;
        let row = world.cli().move_out(&id).and_then(|_| world.cli().known(&id))?;
        ensure!(row.name == "moby/trainer", "expected the name moby/trainer: {row:?}");
        ensure!(worker.verify()?, "the memory of the program has changed");
        Ok(())
    })
}

/// Runs a container with `--gpus all` and NVIDIA's hook. When the shim creates the container, only
/// the environment names a GPU. The hook mounts the driver's libraries into the container's root
/// only after Affinode's mounts exist. The container must nevertheless be offloaded and restored
/// with unchanged memory.
#[test]
fn docker_gpus_flag_works_with_a_prestart_hook() -> Result<()> {
    with_docker("{}", |world, docker| {
        // dockerd looks for NVIDIA's hook at its start.
        docker.stop(Signal::SIGTERM)?;
        let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
        nvidia_hook::place(&docker.hooks(), world.dir(), &parts.mounts)?;
        docker.launch()?;
        let mut flags = vec![format!("--runtime={AFFINODE}"), "--gpus=all".to_owned()];
        flags.extend(
            parts
                .env
                .iter()
                .filter(|(name, _)| *name != "NVIDIA_VISIBLE_DEVICES")
                .map(|(name, value)| format!("--env={name}={value}")),
        );
        let (id, mut worker) = docker.worker("trainer", WORKER_MIB, &flags)?;
        ensure!(
            nvidia_hook::phase(world.dir())? == "prestart",
            "NVIDIA's hook did not run as a prestart hook"
        );
        world.cli().move_out(&id)?;
        wait_gpu_empty(world)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        Ok(())
    })
}
