//! A private environment for a test: one containerd, one GPU and one controller, in one folder.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};

use crate::{
    artifacts::Artifacts,
    cli::Cli,
    container::Running,
    containerd::{self, Containerd, Layout},
    gpu::Gpu,
    image,
    processes::{self, Process},
    release::{Release, Releases},
    supervisor::{Keeper, Scope, cgroup_parent},
};

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
/// VRAM of a simulated GPU in tests that must not run out of VRAM.
pub const PLENTY_BYTES: u64 = 4096 * MIB;

/// Name of the subfolder in which Affinode is installed, in the testbed of a node.
const PREFIX: &str = "prefix";

/// Configuration of a testbed (a private containerd, GPU and controller). [`TestbedConfig::world`]
/// creates the testbed.
pub struct TestbedConfig {
    artifacts: Option<Artifacts>,
    release: Option<Release>,
    gpu: Gpu,
    config: String,
    default_engine: bool,
    images: Vec<&'static str>,
    env: BTreeMap<String, String>,
    sim_options: Vec<String>,
    scope: Scope,
    layout: Layout,
    own_users: bool,
    /// Whether containerd runs without the environment variables that contain the paths of
    /// Affinode's folders.
    without_folders: bool,
    name: Option<String>,
}

impl Default for TestbedConfig {
    fn default() -> Self {
        Self {
            artifacts: None,
            release: None,
            gpu: Gpu::Simulated { vram_bytes: PLENTY_BYTES },
            config: String::new(),
            default_engine: false,
            images: vec!["default"],
            env: BTreeMap::new(),
            sim_options: Vec::new(),
            scope: Scope::default(),
            layout: Layout::default(),
            own_users: false,
            without_folders: false,
            name: None,
        }
    }
}

impl TestbedConfig {
    /// Uses these built files instead of the result of [`Artifacts::find`].
    #[must_use]
    pub fn artifacts(mut self, artifacts: Artifacts) -> Self {
        self.artifacts = Some(artifacts);
        self
    }

    /// Uses this containerd instead of the machine's own.
    #[must_use]
    pub fn release(mut self, release: &Release) -> Self {
        self.release = Some(release.clone());
        self
    }

