//! Runs Podman in a testbed, with `affinode-runtime` as one of its runtimes. Podman's files and
//! images are in the testbed's folder, and its containers have no network.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Result, bail};

use crate::{
    containerd::run,
    engine, image,
    supervisor::{Job, STORE},
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

/// Name of Affinode's runtime in Podman's configuration.
pub const AFFINODE: &str = "affinode";
/// Name of the runtime without Affinode in Podman's configuration.
pub const OWN: &str = "own";
/// Podman's configuration file for Affinode. The tests install the same file that the documents
/// show.
const REGISTER: &str = include_str!("../../../config/podman/affinode.conf");
/// Path of Affinode's OCI runtime in the documents' configuration files.
pub(crate) const INSTALLED: &str = "/usr/local/bin/affinode-runtime";
/// Program name of Affinode's OCI runtime.
const PROGRAM: &str = "affinode-runtime";

/// Mount point of cgroup version 2 on a machine that uses both cgroup versions. crun refuses to run
/// on such a machine, so the testbed hides this mount.
const UNIFIED: &str = "/sys/fs/cgroup/unified";
/// Shell script that Podman runs as its OCI runtime. Podman passes no environment variables to its
/// runtime, so the script sets those of the testbed. It also stores the last spec that Podman
/// passed.
const RUNTIME: &str = r#"#!/bin/sh
@EXPORTS@last=
for word; do
    [ "$last" = --bundle ] && cp "$word/config.json" @GIVEN@
    last=$word
done
exec @PROGRAM@ "$@"
"#;

/// Shell script that runs a command and writes its stdout, stderr and exit code to files in a
/// folder. The file with the exit code is written last.
const COMMAND: &str = r#"dir=$1; shift; "$@" >"$dir/stdout" 2>"$dir/stderr"
echo $? >"$dir/code.new"; mv "$dir/code.new" "$dir/code""#;

/// Paths of the machine's Podman and of its OCI runtimes.
#[derive(Clone, Debug)]
pub struct PodmanPrograms {
    /// Path of the command `podman`.
    pub command: PathBuf,
    /// Path of the runtime `crun`.
    pub crun: PathBuf,
    /// Path of the runtime `runc`.
    pub runc: PathBuf,
}

impl PodmanPrograms {
    /// Finds Podman and the OCI runtimes on the machine. `None` if one of them is missing.
    #[must_use]
    pub fn find() -> Option<Self> {
        let path = std::env::var_os("PATH")?;
        let find = |name: &str| {
            std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
        };
        // Podman needs `conmon` for each container.
        find("conmon")?;
        Some(Self { command: find("podman")?, crun: find("crun")?, runc: find("runc")? })
    }
}

/// A Podman in a testbed, with its own files and images.
pub struct Podman<'a> {
    world: &'a Testbed,
    programs: PodmanPrograms,
    commands: AtomicU32,
}

/// Result of a `podman` command.
#[derive(Clone, Debug)]
pub struct PodmanOutput {
    /// Exit code of the command.
    pub code: i32,
    /// Text that the command wrote to stdout.
    pub stdout: String,
    /// Text that the command wrote to stderr.
    pub stderr: String,
}

impl<'a> Podman<'a> {
    /// Writes Podman's configuration, and imports the image of the tests.
    ///
    /// # Errors
    /// When Podman cannot be run.
    pub fn new(world: &'a Testbed, programs: PodmanPrograms) -> Result<Self> {
        let podman = Self { world, programs, commands: AtomicU32::new(0) };
        if Path::new(UNIFIED).exists() {
            run(world.keeper().command(Path::new("umount")).arg(UNIFIED))?;
        }
        podman.write_runtime(&podman.programs.crun)?;
        podman.register(REGISTER)?;
        let (store, run) = Self::storage_folders(world.dir());
        let storage =
            format!("[storage]\ndriver = \"overlay\"\ngraphroot = {store:?}\nrunroot = {run:?}\n");
        fs::write(podman.storage_file(), storage)?;
        podman.import(image::PLAIN, &[])?;
        Ok(podman)
    }

    /// Returns the two storage folders of Podman in a testbed. The first contains images and
    /// containers. The second contains the state of running containers.
    pub(crate) fn storage_folders(dir: &Path) -> (PathBuf, PathBuf) {
        (dir.join(STORE).join("podman"), dir.join("podman-run"))
    }

    /// Imports the files of the tests' image under the name `name`. Each entry of `changes` is an
    /// instruction of a Dockerfile that is applied to the image.
    pub(crate) fn import(&self, name: &str, changes: &[&str]) -> Result<()> {
        let archive = self.world.dir().join("podman-image.tar");
        fs::write(&archive, image::usual_layer()?.finish()?)?;
        let changes: Vec<String> =
            changes.iter().map(|change| format!("--change={change}")).collect();
        let mut words = vec!["import", "--quiet"];
        words.extend(changes.iter().map(String::as_str));
        let path = archive.display().to_string();
        words.extend([path.as_str(), name]);
        self.run(&words)?;
        Ok(fs::remove_file(archive)?)
    }

    fn config_file(&self) -> PathBuf {
        self.world.dir().join("containers.conf")
    }

    fn storage_file(&self) -> PathBuf {
        self.world.dir().join("storage.conf")
    }

    /// Path of the runtime program that Podman's configuration names.
    #[must_use]
    pub fn runtime(&self) -> PathBuf {
        self.world.dir().join(PROGRAM)
    }

