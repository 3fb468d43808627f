//! The steps that run on each containerd release: dry run, installation, GPU pod, upgrade,
//! uninstallation, and the check that the node is unchanged.

use std::{fs, os::unix::fs::MetadataExt, path::Path, time::Duration};

use affinode_e2e::{
    artifacts::Artifacts,
    cli::Cli,
    cri::{self, Cri, PodConfig},
    installed::{FILES, Installation, SHIM},
    processes::Process,
    release::Release,
    snapshot::{Snapshot, digest},
    testbed::{MIB, Testbed, TestbedConfig},
    wait::{until, until_within},
    worker::Lines,
};
use affinode_proto::paths::LIB_FILE;
use anyhow::{Context, Result, ensure};

use super::table::Column;

pub(super) const HANDLER: &str = "affinode";
/// VRAM in MiB that the program of a pod fills.
const POD_MIB: u64 = 64;
/// Configuration in which a container is offloaded only on request.
pub(super) const CONFIG: &str = "[policy]\nmode = \"manual\"\nminimum_residency = \"1ms\"\n";

/// Maximum time until the controller exits. Before its exit, the controller waits a minute for
/// another container.
pub(super) const CONTROLLER_ENDS: Duration = Duration::from_secs(180);

type Step = fn(&mut Course<'_>) -> Result<String>;
const STEPS: [(&str, Step); 11] = [
    ("`install --dry-run`", dry_run),
    ("`install`", install),
    ("`install` again", install_again),
    ("GPU pod through CRI", gpu_pod),
    ("offload", offload),
    ("wake", wake),
    ("upgrade, containers run", upgrade),
    ("new pod after the upgrade", new_pod),
    ("`uninstall`, containers run", uninstall_is_refused),
    ("`uninstall --drain`", uninstall_drains),
    ("the node as before", as_before),
];

/// Runs all steps on one containerd release. After a failed step the remaining steps are skipped.
pub fn run(column: &mut Column, release: &Release, artifacts: &Artifacts, upgrade: &Path) {
    let recipe = TestbedConfig::default().node().artifacts(artifacts.clone()).release(release);
    let world = match recipe.config(CONFIG).world() {
        Ok(world) => world,
        Err(error) => return column.failed("containerd starts", &error),
    };
    let mut course = match Course::new(&world, upgrade) {
        Ok(course) => course,
        Err(error) => return column.failed("containerd serves", &error),
    };
    let mut holds = true;
    for (name, step) in STEPS {
        match holds {
            true => holds = column.step(name, || step(&mut course)),
            false => column.not_tried(name),
        }
    }
    if !holds {
        world.show_logs();
    }
}

pub(super) struct Course<'a> {
    pub(super) world: &'a Testbed,
    pub(super) installation: Installation<'a>,
    pub(super) upgrade: &'a Path,
    pub(super) before: Snapshot,
    pub(super) cli: Cli,
    pub(super) pods: Vec<Pod>,
}

pub(super) struct Pod {
    pub(super) pod_id: String,
    pub(super) id: String,
    pub(super) lines: Lines,
}

impl<'a> Course<'a> {
    pub(super) fn new(world: &'a Testbed, upgrade: &'a Path) -> Result<Self> {
        Cri::connect(&world.containerd().socket())?;
        let installation = Installation::new(world, &world.prefix(), HANDLER)?;
        let cli = Cli::new(installation.file("bin/affinode"), world.cli().run_dir().to_owned());
        let before = Snapshot::of(world.dir())?;
        Ok(Self { world, installation, upgrade, before, cli, pods: Vec::new() })
    }

    fn snapshot(&self) -> Result<Snapshot> {
        Snapshot::of(self.world.dir())
    }

    /// Runs a pod with a CUDA program, and waits until its VRAM is filled.
    pub(super) fn start_pod(&mut self, name: &str) -> Result<()> {
        let cri = Cri::connect(&self.world.containerd().socket())?;
        let pod = pod(self.world, name);
        let pod_id = cri.run_pod(&pod, HANDLER)?;
        let (config, lines) = cri::gpu_container(self.world, name, POD_MIB)?;
        let id = cri.run_container(&pod_id, &config, &pod)?;
        let mut pod = Pod { pod_id, id, lines };
        for command in ["open", "fill"] {
            pod.receive(command)?;
        }
        self.pods.push(pod);
        Ok(())
    }

    /// Makes every pod's program check the contents of its VRAM.
    pub(super) fn all_verify(&mut self) -> Result<()> {
        self.pods.iter_mut().try_for_each(Pod::verify)
    }

    /// Returns the running shim processes of Affinode.
    fn shims(&self) -> Result<Vec<Process>> {
        let mut shims = self.world.shims()?;
        shims.retain(|shim| shim.command.contains(SHIM));
        Ok(shims)
    }

