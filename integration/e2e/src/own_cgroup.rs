//! Containers with a cgroup of version 2 of their own, and programs in it that do not have
//! Affinode's library.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    container::Spec,
    testbed::Testbed,
    worker::{Answer, USUAL, Worker},
};

/// Folders at which cgroup v2 can be mounted. The second is used if the node also has version 1.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Starts a container whose first process is in a cgroup of version 2 that is named after the
/// container. Returns the folder of this cgroup. With cgroup v1, the container engine makes no such
/// cgroup, so this function makes it before the container's program starts.
///
/// # Errors
/// When the container does not start, or cgroup v2 is not mounted.
pub fn start(world: &Testbed, spec: Spec) -> Result<(Worker, PathBuf)> {
    let root = ROOTS.map(Path::new).into_iter().find(|root| root.join("cgroup.procs").exists());
    let root = root.context("cgroup v2 is not mounted")?;
    let cgroup = root.join(world.cgroup_parent()).join(&spec.id);
    // The program starts when the test opens the pipes.
    let (spec, pipes) = spec.piped(world)?;
    let running = spec.start(world)?;
    fs::create_dir_all(&cgroup)?;
    enter(&cgroup, running.pid(world)?)?;
    Ok((Worker::attach(&spec, &pipes)?, cgroup))
}

fn enter(cgroup: &Path, pid: i32) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    fs::write(&file, pid.to_string()).with_context(|| format!("cannot write {}", file.display()))
}

/// A CUDA program in the cgroup of a container, without Affinode's library. To the driver, it is a
/// program of the container that avoids the library.
pub struct Dodger {
    program: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Dodger {
    /// Starts the program in a cgroup, and makes it fill this many MiB of VRAM.
    ///
    /// # Errors
    /// When the program cannot be started, or a CUDA call fails.
    pub fn start(world: &Testbed, cgroup: &Path, mib: u64) -> Result<Dodger> {
        let program = world.artifacts().clients_dir().join(USUAL);
        let script = "echo $$ >\"$1\" && shift && exec \"$@\"";
        let mut command: Command = world.host_gpu_command(Path::new("/bin/sh"));
        command.args(["-c", script, "sh"]).arg(cgroup.join("cgroup.procs")).arg(program);
        command.args(["--mib", &mib.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.spawn()?;
        let requests = program.stdin.take().context("the program has no input")?;
        let replies = program.stdout.take().context("the program has no output")?;
        let mut dodger = Dodger { program, requests, replies: BufReader::new(replies) };
        for command in ["open", "fill"] {
            let answer = dodger.receive()?;
            anyhow::ensure!(answer.command == command && answer.result == 0, "{answer:?}");
        }
        Ok(dodger)
    }

    /// Sends a command to the program and returns its reply.
    ///
    /// # Errors
    /// When the program has ended.
    pub fn ask(&mut self, command: &str) -> Result<Answer> {
        writeln!(self.requests, "{command}")?;
        self.receive()
    }

    fn receive(&mut self) -> Result<Answer> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("cannot parse the reply: {line}"))
    }
}

impl Drop for Dodger {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