    /// Path of the last spec that Podman passed to the runtime.
    #[must_use]
    pub fn given_spec(&self) -> PathBuf {
        self.world.dir().join("given.json")
    }

    /// Writes the script that Podman's configuration names as a runtime program. The script runs
    /// Affinode's runtime, which in turn calls the OCI runtime `behind`.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub fn write_runtime(&self, behind: &Path) -> Result<()> {
        let env = self.world.oci_runtime_env(behind);
        let exports = env.iter().map(|(name, value)| format!("export {name}='{value}'\n"));
        let program = self.world.artifacts().bin(PROGRAM)?;
        let script = RUNTIME
            .replace("@EXPORTS@", &exports.collect::<String>())
            .replace("@GIVEN@", &self.given_spec().display().to_string())
            .replace("@PROGRAM@", &program.display().to_string());
        // A new file is renamed over the old file, so that an instance of the script that is
        // running keeps its text.
        let fresh = self.runtime().with_extension("new");
        fs::write(&fresh, script)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
        Ok(fs::rename(fresh, self.runtime())?)
    }

    /// Writes `text` as a configuration file of Podman.
    ///
    /// # Errors
    /// When the configuration cannot be written.
    pub fn register(&self, text: &str) -> Result<()> {
        let own = format!(
            r#"[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "{OWN}"
tmp_dir = "{}"
"#,
            self.world.dir().join("podman-tmp").display(),
        );
        let registered = text
            .replace("[engine]\n", &own)
            .replace(INSTALLED, &self.runtime().display().to_string());
        let path = self.programs.crun.display();
        let config =
            format!("{registered}{OWN} = [\"{path}\"]\n[containers]\ndefault_ulimits = []\n");
        Ok(fs::write(self.config_file(), config)?)
    }

    /// Runs the command `podman` as a child of the testbed's supervisor. Processes that Podman
    /// starts and that outlive the command become children of the supervisor.
    ///
    /// # Errors
    /// When the command cannot be run, or does not end.
    pub fn execute(&self, arguments: &[&str]) -> Result<PodmanOutput> {
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        let folder = self.world.dir().join(format!("podman-command-{number}"));
        fs::create_dir(&folder)?;
        let mut argv = ["sh", "-c", COMMAND, "sh"].map(str::to_owned).to_vec();
        argv.push(folder.display().to_string());
        argv.push(self.programs.command.display().to_string());
        argv.extend(arguments.iter().map(|&word| word.to_owned()));
        let env = [
            ("CONTAINERS_CONF", self.config_file()),
            ("CONTAINERS_STORAGE_CONF", self.storage_file()),
        ];
        let env = env.map(|(name, path)| (name.to_owned(), path.display().to_string()));
        let log = folder.join("log");
        self.world.keeper().spawn(&Job { argv, env: env.into(), log })?;
        let code = until(&format!("podman {arguments:?} to end"), || {
            Ok(fs::read_to_string(folder.join("code")).ok())
        })?;
        let read = |name: &str| fs::read_to_string(folder.join(name));
        Ok(PodmanOutput {
            code: code.trim().parse()?,
            stdout: read("stdout")?,
            stderr: read("stderr")?,
        })
    }

    /// Runs a `podman` command, requires success, and returns its output without the final line
    /// feed.
    ///
    /// # Errors
    /// When the command fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let ended = self.execute(arguments)?;
        if ended.code != 0 {
            bail!("podman {arguments:?}: {ended:?}");
        }
        Ok(ended.stdout.trim_end().to_owned())
    }

    /// Runs `podman inspect` for a container, and returns the value that a Go template selects.
    ///
    /// # Errors
    /// When the container is unknown.
    pub fn inspect(&self, container: &str, template: &str) -> Result<String> {
        self.run(&["inspect", "--format", template, container])
    }

    /// Returns the flags of `podman run` that every container of the testbed needs.
    #[must_use]
    pub fn flags(&self, runtime: &str) -> [String; 2] {
        [format!("--runtime={runtime}"), format!("--cgroup-parent=/{}", self.world.cgroup_parent())]
    }

    /// Runs a program in a new container, and returns its output.
    ///
    /// # Errors
    /// When the program fails.
    pub fn output(&self, runtime: &str, flags: &[&str], argv: &[&str]) -> Result<String> {
        let [runtime, cgroup] = self.flags(runtime);
        let first = ["run", "--rm", "--network=none", &runtime, &cgroup];
        self.run(&[&first, flags, &[image::PLAIN], argv].concat())
    }

    /// Starts a CUDA program in the background with these flags of `podman run`, and waits until it
    /// has filled its VRAM. Returns the container's id and the program.
    ///
    /// # Errors
    /// When the container does not start, or a CUDA call fails.
    pub fn worker(&self, name: &str, mib: u64, flags: &[&str]) -> Result<(String, Worker)> {
        let mut all = engine::gpu_flags(self.world)?;
        all.extend(self.flags(AFFINODE));
        all.extend(flags.iter().map(|&flag| flag.to_owned()));
        engine::worker(self.world, name, mib, &all, |words| self.run(words))
    }

    /// Returns the OCI spec of a container, as its runtime has read it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn spec(&self, container: &str) -> Result<String> {
        let path = self.inspect(container, "{{.OCIConfigPath}}")?;
        // The folder of the spec is mounted only in the testbed's mount namespace.
        run(self.world.keeper().command(Path::new("cat")).arg(path))
    }
}
