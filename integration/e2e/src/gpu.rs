//! The GPU of a testbed: a simulated GPU, or the machine's own.
//!
//! For both kinds of GPU, the module provides what the controller on the host needs, and what a
//! container needs. A container gets the same variables, files and devices that NVIDIA's container
//! toolkit adds.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use affinode_sim_protocol::{MemoryLimit, Packet, Reply, Request};
use anyhow::{Context, Result, bail};

use crate::{
    artifacts::Artifacts,
    supervisor::{Job, Keeper},
    wait::until,
};

/// Environment variable with the path of the simulated driver's socket.
const SIM_SOCKET_ENV: &str = "AFFINODE_SIM_SOCKET";
/// Folder inside containers that contains the simulated driver's socket.
const SIM_FOLDER: &str = "/run/affinode-sim";
/// Folder inside containers that contains the driver's libraries. glibc searches it by default.
pub(crate) const CONTAINER_LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
/// Path of `nvidia-smi` inside containers.
pub const CONTAINER_TOOL: &str = "/usr/bin/nvidia-smi";
/// File names of the driver's libraries for compute. The container toolkit mounts the same
/// libraries for the capabilities `compute,utility`.
const DRIVER_LIBRARIES: [&str; 6] = [
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-nvvm70.so.4",
    "libnvidia-gpucomp.so",
];

/// The GPU of a testbed.
#[derive(Clone, Debug)]
pub enum Gpu {
    /// A GPU that the daemon `affinode-sim-gpud` simulates.
    Simulated {
        /// Total VRAM in bytes.
        vram_bytes: u64,
    },
    /// The machine's own GPU.
    Real,
}

impl Gpu {
    /// Whether the machine has an NVIDIA driver and a GPU.
    #[must_use]
    pub fn real_is_there() -> bool {
        Path::new("/dev/nvidiactl").exists() && device_node(0).exists()
    }

    /// Number of the machine's GPUs. The simulated GPU counts as one, even if the options of its
    /// daemon specify several GPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Gpu::Simulated { .. } => 1,
            Gpu::Real => (0..).take_while(|n| device_node(*n).exists()).count(),
        }
    }

    /// Name of the kind of GPU (simulated or real), for outputs.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Gpu::Simulated { .. } => "simulated",
            Gpu::Real => "real",
        }
    }

    /// Environment variables with which containerd runs. The controller inherits them.
    #[must_use]
    pub fn host_env(&self, artifacts: &Artifacts, dir: &Path) -> BTreeMap<String, String> {
        let mut env = BTreeMap::new();
        if let Gpu::Simulated { .. } = self {
            let libraries = artifacts.sim_dir().to_string_lossy().into_owned();
            env.insert("LD_LIBRARY_PATH".into(), libraries);
            let socket = sim_socket(dir).to_string_lossy().into_owned();
            env.insert(SIM_SOCKET_ENV.into(), socket);
        }
        env
    }

    /// Starts the processes that the GPU needs before the first container starts. `options` are
    /// options of the daemon that simulates GPUs.
    ///
    /// # Errors
    /// When the simulated driver does not start.
    pub fn start(
        &self,
        keeper: &Keeper,
        artifacts: &Artifacts,
        dir: &Path,
        options: Vec<String>,
    ) -> Result<()> {
        let Gpu::Simulated { vram_bytes } = self else {
            return Ok(());
        };
        let socket = sim_socket(dir);
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut argv = vec![
            artifacts.bin("affinode-sim-gpud")?.to_string_lossy().into_owned(),
            "--socket".into(),
            socket.to_string_lossy().into_owned(),
            "--vram-mib".into(),
            (vram_bytes >> 20).to_string(),
        ];
        argv.extend(options);
        keeper.spawn(&Job { argv, env: BTreeMap::new(), log: dir.join("sim-gpu.log") })?;
        until("the simulated GPU", || Ok(socket.exists().then_some(())))
    }

    /// The environment variables, mounts and devices that a GPU container needs.
    ///
    /// # Errors
    /// When a library of the driver cannot be found.
    pub fn container_parts(&self, artifacts: &Artifacts, dir: &Path) -> Result<ContainerParts> {
        match self {
            Gpu::Simulated { .. } => Ok(simulated_parts(artifacts, dir)),
            Gpu::Real => real_parts(),
        }
    }
}

