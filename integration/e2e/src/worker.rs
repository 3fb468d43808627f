//! The CUDA program that tests control. It receives commands on its standard input and replies with
//! lines of JSON.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use crate::{
    container::{CLIENTS, Running, Spec},
    testbed::Testbed,
    wait::WAIT_TIMEOUT,
};

/// Connection to the program of a container, through two pipes. It sends and receives lines.
pub struct Lines {
    requests: File,
    replies: File,
    buffer: Vec<u8>,
}

impl Lines {
    /// Opens both pipes in a folder. Does not wait until the program has opened its ends.
    ///
    /// # Errors
    /// When the pipes cannot be opened.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_pair(folder, "")
    }

    /// Like [`Lines::open`], for pipes whose names are `in` and `out` with a suffix.
    ///
    /// # Errors
    /// When the pipes cannot be opened.
    pub fn open_pair(folder: &Path, suffix: &str) -> Result<Self> {
        // The test opens each pipe for reading and writing, and keeps it open. An open or a write
        // at either end then neither blocks nor fails.
        let open = |name: &str| {
            OpenOptions::new().read(true).write(true).open(folder.join(format!("{name}{suffix}")))
        };
        Ok(Self { requests: open("in")?, replies: open("out")?, buffer: Vec::new() })
    }

    /// Closes the program's standard input. After this call, nothing can be sent to the program.
    ///
    /// # Errors
    /// When `/dev/null` cannot be opened.
    pub fn close(&mut self) -> Result<()> {
        self.requests = OpenOptions::new().write(true).open("/dev/null")?;
        Ok(())
    }

    /// Sends a line to the program.
    ///
    /// # Errors
    /// When the program has closed the pipe.
    pub fn send(&mut self, line: &str) -> Result<()> {
        Ok(self.requests.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Waits for the program's next line.
    ///
    /// # Errors
    /// When no line arrives in time.
    pub fn receive(&mut self) -> Result<String> {
        let line = self.receive_before(Instant::now() + WAIT_TIMEOUT)?;
        line.with_context(|| {
            format!("the program sent no line within {} s", WAIT_TIMEOUT.as_secs())
        })
    }

    /// Waits for the program's next line until the deadline. `None` if no line has arrived.
    ///
    /// # Errors
    /// When the pipe cannot be read.
    pub fn receive_before(&mut self, deadline: Instant) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(self.replies.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            if poll(&mut ready, timeout)? == 0 {
                return Ok(None);
            }
            let mut chunk = [0; 4096];
            let count = self.replies.read(&mut chunk)?;
            self.buffer.extend(&chunk[..count]);
        }
    }

    /// Whether the program has written a line, or a part of a line, that was not read yet.
    ///
    /// # Errors
    /// When the pipe cannot be polled.
    pub fn has_reply(&mut self) -> Result<bool> {
        let mut ready = [PollFd::new(self.replies.as_fd(), PollFlags::POLLIN)];
        Ok(!self.buffer.is_empty() || poll(&mut ready, PollTimeout::ZERO)? > 0)
    }
}

/// A reply of a CUDA test program, parsed from one line of JSON.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// The command that was sent.
    pub command: String,
    /// Result code (`CUresult`) of the CUDA call.
    pub result: i32,
    /// Duration of the call, in microseconds.
    pub elapsed_us: u64,
    /// Whether every word of the program's VRAM had the expected value.
    pub ok: Option<bool>,
    /// Line number in the program's source code at which a check failed.
    pub line: Option<u32>,
    /// Description of the failure, if the program provides one.
    pub why: String,
    /// Number of bytes that were compared.
    pub bytes: Option<u64>,
    /// Checksum of all words in the program's VRAM.
    pub checksum: Option<String>,
    /// Number of commands so far that have changed every word of the program's VRAM.
    pub touches: Option<u64>,
    /// User id of the program.
    pub uid: Option<u32>,
    /// Process id in the program's own pid namespace.
    pub pid: Option<i32>,
    /// Name of the GPU, as the driver reports it.
    pub device_name: Option<String>,
    /// Free VRAM of the device in bytes.
    pub free_bytes: Option<u64>,
    /// Size of the VRAM in bytes.
    pub total_bytes: Option<u64>,
    /// VRAM in bytes that was free at the program's start and is not free at its end.
    pub missing_bytes: Option<u64>,
    /// Number of queries that the program's polling thread has made.
    pub polls: Option<u32>,
    /// Result of the CUDA call in a forked child of the program.
    pub child_result: Option<i32>,
    /// Value that a checkpoint call of the driver returned in addition to its result code.
    pub value: Option<i32>,
    /// Handle of CUDA's legacy IPC (`cuIpcGetMemHandle`), in hexadecimal.
    pub handle: Option<String>,
}

