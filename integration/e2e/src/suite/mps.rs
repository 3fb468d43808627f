//! Offloads and restores clients of MPS, NVIDIA's Multi-Process Service. The memory of a client is
//! copied, and its context stays on the GPU, because the driver's checkpoint refuses it.
//!
//! The simulated GPU has no MPS server. There, only the pipe exists by which programs find one.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    BY_ORDER,
    cycle::mib,
    engines::{ENGINE, SCRUBBED_AFTER},
    median,
    python::{self, Python},
    report::{NotHere, Rows},
};
use crate::{
    container::{CLIENTS, Spec},
    gpu::Gpu,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

const CONTROL: &str = "nvidia-cuda-mps-control";
/// Folders in which the programs of MPS can be, besides those of `PATH`.
const FOLDERS: [&str; 2] = ["/usr/local/nvidia/bin", "/usr/bin"];
/// The folder of the pipes, inside containers.
const PIPES: &str = "/mps";
const ROUNDS: usize = 5;

/// The daemon that starts MPS servers. Dropping it ends the daemon and its servers.
struct Daemon {
    folder: PathBuf,
    pid: Option<Pid>,
}

impl Daemon {
    /// Starts the daemon. On the simulated GPU, only creates the pipe.
    fn start(world: &Testbed) -> Result<Daemon> {
        let folder = world.dir().join("mps");
        fs::create_dir_all(&folder)?;
        if matches!(world.gpu(), Gpu::Simulated { .. }) {
            fs::write(folder.join("control"), "")?;
            return Ok(Daemon { folder, pid: None });
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(FOLDERS.map(PathBuf::from));
        let found = folders.map(|folder| folder.join(CONTROL)).find(|program| program.exists());
        let program = found.ok_or_else(|| NotHere(format!("{CONTROL} is not installed")))?;
        let mut command = Command::new(&program);
        command.arg("-d").env("CUDA_MPS_PIPE_DIRECTORY", &folder);
        command.env("CUDA_MPS_LOG_DIRECTORY", &folder).stdin(Stdio::null());
        let status = command.status().with_context(|| program.display().to_string())?;
        ensure!(status.success(), "{} -d ended with {status}", program.display());
        let pid = fs::read_to_string(folder.join(format!("{CONTROL}.pid")))?;
        Ok(Daemon { folder, pid: Some(Pid::from_raw(pid.trim().parse()?)) })
    }

    /// Describes a container that is a client.
    fn client(&self, spec: Spec) -> Spec {
        let mounts = [(&*self.folder, PIPES), (Path::new("/dev/shm"), "/dev/shm")];
        let mounts = mounts.map(|(host, inside)| {
            format!("type=bind,src={},dst={inside},options=rbind:rw", host.display())
        });
        let [pipes, memory] = &mounts;
        spec.env("CUDA_MPS_PIPE_DIRECTORY", PIPES).flags(&["--mount", pipes, "--mount", memory])
    }

    /// Kills the servers. Clients of theirs get errors from then on.
    fn kill_servers(&self) -> Result<()> {
        let Some(daemon) = self.pid else { return Ok(()) };
        let children = format!("/proc/{daemon}/task/{daemon}/children");
        let servers = fs::read_to_string(&children).context(children)?;
        ensure!(!servers.trim().is_empty(), "the MPS daemon has no server");
        for server in servers.split_whitespace() {
            kill(Pid::from_raw(server.parse()?), Signal::SIGKILL)?;
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Errors mean that the process has ended.
        let _ = self.kill_servers();
        if let Some(pid) = self.pid {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

/// VRAM of each C program, in MiB.
fn vram_mib(world: &Testbed) -> u64 {
    if matches!(world.gpu(), Gpu::Real) { 8192 } else { 64 }
}

fn spec(world: &Testbed, id: &str) -> Spec {
    Worker::spec(id, USUAL, vram_mib(world))
        .annotation(BY_ORDER.0, BY_ORDER.1)
        .annotation(ENGINE, "auto")
}

fn start(world: &Testbed, spec: Spec) -> Result<Worker> {
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    Ok(worker)
}

/// Offloads and restores a client beside another client, kills a client, and kills the server.
///
/// # Errors
/// When a container does not start or its program does not reply.
pub fn clients(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let mut alone = start(world, spec(world, "alone"))?;
    moves(world, rows, ("without MPS", "alone"), &mut alone)?;
    alone.running.kill(world)?;
    let daemon = Daemon::start(world)?;
    let mut other = start(world, daemon.client(spec(world, "other")))?;
    let mut client = start(world, daemon.client(spec(world, "client")))?;
    moves(world, rows, ("MPS client", "client"), &mut client)?;
    world.cli().move_out("client")?;
    let offloaded = world.cli().known("client")?;
    ensure!(
        offloaded.process()?.hazards == ["mps"],
        "the hazards are not those of MPS: {offloaded:?}"
    );
    ensure!(
        offloaded.staying_reasons == ["mps"],
        "the context stays for another reason: {offloaded:?}"
    );
    rows.tell("stays on the GPU while offloaded", mib(offloaded.process()?.vram_bytes), "MiB");
    rows.count("another client works meanwhile", usize::from(other.verify()?), 1);
    client.call("streamsync")?;

    let third = start(world, daemon.client(spec(world, "third")))?;
    world.cli().move_out("third")?;
    third.running.kill(world)?;
    let works = other.verify()? && client.verify()?;
    rows.count("others work after the kill of an offloaded client", usize::from(works), 1);
    if matches!(world.gpu(), Gpu::Real) {
        world.cli().move_out("client")?;
        daemon.kill_servers()?;
        let resident = other.ask("verify")?.result;
        let asked = Instant::now();
        let offloaded = client.ask("verify")?.result;
        let waited_ms = asked.elapsed().as_secs_f64() * 1e3;
        rows.tell("error of a resident client after the kill of its server", resident.into(), "");
        rows.want(
            "error of an offloaded client after the kill of its server",
            offloaded.into(),
            "",
            "an error",
            offloaded != 0,
        );
        rows.tell("time until the offloaded client got its error", waited_ms, "ms");
    }
    Ok(())
}

/// Offloads and restores a container that contains the daemon and its server besides a client, and
/// starts another client there while the container is offloaded.
///
/// # Errors
/// When the container does not start or its program does not reply.
pub fn daemon_inside(python: &Python<'_>, rows: &mut Rows) -> Result<()> {
    const SCRIPT: &str = "mkdir -p /tmp/mps && nvidia-cuda-mps-control -d && exec \"$0\" \"$@\"";
    let world = python.world;
    let mut spec = python.on_machine_root(spec(world, "inside"))?;
    spec.argv.splice(0..0, ["/bin/sh", "-c", SCRIPT].map(str::to_owned));
    for name in ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"] {
        spec = spec.env(name, "/tmp/mps");
    }
    let mut client = start(world, spec)?;
    moves(world, rows, ("daemon inside", "inside"), &mut client)?;
    world.cli().move_out("inside")?;
    let program = format!("{CLIENTS}/{USUAL}");
    let second = [&*program, "--mib", "64", "--script", "verify"];
    let said = client.running.exec(world, &second)?;
    rows.count("a second client works", usize::from(said.contains("\"ok\":true")), 1);
    rows.count("contents as before, after the second client", usize::from(client.verify()?), 1);
    Ok(())
}

/// Offloads and restores a torch program that is a client, while another one works.
///
/// # Errors
/// When a container does not start or its program does not reply.
pub fn torch(python: &Python<'_>, rows: &mut Rows) -> Result<()> {
    const PROGRAM: &[&str] = &["torch_worker.py"];
    let world = python.world;
    let daemon = Daemon::start(world)?;
    let client = |id: &str| {
        let spec = daemon.client(python.spec(id, "root", PROGRAM)?).annotation(ENGINE, "auto");
        let mut worker = Worker::start_as(world, spec.annotation(BY_ORDER.0, BY_ORDER.1))?;
        match python.greet(&mut worker, PROGRAM)? {
            Some(why) => Err(NotHere(why).into()),
            None => python::step(&mut worker, 5).map(|_| worker),
        }
    };
    let (mut other, mut worker) = (client("torch-other")?, client("torch-client")?);
    python::ask(&mut worker, "hold 8")?;
    let before = python::ask(&mut worker, "check")?.digest()?;
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        out.push(world.cli().move_out("torch-client")?.elapsed_ms as f64);
        python::step(&mut other, 5)?;
        back.push(python::ask(&mut worker, "sync")?.sync_ms);
    }
    let after = python::ask(&mut worker, "check")?.digest()?;
    rows.tell("torch: offload", median(&out), "ms");
    rows.tell("torch: wake", median(&back), "ms");
    rows.count("torch: digest as before", usize::from(after == before), 1);
    Ok(())
}

/// Measures offloads and wakes of a container, and checks its contents.
fn moves(
    world: &Testbed,
    rows: &mut Rows,
    (name, id): (&str, &str),
    worker: &mut Worker,
) -> Result<()> {
    let (mut out, mut back, mut good) = (Vec::new(), Vec::new(), 0);
    for _ in 0..ROUNDS {
        out.push(world.cli().move_out(id)?.elapsed_ms as f64);
        if matches!(world.gpu(), Gpu::Real) {
            std::thread::sleep(SCRUBBED_AFTER);
        }
        back.push(worker.call("streamsync")?.elapsed_us as f64 / 1e3);
        good += usize::from(worker.check(vram_mib(world) * MIB)?);
        until("the container to be resident", || {
            Ok((world.cli().known(id)?.state != "Restoring").then_some(()))
        })?;
    }
    rows.tell(&format!("{name}: offload"), median(&out), "ms");
    rows.tell(&format!("{name}: wake"), median(&back), "ms");
    rows.count(&format!("{name}: contents as before"), good, ROUNDS);
    Ok(())
}