    /// Returns the inode of the preload library that a pod's program has loaded.
    fn loaded_library(&self, pod: &Pod) -> Result<u64> {
        let row =
            self.cli.container(&pod.id)?.context("the controller does not list the container")?;
        let process = row.processes.first().context("the container has no CUDA process")?;
        let maps = fs::read_to_string(format!("/proc/{}/maps", process.pid))?;
        let line = maps
            .lines()
            .find(|line| line.contains(LIB_FILE))
            .context("the library is not mapped into the process")?;
        Ok(line
            .split_whitespace()
            .nth(4)
            .context("the mapping of the library has no inode")?
            .parse()?)
    }
}

impl Pod {
    fn receive(&mut self, command: &str) -> Result<()> {
        let line = self.lines.receive()?;
        let good = format!("\"command\":\"{command}\",\"result\":0");
        ensure!(line.contains(&good) && !line.contains("\"ok\":false"), "{command}: {line}");
        Ok(())
    }

    fn verify(&mut self) -> Result<()> {
        self.lines.send("verify")?;
        self.receive("verify")
    }
}

pub(super) fn pod(world: &Testbed, name: &str) -> PodConfig {
    cri::pod(name, &world.cgroup_parent(), &world.dir().join("pods"))
}

fn dry_run(course: &mut Course<'_>) -> Result<String> {
    let (said, restarts) = {
        let installation = &course.installation;
        installation.restarted(|| installation.done("install", &["--dry-run"]))?
    };
    let added = "+ [plugins.";
    let lines = said.lines().filter(|line| line.trim_start().starts_with("+ ")).count();
    ensure!(
        said.contains(added) && said.contains("restart containerd"),
        "expected the new handler and a restart in the dry run: {said}"
    );
    ensure!(restarts == 0, "the dry run restarted containerd");
    course.before.same_as(&course.snapshot()?)?;
    Ok(format!("{lines} lines to add; {} files as before", course.before.count()))
}

fn install(course: &mut Course<'_>) -> Result<String> {
    let installation = &course.installation;
    let (_, restarts) = installation.restarted(|| installation.done("install", &[]))?;
    ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
    for file in FILES {
        ensure!(installation.file(file).exists(), "{file} does not exist");
    }
    let said = installation.done("status", &[])?;
    ensure!(said.contains("served by containerd"), "expected `served by containerd` in: {said}");
    Ok("one restart; status: served by containerd".into())
}

fn install_again(course: &mut Course<'_>) -> Result<String> {
    let (installed, containerd) = (course.snapshot()?, course.world.containerd().pid());
    let installation = &course.installation;
    let (said, restarts) = installation.restarted(|| installation.done("install", &[]))?;
    ensure!(
        said.contains("nothing to do") && restarts == 0,
        "expected `nothing to do` and no restart, got {restarts} restarts: {said}"
    );
    installed.same_as(&course.snapshot()?)?;
    ensure!(
        course.world.containerd().pid() == containerd,
        "containerd was restarted: its pid has changed"
    );
    Ok("nothing to do; no restart, no file changed".into())
}

fn gpu_pod(course: &mut Course<'_>) -> Result<String> {
    course.start_pod("first")?;
    course.all_verify()?;
    let id = course.pods[0].id.clone();
    let row = until("the controller to see its VRAM", || {
        let row = course.cli.container(&id)?;
        Ok(row.filter(|row| row.vram_bytes >= POD_MIB * MIB))
    })?;
    ensure!(row.pod == "first", "expected the pod `first`: {row:?}");
    let library = fs::metadata(course.installation.file("lib/affinode").join(LIB_FILE))?;
    ensure!(course.loaded_library(&course.pods[0])? == library.ino(), "another library");
    Ok(format!("{}: {}, {} MiB of VRAM", row.name, row.state, row.vram_bytes / MIB))
}

fn offload(course: &mut Course<'_>) -> Result<String> {
    let said = course.cli.move_out(&course.pods[0].id)?;
    course.cli.wait_for_state(&course.pods[0].id, "Offloaded")?;
    let cli = &course.cli;
    until("NVML to show 0 in use", || {
        let gpus = cli.ps()?.gpus;
        Ok(gpus.iter().all(|gpu| gpu.vram_used_bytes == 0).then_some(()))
    })?;
    Ok(format!("{} MiB offloaded; NVML shows 0 in use", said.bytes / MIB))
}

fn wake(course: &mut Course<'_>) -> Result<String> {
    course.all_verify()?;
    let row = course.cli.container(&course.pods[0].id)?.context("the container is gone")?;
    ensure!(
        row.restores == 1 && row.vram_bytes >= POD_MIB * MIB,
        "expected one restore of {POD_MIB} MiB: {row:?}"
    );
    Ok(format!("every word of {} MiB unchanged", row.vram_bytes / MIB))
}

