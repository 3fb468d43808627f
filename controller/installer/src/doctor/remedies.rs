//! Requirement, cause of failure and remedy of each check of `affinode doctor`. The troubleshooting
//! page consists of these texts. [`CheckGroup`](super::CheckGroup) rejects checks that have no
//! entry here.

use serde::Serialize;

/// Explanation of a check: its requirement, cause of failure and remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckHelp {
    /// Heading under which `affinode doctor` prints the check.
    pub group: &'static str,
    /// Name of the check, unique in its group.
    pub name: &'static str,
    /// Requirement: the state in which the check passes.
    pub meaning: &'static str,
    /// Cause of a warning or a failure.
    pub cause: &'static str,
    /// Remedy: what an operator can do if the check does not pass.
    pub remedy: &'static str,
}

macro_rules! checks {
    ($($group:literal, $name:literal: $meaning:literal, $cause:literal, $remedy:literal;)*) => {
        /// The entries of all checks, in the order of `affinode doctor`.
        pub const CHECKS: &[CheckHelp] = &[$(CheckHelp {
            group: $group,
            name: $name,
            meaning: $meaning,
            cause: $cause,
            remedy: $remedy,
        },)*];
    };
}

checks! {
    "GPU", "NVML":
        "NVIDIA's management library (NVML) must load and report the GPUs.",
        "The driver is not installed, its kernel module is not loaded, or the library has another path.",
        "Install the NVIDIA driver 570 or newer. Then check that `nvidia-smi` works. If the driver is installed in another folder, set `driver.root` in the configuration. If only the library has another path, set `nvml.library`.";
    "GPU", "driver":
        "The driver must have functions that checkpoint a process. It has them from version 570 on.",
        "The driver is older than version 570.",
        "Install driver 570 or newer.";
    "GPU", "devices":
        "NVML must list at least one GPU.",
        "No GPU is attached, or the driver did not initialise it.",
        "Find the cause with `nvidia-smi` and `dmesg | grep NVRM`.";
    "GPU", "device":
        "This check requires nothing. It shows a GPU that NVML lists, with its VRAM.",
        "This check cannot fail: it gives only information. It marks a simulated GPU as \
         simulated.",
        "No action is needed.";
    "GPU", "VRAM limits":
        "This check requires nothing. It shows what enforces the VRAM limits of containers, by the version of the driver.",
        "This check cannot fail: it gives only information. Driver 615 or newer enforces the limits too, if the node has cgroup v2.",
        "No action is needed. The field `vram_limit_enforced_by` of `affinode ps -o json` shows what enforces the limit of one container.";
    "GPU", "persistence mode":
        "The driver must stay loaded while no process uses the GPU (persistence mode).",
        "Persistence mode is off. When no process uses the GPU any more, the driver is then unloaded. The next process waits until the driver has initialised the GPU again.",
        "Start `nvidia-persistenced`, or run `nvidia-smi -pm 1`.";
    "GPU", "MIG":
        "No GPU may be divided into MIG instances.",
        "MIG is on. NVML does not report the free VRAM of a single instance, so containers on instances are not offloaded.",
        "Turn MIG off with `nvidia-smi -mig 0`.";
    "GPU", "MPS":
        "The daemon of CUDA's Multi-Process Service (MPS) does not run.",
        "The MPS daemon runs. The driver cannot checkpoint clients of this service. Their memory is offloaded, but their contexts stay on the GPU. With the engine `checkpoint` they are not offloaded.",
        "If the contexts need too much VRAM, stop the daemon with `echo quit | nvidia-cuda-mps-control`.";
    "machine", "permissions":
        "`affinode doctor` must run as root of the machine.",
        "`affinode doctor` runs as another user, or as root of a user namespace. Such a user \
         cannot see all processes and memory limits.",
        "Run `affinode doctor` as root on the host.";
    "machine", "kernel":
        "Three features of the kernel must be usable: `pidfd_open`, sealed memfds and `MADV_WIPEONFORK`.",
        "The kernel is older than 5.3, or a sandbox forbids the feature that the check names.",
        "Use Linux 5.3 or newer, or allow the feature in the sandbox.";
    "machine", "membarrier":
        "The system call `membarrier(PRIVATE_EXPEDITED)` should be usable, because it makes CUDA calls cheaper.",
        "The kernel is older than 4.14, or a sandbox forbids the system call. Affinode works without it, but each CUDA call then takes about 15 ns longer.",
        "Use Linux 4.14 or newer, or allow the system call in the sandbox. No action is needed if 15 ns per call do not matter.";
    "machine", "SELinux":
        "SELinux should not be in enforcing mode, because this was not tested with Affinode.",
        "The file `/sys/fs/selinux/enforce` contains 1. A confined container may then not read the library or connect to the controller, and runs unmanaged.",
        "If containers run unmanaged, look for denials with `ausearch -m avc`, and give the library's folder and `/run/affinode/containers` the type `container_file_t`. The page Compatibility shows what to expect.";
    "memory", "cgroups":
        "The memory limits of containers must be readable, because offloaded memory is charged to the container.",
        "No cgroup hierarchy with the memory controller is mounted at `/sys/fs/cgroup`.",
        "Mount cgroup2 at `/sys/fs/cgroup`. If the memory controller is missing there, boot with the kernel argument `cgroup_enable=memory`.";
    "memory", "host pool":
        "The host pool stores the content of offloaded containers, so that the containers are not charged for this memory. The host pool needs a memory cgroup.",
        "The cgroup hierarchy has no memory controller, so offloaded memory is charged to the containers.",
        "See the check `cgroups`. If the host pool is full, enlarge it with `memory.host_pool_percent`.";
    "memory", "host RAM":
        "Free host memory must be large enough for an offload of all VRAM that is in use now.",
        "Free host memory minus the reserve `memory.node_reserve_mib` is smaller than the VRAM in use. Some containers then keep their VRAM. If the free host memory is not larger than the reserve, no container can be offloaded.",
        "Add host memory, end other programs, or lower `memory.node_reserve_mib`.";
    "memory", "disk folder":
        "This check runs only if `memory.disk_folder` is set. The folder must be on a file system that \
         supports direct I/O (O_DIRECT). Besides a twentieth of the file system, there should be free \
         space for `memory.disk_max_mib`.",
        "The folder does not exist, its file system has no direct I/O, or its free space is smaller \
         than `memory.disk_max_mib`. Content of offloaded containers then stays in host memory.",
        "Create the folder on a local disk, free space there, or change `memory.disk_folder` or \
         `memory.disk_max_mib`.";
    "containerd", "daemon":
        "containerd must answer on its socket, unless only Podman is installed.",
        "containerd is not installed, does not run, or has its socket at another path.",
        "Start containerd, or name its socket with `--containerd`.";
    "containerd", "version":
        "The version of containerd must be 1.6 or newer.",
        "containerd is older than 1.6, or the check could not read its version.",
        "Install containerd 1.6 or newer. Versions 1.6 to 2.4 were tested.";
    "containerd", "configuration":
        "containerd's configuration, as `containerd config dump` prints it, must be valid.",
        "containerd's configuration file has an error.",
        "Correct the error that the check prints, then restart containerd.";
    "containerd", "handler":
        "containerd's CRI plugin must have a handler for Affinode's runtime `io.containerd.affinode.v1`. A RuntimeClass of Kubernetes names this handler. ctr and nerdctl do not need it.",
        "containerd's configuration does not contain Affinode's handler, the CRI plugin is off, or `runtime_path` of the handler does not name a program.",
        "Run `affinode install`. To do it by hand with containerd 1.x, append `config/containerd/affinode-v2.toml` to `/etc/containerd/config.toml`. With containerd 2.x, copy `affinode-v3.toml` into a folder that `config.toml` imports. Then restart containerd.";
    "containerd", "annotations":
        "Affinode's handler must pass the annotations `affinode.io/*` of pods and containers to the runtime.",
        "`pod_annotations` or `container_annotations` of the handler does not contain `affinode.io/*`. containerd then withholds these annotations, so they have no effect.",
        "Add both keys to the handler, as in the files of `config/containerd`, and restart containerd.";
    "containerd", "default handler":
        "containerd's configuration must contain the handler of pods without a RuntimeClass (the default handler, usually `runc`).",
        "The configuration defines only Affinode's handler. As soon as it defines a handler, \
         containerd's built-in default no longer exists, so pods without a RuntimeClass fail.",
        "Add the default handler to the configuration as well, and restart containerd.";
    "containerd", "options":
        "Affinode's handler must have the same options as the handler that GPU pods used before, so that pods run in the same environment.",
        "The option `SystemdCgroup` or `BinaryName` differs between the two handlers.",
        "Copy the options from the handler that the check names to Affinode's handler, and restart containerd.";
    "programs", "shim":
        "`containerd-shim-affinode-v1` must be on containerd's PATH, and must be of the same release as `affinode`.",
        "The shim is missing, does not start on this machine, or is of another release than `affinode`.",
        "Run `affinode install`, or copy both programs from one release.";
    "programs", "stock shim":
        "containerd's own shim `containerd-shim-runc-v2` must be on containerd's PATH or in containerd's folder, because Affinode's shim forwards calls to it.",
        "The package of containerd is incomplete, or this shim is in another folder.",
        "Install containerd's package, or set the environment variable `AFFINODE_STOCK_SHIM` of containerd to the path of this shim.";
    "programs", "runc":
        "runc or crun must be on containerd's PATH.",
        "Neither runc nor crun is installed.",
        "Install runc, unless `options.BinaryName` of the handlers names another runtime.";
    "programs", "library":
        "Affinode's library `libaffinode_preload.so` must exist, must be readable for every user, and must be loadable in every image.",
        "The library's file is missing, not every user can read it, or its file system is mounted `noexec`. Or the file is from a build that needs libraries which an image may lack.",
        "Run `affinode install`, or follow the instruction that the check prints.";
    "Kubernetes", "sharing":
        "Kubernetes must assign a GPU to more than one pod. Otherwise no other pod can use the VRAM that an offload frees.",
        "The device plugin assigns each GPU to only one pod, or offers MIG instances, or the check could not read the kubelet's file about device plugins.",
        "Share GPUs by time-slicing, KAI, a DRA driver or Affinode's device plugin, as in the examples of `config/kubernetes/sharing`. If the file could not be read, restart the kubelet, which writes it again.";
    "Kubernetes", "KAI":
        "This check requires nothing. It reports that the scheduler KAI assigns fractions of GPUs on this node.",
        "This check cannot fail: it gives only information.",
        "No action is needed.";
    "Kubernetes", "DRA":
        "This check requires nothing. It reports that NVIDIA's driver for dynamic resource allocation (DRA) runs on this node.",
        "This check cannot fail: it gives only information.",
        "No action is needed.";
    "Kubernetes", "offers":
        "If Affinode's device plugin or DRA driver offers the GPUs of this node to Kubernetes, no other program may offer them.",
        "NVIDIA's device plugin or DRA driver also runs on this node, or both of Affinode's do. Kubernetes then assigns each GPU once per program.",
        "Keep one of the programs off this node, for example by its node selector. Different programs may serve different nodes: docs/gpu-sharing.md#by-node-pool shows the labels. `affinode doctor` does not see these labels, so it still warns on a node whose GPUs the label `affinode.io/offer-gpus=false` leaves to another program.";
    "Kubernetes", "HAMi":
        "The GPU sharing library of HAMi should not be installed, because containers would load it in addition to Affinode's. Affinode was not tested with it, only with a similar library.",
        "HAMi's library is installed, and containers load it before Affinode's. Therefore HAMi's limits apply. Containers with HAMi's virtual device memory are not offloaded.",
        "Leave HAMi's virtual device memory off, and try your programs with both libraries before you use them in production. See docs/gpu-sharing.md.";
    "installation", "run directory":
        "Root must own the run directory, no other user may have write access to it, and containerd's shims must use the same run directory as `affinode`.",
        "The directory has the wrong owner or mode, its file system is read-only, or containerd's shims use another directory.",
        "If the owner or the mode is wrong, run the command that the check prints. If containerd's shims use another directory, pass the option `--run-dir` that the check prints. If the file system is read-only, name another directory in the environment variable `AFFINODE_RUN_DIR` of containerd.";
    "installation", "control socket":
        "Only root may be able to connect to the control socket.",
        "The mode of the socket lets other users connect, so they could offload and restore containers.",
        "Run the command `chmod 600` that the check prints.";
    "installation", "configuration":
        "The configuration of Affinode's controller must be valid.",
        "A key is unknown or a value is invalid. A controller does not start with such a configuration.",
        "Correct the key that the check names. Then run `affinode policy validate FILE` to check the file.";
    "installation", "controller":
        "If a controller runs, it must answer and must be of the same release as `affinode`.",
        "The controller does not answer. Or it was started before an upgrade, so it is still of the earlier release.",
        "After an upgrade, end the controller's process with the command that the check prints. A shim or systemd then starts the installed release within a second. Containers are not affected. If the controller does not answer, see `controller.log` in the run directory, or the journal if systemd runs the controller.";
}

