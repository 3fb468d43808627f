//! Runs CRI-O in a testbed, with `affinode-runtime` as one of its runtime handlers. CRI-O's files
//! are in the testbed's folder. CRI-O uses Podman's images, because it cannot import images itself.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use anyhow::{Context, Result, anyhow, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    artifacts::Artifacts,
    containerd::gone,
    cri::Cri,
    image,
    podman::{INSTALLED, Podman, PodmanPrograms},
    supervisor::Job,
    testbed::Testbed,
    wait::until,
};

/// Name of the runtime handler that uses Affinode, as in the documented configuration.
pub const AFFINODE: &str = "affinode";
/// Name of the runtime handler that does not use Affinode.
pub const OWN: &str = "own";
/// CRI-O's configuration file for Affinode. The tests install the same file that the documents
/// show.
const REGISTER: &str = include_str!("../../../config/crio/affinode.conf");
/// Shell script that edits a container's spec and then runs runc. CRI-O gives the first process of
/// a pod a negative `oom_score_adj`. Setting a negative value needs CAP_SYS_RESOURCE, which build
/// machines often lack. Therefore the script replaces the negative value by its own
/// `oom_score_adj`. conmon runs the script in the folder of the spec.
const RUNC: &str = r#"#!/bin/sh
score=$(cat /proc/self/oom_score_adj)
[ -f config.json ] && sed -i "s/\"oomScoreAdj\": -[0-9]*/\"oomScoreAdj\": $score/" config.json
exec @RUNC@ "$@"
"#;

/// Entry point of a pod's first container, which sleeps until it receives SIGTERM. The shell sets a
/// handler for SIGTERM. Without a handler, the first process of a pid namespace ignores this
/// signal.
const PAUSE: &str = r#"ENTRYPOINT ["/bin/sh", "-c", "trap exit TERM; /bin/sleep infinity & wait"]"#;

/// Paths of CRI-O and of the programs that it needs, built or installed.
#[derive(Clone, Debug)]
pub struct CrioPrograms {
    /// Folder with the programs `crio` and `pinns`.
    pub folder: PathBuf,
    /// Path of a runc that supports the version of the OCI spec that CRI-O writes. The crun of a
    /// distribution may be too old for this version.
    pub runc: PathBuf,
    /// Programs that CRI-O and Podman have in common.
    pub podman: PodmanPrograms,
}

impl CrioPrograms {
    /// Finds the built and installed programs. `None` if one of them is missing.
    #[must_use]
    pub fn find(artifacts: &Artifacts) -> Option<Self> {
        let folder = artifacts.crio_dir();
        let runc = artifacts.own_users_runc_dir().join("runc");
        let needed = [folder.join("crio"), folder.join("pinns"), runc.clone()];
        let built = needed.iter().all(|program| program.is_file());
        Some(Self { podman: PodmanPrograms::find().filter(|_| built)?, runc, folder })
    }
}

/// A running CRI-O with its files in a testbed's folder. It uses Podman's images.
pub struct Crio<'a> {
    world: &'a Testbed,
    folder: PathBuf,
    pid: Mutex<Option<Pid>>,
}

impl<'a> Crio<'a> {
    /// Writes CRI-O's configuration, imports the images, and starts CRI-O.
    ///
    /// # Errors
    /// When Podman cannot import the images, or CRI-O does not start.
    pub fn start(world: &'a Testbed, programs: &CrioPrograms) -> Result<Self> {
        let podman = Podman::new(world, programs.podman.clone())?;
        podman.import(image::PAUSE, &[PAUSE])?;
        let crio = Self { world, folder: programs.folder.clone(), pid: Mutex::new(None) };
        fs::create_dir_all(crio.drop_ins())?;
        let runc = crio.runc();
        fs::write(&runc, RUNC.replace("@RUNC@", &programs.runc.display().to_string()))?;
        fs::set_permissions(&runc, fs::Permissions::from_mode(0o755))?;
        fs::write(crio.config_file(), crio.config())?;
        fs::write(crio.policy_file(), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
        fs::write(crio.drop_ins().join("99-affinode.conf"), crio.handler()?)?;
        crio.run()?;
        Ok(crio)
    }

    fn dir(&self) -> PathBuf {
        self.world.dir().join("crio")
    }

    fn config_file(&self) -> PathBuf {
        self.dir().join("crio.conf")
    }

    fn policy_file(&self) -> PathBuf {
        self.dir().join("policy.json")
    }

    fn drop_ins(&self) -> PathBuf {
        self.dir().join("crio.conf.d")
    }

    /// Path of the script that runs runc for CRI-O's containers. The script must be named `runc`:
    /// from this name `affinode-runtime` knows where the runtime keeps the state of containers.
    fn runc(&self) -> PathBuf {
        self.dir().join("runc")
    }

    /// Path of the socket that serves CRI.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.world.dir().join("crio.sock")
    }