/// Upgrades Affinode while one container is offloaded and one is resident.
fn upgrade(course: &mut Course<'_>) -> Result<String> {
    course.start_pod("second")?;
    course.cli.move_out(&course.pods[0].id)?;
    let pids = |shims: Vec<Process>| shims.iter().map(|shim| shim.pid).collect::<Vec<_>>();
    let (shims, containerd) = (pids(course.shims()?), course.world.containerd().pid());
    let (installation, from) = (&course.installation, course.upgrade.display().to_string());
    let (_, restarts) =
        installation.restarted(|| installation.done("install", &["--from", &from]))?;
    ensure!(restarts == 0, "the upgrade restarted containerd");
    ensure!(
        course.world.containerd().pid() == containerd,
        "containerd was restarted: its pid has changed"
    );
    let built = digest(&course.upgrade.join(SHIM))?;
    ensure!(digest(&installation.shim())? == built, "the shim was not replaced");
    let said = installation.done("status", &[])?;
    ensure!(said.contains("served by containerd"), "expected `served by containerd` in: {said}");
    until("a controller of the new version", || {
        let controller = course.world.controller()?;
        let exe = |process: Process| fs::read_link(format!("/proc/{}/exe", process.pid)).ok();
        Ok((controller.and_then(exe) == Some(installation.shim())).then_some(()))
    })?;
    course.all_verify()?;
    ensure!(pids(course.shims()?) == shims, "a shim has exited");
    course.cli.move_out(&course.pods[1].id)?;
    course.cli.wait_for_state(&course.pods[1].id, "Offloaded")?;
    course.all_verify()?;
    Ok("no restart; the offloaded one was restored, the resident one offloaded and restored; the new \
        controller manages both"
        .into())
}

fn new_pod(course: &mut Course<'_>) -> Result<String> {
    course.start_pod("third")?;
    let library = fs::metadata(course.installation.file("lib/affinode").join(LIB_FILE))?.ino();
    for (at, pod) in course.pods.iter().enumerate() {
        let shims = course.shims()?;
        let shim = shims.iter().find(|shim| shim.command.contains(&pod.pod_id));
        let exe = fs::read_link(format!("/proc/{}/exe", shim.context("the pod has no shim")?.pid))?;
        let new = (exe == course.installation.shim(), course.loaded_library(pod)? == library);
        ensure!(new == (at == 2, at == 2), "pod {at}: new shim and library: {new:?}");
    }
    course.cli.move_out(&course.pods[2].id)?;
    course.all_verify()?;
    Ok("its shim and library are new, those of the others unchanged".into())
}

fn uninstall_is_refused(course: &mut Course<'_>) -> Result<String> {
    let before = course.snapshot()?;
    let said = course.installation.refused("uninstall", &[])?;
    ensure!(said.contains("3 shims run"), "expected `3 shims run` in: {said}");
    before.same_as(&course.snapshot()?)?;
    course.all_verify()?;
    Ok(said.trim().to_owned())
}

fn uninstall_drains(course: &mut Course<'_>) -> Result<String> {
    let pods = std::mem::take(&mut course.pods);
    let (installation, world) = (&course.installation, course.world);
    let (waited, restarts) = installation.restarted(|| {
        let mut command = installation.command("uninstall", &["--drain", "10m"])?;
        let mut waiting = command.stdout(std::process::Stdio::null()).spawn()?;
        let mut waited = 0;
        let cri = Cri::connect(&world.containerd().socket())?;
        for pod in &pods {
            waited += usize::from(waiting.try_wait()?.is_none() && installation.shim().exists());
            cri.remove_container(&pod.id)?;
            cri.remove_pod(&pod.pod_id)?;
        }
        ensure!(waiting.wait()?.success(), "affinode uninstall failed");
        Ok(waited)
    })?;
    ensure!(waited == pods.len(), "uninstall did not wait for all pods");
    ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
    Ok(format!("uninstall waited for {waited} pods; one restart"))
}

fn as_before(course: &mut Course<'_>) -> Result<String> {
    let world = course.world;
    until_within(CONTROLLER_ENDS, "shims and controller to end", || {
        Ok((world.shims()?.is_empty() && world.controller()?.is_none()).then_some(()))
    })?;
    let cri = Cri::connect(&world.containerd().socket())?;
    let stock = pod(world, "stock");
    let pod_id = cri.run_pod(&stock, "runc")?;
    let ours = cri.run_pod(&stock, HANDLER);
    ensure!(ours.is_err(), "containerd still knows the handler");
    cri.remove_pod(&pod_id)?;
    course.before.same_as(&course.snapshot()?)?;
    Ok(format!(
        "{} files and folders unchanged, byte for byte; runc serves, the handler is unknown",
        course.before.count()
    ))
}
