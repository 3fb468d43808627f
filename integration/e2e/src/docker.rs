//! Runs dockerd in a testbed, with the testbed's containerd. The files, sockets and images of
//! dockerd are in the testbed's folder. Its containers have no network.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    artifacts::Artifacts,
    containerd::{gone, run},
    engine, image,
    supervisor::{Job, STORE},
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Path of `dockerd`, relative to the folder with Docker's unpacked packages.
const DAEMON: &str = "usr/sbin/dockerd";
const COMMAND: &str = "usr/bin/docker";
/// Path of `dockerd` in Ubuntu's packages, relative to the folder with the unpacked packages.
const DAEMON_OF_UBUNTU: &str = "usr/bin/dockerd";

/// Paths of Docker's programs in the packages that `cargo xtask deps` has unpacked.
#[derive(Clone, Debug)]
pub struct DockerPrograms {
    /// Path of the daemon `dockerd`.
    pub daemon: PathBuf,
    /// Path of the command `docker`.
    pub command: PathBuf,
}

impl DockerPrograms {
    /// Finds Docker's programs in a folder with unpacked packages. `None` if a program is missing.
    #[must_use]
    pub fn in_folder(folder: &Path) -> Option<Self> {
        let daemon = [DAEMON, DAEMON_OF_UBUNTU].map(|name| folder.join(name));
        let daemon = daemon.into_iter().find(|path| path.is_file())?;
        let command = folder.join(COMMAND);
        command.is_file().then_some(Self { daemon, command })
    }

    /// Finds Docker's programs that `cargo xtask deps` unpacked. `None` if a program is missing,
    /// for example because no packages were unpacked.
    #[must_use]
    pub fn find(artifacts: &Artifacts) -> Option<Self> {
        Self::in_folder(&artifacts.docker_dir())
    }
}

/// A dockerd in a testbed. It can be stopped and started again.
pub struct Docker<'a> {
    world: &'a Testbed,
    programs: DockerPrograms,
    pid: Mutex<Option<Pid>>,
}

impl<'a> Docker<'a> {
    /// Starts dockerd with `config` as its `daemon.json`, and loads the image [`image::PLAIN`] into
    /// it.
    ///
    /// # Errors
    /// When dockerd does not start.
    pub fn start(world: &'a Testbed, programs: DockerPrograms, config: &str) -> Result<Self> {
        let docker = Self { world, programs, pid: Mutex::new(None) };
        std::fs::create_dir_all(docker.hooks())?;
        std::fs::write(docker.config_file(), config)?;
        docker.launch()?;
        let archive = world.dir().join("docker-image.tar");
        std::fs::write(&archive, image::usual_layer()?.finish()?)?;
        let path = archive.display().to_string();
        docker.run(&["import", &path, image::PLAIN])?;
        std::fs::remove_file(archive)?;
        Ok(docker)
    }

    /// Path of dockerd's configuration.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        self.world.dir().join("daemon.json")
    }

    /// Path of dockerd's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.world.dir().join("docker.sock")
    }

    /// Folder that is the first entry of dockerd's PATH. Tests write scripts into it.
    #[must_use]
    pub fn hooks(&self) -> PathBuf {
        self.world.dir().join("hooks")
    }

    /// Starts dockerd, and waits until it replies.
    ///
    /// # Errors
    /// When dockerd ends, or does not reply.
    pub fn launch(&self) -> Result<()> {
        let dir = self.world.dir();
        let path = |name: &str| dir.join(name).display().to_string();
        let folder =
            self.programs.daemon.parent().context("the path of dockerd has no folder")?.display();
        let releases = self.world.containerd().release().bin_dir.display().to_string();
        let inherited = std::env::var("PATH").unwrap_or_default();
        let search = format!("{}:{folder}:{releases}:{inherited}", self.hooks().display());
        let mut argv = vec![self.programs.daemon.display().to_string()];
        for (flag, value) in [
            ("config-file", self.config_file().display().to_string()),
            ("containerd", self.world.containerd().socket().display().to_string()),
            ("host", format!("unix://{}", self.socket().display())),
            ("data-root", path(&format!("{STORE}/docker"))),
            ("exec-root", path("docker-run")),
            ("pidfile", path("docker.pid")),
            ("cgroup-parent", format!("/{}", self.world.cgroup_parent())),
            ("bridge", "none".into()),
            ("iptables", "false".into()),
            ("ip6tables", "false".into()),
        ] {
            argv.push(format!("--{flag}={value}"));
        }
        let env = BTreeMap::from([("PATH".to_owned(), search)]);
        let pid = self.world.keeper().spawn(&Job { argv, env, log: dir.join("dockerd.log") })?;
        let pid = Pid::from_raw(i32::try_from(pid)?);
        *self.pid.lock().unwrap_or_else(PoisonError::into_inner) = Some(pid);
        until("dockerd to answer", || {
            if gone(pid) {
                bail!("dockerd ended; its log: {}", dir.join("dockerd.log").display());
            }
            Ok(self.command(&["version"]).output()?.status.success().then_some(()))
        })
    }

    /// Ends dockerd.
    ///
    /// # Errors
    /// When dockerd does not end.
    pub fn stop(&self, signal: Signal) -> Result<()> {
        let taken = self.pid.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pid = taken.context("dockerd does not run")?;
        kill(pid, signal).context("cannot signal dockerd")?;
        until("dockerd to end", || Ok(gone(pid).then_some(())))
    }

    /// Builds a `docker` command that connects to this dockerd.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.world.keeper().command(&self.programs.command);
        command.env("DOCKER_HOST", format!("unix://{}", self.socket().display()));
        command.env("DOCKER_CONFIG", self.world.dir().join("docker-user"));
        command.args(arguments);
        command
    }

    /// Runs a `docker` command, requires success, and returns its output without the final line
    /// feed.
    ///
    /// # Errors
    /// When the command fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        Ok(run(&mut self.command(arguments))?.trim_end().to_owned())
    }

    /// Whether dockerd's list of runtimes contains this name.
    ///
    /// # Errors
    /// When dockerd does not reply.
    pub fn serves(&self, runtime: &str) -> Result<bool> {
        let names = "{{range $name, $_ := .Runtimes}}{{println $name}}{{end}}";
        Ok(self.run(&["info", "--format", names])?.lines().any(|name| name == runtime))
    }

    /// Runs `docker inspect` for a container, and returns the value that a Go template selects.
    ///
    /// # Errors
    /// When the container is unknown.
    pub fn inspect(&self, container: &str, template: &str) -> Result<String> {
        self.run(&["inspect", "--format", template, container])
    }

    /// Returns the flags of `docker run` that give a container the testbed's GPU.
    ///
    /// # Errors
    /// When a file that the GPU needs cannot be found.
    pub fn gpu_flags(&self) -> Result<Vec<String>> {
        engine::gpu_flags(self.world)
    }

    /// Starts a CUDA program in the background with these flags of `docker run`, and waits until it
    /// has filled its VRAM. Returns the container's id and the program.
    ///
    /// # Errors
    /// When the container does not start, or a CUDA call fails.
    pub fn worker(&self, name: &str, mib: u64, flags: &[String]) -> Result<(String, Worker)> {
        engine::worker(self.world, name, mib, flags, |words| self.run(words))
    }
}
