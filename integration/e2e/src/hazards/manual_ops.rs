//! Helpers for the hazards: containers without Affinode, manual offloads and restores, and checks.

use std::{
    process::{Child, Stdio},
    thread::JoinHandle,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    chaos::watch::Watch,
    cli::ActionRow,
    container::{CLIENTS, Spec},
    testbed::{MIB, Testbed},
    wait::{WAIT_TIMEOUT, until},
    worker::{Answer, USUAL, Worker},
};

/// Value of the driver's `CUprocessState` for a locked process.
pub const LOCKED: i32 = 1;
pub const CHECKPOINTED: i32 = 2;

/// A container that a `ctr run` in the foreground runs. The test can therefore observe the end of
/// the container's program.
pub struct Held {
    /// The program in the container.
    pub worker: Worker,
    container: Child,
}

impl Held {
    /// Starts a container that Affinode does not manage.
    pub fn bare(world: &Testbed, spec: Spec) -> Result<Self> {
        Self::start(world, spec.annotation("affinode.io/inject", "false"))
    }

    /// Starts a container that Affinode manages.
    pub fn start(world: &Testbed, spec: Spec) -> Result<Self> {
        let (spec, pipes) = spec.piped(world)?;
        let mut command = spec.command(world, &["--rm"])?;
        let container = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Self { worker: Worker::attach(&spec, &pipes)?, container })
    }

    /// Makes checkpoint calls of the driver for the container's process, from another program.
    /// Returns the result of each call.
    pub fn tool(&self, world: &Testbed, calls: &[&str]) -> Result<Vec<i32>> {
        let pid = self.worker.running.pid(world)?.to_string();
        let program = world.artifacts().clients_dir().join("checkpoint");
        let output = world.host_gpu_command(&program).arg(&pid).args(calls).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines()
            .map(|line| {
                let answer: Answer = serde_json::from_str(line).with_context(|| line.to_owned())?;
                Ok(answer.result)
            })
            .collect()
    }

    /// Returns the driver's checkpoint state of the process. If the driver is executing a
    /// checkpoint call for the process, first waits until that call ends.
    pub fn state(&self, world: &Testbed) -> Result<i32> {
        let pid = self.worker.running.pid(world)?.to_string();
        let program = world.artifacts().clients_dir().join("checkpoint");
        let output = world.host_gpu_command(&program).args([&pid, "state"]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let answer: Answer = serde_json::from_str(text.trim()).with_context(|| text.clone())?;
        ensure!(answer.result == 0, "the state cannot be read: {text}");
        answer.value.with_context(|| format!("cannot find the state in: {text}"))
    }

    /// Offloads and restores the process by the driver's checkpoint calls, made from another
    /// program. Returns a description of the outcome.
    pub fn cycle(&mut self, world: &Testbed) -> Result<String> {
        let out = self.tool(world, &["lock", "checkpoint"])?;
        if out != [0, 0] {
            let back = self.tool(world, &["unlock"])?;
            let lives = back == [0] && self.verifies()?;
            let end = if lives { "unlock brings it back" } else { "lost" };
            return Ok(format!("checkpoint returns {}, {end}", out.last().unwrap_or(&-1)));
        }
        let back = self.tool(world, &["restore"])?;
        if back != [0] {
            return Ok(format!("restore returns {}: lost", back.first().unwrap_or(&-1)));
        }
        ensure!(self.tool(world, &["unlock"])? == [0], "unlock failed");
        let good = self.verifies()?;
        Ok(if good { "moves, contents intact" } else { "moves, contents wrong" }.into())
    }

    /// Whether the program replies and its memory is unchanged.
    pub fn verifies(&mut self) -> Result<bool> {
        let answer = self.worker.ask("verify")?;
        Ok(answer.result == 0 && answer.ok == Some(true))
    }

    /// Waits for the program's end. Returns its exit status and a description.
    pub fn end(mut self) -> Result<(Option<i32>, String)> {
        let status = until("the container to end", || Ok(self.container.try_wait()?))?;
        let word = match status.code() {
            Some(0) => "ends well".into(),
            Some(139) => "dies of a segmentation fault".into(),
            Some(137) => "is killed".into(),
            Some(code) => format!("ends with status {code}"),
            None => format!("{status}"),
        };
        Ok((status.code(), word))
    }

    /// Kills and removes the container.
    pub fn kill(self, world: &Testbed) -> Result<()> {
        self.worker.running.kill(world)?;
        self.end().map(|_| ())
    }
}

