//! Runs programs in the machine's Python with torch, and reads their replies.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::host_root;
use crate::{
    container::{CLIENTS, Spec},
    gpu::Gpu,
    testbed::Testbed,
    worker::Worker,
};

/// Environment variables that a Python and its GPU libraries may need. They are passed to the
/// container.
const ENVIRONMENT: [&str; 5] =
    ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "NCCL_NVLS_ENABLE"];

/// Time limit until a program has imported its libraries. A machine that has just started reads
/// large libraries slowly.
const IMPORTS: Duration = Duration::from_secs(180);

/// A Python with torch, and a root filesystem that contains it.
pub struct Python<'w> {
    /// Testbed in which the Python containers run.
    pub world: &'w Testbed,
    path: PathBuf,
    root: PathBuf,
}

/// Reply of a Python program to a command. A field that is missing in the reply has its default
/// value.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Answer {
    command: String,
    result: i32,
    /// Reason why the command failed, or why the program cannot run on this machine.
    pub why: String,
    digest: String,
    /// Median duration of a step, in milliseconds.
    pub step_ms: f64,
    /// Shortest duration of a step, in milliseconds.
    pub best_ms: f64,
    /// Duration of a call that waits for the device, in milliseconds.
    pub sync_ms: f64,
    /// Device memory in bytes that all allocators of the program have reserved together.
    pub held_bytes: Option<u64>,
    /// Size of the GPU's VRAM in bytes, by the name of the library or tool that returned it.
    pub sizes_bytes: BTreeMap<String, u64>,
}

impl Answer {
    /// Returns the digest of the contents that the command requested.
    ///
    /// # Errors
    /// When the reply has no digest. Without this error, two replies without a digest would compare
    /// as equal.
    pub fn digest(&self) -> Result<String> {
        ensure!(!self.digest.is_empty(), "the program's reply to {} has no digest", self.command);
        Ok(self.digest.clone())
    }
}

impl<'w> Python<'w> {
    /// Finds the machine's Python with torch, and mounts a root filesystem that contains it.
    ///
    /// # Errors
    /// When the machine has no such Python, or the GPU is not a real one.
    pub fn find(world: &'w Testbed) -> Result<Self> {
        if !matches!(world.gpu(), Gpu::Real) {
            bail!("the simulated GPU runs no torch");
        }
        let probe = "import sys, torch; assert torch.cuda.is_available(); print(sys.executable)";
        let output =
            Command::new("python3").args(["-c", probe]).output().context("cannot run python3")?;
        if !output.status.success() {
            bail!("python3 has no torch that sees the GPU");
        }
        let path = String::from_utf8(output.stdout)?.trim().into();
        Ok(Self { world, path, root: host_root::mount(world)? })
    }

    /// Describes a container that runs one of the Python programs in [`CLIENTS`] with its
    /// arguments, as the user `who`.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn spec(&self, id: &str, who: &str, program: &[&str]) -> Result<Spec> {
        let (name, arguments) =
            program.split_first().context("the list of words has no program")?;
        let (path, script) = (self.path.to_string_lossy(), format!("{CLIENTS}/{name}"));
        let argv: Vec<&str> = [&*path, "-u", &script].iter().chain(arguments).copied().collect();
        let spec = self.on_machine_root(Spec::gpu(id, &argv))?;
        // The container must not use the caches of the machine's users.
        let spec = spec.env("HOME", "/tmp").env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor");
        Ok(if who == "root" { spec } else { spec.flags(&["--user", "1000:1000"]) })
    }

    /// Gives a container the machine's installed software, and the variables to find it.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn on_machine_root(&self, mut spec: Spec) -> Result<Spec> {
        spec.rootfs = Some(self.root.clone());
        spec.mounts = host_root::other_mounts(self.world)?;
        for name in ENVIRONMENT {
            if let Ok(value) = std::env::var(name) {
                spec = spec.env(name, &value);
            }
        }
        Ok(spec)
    }

    /// Whether this Python has JAX.
    pub fn has_jax(&self) -> bool {
        let probe = ["-c", "import jax; assert jax.default_backend() == 'gpu'"];
        let mut command = Command::new(&self.path);
        command.args(probe).env("XLA_PYTHON_CLIENT_PREALLOCATE", "false");
        command.output().is_ok_and(|out| out.status.success())
    }

    /// Waits for a program's first line. If the program reports that it cannot run on this machine,
    /// returns the reason.
    ///
    /// # Errors
    /// When the program prints any other line. Also when the program reports that it cannot run,
    /// but starts successfully outside a container.
    pub fn greet(&self, worker: &mut Worker, program: &[&str]) -> Result<Option<String>> {
        let first = parse(worker.receive_first_line(IMPORTS)?)?;
        match (first.command.as_str(), first.result) {
            ("ready", 0) => Ok(None),
            ("absent", _) if self.has(program)? => {
                bail!("{program:?} starts on the machine, but not in a container: {}", first.why)
            }
            ("absent", _) => Ok(Some(first.why)),
            (command, result) => {
                bail!("unexpected first line of {program:?}: {command}: {result} {}", first.why)
            }
        }
    }

    /// Whether a program can start outside a container. The function closes the program's standard
    /// input, so that the program ends after its start.
    fn has(&self, program: &[&str]) -> Result<bool> {
        let (name, arguments) =
            program.split_first().context("the list of words has no program")?;
        let script = self.world.artifacts().clients_dir().join(name);
        let mut command = Command::new(&self.path);
        command.arg(script).args(arguments).stdin(Stdio::null());
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(command.output().context("cannot run python3")?.status.success())
    }
}

/// Orders a program to run `count` steps.
///
/// # Errors
/// When a step fails.
pub fn step(worker: &mut Worker, count: u32) -> Result<Answer> {
    ask(worker, &format!("step {count}"))
}

/// Sends a command to a program, and returns its reply.
///
/// # Errors
/// When the command fails.
pub fn ask(worker: &mut Worker, command: &str) -> Result<Answer> {
    worker.send(command)?;
    answered(worker.receive_line()?, worker, command)
}

/// Like [`ask`], with the time limit `most` for the reply.
///
/// # Errors
/// When the command fails.
pub fn ask_within(worker: &mut Worker, command: &str, most: Duration) -> Result<Answer> {
    worker.send(command)?;
    answered(worker.receive_first_line(most)?, worker, command)
}

fn answered(line: String, worker: &Worker, command: &str) -> Result<Answer> {
    let answer = parse(line).with_context(|| format!("cannot read the reply to {command}"))?;
    if answer.result != 0 {
        bail!("{}: {command}: {}", worker.running.id, answer.why);
    }
    Ok(answer)
}

fn parse(line: String) -> Result<Answer> {
    serde_json::from_str(&line).context(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_without_a_digest_is_an_error() -> Result<()> {
        let without = parse(r#"{"command":"step","result":0}"#.into())?;
        assert!(without.digest().is_err());
        let with = parse(r#"{"command":"step","result":0,"digest":"7f"}"#.into())?;
        assert_eq!(with.digest()?, "7f");
        Ok(())
    }
}
