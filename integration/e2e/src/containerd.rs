//! A private containerd with its own root, state and sockets, in which the runtime `affinode` is
//! registered.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    image,
    rancher::{self, Rancher},
    release::{Line, Release},
    supervisor::{Job, Keeper},
    wait::until,
};

/// Runtime type of Affinode, for `ctr run --runtime`.
pub const AFFINODE: &str = "io.containerd.affinode.v1";
/// Runtime type of the stock shim.
pub const STOCK: &str = "io.containerd.runc.v2";

/// Snippet that adds Affinode's runtime to a containerd configuration of version 2. The tests
/// install the same file that the documents show to users.
const REGISTER_V2: &str = include_str!("../../../config/containerd/affinode-v2.toml");
/// Program name of Affinode's shim. The constant `INSTALLED` is the path of this program in the
/// snippet for containerd 2.
const SHIM: &str = "containerd-shim-affinode-v1";
const INSTALLED: &str = "/usr/local/bin/containerd-shim-affinode-v1";
const REGISTER_V3: &str = include_str!("../../../config/containerd/affinode-v3.toml");

/// Program or package that writes containerd's configuration file. It determines the form of the
/// file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// A distribution has written the file once, at the installation of containerd.
    #[default]
    Usual,
    /// Docker's packages have installed the file. It disables CRI.
    Docker,
    /// k3s or rke2 writes the file at each start.
    Rancher {
        /// Whether the file imports the files of a folder next to it. For containerd 2, newer
        /// versions of k3s and rke2 write a file with such an import.
        imports: bool,
    },
}

/// A private containerd whose files are in a testbed's folder.
pub struct Containerd {
    release: Release,
    layout: Layout,
    dir: PathBuf,
    store: PathBuf,
    env: BTreeMap<String, String>,
    pid: Mutex<Option<Pid>>,
}

impl Containerd {
    /// Writes containerd's configuration without Affinode's runtime. containerd gets the
    /// environment `env`, which shims and the controller inherit.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn new(
        release: &Release,
        dir: &Path,
        store: &Path,
        env: BTreeMap<String, String>,
        layout: Layout,
    ) -> Result<Self> {
        let containerd = Self {
            release: release.clone(),
            layout,
            dir: dir.to_path_buf(),
            store: store.to_path_buf(),
            env,
            pid: Mutex::new(None),
        };
        match containerd.rancher() {
            Some(rancher) => rancher.prepare()?,
            None => {
                std::fs::create_dir_all(dir.join("conf.d"))?;
                let text = match layout {
                    Layout::Docker => config_without_cri(dir, store),
                    Layout::Usual | Layout::Rancher { .. } => config(release.line, dir, store),
                };
                std::fs::write(containerd.config_file(), text)?;
            }
        }
        Ok(containerd)
    }

    fn rancher(&self) -> Option<Rancher<'_>> {
        let Layout::Rancher { imports } = self.layout else { return None };
        Some(Rancher { line: self.release.line, imports, dir: &self.dir, store: &self.store })
    }

    /// Adds Affinode's runtime to the configuration, with the documented snippets.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn register(&self) -> Result<()> {
        let file = self.config_file();
        if self.release.line == Line::V2 {
            let path = self.env.get("PATH").context("containerd has no PATH")?;
            let shim = std::env::split_paths(path)
                .map(|folder| folder.join(SHIM))
                .find(|shim| shim.exists())
                .context("Affinode's shim is not in containerd's PATH")?;
            let text = REGISTER_V3.replace(INSTALLED, &shim.to_string_lossy());
            return Ok(std::fs::write(self.dir.join("conf.d/affinode.toml"), text)?);
        }
        // The file already has a `version` line, and a second `version` line would be invalid. The
        // line is therefore removed from the snippet.
        let text = std::fs::read_to_string(&file)? + &REGISTER_V2.replace("version = 2", "");
        Ok(std::fs::write(file, text)?)
    }

    /// The containerd release that runs in this testbed.
    #[must_use]
    pub fn release(&self) -> &Release {
        &self.release
    }

    /// Path of containerd's configuration file.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        match self.rancher() {
            Some(rancher) => rancher.config_file(),
            None => self.dir.join("containerd.toml"),
        }
    }

    /// Name of the systemd unit in which a distribution runs this containerd.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        self.rancher().map_or("containerd", |_| rancher::UNIT)
    }

    /// Process id of containerd, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<Pid> {
        self.pid.lock().ok().and_then(|pid| *pid)
    }

    /// Path of containerd's gRPC socket, which also serves CRI.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// Folder of the OCI bundles of the containers in a containerd namespace.
    #[must_use]
    pub fn bundles(&self, namespace: &str) -> PathBuf {
        self.dir.join("state/io.containerd.runtime.v2.task").join(namespace)
    }

    /// Path of containerd's log file.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    /// Starts containerd and waits until it replies to requests.
    ///
    /// # Errors
    /// When containerd ends or does not reply.
    pub fn start(&self, keeper: &Keeper) -> Result<()> {
        let argv = match self.rancher() {
            Some(rancher) => {
                rancher.render()?;
                rancher.argv()?
            }
            None => vec![
                self.release.bin_dir.join("containerd").to_string_lossy().into_owned(),
                "--config".into(),
                self.config_file().to_string_lossy().into_owned(),
            ],
        };
        let pid = keeper.spawn(&Job { argv, env: self.env.clone(), log: self.log() })?;
        let pid = Pid::from_raw(i32::try_from(pid)?);
        *self.pid.lock().map_err(|_| anyhow::anyhow!("another thread of the test panicked"))? =
            Some(pid);
        until("containerd to reply", || {
            if gone(pid) {
                bail!("containerd ended; its log: {}", self.log().display());
            }
            // containerd loads its services one after the other. Its namespace service replies
            // before CRI is ready, so this check lists the plugins instead.
            let answer =
                self.ctr(keeper, "default").args(["plugins", "list", "--quiet"]).output()?;
            Ok((answer.status.success() && self.socket().exists()).then_some(()))
        })
    }

    /// Ends containerd with a signal: SIGTERM as systemd does, or SIGKILL to simulate a crash.
    /// Containers continue to run.
    ///
    /// # Errors
    /// When containerd is not running or does not end.
    pub fn stop(&self, signal: Signal) -> Result<()> {
        let taken = self
            .pid
            .lock()
            .map_err(|_| anyhow::anyhow!("another thread of the test panicked"))?
            .take();
        let pid = taken.context("containerd is not running")?;
        kill(pid, signal).context("cannot signal containerd")?;
        until("containerd to end", || Ok(gone(pid).then_some(())))
    }

    /// Ends containerd as systemd does when containerd's unit is stopped.
    ///
    /// # Errors
    /// When [`Containerd::stop`] fails, or the unit's settings would end other processes as well.
    pub fn stop_unit(&self) -> Result<()> {
        match self.rancher() {
            Some(rancher) => {
                self.stop(Signal::SIGKILL)?;
                rancher.stopped()
            }
            None => self.stop(Signal::SIGTERM),
        }
    }

    /// Imports an archive of images into a containerd namespace.
    ///
    /// # Errors
    /// When ctr fails.
    pub fn import(&self, keeper: &Keeper, namespace: &str, archive: &Path) -> Result<()> {
        run(self.ctr(keeper, namespace).args(["images", "import"]).arg(archive)).map(|_| ())
    }

    /// Builds the command `ctr` for this containerd. It runs in the supervisor's mount namespace.
    #[must_use]
    pub fn ctr(&self, keeper: &Keeper, namespace: &str) -> Command {
        let mut command = keeper.command(&self.release.bin_dir.join("ctr"));
        command.arg("--address").arg(self.socket()).args(["--namespace", namespace]);
        command.env("CONTAINERD_ADDRESS", self.socket());
        command
    }

    /// Folder of containerd's snapshots and images.
    #[must_use]
    pub fn store(&self) -> &Path {
        &self.store
    }
}

