//! One container of a crash campaign. Its first process is a shell. The shell starts one or several
//! CUDA processes, and each of them has its own pipes to the test.

use std::{
    collections::VecDeque,
    process::{Child, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use nix::{errno::Errno, sys::signal::kill, unistd::Pid};

use crate::{
    container::{CLIENTS, PIPES, Running, Spec, make_pipe_pairs},
    supervisor::cgroup_folders,
    testbed::Testbed,
    wait::WAIT_TIMEOUT,
    worker::{Answer, Lines, USUAL},
};

/// Suffix in the names of the pipes of a process that is started with `ctr tasks exec`.
const EXEC: &str = "x";
/// VRAM in MiB that a process allocates if it is started with `ctr tasks exec`.
const EXEC_MIB: u64 = 20;
/// Seed of the memory contents that both twins (two containers with equal contents) use.
const SHARED_SEED: u32 = 7;
/// Error code that `cuMemAlloc` returns if VRAM does not suffice (`CUDA_ERROR_OUT_OF_MEMORY`).
const OUT_OF_MEMORY: i32 = 2;

/// A CUDA process of a container of the campaign.
pub struct Process {
    lines: Lines,
    asked: VecDeque<String>,
    /// Number of commands that have changed the process's memory, as the process reported it at the
    /// last verification.
    pub touches: u64,
    /// Process id on the host.
    pub pid: Pid,
    /// Whether a fault was meant to end this process.
    pub doomed: bool,
}

/// A container with its CUDA processes.
pub struct ChaosContainer {
    /// The running container. Its name differs after each restart.
    pub running: Running,
    /// CUDA processes of the container, in the order of their start.
    pub processes: Vec<Process>,
    /// The pipes of the process that was started with exec, and the running `ctr` command that
    /// started it. `None` if no process was started with exec.
    pub guest: Option<(Lines, Child)>,
    /// Whether a fault was meant to end the whole container.
    pub doomed: bool,
    /// Settings that determine how the container is offloaded.
    pub way: Way,
    pipes: std::path::PathBuf,
}

/// Interval between two checks whether a process has ended.
const LOOK: std::time::Duration = std::time::Duration::from_millis(200);

/// Result of checking a process or container after a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The process replied, and its memory has the expected contents.
    Well,
    /// The process has ended, although no fault was meant to end it.
    Lost(String),
    /// The process exists, but does not reply.
    Stuck(String),
    /// The process replied with an error, or its memory does not have the expected contents.
    Corrupted(String),
}

/// Settings that determine how a container is offloaded.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Engine that the annotation selects.
    pub engine: &'static str,
    /// Whether host memory keeps a copy of the contents after a restore (`retain_host_copy`).
    pub keeps: bool,
    /// Whether the container's host memory is prefaulted (touched and registered before an
    /// offload).
    pub prepares: bool,
    /// Whether the container's memory has the same contents as other containers' memory. Dedup can
    /// then store the contents once.
    pub shares: bool,
    /// Index of the GPU that the container sees. `None` if it sees all GPUs.
    pub gpu: Option<usize>,
}

impl Way {
    /// Settings with the engine `full` and no further option.
    pub const FAST: Way =
        Way { engine: "full", keeps: false, prepares: false, shares: false, gpu: None };
    /// Settings with the engine `checkpoint`. The driver moves all memory, and the library copies
    /// nothing.
    pub const DRIVER: Way = Way { engine: "checkpoint", ..Way::FAST };
}

impl ChaosContainer {
    /// Starts a container with `processes` CUDA processes. Waits until each process has filled its
    /// VRAM.
    ///
    /// # Errors
    /// When the container does not start, or a CUDA call fails.
    pub fn start(world: &Testbed, id: &str, processes: usize, mib: u64, way: Way) -> Result<Self> {
        let suffixes: Vec<String> = (0..processes).map(|n| n.to_string()).collect();
        let pairs: Vec<&str> = suffixes.iter().map(String::as_str).chain([EXEC]).collect();
        let pipes = make_pipe_pairs(world.dir(), id, &pairs)?;
        let mut script = String::from("trap 'exit 0' TERM\n");
        for suffix in &suffixes {
            let seed = if way.shares { SHARED_SEED } else { seed(id, suffix) };
            script.push_str(&program(suffix, seed, mib));
            script.push_str(" &\n");
        }
        // The shell uses `wait`, because a signal interrupts `wait` immediately.
        script.push_str("while :; do wait; sleep 3600 & done\n");
        let spec = Spec::gpu(id, &["/bin/sh", "-c", &script]);
        // Prefaulting runs while the container is idle, so the container needs a longer idle
        // timeout.
        let spec = if way.prepares { spec.prepared() } else { spec };
        let mut spec = spec
            .annotation("affinode.io/engine", way.engine)
            .annotation("affinode.io/checksum", "true")
            .annotation("affinode.io/retain-host-copy", if way.keeps { "true" } else { "false" })
            .annotation("affinode.io/dedup", if way.shares { "true" } else { "false" });
        if let Some(gpu) = way.gpu {
            spec = spec.env("CUDA_VISIBLE_DEVICES", &gpu.to_string());
        }
        let mount = format!("type=bind,src={},dst={PIPES},options=rbind:rw", pipes.display());
        spec = spec.flags(&["--mount", &mount]);
        let running = spec.start(world)?;
        let processes = Vec::new();
        let mut actor = Self { running, processes, guest: None, doomed: false, way, pipes };
        let mut opened = Vec::new();
        for suffix in &suffixes {
            opened.push(Lines::open_pair(&actor.pipes, suffix)?);
        }
        for mut lines in opened {
            let inside =
                receive(&mut lines, "open")?.pid.context("the reply to `open` has no pid")?;
            receive(&mut lines, "fill")?;
            let pid = actor.host_pid(world, inside)?;
            actor.processes.push(Process {
                lines,
                asked: VecDeque::new(),
                touches: 0,
                pid,
                doomed: false,
            });
        }
        Ok(actor)
    }

