//! A private node with systemd. systemd is process 1 in namespaces and cgroups of its own, and the
//! only network is loopback. A supervisor process owns the node, so nothing remains when the
//! command ends or is killed.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use affinode_e2e::{
    artifacts::Artifacts,
    cli::{Cli, ContainerRow},
    image,
    supervisor::{Job, Keeper, Scope, cgroup_folders, cgroup_parent},
    wait::{until, until_within},
};
use anyhow::{Context, Result, bail, ensure};

use super::tree;
use crate::sh;

/// Time limit for a node's boot.
const BOOT: Duration = Duration::from_secs(180);
/// Time limit of each command on the node, in seconds.
const LIMIT: &str = "180";
/// Name of the unprivileged user on the node.
pub const USER: &str = "alice";

const FILES: [(&str, &str); 7] = [
    ("etc/systemd/system/affinode-sim-gpu.service", include_str!("files/affinode-sim-gpu.service")),
    ("etc/affinode/config.toml", include_str!("files/config.toml")),
    ("etc/slurm/slurm.conf", include_str!("files/slurm.conf")),
    ("etc/slurm/gres.conf", include_str!("files/gres.conf")),
    ("etc/slurm/cgroup.conf", include_str!("files/cgroup.conf")),
    ("etc/hosts", "127.0.0.1 localhost node\n"),
    ("etc/hostname", "node\n"),
];

pub struct Node {
    keeper: Keeper,
    dir: PathBuf,
    pid: u32,
    cli: Cli,
}

impl Node {
    /// Boots a node from a copy of `base`, and waits until systemd reports that it is running.
    pub fn boot(artifacts: &Artifacts, base: &Path) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("afn-systemd-{}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let keeper = Keeper::start(&artifacts.bin("affinode-keeper")?, &dir, Scope::Mounts)?;
        let root = dir.join("root");
        tree::copy(base, &root)?;
        furnish(&root, artifacts)?;
        let boot = dir.join("boot.sh");
        fs::write(&boot, include_str!("files/boot.sh"))?;
        let word = |path: &Path| path.display().to_string();
        let argv = vec![
            "sh".into(),
            word(&boot),
            word(&root),
            cgroup_parent(&dir),
            word(artifacts.root()),
        ];
        let log = dir.join("boot.log");
        let booting = keeper.spawn(&Job { argv, env: BTreeMap::new(), log: log.clone() })?;
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let pid = until_within(BOOT, "process 1 of the node", || {
            ensure!(
                Path::new(&format!("/proc/{booting}")).exists(),
                "the node ended while booting: {}",
                said()
            );
            Ok(first_process(booting))
        })?;
        let run_dir = PathBuf::from(format!("/proc/{pid}/root/run/affinode"));
        let node = Self { keeper, dir, pid, cli: Cli::new(artifacts.bin("affinode")?, run_dir) };
        let mut state = String::new();
        until_within(BOOT, "systemd to have booted", || {
            let output = node.output("systemctl is-system-running")?;
            state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            Ok(["running", "degraded"].contains(&state.as_str()).then_some(()))
        })
        .with_context(|| format!("systemd on the node is {state}: {}", said()))?;
        if state == "degraded" {
            bail!("units failed: {}", node.sh("systemctl --failed --no-legend --plain")?);
        }
        Ok(node)
    }

    /// Converts a path on the node to the path of the same file on this machine.
    pub fn file(&self, path: &str) -> PathBuf {
        self.dir.join("root").join(path.trim_start_matches('/'))
    }

    /// Returns the command `affinode`, which is connected to the node's controller.
    pub fn cli(&self) -> &Cli {
        &self.cli
    }

    /// Returns the controller's row of the container or job with this name.
    pub fn row(&self, name: &str) -> Result<Option<ContainerRow>> {
        let rows = self.cli.ps()?.containers;
        Ok(rows.into_iter().find(|row| [&row.container, &row.id].contains(&&name.to_owned())))
    }

    /// Waits until a container or job has this state, and returns its row.
    pub fn wait_for(&self, name: &str, state: &str) -> Result<ContainerRow> {
        let mut last = None;
        until(&format!("{name} to be {state}"), || {
            last = self.row(name).ok().flatten();
            Ok(last.clone().filter(|row| row.state == state))
        })
        .with_context(|| format!("last row of {name}: {last:?}"))
    }

