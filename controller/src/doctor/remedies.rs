//! Requirement, cause of failure and remedy of each check of `affinode doctor`: the text of the troubleshooting
//! page. [`CheckGroup`](super::CheckGroup) rejects checks that have no entry here.

use serde::Serialize;

/// The explanation of a check.
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
    /// What an operator can do.
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
        "NVIDIA's management library must load and answer.",
        "The driver is not installed, its kernel module is not loaded, or the library has another path.",
        "Install the NVIDIA driver 570 or newer. `nvidia-smi` must work. If the library has another path, set `nvml.library`.";
    "GPU", "driver":
        "The driver must have the checkpoint functions.",
        "The driver is older than 570.",
        "Install driver 570 or newer.";
    "GPU", "devices":
        "NVML must list at least one GPU.",
        "No GPU is attached, or the driver did not initialise it.",
        "Run `nvidia-smi` and `dmesg | grep NVRM`.";
    "GPU", "device":
        "Nothing. The check shows a GPU that NVML lists, with its VRAM.",
        "None: the check gives only information and cannot fail. It marks a simulated GPU as \
         simulated.",
        "No action is needed.";
    "GPU", "persistence mode":
        "The driver must stay loaded while no process uses the GPU (persistence mode).",
        "Persistence mode is off. The driver is then unloaded when the last process has been offloaded or has ended, and the next process must initialise the GPU again.",
        "Start `nvidia-persistenced`, or run `nvidia-smi -pm 1`.";
    "GPU", "MIG":
        "No GPU may be divided into MIG instances.",
        "MIG is on. NVML does not report the free VRAM of one instance, so containers on instances are not offloaded.",
        "Turn MIG off with `nvidia-smi -mig 0`.";
    "GPU", "MPS":
        "The daemon of CUDA's Multi-Process Service must not run.",
        "The daemon runs. The driver cannot checkpoint processes that use this service, so they are not offloaded.",
        "Stop the daemon with `echo quit | nvidia-cuda-mps-control`.";
    "machine", "permissions":
        "`affinode doctor` must run as root of the machine.",
        "`affinode doctor` runs as another user, or as root of a user namespace. Such a user \
         cannot see all processes and memory limits.",
        "Run `affinode doctor` as root on the host.";
    "machine", "kernel":
        "The kernel must have `pidfd_open`, sealed memfds and `MADV_WIPEONFORK`.",
        "The kernel is older than 5.3, or a sandbox forbids the system call that the check names.",
        "Use a newer kernel, or allow the system call.";
    "machine", "membarrier":
        "The kernel must have `membarrier(PRIVATE_EXPEDITED)`.",
        "The kernel is older than 4.14, or a sandbox forbids the system call. Without the system call each CUDA call takes about 15 ns longer.",
        "Use a newer kernel, or allow the system call. Affinode also works without it.";
    "memory", "cgroups":
        "The memory limits of containers must be readable.",
        "No cgroup hierarchy with the memory controller is mounted at `/sys/fs/cgroup`.",
        "Mount cgroup2 at `/sys/fs/cgroup`. Some systems also need the kernel argument `cgroup_enable=memory`.";
    "memory", "host RAM":
        "Free host memory must be large enough for the VRAM in use.",
        "Free host memory minus `memory.node_reserve_mib` is smaller than the VRAM in use. If free host memory is not larger than `memory.node_reserve_mib`, no container can be offloaded.",
        "Add host memory, end other programs, or lower `memory.node_reserve_mib`.";
    "containerd", "daemon":
        "A containerd must answer on its socket. This is not required if only Podman is installed.",
        "containerd is not installed, does not run, or has its socket at another path.",
        "Start containerd, or name its socket with `--containerd`.";
    "containerd", "version":
        "The version of containerd must be 1.6 or newer.",
        "The version of containerd is older, or it could not be read.",
        "Install containerd 1.6 or newer. Versions 1.6 to 2.4 were tested.";
    "containerd", "configuration":
        "`containerd config dump` must print a valid configuration.",
        "The configuration file has an error.",
        "Correct the error that the check prints.";
    "containerd", "handler":
        "The CRI plugin must have a handler for the runtime `io.containerd.affinode.v1`.",
        "The configuration does not contain Affinode's handler, the CRI plugin is off, or `runtime_path` does not name a program.",
        "Run `affinode install`, or add `config/containerd/affinode-v2.toml` (containerd 1.x) or `affinode-v3.toml` (2.x) and restart containerd.";
    "containerd", "annotations":
        "The handler must pass the annotations `affinode.io/*` of pods and containers to the runtime.",
        "`pod_annotations` or `container_annotations` of the handler does not contain `affinode.io/*`, so annotations have no effect.",
        "Add both keys to the handler, as in the files of `config/containerd`.";
    "containerd", "default handler":
        "The configuration must contain containerd's default handler.",
        "The configuration defines only Affinode's handler. A configured handler replaces \
         containerd's built-in handlers.",
        "Add the default handler to the configuration as well.";
    "containerd", "options":
        "Affinode's handler must have the same options as the handler that pods used before.",
        "The option `SystemdCgroup` or `BinaryName` differs between the two handlers.",
        "Copy the options of the handler that the check names.";
    "programs", "shim":
        "`containerd-shim-affinode-v1` must be on containerd's PATH, and must be of the same release as `affinode`.",
        "The shim is missing, does not run, or is of another release.",
        "Run `affinode install`, or copy both programs from one release.";
    "programs", "stock shim":
        "`containerd-shim-runc-v2` must be on containerd's PATH or in containerd's folder.",
        "The package of containerd is incomplete, or the stock shim is in another folder.",
        "Install containerd's package, or name the file in containerd's environment variable `AFFINODE_STOCK_SHIM`.";
    "programs", "runc":
        "runc or crun must be on containerd's PATH.",
        "Neither runc nor crun is installed.",
        "Install runc, unless `options.BinaryName` of the handlers names another runtime.";
    "programs", "library":
        "The preload library must exist, must be readable for every user, and must be loadable in every image.",
        "The library's file is missing, is of another build, is not readable, or is on a file system that is mounted `noexec`.",
        "Run `affinode install`, or follow the instruction that the check prints.";
    "Kubernetes", "sharing":
        "Kubernetes must let more than one pod use a GPU, because otherwise other pods cannot use freed VRAM.",
        "The device plugin gives each GPU to only one pod, or offers MIG instances, or its state could not be read.",
        "Share GPUs by time-slicing, KAI or DRA: see `config/kubernetes/sharing`.";
    "Kubernetes", "KAI":
        "Nothing. The check reports that KAI assigns fractions of GPUs on this node.",
        "None: the check gives only information and cannot fail.",
        "No action is needed.";
    "Kubernetes", "DRA":
        "Nothing. The check reports that NVIDIA's DRA driver is on this node.",
        "None: the check gives only information and cannot fail.",
        "No action is needed.";
    "Kubernetes", "HAMi":
        "Containers should not load HAMi's library: Affinode was tested only with a similar library.",
        "HAMi's library is installed, and containers load it before Affinode's. HAMi's limits apply. Containers with HAMi's virtual device memory are not offloaded.",
        "Try your programs with both libraries first: see docs/gpu-sharing.md. Leave HAMi's virtual device memory off.";
    "installation", "run directory":
        "Root must own the run directory, no other user may have write access to it, and shims must use the same directory.",
        "The directory has the wrong owner or mode, the file system is read-only, or containerd's environment names another directory.",
        "Run the command or pass the option that the check prints: `chown root`, `chmod 711`, or `--run-dir`.";
    "installation", "control socket":
        "Only root may be able to connect to the control socket.",
        "The mode of the socket lets other users connect. They could then move containers.",
        "Run `chmod 600` on the socket.";
    "installation", "configuration":
        "The configuration of Affinode must be valid.",
        "A key is unknown or a value is invalid. A controller does not start with such a configuration.",
        "Correct the key that the check names. `affinode policy validate FILE` checks a file.";
    "installation", "controller":
        "The controller must answer, and must be of the same release as `affinode`.",
        "The controller does not answer, or it was started before an upgrade.",
        "End the controller's process. A shim or systemd then starts the installed release within a second, and containers are not affected. Details are in `controller.log` in the run directory.";
}

/// Whether a check has an entry.
#[must_use]
pub fn is_explained(group: &str, name: &str) -> bool {
    CHECKS.iter().any(|check| check.group == group && check.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every entry belongs to a check that is still made. The test searches the text of the modules
    /// for the calls that add checks.
    #[test]
    fn explained_checks_are_made() {
        let sources = [
            include_str!("gpu.rs"),
            include_str!("kernel.rs"),
            include_str!("memory.rs"),
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