fn device_node(index: usize) -> PathBuf {
    format!("/dev/nvidia{index}").into()
}

/// VRAM in use on a GPU, in total and by process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// VRAM in use by all processes and by the driver itself, in bytes.
    pub used_bytes: u64,
    /// VRAM in use by process id on the host, in bytes.
    pub by_pid: BTreeMap<i32, u64>,
}

impl Gpu {
    /// Returns the VRAM in use on the GPU with this index. The figures do not come from the
    /// controller. They come from the simulated driver's daemon, or from `nvidia-smi`.
    ///
    /// # Errors
    /// When the daemon or the tool does not reply, or shows no GPU.
    pub fn holders(&self, dir: &Path, index: usize) -> Result<Holders> {
        match self {
            Gpu::Simulated { .. } => simulated_holders(&sim_socket(dir), index),
            Gpu::Real => real_holders(index),
        }
    }
}

/// Returns the VRAM limits of cgroups that the simulated driver enforces.
///
/// # Errors
/// When the daemon does not reply.
pub fn cgroup_limits(dir: &Path) -> Result<Vec<MemoryLimit>> {
    let packet = Packet::connect(&sim_socket(dir)).context("cannot connect to the driver")?;
    packet.send(&Request::Limits, None)?;
    match packet.receive()?.context("the simulated driver did not reply")?.0 {
        Reply::Limits(limits) => Ok(limits),
        other => bail!("unexpected reply of the simulated driver: {other:?}"),
    }
}

fn simulated_holders(socket: &Path, index: usize) -> Result<Holders> {
    let packet = Packet::connect(socket).context("cannot connect to the simulated driver")?;
    packet.send(&Request::Snapshot, None)?;
    match packet.receive()?.context("the simulated driver did not reply")?.0 {
        Reply::Snapshot(gpus) => {
            let gpu = gpus.get(index).context("the simulated driver does not show the GPU")?;
            let by_pid = gpu.processes.iter().map(|process| {
                let pid = i32::try_from(process.pid).context("the process id is out of range")?;
                Ok((pid, process.used_bytes))
            });
            Ok(Holders { used_bytes: gpu.used_bytes, by_pid: by_pid.collect::<Result<_>>()? })
        }
        other => bail!("unexpected reply of the simulated driver: {other:?}"),
    }
}

fn real_holders(index: usize) -> Result<Holders> {
    let id = format!("--id={index}");
    let query = ["--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"];
    let output = std::process::Command::new(nvidia_smi()?).args(query).arg(&id).output();
    let text = String::from_utf8(output.context("cannot run nvidia-smi")?.stdout)?;
    Ok(Holders { used_bytes: used_mib(&id)? << 20, by_pid: listed_holders(&text)? })
}

/// Parses lines that each contain a process id and a number of MiB.
fn listed_holders(text: &str) -> Result<BTreeMap<i32, u64>> {
    let mut by_pid = BTreeMap::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (pid, mib) = line
            .split_once(',')
            .with_context(|| format!("cannot parse a line of nvidia-smi: {line}"))?;
        let mib: u64 = mib
            .trim()
            .parse()
            .with_context(|| format!("cannot parse a line of nvidia-smi: {line}"))?;
        by_pid.insert(pid.trim().parse()?, mib << 20);
    }
    Ok(by_pid)
}

/// Environment variables, mounts and devices that make a container a GPU container.
#[derive(Clone, Debug, Default)]
pub struct ContainerParts {
    /// Environment variables for the container's program.
    pub env: BTreeMap<String, String>,
    /// Read-only bind mounts, each with the path on the host and the path in the container.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// Device nodes of the GPU that a container needs.
    pub devices: Vec<PathBuf>,
}

fn sim_socket(dir: &Path) -> PathBuf {
    dir.join("sim/gpu.sock")
}

fn simulated_parts(artifacts: &Artifacts, dir: &Path) -> ContainerParts {
    let mut parts = ContainerParts::default();
    parts.env.insert("NVIDIA_VISIBLE_DEVICES".into(), "all".into());
    parts.env.insert(SIM_SOCKET_ENV.into(), format!("{SIM_FOLDER}/gpu.sock"));
    parts.mounts.push((dir.join("sim"), SIM_FOLDER.into()));
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let inside = Path::new(CONTAINER_LIBRARIES).join(library);
        parts.mounts.push((artifacts.sim_dir().join(library), inside));
    }
    parts.mounts.push((artifacts.clients_dir().join("nvidia-smi"), CONTAINER_TOOL.into()));
    parts
}