    /// Gives the testbed this GPU.
    #[must_use]
    pub fn gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = gpu;
        self
    }

    /// Sets the text of Affinode's `config.toml`.
    #[must_use]
    pub fn config(mut self, text: &str) -> Self {
        text.clone_into(&mut self.config);
        self
    }

    /// Lets the controller use its default engine. Without this call, a configuration that names no
    /// engine gets the engine `checkpoint`. Most tests expect that an offload leaves 0 bytes on the
    /// GPU, as this engine does.
    #[must_use]
    pub fn default_engine(mut self) -> Self {
        self.default_engine = true;
        self
    }

    fn config_text(&self) -> String {
        const TABLE: &str = "[policy]\n";
        const ENGINE: &str = "engine = \"checkpoint\"\n";
        let text = &self.config;
        if self.default_engine || text.contains("engine = ") {
            text.clone()
        } else if text.contains(TABLE) {
            text.replacen(TABLE, &format!("{TABLE}{ENGINE}"), 1)
        } else {
            format!("{text}\n{TABLE}{ENGINE}")
        }
    }

    /// Imports the images into containerd's namespace for CRI as well.
    #[must_use]
    pub fn cri(mut self) -> Self {
        self.images.push("k8s.io");
        self
    }

    /// Configures a node of a cluster on which Affinode is not installed. The node has a private
    /// network. Its containerd finds Affinode's files when they are installed in
    /// [`Testbed::prefix`].
    #[must_use]
    pub fn node(mut self) -> Self {
        self.scope = Scope::Node;
        self.cri()
    }

    /// Configures a machine with Docker on which Affinode is not installed. CRI is disabled in its
    /// containerd, which finds Affinode's files when they are installed in [`Testbed::prefix`].
    #[must_use]
    pub fn docker(mut self) -> Self {
        self.scope = Scope::Node;
        self.layout = Layout::Docker;
        self.images.clear();
        self
    }

    /// Configures a node of k3s or rke2, which write containerd's configuration at each start.
    /// `imports` sets whether this configuration imports a folder.
    #[must_use]
    pub fn rancher(mut self, imports: bool) -> Self {
        self.layout = Layout::Rancher { imports };
        self.node()
    }

    /// Uses the runc that `cargo xtask deps` built, which supports user namespaces.
    #[must_use]
    pub fn own_users(mut self) -> Self {
        self.own_users = true;
        self
    }

    /// Removes the variables with the paths of Affinode's folders from containerd's environment, as
    /// on a node whose operator has set none.
    #[must_use]
    pub fn without_folders(mut self) -> Self {
        self.without_folders = true;
        self
    }

    /// Sets the last part of the name of the testbed's folder. Without this call, the last part is
    /// a number.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Adds a variable to containerd's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Adds options of the simulated GPU's daemon. They have no effect on a machine's own GPU.
    #[must_use]
    pub fn sim_options(mut self, options: &[&str]) -> Self {
        self.sim_options.extend(options.iter().map(|&option| option.to_owned()));
        self
    }

    /// Creates the testbed and waits until its containerd replies.
    ///
    /// # Errors
    /// When a part is missing or does not start.
    pub fn world(self) -> Result<Testbed> {
        let config_text = self.config_text();
        let artifacts = match self.artifacts {
            Some(artifacts) => artifacts,
            None => Artifacts::find()?,
        };
        let release = match self.release {
            Some(release) => release,
            None => Releases::read(&artifacts)?.own()?.clone(),
        };
        let dir = new_folder(self.name.as_deref())?;
        let keeper = Keeper::start(&artifacts.bin("affinode-keeper")?, &dir, self.scope)?;
        let config = dir.join("affinode/config.toml");
        std::fs::create_dir_all(dir.join("affinode"))?;
        std::fs::write(&config, config_text)?;
        let run_dir = dir.join("run");

        let mut env = self.gpu.host_env(&artifacts, &dir);
        let (ours, libraries) = match self.scope {
            Scope::Mounts => (artifacts.bin_dir(), artifacts.lib_dir()),
            Scope::Node => (dir.join(PREFIX).join("bin"), dir.join(PREFIX).join("lib/affinode")),
        };
        let runc = self.own_users.then(|| artifacts.own_users_runc_dir());
        let folders = [Some(ours), runc, Some(release.bin_dir.clone())];
        let path = folders.into_iter().flatten().map(|folder| format!("{}:", folder.display()));
        let inherited = std::env::var("PATH").unwrap_or_default();
        env.insert("PATH".into(), path.chain([inherited]).collect());
        if !self.without_folders {
            env.insert("AFFINODE_RUN_DIR".into(), run_dir.display().to_string());
            env.insert("AFFINODE_LIB_DIR".into(), libraries.display().to_string());
            env.insert("AFFINODE_CONFIG".into(), config.display().to_string());
        }
        env.extend(self.env);

        let containerd =
            Containerd::new(&release, &dir, &dir.join(crate::supervisor::STORE), env, self.layout)?;
        if self.scope == Scope::Mounts {
            containerd.register()?;
        }
        let world = Testbed {
            cli: Cli::new(artifacts.bin("affinode")?, run_dir),
            artifacts,
            dir,
            keeper,
            containerd,
            gpu: self.gpu,
        };
        world.gpu.start(&world.keeper, &world.artifacts, &world.dir, self.sim_options)?;
        world.containerd.start(&world.keeper)?;
        let archive = world.dir.join("images.tar");
        image::write_usual(&archive)?;
        for namespace in self.images {
            world.containerd.import(&world.keeper, namespace, &archive)?;
        }
        std::fs::remove_file(archive)?;
        Ok(world)
    }
}

/// A private containerd, GPU and controller that are running. Dropping this value ends all its
/// processes, and removes its mounts and files.
pub struct Testbed {
    // Fields are dropped in this order. The supervisor comes first, because it ends the processes.
    keeper: Keeper,
    containerd: Containerd,
    gpu: Gpu,
    cli: Cli,
    artifacts: Artifacts,
    dir: PathBuf,
}

impl Testbed {
    /// Creates a testbed with the defaults: the machine's containerd, and a simulated GPU with
    /// enough VRAM.
    ///
    /// # Errors
    /// When [`TestbedConfig::world`] fails.
    pub fn new() -> Result<Self> {
        TestbedConfig::default().world()
    }

    /// Folder of the testbed.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Folder in which Affinode is installed, in the testbed of a node.
    #[must_use]
    pub fn prefix(&self) -> PathBuf {
        self.dir.join(PREFIX)
    }

    /// The containerd of this testbed.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// The supervisor of this testbed.
    #[must_use]
    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// The GPU of this testbed.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The `affinode` command for the testbed's controller.
    #[must_use]
    pub fn cli(&self) -> &Cli {
        &self.cli
    }

    /// The built files that this testbed uses.
    #[must_use]
    pub fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    /// Builds the command `ctr` for the testbed's containerd.
    #[must_use]
    pub fn ctr(&self) -> std::process::Command {
        self.containerd.ctr(&self.keeper, "default")
    }

