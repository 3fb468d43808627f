//! Containers that tests run with `ctr`, with and without a GPU.
//!
//! A test communicates with a container's program through two named pipes in a mounted folder. The
//! pipes do not depend on `ctr` or containerd, so a test can use them even after `ctr` or
//! containerd has ended. Containers that are started through CRI use the same pipes.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use nix::{sys::stat::Mode, unistd::mkfifo};

use crate::{containerd, image, testbed::Testbed, wait::until};

/// Folder inside a container that contains the client programs.
pub const CLIENTS: &str = "/opt/clients";
/// Flags of `ctr` that make a container's cgroup visible inside it, as Kubernetes and nerdctl do by
/// default.
pub const SEES_ITS_CGROUP: [&str; 2] =
    ["--mount", "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro"];
/// Folder inside a container that contains the pipes to the test.
pub const PIPES: &str = "/io";

/// Description of a container to run.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Id of the container in containerd.
    pub id: String,
    /// Runtime type in containerd.
    pub runtime: String,
    /// Name of the container's image. The module [`image`] writes the images.
    pub image: String,
    /// An existing root filesystem. If it is set, it replaces the image.
    pub rootfs: Option<PathBuf>,
    /// Whether the container can use the testbed's GPU.
    pub gpu: bool,
    /// Environment variables of the program.
    pub env: Vec<(String, String)>,
    /// Annotations of the container's OCI spec.
    pub annotations: Vec<(String, String)>,
    /// Read-only bind mounts, as source and destination.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// Further flags of `ctr run`.
    pub flags: Vec<String>,
    /// The container's program and its arguments.
    pub argv: Vec<String>,
}

impl Spec {
    /// Describes a container with the testbed's GPU. It runs the command line `argv` as root, with
    /// the runtime `affinode`.
    #[must_use]
    pub fn gpu(id: &str, argv: &[&str]) -> Self {
        Self { gpu: true, ..Self::plain(id, argv) }
    }

    /// Describes a container without a GPU. It runs the command line `argv`, with the runtime
    /// `affinode`.
    #[must_use]
    pub fn plain(id: &str, argv: &[&str]) -> Self {
        Self {
            id: id.into(),
            runtime: containerd::AFFINODE.into(),
            image: image::PLAIN.into(),
            rootfs: None,
            gpu: false,
            env: Vec::new(),
            annotations: Vec::new(),
            mounts: Vec::new(),
            flags: Vec::new(),
            argv: argv.iter().map(|&word| word.into()).collect(),
        }
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Makes the worker launch a kernel every 20 ms, and sets an idle timeout of one hour. The
    /// container then stays active, even on a slow machine.
    #[must_use]
    pub fn busy(mut self) -> Self {
        self.argv.extend(["--period-ms".into(), "20".into()]);
        self.annotation("affinode.io/idle-timeout", "1h")
    }

    /// Turns on the prefault of host memory (the memory is touched and registered before an
    /// offload). Also sets a short idle timeout, so that the prefault starts soon after the last
    /// call.
    #[must_use]
    pub fn prepared(self) -> Self {
        self.annotation("affinode.io/engine", "full")
            .annotation("affinode.io/prefault", "true")
            .annotation("affinode.io/idle-timeout", "1s")
            .flags(&SEES_ITS_CGROUP)
    }

    /// Adds an annotation to the container's OCI spec.
    #[must_use]
    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.annotations.push((name.into(), value.into()));
        self
    }

