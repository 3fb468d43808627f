//! The client of a supervisor, which runs in the test. It starts the supervisor and requests
//! processes from it.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result, bail};

use super::{Job, Reply, Scope};

/// Handle of a running supervisor. Dropping this value ends everything that the supervisor started.
pub struct Keeper {
    pid: u32,
    pipes: Mutex<Option<Pipes>>,
}

struct Pipes {
    child: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Keeper {
    /// Starts a supervisor for the testbed in `dir`.
    ///
    /// # Errors
    /// When the supervisor cannot be started, or cannot create its mount namespace (needs root).
    pub fn start(binary: &Path, dir: &Path, scope: Scope) -> Result<Self> {
        let mut child = Command::new(binary)
            .arg(dir)
            .args((scope == Scope::Node).then_some(Scope::NODE))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, replies) = pipes.context("the supervisor has no pipes")?;
        let mut pipes = Pipes { child, requests, replies: BufReader::new(replies) };
        let pid = pipes.reply().context("the supervisor did not start")?;
        Ok(Self { pid, pipes: Mutex::new(Some(pipes)) })
    }

    /// Process id of the supervisor. All processes of the testbed descend from it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.pid).unwrap_or(i32::MAX)
    }

    /// Starts a process and returns its id.
    ///
    /// # Errors
    /// When the program cannot be started, or the supervisor has ended.
    pub fn spawn(&self, job: &Job) -> Result<u32> {
        let mut pipes = self.lock();
        let pipes = pipes.as_mut().context("the supervisor has ended")?;
        let mut line = serde_json::to_string(job)?;
        line.push('\n');
        pipes.requests.write_all(line.as_bytes())?;
        pipes.reply().with_context(|| format!("cannot start {}", job.argv.join(" ")))
    }

    /// Builds a command that runs as a child of the caller, but in the supervisor's mount and
    /// network namespaces.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        for (option, namespace) in [("--mount", "mnt"), ("--net", "net")] {
            command.arg(format!("{option}=/proc/{}/ns/{namespace}", self.pid));
        }
        command.arg("--").arg(program);
        command
    }

    /// Ends the supervisor with all its processes, and waits until it has ended. A concurrent call
    /// waits as well. Further calls have no effect.
    pub fn end(&self) {
        let mut pipes = self.lock();
        if let Some(Pipes { mut child, requests, replies }) = pipes.take() {
            drop((requests, replies));
            // An error here means that the supervisor has ended already.
            let _ = child.wait();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pipes>> {
        self.pipes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end();
    }
}

impl Pipes {
    fn reply(&mut self) -> Result<u32> {
        let mut line = String::new();
        if self.replies.read_line(&mut line)? == 0 {
            bail!("the supervisor closed its pipe: run this program as root");
        }
        match serde_json::from_str(&line)? {
            Reply::Pid(pid) => Ok(pid),
            Reply::Error(error) => bail!("{error}"),
        }
    }
}