/// Requests an offload and returns the reply. If the request is refused because a call is in
/// progress or was made a moment ago, it is repeated.
pub fn offload_once(world: &Testbed, id: &str) -> Result<ActionRow> {
    until(&format!("an answer about {id}"), || {
        let output = world.cli().output(&["offload", id, "-o", "json"])?;
        let text = String::from_utf8_lossy(&output.stdout);
        let said: ActionRow = serde_json::from_str(&text)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let called = ["call-in-progress", "woken-meanwhile"].contains(&said.reason.as_str());
        Ok((!called).then_some(said))
    })
}

/// Requires that an offload is refused with this reason, and that an event shows the reason.
pub fn refused(world: &Testbed, id: &str, reason: &str) -> Result<String> {
    until(&format!("{id} to be registered"), || {
        let row = world.cli().container(id)?;
        Ok(row.filter(|row| !row.processes.is_empty()))
    })?;
    let said = offload_once(world, id)?;
    ensure!(!said.done && said.reason == reason, "expected a refusal for {reason}, got {said:?}");
    let shown = world.cli().known(id)?;
    ensure!(shown.offloaded_bytes == 0, "the container was moved: {shown:?}");
    let told = |name: &str| -> Result<bool> {
        let events = world.cli().events()?;
        Ok(events.iter().any(|e| e.container == name && e.kind == "refused" && e.reason == reason))
    };
    ensure!(told(&shown.name)?, "no event has the reason {reason}");
    Ok(format!("refused: {reason}; contents intact"))
}

/// Requires that the program replies and that all its memory is unchanged.
pub fn intact(worker: &mut Worker) -> Result<()> {
    let answer = worker.call("verify")?;
    ensure!(answer.ok == Some(true), "the memory of the process has changed: {answer:?}");
    Ok(())
}

/// An offload in progress that a test has requested.
pub struct Offload {
    answer: JoinHandle<Result<ActionRow>>,
}

impl Offload {
    /// Requests an offload, and waits until the driver is executing it.
    pub fn begin(world: &Testbed, id: &str) -> Result<Self> {
        let watch = Watch::start(world.cli());
        let (cli, asked) = (world.cli().clone(), id.to_owned());
        let answer = std::thread::spawn(move || cli.offload(&asked));
        let name = format!("default/{id}");
        ensure!(
            watch.wait(&name, "Offloading", 0, WAIT_TIMEOUT),
            "{id} was not seen to be offloading"
        );
        Ok(Self { answer })
    }

    /// Waits for the controller's reply to the offload request. The reply's content is not checked.
    pub fn end(self) -> Result<()> {
        let ended = self
            .answer
            .join()
            .map_err(|_| anyhow::anyhow!("the thread of the request panicked"))?;
        // If the test has killed the controller, the request gets no reply, so its result is
        // ignored.
        let _ = ended;
        Ok(())
    }
}

/// Describes a container that runs the CUDA test program [`USUAL`] with `mib` MiB of VRAM.
pub fn usual(id: &str, mib: u64) -> Spec {
    Worker::spec(id, USUAL, mib)
}

/// Describes a container that runs the hazard program. `kind` selects what the program does.
pub fn kind(id: &str, kind: &str) -> Spec {
    Spec::gpu(id, &[&format!("{CLIENTS}/hazards"), kind])
}

/// Step in MiB by which the size of a failed allocation is reduced until the allocation succeeds.
const LESS_MIB: u64 = 4;
/// The driver's error code `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

/// Starts an unmanaged program that allocates all VRAM of the first GPU except `leave_bytes`.
pub fn ballast(world: &Testbed, leave_bytes: u64) -> Result<Worker> {
    ballast_on(world, 0, leave_bytes)
}

/// Like [`ballast`], but on the GPU with this index. The worker's name ends with the index.
///
/// # Errors
/// When the program cannot be started, or less VRAM than `leave_bytes` is free.
pub fn ballast_on(world: &Testbed, gpu: usize, leave_bytes: u64) -> Result<Worker> {
    let spec = usual(&format!("ballast-{gpu}"), 1).annotation("affinode.io/inject", "false");
    let spec = spec.env("CUDA_VISIBLE_DEVICES", &gpu.to_string());
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let free = worker
        .call("meminfo")?
        .free_bytes
        .context("the reply to `meminfo` has no field `free_bytes`")?;
    let Some(more) = free.checked_sub(leave_bytes) else {
        bail!("{} MiB are free, {} are needed", free / MIB, leave_bytes / MIB);
    };
    // A real driver reports VRAM as free that it needs for itself. The first allocations may
    // therefore fail.
    let mut mib = more / MIB;
    while mib > 0 {
        match worker.ask(&format!("alloc {mib} -"))?.result {
            0 => break,
            OUT_OF_MEMORY => mib = mib.saturating_sub(LESS_MIB),
            code => bail!("the allocation of {mib} MiB returned {code}"),
        }
    }
    Ok(worker)
}