    /// Starts an additional CUDA process in the container with `ctr tasks exec`. The process may
    /// fail if VRAM does not suffice.
    ///
    /// # Errors
    /// When `ctr` or the pipes cannot be opened.
    pub fn exec(&mut self, world: &Testbed) -> Result<()> {
        if self.guest.is_some() {
            return Ok(());
        }
        let lines = Lines::open_pair(&self.pipes, EXEC)?;
        let script = format!("exec {}", program(EXEC, seed(&self.running.id, EXEC), EXEC_MIB));
        let mut command = world.ctr();
        command.args(["tasks", "exec", "--exec-id", "guest", &self.running.id]);
        command.args(["/bin/sh", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.guest = Some((lines, command.spawn().context("cannot run ctr")?));
        Ok(())
    }

    /// Orders the process that was started with exec to verify its memory and then to end. It is
    /// not an error if this process never started, or ended because VRAM did not suffice.
    #[must_use]
    pub fn settle_guest(&mut self, world: &Testbed, deadline: Instant) -> Verdict {
        let Some((mut lines, mut child)) = self.guest.take() else { return Verdict::Well };
        let verdict = self.ask_guest(world, &mut lines, &mut child, deadline);
        let _ = child.kill();
        let _ = child.wait();
        verdict
    }

    fn ask_guest(
        &self,
        world: &Testbed,
        lines: &mut Lines,
        child: &mut Child,
        deadline: Instant,
    ) -> Verdict {
        for command in ["open", "fill", "verify", "quit"] {
            if matches!(command, "verify" | "quit") && lines.send(command).is_err() {
                return Verdict::Lost("the pipe of exec is broken".into());
            }
            loop {
                let soon = deadline.min(Instant::now() + LOOK);
                match lines.receive_before(soon) {
                    Ok(Some(line)) if is_well(command, &line) => break,
                    Ok(Some(line)) if command == "fill" || command == "open" => {
                        let short = serde_json::from_str::<Answer>(&line)
                            .is_ok_and(|answer| answer.result == OUT_OF_MEMORY);
                        let text = format!("exec: {command}: {line}");
                        return if short { Verdict::Well } else { Verdict::Corrupted(text) };
                    }
                    Ok(Some(line)) => {
                        return Verdict::Corrupted(format!("exec: {command}: {line}"));
                    }
                    Ok(None) => {}
                    Err(error) => return Verdict::Lost(format!("exec: {error:#}")),
                }
                let lives = self.guest_pid(world).is_some();
                let over = child.try_wait().is_ok_and(|status| status.is_some());
                if !lives && over {
                    let started = !matches!(command, "open");
                    let text = format!("exec: the process ended before {command}");
                    return if started { Verdict::Lost(text) } else { Verdict::Well };
                }
                if Instant::now() >= deadline {
                    return Verdict::Stuck(format!(
                        "exec: no reply to {command} (process is running: {lives})"
                    ));
                }
            }
        }
        Verdict::Well
    }

    /// Host pid of the process that was started with exec. `None` if no such process exists.
    fn guest_pid(&self, world: &Testbed) -> Option<i32> {
        let seed = format!("--seed\0{}\0", seed(&self.running.id, EXEC));
        self.pids(world).into_iter().find(|pid| {
            let raw = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&raw).contains(&seed)
        })
    }

    /// Name of the container in events.
    #[must_use]
    pub fn name(&self) -> String {
        format!("default/{}", self.running.id)
    }

    /// Pids on the host of the processes in the container's cgroup. Empty if the cgroup does not
    /// exist.
    #[must_use]
    pub fn pids(&self, world: &Testbed) -> Vec<i32> {
        let mut found: Vec<i32> = Vec::new();
        for folder in cgroup_folders(world.dir()) {
            let file = folder.join(&self.running.id).join("cgroup.procs");
            let text = std::fs::read_to_string(file).unwrap_or_default();
            found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    fn host_pid(&self, world: &Testbed, inside: i32) -> Result<Pid> {
        let of = |pid: i32| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("NSpid:").map(str::to_owned));
            line.and_then(|line| line.split_whitespace().last()?.parse::<i32>().ok())
        };
        let found = self.pids(world).into_iter().find(|pid| of(*pid) == Some(inside));
        found
            .map(Pid::from_raw)
            .with_context(|| format!("container {} has no process {inside}", self.running.id))
    }

    /// Whether no fault was meant to end the container or one of its processes.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.doomed && self.processes.iter().all(|process| !process.doomed)
    }
}

