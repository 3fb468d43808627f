//! The CUDA program that tests talk to, one JSON object per line each way.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::AsFd,
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::Value;

use crate::{
    container::{CLIENTS, Running, Spec},
    until::PATIENCE,
    world::World,
};

/// Lines to and from a program through the pipes of its container.
pub struct Lines {
    requests: File,
    replies: File,
    buffer: Vec<u8>,
}

impl Lines {
    /// Opens both pipes of a folder without waiting for the program to open its ends.
    ///
    /// # Errors
    /// When they cannot be opened.
    pub fn open(folder: &Path) -> Result<Self> {
        // Read and write: an end of ours stays open, so neither open nor write blocks or fails.
        let open = |name: &str| OpenOptions::new().read(true).write(true).open(folder.join(name));
        Ok(Self { requests: open("in")?, replies: open("out")?, buffer: Vec::new() })
    }

    /// Sends a line.
    ///
    /// # Errors
    /// When the pipe is broken.
    pub fn send(&mut self, line: &str) -> Result<()> {
        Ok(self.requests.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// When none comes.
    pub fn receive(&mut self) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let text = String::from_utf8_lossy(&line);
                return serde_json::from_str(&text)
                    .with_context(|| format!("the program said: {text}"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(self.replies.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            if poll(&mut ready, timeout)? == 0 {
                bail!("the program did not answer in {} s", PATIENCE.as_secs());
            }
            let mut chunk = [0; 4096];
            let count = self.replies.read(&mut chunk)?;
            self.buffer.extend(&chunk[..count]);
        }
    }

    /// Whether a line, or a part of one, is there now.
    ///
    /// # Errors
    /// When the pipe cannot be polled.
    pub fn has_reply(&mut self) -> Result<bool> {
        let mut ready = [PollFd::new(self.replies.as_fd(), PollFlags::POLLIN)];
        Ok(!self.buffer.is_empty() || poll(&mut ready, PollTimeout::ZERO)? > 0)
    }

    /// Sends a line and waits for the answer.
    ///
    /// # Errors
    /// As [`Lines::send`] and [`Lines::receive`].
    pub fn ask(&mut self, line: &str) -> Result<Value> {
        self.send(line)?;
        self.receive().with_context(|| format!("asked: {line}"))
    }
}

/// A container that runs the CUDA program `worker`.
pub struct Worker {
    /// Its container.
    pub running: Running,
    lines: Lines,
}

impl Worker {
    /// Starts one as root with the world's GPU.
    ///
    /// # Errors
    /// When the container does not start.
    pub fn start(world: &World, id: &str) -> Result<Self> {
        Self::start_as(world, Spec::gpu(id, &[&format!("{CLIENTS}/worker")]))
    }

    /// Starts one from a specification whose program is a worker.
    ///
    /// # Errors
    /// When the container does not start.
    pub fn start_as(world: &World, spec: Spec) -> Result<Self> {
        let (running, folder) = spec.start_piped(world)?;
        Ok(Self { running, lines: Lines::open(&folder)? })
    }

    /// Its pipes.
    pub fn lines(&mut self) -> &mut Lines {
        &mut self.lines
    }

    /// Takes VRAM and fills it with a pattern.
    ///
    /// # Errors
    /// When CUDA or the program fails.
    pub fn fill(&mut self, bytes: u64, seed: u64) -> Result<()> {
        todo!("{bytes} {seed}")
    }

    /// Whether all VRAM holds its pattern.
    ///
    /// # Errors
    /// When CUDA or the program fails.
    pub fn verify(&mut self) -> Result<bool> {
        todo!()
    }
}