    pub fn move_out(&self, name: &str) -> Result<ContainerRow> {
        let id = until(&format!("{name} to be known"), || Ok(self.row(name)?.map(|row| row.id)))?;
        self.cli.move_out(&id)?;
        self.wait_for(name, "Offloaded")
    }

    /// Waits until NVML reports 0 bytes in use on the simulated GPU.
    pub fn wait_gpu_empty(&self) -> Result<()> {
        until("the GPU to be empty", || {
            let gpus = self.cli.ps()?.gpus;
            Ok((!gpus.is_empty() && gpus.iter().all(|gpu| gpu.vram_used_bytes == 0)).then_some(()))
        })
    }

    /// Runs a shell script on the node, and returns its status and output.
    pub fn output(&self, script: &str) -> Result<Output> {
        let mut command = Command::new("timeout");
        command.args([LIMIT, "nsenter", "--target", &self.pid.to_string(), "--mount", "--uts"]);
        command.args(["--ipc", "--net", "--pid", "--cgroup", "--root", "--wd", "--"]);
        command.args(["sh", "-c", script]).env_clear();
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        Ok(command.output()?)
    }

    /// Runs a shell script on the node, requires success, and returns its stdout.
    pub fn sh(&self, script: &str) -> Result<String> {
        let output = self.output(script)?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "the script {script:?} failed: {}: {said} {}",
            output.status,
            error.trim()
        );
        Ok(said)
    }

    /// Returns a property of a unit on the node, as systemctl shows it.
    pub fn property(&self, unit: &str, name: &str) -> Result<String> {
        self.sh(&format!("systemctl show --value --property {name} {unit}"))
    }

    /// Powers the node off, and checks that no process or file of the node is left.
    pub fn end(self) -> Result<String> {
        // The connection to systemd may end before the reply.
        let _ = self.output("systemctl poweroff");
        let process = PathBuf::from(format!("/proc/{}", self.pid));
        until_within(BOOT, "the node to switch itself off", || {
            Ok((!process.exists()).then_some(()))
        })?;
        let dir = self.dir.clone();
        drop(self);
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        ensure!(!mounts.contains(&*dir.to_string_lossy()), "a mount is left");
        ensure!(cgroup_folders(&dir).is_empty(), "cgroups are left: {:?}", cgroup_folders(&dir));
        ensure!(!dir.exists(), "{} is left", dir.display());
        Ok("the node powered off; no process, cgroup, mount or file is left".into())
    }

    /// Returns the logs of the node's programs, to explain a failed step.
    pub fn log(&self) -> String {
        let script = "journalctl --no-pager --lines 60 --output short-precise; \
                      tail --lines 30 /run/affinode/controller.log";
        let output = self.output(script);
        output.map_or_else(
            |error| error.to_string(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.keeper.end();
    }
}

/// Finds the child of `parent` that is the first process of a new pid namespace.
fn first_process(parent: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        line.is_some_and(|pids| pids.split_whitespace().count() > 1 && pids.ends_with("\t1"))
    })
}

/// Creates the files of a GPU node on which Affinode is not installed: a driver, a configuration,
/// users, and images.
fn furnish(root: &Path, artifacts: &Artifacts) -> Result<()> {
    let put = |path: &str, text: &str| -> Result<PathBuf> {
        let path = root.join(path);
        fs::create_dir_all(path.parent().context("the file's path has no folder")?)?;
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    for (path, text) in FILES {
        put(path, text)?;
    }
    let init = put("sbin/affinode-node-init", include_str!("files/init.sh"))?;
    fs::set_permissions(init, fs::Permissions::from_mode(0o755))?;
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let inside = root.join("usr/lib/x86_64-linux-gnu").join(library);
        fs::copy(artifacts.sim_dir().join(library), inside)?;
    }
    for folder in ["slurmctld", "slurmd"] {
        fs::create_dir_all(root.join("var/lib/slurm").join(folder))?;
    }
    let inside = |words: &[&str]| sh::read(Command::new("chroot").arg(root).args(words));
    inside(&["/usr/sbin/useradd", "--create-home", USER])?;
    inside(&["systemctl", "enable", "affinode-sim-gpu"])?;
    image::write_usual(&root.join("srv/images.tar"))
}