/// Runs a command and returns its stdout. An error contains the end of its stderr.
///
/// # Errors
/// When the command cannot be run or fails.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let out = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let err = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}: {}\n{}", output.status, last(&err), last(&out));
    }
    Ok(out.into_owned())
}

/// Returns the last part of a program's output, which contains the error.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    lines.split_at(lines.len().saturating_sub(30)).1.join("\n")
}

/// Whether a process has ended and was reaped.
#[must_use]
pub fn gone(pid: Pid) -> bool {
    kill(pid, None) == Err(Errno::ESRCH)
}

/// Returns the configuration of the containerd in Docker's package, in which CRI is disabled. The
/// first line is copied from the package's file. Like that file, this configuration has no
/// `version`.
fn config_without_cri(dir: &Path, store: &Path) -> String {
    let (dir, store) = (dir.display(), store.display());
    format!(
        r#"disabled_plugins = ["cri"]
root = "{store}/containerd"
state = "{dir}/state"
[grpc]
address = "{dir}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{store}/opt"
"#
    )
}

fn config(line: Line, dir: &Path, store: &Path) -> String {
    let dir = dir.display();
    let store = store.display();
    let pause = image::PAUSE;
    let common = format!(
        r#"root = "{store}/containerd"
state = "{dir}/state"
[grpc]
address = "{dir}/containerd.sock"
[debug]
level = "info"
"#
    );
    match line {
        Line::V1_6 | Line::V1_7 => {
            format!(
                r#"version = 2
{common}[plugins."io.containerd.internal.v1.opt"]
path = "{store}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
# Build machines often lack CAP_SYS_RESOURCE, which a pod's negative score needs.
restrict_oom_score_adj = true
# A handler of one's own makes containerd forget its default one.
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "{STOCK}"
"#
            )
        }
        Line::V2 => format!(
            r#"version = 3
imports = ["{dir}/conf.d/*.toml"]
{common}[plugins."io.containerd.internal.v1.opt"]
path = "{store}/opt"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dir = "{dir}/cni/bin"
conf_dir = "{dir}/cni/net.d"
"#
        ),
    }
}