impl Process {
    /// Sends a command to the process, without waiting for the reply. If the command is `alloc`,
    /// the command `free` is sent after it.
    ///
    /// # Errors
    /// When the program has closed the pipe.
    pub fn ask(&mut self, command: &str) -> Result<()> {
        self.lines.send(command)?;
        self.asked.push_back(command.to_owned());
        if command.starts_with("alloc") {
            return self.ask("free");
        }
        Ok(())
    }

    /// Reads the replies to all commands that were sent. Returns at the first wrong reply, or if a
    /// reply does not arrive before the deadline.
    #[must_use]
    pub fn settle(&mut self, deadline: Instant) -> Verdict {
        while let Some(asked) = self.asked.front() {
            let line = match self.lines.receive_before(deadline) {
                Ok(Some(line)) => line,
                Ok(None) if has_ended(self.pid) => {
                    return Verdict::Lost(format!(
                        "process {} ended without a reply to {asked}",
                        self.pid
                    ));
                }
                Ok(None) => {
                    return Verdict::Stuck(format!(
                        "process {} has not replied to {asked}",
                        self.pid
                    ));
                }
                Err(error) => return Verdict::Lost(format!("process {}: {error:#}", self.pid)),
            };
            if !is_well(asked, &line) {
                return Verdict::Corrupted(format!("process {}: {asked}: {line}", self.pid));
            }
            let touches = serde_json::from_str::<Answer>(&line).ok().and_then(|it| it.touches);
            self.touches = touches.unwrap_or(self.touches);
            self.asked.pop_front();
        }
        Verdict::Well
    }

    /// Whether a command has been sent whose reply has not been read yet.
    #[must_use]
    pub fn owes(&self) -> bool {
        !self.asked.is_empty()
    }
}

fn is_well(asked: &str, line: &str) -> bool {
    let Ok(answer) = serde_json::from_str::<Answer>(line) else { return false };
    let command = asked.split(' ').next().unwrap_or_default();
    let result = match command {
        "alloc" => answer.result == 0 || answer.result == OUT_OF_MEMORY,
        // `free` returns an error if nothing is allocated.
        "free" => answer.result == 0 || answer.result == 1,
        _ => answer.result == 0,
    };
    // Only the reply to `verify` reports on the contents. It must report that the contents are
    // intact.
    let contents = if command == "verify" { answer.ok == Some(true) } else { answer.ok.is_none() };
    result && contents && answer.command == command
}

/// Whether a process has ended. A zombie counts as ended.
#[must_use]
pub fn has_ended(pid: Pid) -> bool {
    if kill(pid, None) == Err(Errno::ESRCH) {
        return true;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Every second process maps its memory in pieces, which a copy out can free one by one. Twins do not,
/// because a copier does not copy such small pieces, and only a copier stores equal content once.
fn program(suffix: &str, seed: u32, mib: u64) -> String {
    let in_pieces = seed != SHARED_SEED && !seed.is_multiple_of(2);
    let pieces = if in_pieces { " --piece-mib 2" } else { "" };
    format!(
        "{CLIENTS}/{USUAL} --mib {mib} --seed {seed}{pieces} <{PIPES}/in{suffix} >{PIPES}/out{suffix} 2>{PIPES}/err{suffix}.log"
    )
}

/// Seed for the contents of a process's memory. Each process has its own seed, computed from the
/// container's id and from `suffix`. Twins use [`SHARED_SEED`] in its place.
fn seed(id: &str, suffix: &str) -> u32 {
    id.bytes().chain(suffix.bytes()).fold(1, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into()))
}

/// Reads the reply to `command`, which must be a success.
///
/// # Errors
/// When the reply is an error, or no reply arrives.
pub fn receive(lines: &mut Lines, command: &str) -> Result<Answer> {
    let line = lines.receive_before(Instant::now() + WAIT_TIMEOUT)?;
    let line = line.with_context(|| format!("no reply to {command}"))?;
    let answer: Answer = serde_json::from_str(&line).with_context(|| line.clone())?;
    if answer.command != command || answer.result != 0 {
        bail!("expected success of {command}, got {line}");
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::is_well;

    #[test]
    fn verification_without_a_verdict_is_not_well() {
        let line =
            |command: &str, more: &str| format!("{{\"command\":\"{command}\",\"result\":0{more}}}");
        assert!(is_well("verify", &line("verify", ",\"ok\":true")));
        assert!(!is_well("verify", &line("verify", ",\"ok\":false")));
        assert!(!is_well("verify", &line("verify", "")));
        assert!(!is_well("verify", &line("touch", ",\"ok\":true")));
        assert!(is_well("alloc 8", &line("alloc", "")));
        assert!(!is_well("alloc 8", &line("free", "")));
        assert!(!is_well("touch", "garbage"));
    }
}