    /// Builds a command for a program on the host, outside of all containers. Its environment lets
    /// it find the testbed's GPU.
    #[must_use]
    pub fn host_gpu_command(&self, program: &Path) -> std::process::Command {
        let mut command = std::process::Command::new(program);
        command.envs(self.gpu.host_env(&self.artifacts, &self.dir));
        command
    }

    /// Environment variables of Affinode's OCI runtime in this testbed. `behind` is the OCI runtime
    /// that Affinode's runtime calls.
    #[must_use]
    pub fn oci_runtime_env(&self, behind: &Path) -> BTreeMap<String, String> {
        let mut env = self.gpu.host_env(&self.artifacts, &self.dir);
        for (name, path) in [
            ("RUN_DIR", self.cli.run_dir().to_owned()),
            ("LIB_DIR", self.artifacts.lib_dir()),
            ("CONFIG", self.dir.join("affinode/config.toml")),
            ("OCI__RUNTIME", behind.to_owned()),
        ] {
            env.insert(format!("AFFINODE_{name}"), path.display().to_string());
        }
        env
    }

    /// Path of the cgroup of the testbed's containers, relative to each cgroup hierarchy.
    #[must_use]
    pub fn cgroup_parent(&self) -> String {
        cgroup_parent(&self.dir)
    }

    /// Lists the running shims, both stock shims and Affinode's. The controller is the same binary
    /// as Affinode's shim, but is not included.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn shims(&self) -> Result<Vec<Process>> {
        let mut found = processes::named("containerd-shim", self.keeper.pid())?;
        found.retain(|process| !is_controller(process));
        Ok(found)
    }

    /// Finds the controller's process. `None` if no controller runs.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn controller(&self) -> Result<Option<Process>> {
        let found = processes::named("containerd-shim", self.keeper.pid())?;
        Ok(found.into_iter().find(is_controller))
    }

    /// Lists the processes of the testbed whose command lines contain `part`.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn processes(&self, part: &str) -> Result<Vec<Process>> {
        processes::named(part, self.keeper.pid())
    }

    /// Kills and removes all containers of containerd's namespace `default`.
    ///
    /// # Errors
    /// When a container does not end.
    pub fn remove_containers(&self) -> Result<()> {
        let listed = containerd::run(self.ctr().args(["containers", "list", "--quiet"]))?;
        for id in listed.lines() {
            let running = Running { id: id.into() };
            // The kill fails if the program ends by itself at the same time.
            if running.status(self)?.as_deref() == Some("RUNNING")
                && let Err(error) = running.kill(self)
                && running.status(self)?.as_deref() == Some("RUNNING")
            {
                return Err(error);
            }
            running.delete(self)?;
        }
        Ok(())
    }

    /// Ends all processes of the testbed before the testbed is dropped.
    pub fn end(&self) {
        self.keeper.end();
    }

    /// Prints the last lines of each log of the testbed's programs, to explain why a test failed.
    pub fn show_logs(&self) {
        crate::logs::show(&self.dir);
    }

    /// Copies the logs to the folder whose path is in the variable `AFFINODE_E2E_KEEP_LOGS`.
    /// Without the variable, nothing is copied.
    pub fn keep_logs(&self) {
        crate::logs::all(&self.dir).for_each(|log| crate::logs::keep(&self.dir, &log));
    }

    /// Restarts containerd in the same way as systemd does with the settings of containerd's unit.
    ///
    /// # Errors
    /// When containerd does not end or start, or when the unit's settings would end other processes
    /// as well.
    pub fn restart_containerd(&self) -> Result<()> {
        self.containerd.stop_unit()?;
        self.start_containerd()
    }

    /// Starts containerd again after [`Containerd::stop`].
    ///
    /// # Errors
    /// When containerd does not start.
    pub fn start_containerd(&self) -> Result<()> {
        self.containerd.start(&self.keeper)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        self.keeper.end();
    }
}

/// Whether a process is the controller of a testbed.
#[must_use]
pub fn is_controller(process: &Process) -> bool {
    process.command.trim_end().ends_with("containerd-shim-affinode-v1 controller")
}

/// Creates the testbed's folder. Its name is short, because a socket path has at most 107 bytes.
fn new_folder(name: Option<&str>) -> Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = || format!("{:x}", NEXT.fetch_add(1, Ordering::Relaxed));
    let name = name.map_or_else(number, str::to_owned);
    let dir = std::env::temp_dir().join(format!("afn-{:x}-{name}", std::process::id()));
    std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    // Containers run as other users and access this folder.
    std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(dir)
}