    /// Adds flags of `ctr run`.
    #[must_use]
    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|&flag| flag.to_owned()));
        self
    }

    /// Sets the container's runtime type in containerd.
    #[must_use]
    pub fn runtime(mut self, runtime: &str) -> Self {
        runtime.clone_into(&mut self.runtime);
        self
    }

    /// Sets the image that the container runs from.
    #[must_use]
    pub fn image(mut self, image: &str) -> Self {
        image.clone_into(&mut self.image);
        self
    }

    /// Builds the command `ctr run` for this container. `flags` are flags such as `--rm`,
    /// `--detach` and `--tty`.
    ///
    /// # Errors
    /// When a file that the GPU needs cannot be found.
    pub fn command(&self, world: &Testbed, flags: &[&str]) -> Result<Command> {
        let mut command = world.ctr();
        command.arg("run").args(flags).args(&self.flags);
        command.args(["--runtime", &self.runtime]);
        command.arg("--cgroup").arg(format!("/{}/{}", world.cgroup_parent(), self.id));
        let mut mounts = self.mounts.clone();
        let mut env = self.env.clone();
        if self.gpu {
            let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
            env.extend(parts.env);
            mounts.extend(parts.mounts);
            mounts.push((world.artifacts().clients_dir(), CLIENTS.into()));
            for device in &parts.devices {
                command.arg("--device").arg(device);
            }
        }
        for (name, value) in &env {
            command.arg("--env").arg(format!("{name}={value}"));
        }
        for (name, value) in &self.annotations {
            command.arg("--annotation").arg(format!("{name}={value}"));
        }
        for (host, inside) in &mounts {
            let (host, inside) = (host.display(), inside.display());
            command
                .arg("--mount")
                .arg(format!("type=bind,src={host},dst={inside},options=rbind:ro"));
        }
        match &self.rootfs {
            Some(root) => command.arg("--rootfs").arg(root),
            None => command.arg(&self.image),
        };
        command.arg(&self.id).args(&self.argv);
        Ok(command)
    }

    /// Runs the container in the foreground until it ends, removes it, and returns its stdout.
    ///
    /// # Errors
    /// When the container fails.
    pub fn run(&self, world: &Testbed) -> Result<String> {
        containerd::run(&mut self.command(world, &["--rm"])?)
    }

    /// Starts the container in the background.
    ///
    /// # Errors
    /// When the container does not start.
    pub fn start(&self, world: &Testbed) -> Result<Running> {
        containerd::run(&mut self.command(world, &["--detach", "--null-io"])?)?;
        Ok(self.running())
    }

    /// Creates a handle for a container that was started by other means than [`Spec::start`].
    #[must_use]
    pub fn running(&self) -> Running {
        Running { id: self.id.clone() }
    }

    /// Connects the program's standard input and output to pipes, which the test can open. Returns
    /// the folder of the pipes.
    ///
    /// # Errors
    /// When the pipes cannot be created.
    pub fn piped(mut self, world: &Testbed) -> Result<(Self, PathBuf)> {
        let folder = make_pipes(world.dir(), &self.id)?;
        let mount = format!("type=bind,src={},dst={PIPES},options=rbind:rw", folder.display());
        self.flags.extend(["--mount".into(), mount]);
        self.argv = piped(&self.argv);
        Ok((self, folder))
    }
}

/// Wraps the command line `argv` in a shell command that connects its input and output to the pipes
/// in [`PIPES`].
#[must_use]
pub fn piped(argv: &[String]) -> Vec<String> {
    let script = format!("exec \"$@\" <{PIPES}/in >{PIPES}/out 2>{PIPES}/err.log");
    let mut command = vec!["/bin/sh".into(), "-c".into(), script, "sh".into()];
    command.extend(argv.iter().cloned());
    command
}

/// Creates a folder with the named pipes `in` and `out`, which every user may open.
///
/// # Errors
/// When the folder or a pipe cannot be created.
pub fn make_pipes(world: &Path, id: &str) -> Result<PathBuf> {
    make_pipe_pairs(world, id, &[""])
}

/// Creates a folder with the named pipes `in` and `out` for each suffix. The suffix is added to
/// their names.
///
/// # Errors
/// When the folder or a pipe cannot be created.
pub fn make_pipe_pairs(world: &Path, id: &str, suffixes: &[&str]) -> Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let folder = world.join("io").join(id);
    if folder.exists() {
        // An earlier container of the same id may have left this folder.
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777))?;
    for name in suffixes.iter().flat_map(|suffix| ["in", "out"].map(|end| format!("{end}{suffix}")))
    {
        let pipe = folder.join(name);
        mkfifo(&pipe, Mode::from_bits_truncate(0o666))
            .with_context(|| format!("cannot make {}", pipe.display()))?;
        // `mkfifo` applied the umask, so the mode is set again.
        std::fs::set_permissions(&pipe, std::fs::Permissions::from_mode(0o666))?;
    }
    Ok(folder)
}

/// Handle of a container that was started.
#[derive(Clone, Debug)]
pub struct Running {
    /// Id of the container in containerd.
    pub id: String,
}