    /// Path of the file with CRI-O's messages.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.world.dir().join("crio.log")
    }

    /// A client of CRI-O. Waits until CRI-O serves CRI.
    ///
    /// # Errors
    /// When CRI-O does not reply.
    pub fn cri(&self) -> Result<Cri> {
        Cri::connect(&self.socket())
    }

    /// Returns the documented configuration of Affinode's handler, with the testbed's paths. The
    /// configuration also lists the environment variables that Affinode's runtime needs, because
    /// CRI-O passes no other variables to a runtime.
    fn handler(&self) -> Result<String> {
        let program = self.world.artifacts().bin("affinode-runtime")?;
        let env = self.world.oci_runtime_env(&self.runc());
        let env: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let text = REGISTER.replace(INSTALLED, &program.display().to_string());
        Ok(format!("{text}monitor_env = {env:?}\n"))
    }

    /// Returns the text of CRI-O's own configuration file, without the handler of Affinode.
    fn config(&self) -> String {
        let dir = self.dir();
        let path = |name: &str| dir.join(name);
        let (storage, state) = Podman::storage_folders(self.world.dir());
        format!(
            r#"[crio]
root = {storage:?}
runroot = {state:?}
storage_driver = "overlay"
log_dir = {:?}
version_file = {:?}
clean_shutdown_file = ""
[crio.api]
listen = {:?}
[crio.runtime]
default_runtime = "{OWN}"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
# CRI-O crashes at a host port where neither nft nor iptables exists.
disable_hostport_mapping = true
container_exits_dir = {:?}
container_attach_socket_dir = {dir:?}
namespaces_dir = {:?}
pinns_path = {:?}
[crio.runtime.runtimes.{OWN}]
runtime_path = {:?}
[crio.image]
pause_image = "{}"
pause_command = ""
signature_policy = {:?}
signature_policy_dir = {:?}
[crio.network]
network_dir = {:?}
plugin_dirs = [{:?}]
[crio.nri]
enable_nri = false
"#,
            path("pods"),
            path("version"),
            self.socket(),
            path("exits"),
            path("namespaces"),
            self.folder.join("pinns"),
            self.runc(),
            image::PAUSE,
            self.policy_file(),
            path("policies"),
            self.world.dir().join("cni/net.d"),
            self.world.dir().join("cni/bin"),
        )
    }

    /// Starts CRI-O and waits until it serves CRI.
    ///
    /// # Errors
    /// When CRI-O ends or does not reply.
    pub fn run(&self) -> Result<()> {
        // CRI-O asks each runtime for its features with its own environment, not the handler's.
        let env = self.world.oci_runtime_env(&self.runc());
        let mut argv = vec![self.folder.join("crio").display().to_string()];
        argv.extend(["--config".into(), self.config_file().display().to_string()]);
        argv.extend(["--config-dir".into(), self.drop_ins().display().to_string()]);
        let pid = self.world.keeper().spawn(&Job { argv, env, log: self.log() })?;
        let pid = Pid::from_raw(i32::try_from(pid)?);
        *self.pid.lock().map_err(|_| anyhow!("another thread of the test panicked"))? = Some(pid);
        until("CRI-O to listen", || {
            if gone(pid) {
                bail!("CRI-O ended; its log: {}", self.log().display());
            }
            Ok(self.socket().exists().then_some(()))
        })?;
        self.cri().map(drop)
    }

    /// Ends CRI-O with a signal. Its containers continue to run.
    ///
    /// # Errors
    /// When CRI-O is not running or does not end.
    pub fn stop(&self, signal: Signal) -> Result<()> {
        let mut pid =
            self.pid.lock().map_err(|_| anyhow!("another thread of the test panicked"))?;
        let pid = pid.take().context("CRI-O is not running")?;
        kill(pid, signal).context("cannot signal CRI-O")?;
        until("CRI-O to end", || Ok(gone(pid).then_some(())))
    }

    /// Returns the spec of a container twice: as CRI-O has written it, and as its runtime has read
    /// it.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn specs(&self, id: &str) -> Result<[String; 2]> {
        let (storage, state) = Podman::storage_folders(self.world.dir());
        let read = |root: PathBuf| {
            let file = root.join("overlay-containers").join(id).join("userdata/config.json");
            // The folder of the spec is mounted only in the testbed's mount namespace.
            crate::containerd::run(self.world.keeper().command(Path::new("cat")).arg(file))
        };
        Ok([read(storage)?, read(state)?])
    }
}