/// Returns whether there is an explanation of this check.
#[must_use]
pub fn is_explained(group: &str, name: &str) -> bool {
    CHECKS.iter().any(|check| check.group == group && check.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every explanation belongs to a check that still exists. The test searches the source text of
    /// the modules for the calls that add checks.
    #[test]
    fn explained_checks_are_made() {
        let sources = [
            include_str!("gpu.rs"),
            include_str!("kernel.rs"),
            include_str!("memory.rs"),
            include_str!("disk.rs"),
            include_str!("containerd.rs"),
            include_str!("handler.rs"),
            include_str!("programs.rs"),
            include_str!("library.rs"),
            include_str!("sharing.rs"),
            include_str!("files.rs"),
        ];
        let code = sources.map(|text| text.split("#[cfg(test)]").next().unwrap_or_default());
        for check in CHECKS {
            let group = format!("CheckGroup::new({:?})", check.group);
            let name = format!("{:?}", check.name);
            let made = code.iter().any(|text| text.contains(&group) && text.contains(&name));
            assert!(made, "{} / {} is made nowhere", check.group, check.name);
        }
    }

    #[test]
    fn made_checks_are_explained() {
        for check in super::super::examine(&super::super::DoctorPaths {
            run_dir: "/nonexistent/run".into(),
            containerd: None,
        }) {
            assert!(is_explained(check.group, check.name), "{} / {}", check.group, check.name);
        }
    }

    #[test]
    fn entries_are_unique_and_made_of_sentences() {
        for (at, check) in CHECKS.iter().enumerate() {
            let twin = |other: &CheckHelp| (other.group, other.name) == (check.group, check.name);
            assert!(!CHECKS[at + 1..].iter().any(twin), "{} / {} twice", check.group, check.name);
            for text in [check.meaning, check.cause, check.remedy] {
                assert!(text.ends_with('.'), "{} / {}: {text:?}", check.group, check.name);
            }
        }
    }
}