impl Running {
    /// Pid on the host of the container's first process.
    ///
    /// # Errors
    /// When containerd has no task of this container.
    pub fn pid(&self, world: &Testbed) -> Result<i32> {
        let tasks = containerd::run(world.ctr().args(["tasks", "ls"]))?;
        let row = tasks.lines().find(|row| row.split_whitespace().next() == Some(&self.id));
        let pid = row.and_then(|row| row.split_whitespace().nth(1)).with_context(|| {
            format!("containerd lists no task of container {}:\n{tasks}", self.id)
        })?;
        Ok(pid.parse()?)
    }

    /// Status of the container's task in containerd, such as RUNNING or STOPPED. `None` if there is
    /// no task.
    ///
    /// # Errors
    /// When ctr fails.
    pub fn status(&self, world: &Testbed) -> Result<Option<String>> {
        let tasks = containerd::run(world.ctr().args(["tasks", "ls"]))?;
        let row = tasks.lines().find(|row| row.split_whitespace().next() == Some(&self.id));
        Ok(row.and_then(|row| row.split_whitespace().nth(2)).map(str::to_owned))
    }

    /// Runs a program in the container with `ctr tasks exec`, and returns its standard output.
    ///
    /// If a program ends before `ctr` has opened the pipes, `ctr` drops the program's output.
    /// Therefore a shell runs the program. The shell ends only after this function has read the
    /// whole output.
    ///
    /// # Errors
    /// When the program fails.
    pub fn exec(&self, world: &Testbed, argv: &[&str]) -> Result<String> {
        const LAST: &str = "end of output";
        let script = format!("\"$@\"; code=$?; echo; echo {LAST}; read -r _; exit $code");
        let mut command = world.ctr();
        command
            .args(["tasks", "exec", "--exec-id", "probe", &self.id, "/bin/sh", "-c", &script, "sh"])
            .args(argv)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut said = String::new();
        let mut output =
            BufReader::new(child.stdout.take().context("the process has no output pipe")?);
        let tail = format!("\n{LAST}\n");
        while !said.ends_with(&tail) && output.read_line(&mut said)? > 0 {}
        if let Some(mut input) = child.stdin.take() {
            // The write fails if the program was never started.
            let _ = writeln!(input);
        }
        let ended = child.wait_with_output()?;
        match (ended.status.success(), said.strip_suffix(&tail)) {
            (true, Some(said)) => Ok(said.to_owned()),
            _ => bail!(
                "{argv:?} failed in {}: {said}{}",
                self.id,
                String::from_utf8_lossy(&ended.stderr)
            ),
        }
    }

    /// Sends SIGKILL to the container's task, and waits until the task has stopped.
    ///
    /// # Errors
    /// When the task does not stop.
    pub fn kill(&self, world: &Testbed) -> Result<()> {
        let killed =
            containerd::run(world.ctr().args(["tasks", "kill", "--signal", "SIGKILL", &self.id]));
        if let Err(error) = killed {
            // The kill fails with this error if the task has ended by itself. A task with much VRAM
            // takes seconds to end.
            let ends = format!("{error:#}").contains("process already finished");
            if !ends && self.status(world)?.as_deref() == Some("RUNNING") {
                return Err(error);
            }
        }
        self.wait_stopped(world)
    }

    /// Waits until the task has stopped by itself.
    ///
    /// # Errors
    /// When the task does not stop.
    pub fn wait_stopped(&self, world: &Testbed) -> Result<()> {
        until(&format!("{} to stop", self.id), || {
            let status = self.status(world)?;
            Ok((status.as_deref() != Some("RUNNING")).then_some(()))
        })
    }

    /// Removes a stopped task and its container.
    ///
    /// # Errors
    /// When ctr fails.
    pub fn delete(&self, world: &Testbed) -> Result<()> {
        // `ctr run --rm` and a kill may have removed the task already.
        if self.status(world)?.is_some() {
            // The command exits with the task's own exit status, so its status is ignored. The
            // check below shows whether the task was removed.
            world.ctr().args(["tasks", "delete", &self.id]).output()?;
        }
        containerd::run(world.ctr().args(["containers", "delete", &self.id])).map(|_| ())
    }
}