/// A container that runs a CUDA test program, and the pipes to the program.
pub struct Worker {
    /// The container that runs the program.
    pub running: Running,
    lines: Lines,
}

/// Name of the test program that most tests run. It finds the driver by `dlopen` and `dlsym`.
pub const USUAL: &str = "dlopen_dlsym";

impl Worker {
    /// Starts a worker (a container with the CUDA test program) as root. Waits until it has filled
    /// its VRAM.
    ///
    /// # Errors
    /// When the container does not start, or a CUDA call fails.
    pub fn start(world: &Testbed, id: &str, mib: u64) -> Result<Self> {
        let mut worker = Self::start_as(world, Self::spec(id, USUAL, mib))?;
        worker.wait_filled()?;
        Ok(worker)
    }

    /// Describes the container that [`Worker::start`] starts. `program` is one of the programs
    /// built from `worker.c`.
    #[must_use]
    pub fn spec(id: &str, program: &str, mib: u64) -> Spec {
        let program = format!("{CLIENTS}/{program}");
        // The id determines the seed, so that workers have different contents.
        let seed: u32 =
            id.bytes().fold(1, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        Spec::gpu(id, &[&program, "--mib", &mib.to_string(), "--seed", &seed.to_string()])
    }

    /// Describes a container with this engine. Its program maps its memory in pieces, as some
    /// allocators do.
    #[must_use]
    pub fn segments(id: &str, engine: &str, mib: u64) -> Spec {
        Worker::pieces(id, engine, mib, &[])
    }

    /// Like [`Worker::segments`], but with more arguments for the program.
    #[must_use]
    pub fn pieces(id: &str, engine: &str, mib: u64, more: &[&str]) -> Spec {
        let (program, mib) = (format!("{CLIENTS}/segments"), mib.to_string());
        let argv = [&[&*program, "--mib", &*mib], more].concat();
        Spec::gpu(id, &argv).annotation("affinode.io/engine", engine)
    }

    /// Describes a container with this engine. Its program allocates from stream-ordered pools.
    #[must_use]
    pub fn pools(id: &str, engine: &str, mib: u64) -> Spec {
        let (program, mib) = (format!("{CLIENTS}/pools"), mib.to_string());
        // During a stream capture, a real driver may refuse some of its own functions.
        let may_refuse = if engine == "checkpoint" { "1" } else { "0" };
        Spec::gpu(id, &[&program, "--mib", &mib, "--may-refuse", may_refuse])
            .annotation("affinode.io/engine", engine)
    }

    /// Commands for the program with stream-ordered pools. A test sends one command before each
    /// offload. Each reply reports whether the program's checks passed.
    pub const POOL_TURNS: [&str; 11] = [
        "touch",
        "churn",
        "swap",
        "twice",
        "attributes",
        "threshold",
        "early",
        "capture",
        "outlive",
        "full",
        "hold",
    ];

    /// Starts a container whose program is connected to the test by pipes. Does not wait for the
    /// program's first line.
    ///
    /// # Errors
    /// When the container does not start.
    pub fn start_as(world: &Testbed, spec: Spec) -> Result<Self> {
        let (spec, pipes) = spec.piped(world)?;
        spec.start(world)?;
        Self::attach(&spec, &pipes)
    }

    /// Opens the pipes of a container that is started by other means, before or after this call.
    ///
    /// # Errors
    /// When the pipes cannot be opened.
    pub fn attach(spec: &Spec, pipes: &Path) -> Result<Self> {
        Ok(Self { running: spec.running(), lines: Lines::open(pipes)? })
    }

    /// Creates a worker from open pipes, for a container with this id that was started by other
    /// means.
    #[must_use]
    pub fn over(lines: Lines, id: &str) -> Self {
        Self { running: Running { id: id.into() }, lines }
    }

    /// Ends a program that [`Worker::segments`] describes. Returns whether all of its VRAM is free
    /// again. Two uses of VRAM are ignored: the driver's own (for streams and registered host
    /// memory), and the copier's.
    ///
    /// # Errors
    /// When the program does not reply.
    pub fn ends_with_nothing_left(&mut self, world: &Testbed) -> Result<bool> {
        const DRIVERS_OWN_BYTES: u64 = 32 << 20;
        let missing =
            self.call("end")?.missing_bytes.context("the reply has no number of bytes")?;
        let copiers: u64 = world.cli().ps()?.gpus.iter().map(|gpu| gpu.copier_vram_bytes).sum();
        Ok(missing <= DRIVERS_OWN_BYTES + copiers)
    }

    /// Waits for the first two replies of the program. After them the program has filled its VRAM.
    ///
    /// # Errors
    /// When a CUDA call fails.
    pub fn wait_filled(&mut self) -> Result<()> {
        self.expect("open")?;
        self.expect("fill").map(|_| ())
    }

    /// Reads the reply to `command`, which must be a success.
    ///
    /// # Errors
    /// When the reply is an error, or belongs to another command.
    pub fn expect(&mut self, command: &str) -> Result<Answer> {
        let answer = self.receive()?;
        if answer.command != command || answer.result != 0 {
            bail!("{}: expected success of {command}, got {answer:?}", self.running.id);
        }
        Ok(answer)
    }

    /// Reads and parses the program's next reply.
    ///
    /// # Errors
    /// When no reply arrives in time.
    pub fn receive(&mut self) -> Result<Answer> {
        let line = self.receive_line()?;
        serde_json::from_str(&line)
            .with_context(|| format!("{}: cannot parse the reply: {line}", self.running.id))
    }

    /// Reads the program's next line, without parsing it.
    ///
    /// # Errors
    /// When no line arrives in time.
    pub fn receive_line(&mut self) -> Result<String> {
        self.lines.receive().with_context(|| format!("cannot read a line of {}", self.running.id))
    }

    /// Reads the first line of a program that starts slowly.
    ///
    /// # Errors
    /// When no line arrives in time.
    pub fn receive_first_line(&mut self, patience: Duration) -> Result<String> {
        let line = self.lines.receive_before(Instant::now() + patience)?;
        line.with_context(|| format!("container {} sent no first line in time", self.running.id))
    }

    /// Sends a command to the program without waiting for the reply.
    ///
    /// # Errors
    /// When the program has closed the pipe.
    pub fn send(&mut self, command: &str) -> Result<()> {
        self.lines.send(command)
    }

    /// Whether the program has written a reply that was not read yet.
    ///
    /// # Errors
    /// When the pipe cannot be polled.
    pub fn has_answer(&mut self) -> Result<bool> {
        self.lines.has_reply()
    }

    /// Sends a command to the program and returns its reply, whatever the result code.
    ///
    /// # Errors
    /// When no reply arrives in time.
    pub fn ask(&mut self, command: &str) -> Result<Answer> {
        self.send(command)?;
        self.receive().with_context(|| format!("cannot read the reply to {command}"))
    }

    /// Sends a command to the program, and requires that the reply is a success.
    ///
    /// # Errors
    /// When the command fails.
    pub fn call(&mut self, command: &str) -> Result<Answer> {
        let answer = self.ask(command)?;
        if answer.result != 0 {
            bail!("{}: {command} returned {}", self.running.id, answer.result);
        }
        Ok(answer)
    }

    /// Closes the program's standard input. Returns whether the program ends afterwards.
    ///
    /// # Errors
    /// If containerd cannot be reached.
    pub fn ends(&mut self, world: &Testbed) -> Result<bool> {
        self.lines.close()?;
        match self.running.wait_stopped(world) {
            Ok(()) => Ok(true),
            Err(_) if self.running.status(world)?.as_deref() == Some("RUNNING") => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the program's VRAM has this size in bytes and the expected contents. Kernels on the
    /// GPU compare the memory.
    ///
    /// # Errors
    /// When a CUDA call fails.
    pub fn check(&mut self, bytes: u64) -> Result<bool> {
        let answer = self.call("check")?;
        let compared = answer.bytes.context("the reply to `check` has no number of bytes")?;
        if compared != bytes {
            bail!("{}: the program compared {compared} bytes, expected {bytes}", self.running.id);
        }
        answer.ok.context("the reply to `check` has no field `ok`")
    }

    /// Whether all of the program's VRAM has the expected contents.
    ///
    /// # Errors
    /// When a CUDA call fails.
    pub fn verify(&mut self) -> Result<bool> {
        let answer = self.call("verify")?;
        answer.ok.context("the reply to `verify` has no field `ok`")
    }
}