fn real_parts() -> Result<ContainerParts> {
    let mut parts = ContainerParts::default();
    parts.env.insert("NVIDIA_VISIBLE_DEVICES".into(), "all".into());
    let folder = driver_folder()?;
    for entry in std::fs::read_dir(&folder)?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let wanted = DRIVER_LIBRARIES.iter().any(|library| name.starts_with(library));
        if wanted {
            let inside = Path::new(CONTAINER_LIBRARIES).join(&*name);
            parts.mounts.push((std::fs::canonicalize(entry.path())?, inside));
        }
    }
    parts.mounts.push((nvidia_smi()?, CONTAINER_TOOL.into()));
    let nodes = std::fs::read_dir("/dev").context("cannot read /dev")?;
    for node in nodes.flatten() {
        let name = node.file_name();
        let name = name.to_string_lossy();
        let gpu = name.strip_prefix("nvidia").is_some_and(|rest| {
            rest.bytes().all(|b| b.is_ascii_digit())
                || matches!(rest, "ctl" | "-uvm" | "-uvm-tools")
        });
        if gpu {
            parts.devices.push(node.path());
        }
    }
    Ok(parts)
}

/// Finds the folder of the machine's `libcuda.so.1`. The function searches the loader's cache, then
/// the folder that container toolkits use.
///
/// # Errors
/// When the library is not found.
pub fn driver_folder() -> Result<PathBuf> {
    let cache = std::process::Command::new("/sbin/ldconfig").arg("-p").output();
    let cached = cache.ok().and_then(|output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines()
            .filter(|line| {
                line.trim_start().starts_with("libcuda.so.1 ") && line.contains("x86-64")
            })
            .find_map(|line| Some(PathBuf::from(line.rsplit_once(" => ")?.1)))
    });
    let known = [
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/local/nvidia/lib64/libcuda.so.1",
        "/usr/lib64/libcuda.so.1",
    ];
    cached
        .into_iter()
        .chain(known.iter().map(PathBuf::from))
        .find(|path| path.exists())
        .and_then(|path| Some(path.parent()?.to_path_buf()))
        .context("cannot find the NVIDIA driver's libcuda.so.1: is the driver installed?")
}

/// Path of the machine's `nvidia-smi`.
fn nvidia_smi() -> Result<PathBuf> {
    let beside = driver_folder()?.join("../bin/nvidia-smi");
    [beside, "/usr/bin/nvidia-smi".into(), "/usr/local/bin/nvidia-smi".into()]
        .iter()
        .find_map(|path| std::fs::canonicalize(path).ok())
        .context("cannot find the NVIDIA driver's nvidia-smi: is the driver installed?")
}

/// Returns the VRAM in use on the machine's first GPU, as `nvidia-smi` reports it.
///
/// # Errors
/// When there is no `nvidia-smi`, or it fails.
pub fn nvidia_smi_used_bytes() -> Result<u64> {
    Ok(used_mib("--id=0")? << 20)
}

/// Returns the VRAM in use on one GPU, in MiB. `id` is the option of `nvidia-smi` that selects the
/// GPU.
fn used_mib(id: &str) -> Result<u64> {
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
    let output = std::process::Command::new(nvidia_smi()?).args(query).arg(id).output();
    let text =
        String::from_utf8_lossy(&output.context("cannot run nvidia-smi")?.stdout).into_owned();
    text.trim().parse().with_context(|| format!("cannot parse the output of nvidia-smi: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_read_from_lines_of_nvidia_smi() -> Result<()> {
        assert_eq!(listed_holders("\n")?, BTreeMap::new());
        let two = listed_holders("4711, 530\n4712, 24\n")?;
        assert_eq!(two, BTreeMap::from([(4711, 530 << 20), (4712, 24 << 20)]));
        assert!(listed_holders("4711, [N/A]\n").is_err(), "not known is not nothing");
        Ok(())
    }
}
