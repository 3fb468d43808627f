//! Meaning, cause and remedy of each check of the doctor: the text of the troubleshooting page.
//! [`CheckGroup`](super::CheckGroup) refuses checks that have no entry here.

use serde::Serialize;

/// The explanation of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckHelp {
    /// Heading under which `affinode doctor` prints the check.
    pub group: &'static str,
    /// Name of the check, unique in its group.
    pub name: &'static str,
    /// Subject of the check.
    pub meaning: &'static str,
    /// Cause of a warning or a failure.
    pub cause: &'static str,
    /// What an operator can do.
    pub remedy: &'static str,
}

macro_rules! checks {
    ($($group:literal, $name:literal: $meaning:literal, $cause:literal, $remedy:literal;)*) => {
        /// Every check, in the order of `affinode doctor`.
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
        "NVIDIA's management library loads and answers.",
        "The driver is not installed, its kernel module is not loaded, or the library has another path.",
        "Install the NVIDIA driver 570 or newer until `nvidia-smi` works. `nvml.library` names a library elsewhere.";
    "GPU", "driver":
        "The driver has the checkpoint functions.",
        "The driver is older than 570.",
        "Install driver 570 or newer.";
    "GPU", "devices":
        "NVML lists at least one GPU.",
        "No GPU is attached, or the driver did not initialise it.",
        "See `nvidia-smi` and `dmesg | grep NVRM`.";
    "GPU", "device":
        "A GPU that NVML lists, with its VRAM.",
        "The check is informative. A simulated GPU is named as such.",
        "No action is needed.";
    "GPU", "persistence mode":
        "The driver stays loaded while no process uses the GPU.",
        "Persistence mode is off, so the driver initialises the GPU anew after the last process has been offloaded or has ended.",
        "Start `nvidia-persistenced`, or run `nvidia-smi -pm 1`.";
    "GPU", "MIG":
        "No GPU is divided into MIG instances.",
        "MIG is on. NVML does not prove VRAM free for one instance, so containers on instances are not offloaded.",
        "`nvidia-smi -mig 0` turns instances off.";
    "GPU", "MPS":
        "No daemon of CUDA's Multi-Process Service runs.",
        "The daemon runs. The driver cannot checkpoint its clients, so they are not offloaded.",
        "Stop the daemon with `echo quit | nvidia-cuda-mps-control`.";
    "machine", "permissions":
        "The command runs as root of the machine.",
        "Another user, or root of a user namespace, sees neither all processes nor all memory limits.",
        "Run `affinode doctor` as root on the host.";
    "machine", "kernel":
        "The kernel has `pidfd_open`, sealed memfds and `MADV_WIPEONFORK`.",
        "The kernel is older than 5.3, or a sandbox forbids the call that is named.",
        "Use a newer kernel, or allow the call.";
    "machine", "membarrier":
        "The kernel has `membarrier(PRIVATE_EXPEDITED)`.",
        "The kernel is older than 4.14, or a sandbox forbids the call. Each CUDA call then costs about 15 ns more.",
        "Use a newer kernel, or allow the call. Nothing else depends on it.";
    "memory", "cgroups":
        "The memory limits of containers can be read.",
        "No cgroup hierarchy with the memory controller is mounted at `/sys/fs/cgroup`.",
        "Mount cgroup2 there; on some systems the kernel argument `cgroup_enable=memory` is needed.";
    "memory", "host RAM":
        "Free host memory suffices for the VRAM in use.",
        "Free host memory minus `memory.node_reserve_mib` is smaller than the VRAM in use. If nothing is left, no container can be offloaded.",
        "Add host memory, end other programs, or lower `memory.node_reserve_mib`.";
    "containerd", "daemon":
        "A containerd answers on its socket.",
        "containerd is not installed, does not run, or has its socket elsewhere.",
        "Start containerd, or name its socket with `--containerd`.";
    "containerd", "version":
        "containerd is 1.6 or newer.",
        "The version is older or could not be read.",
        "Install containerd 1.6 to 2.3.";
    "containerd", "configuration":
        "`containerd config dump` prints a valid configuration.",
        "The configuration file has an error.",
        "Correct what the check prints.";
    "containerd", "handler":
        "The CRI plugin has a handler for the runtime `io.containerd.affinode.v1`.",
        "Affinode is not installed into the configuration, the CRI plugin is off, or `runtime_path` names no program.",
        "Run `affinode install`, or add `config/containerd/affinode-v2.toml` (containerd 1.x) or `affinode-v3.toml` (2.x) and restart containerd.";
    "containerd", "annotations":
        "The handler passes annotations `affinode.io/*` of pods and containers on.",
        "`pod_annotations` or `container_annotations` of the handler lacks `affinode.io/*`, so annotations have no effect.",
        "Add the line to the handler, as in `config/containerd`.";
    "containerd", "default handler":
        "The default handler of containerd still exists.",
        "The configuration defines the handler of Affinode alone, which replaces the built-in ones.",
        "Add the default handler beside it.";
    "containerd", "options":
        "The handler has the options of the handler that pods used before.",
        "`SystemdCgroup` or `BinaryName` differ.",
        "Copy the options of the handler that is named.";
    "programs", "shim":
        "`containerd-shim-affinode-v1` is on containerd's PATH and of the same release as this command.",
        "The shim is missing, does not run, or is of another release.",
        "Run `affinode install`, or copy both programs from one release.";
    "programs", "stock shim":
        "`containerd-shim-runc-v2` is on containerd's PATH or beside it.",
        "The package of containerd is incomplete, or the shim is elsewhere.",
        "Install containerd's package, or name the file in `AFFINODE_STOCK_SHIM` for containerd.";
    "programs", "runc":
        "runc or crun is on containerd's PATH.",
        "Neither is installed.",
        "Install runc, unless `options.BinaryName` of the handlers names another runtime.";
    "programs", "library":
        "The preload library exists, every user may read it, and it loads in every image.",
        "The file is missing, is of another build, is not readable, or lies on a file system mounted `noexec`.",
        "Run `affinode install`, or do what the check prints.";
    "Kubernetes", "sharing":
        "More than one pod may use a GPU, so that freed VRAM is of use.",
        "The device plugin gives each GPU to one pod, hands out MIG instances, or its state could not be read.",
        "Share GPUs by time-slicing, KAI or DRA: see `config/kubernetes/sharing`.";
    "Kubernetes", "KAI":
        "KAI hands out parts of GPUs on this node.",
        "The check is informative.",
        "No action is needed.";
    "Kubernetes", "DRA":
        "NVIDIA's DRA driver is on this node.",
        "The check is informative.",
        "No action is needed.";
    "Kubernetes", "HAMi":
        "HAMi's library is not on this node.",
        "Containers load HAMi's library before that of Affinode. With its virtual device memory they are not offloaded.",
        "Do not use both for one container: see `config/kubernetes/sharing`.";
    "installation", "run directory":
        "The run directory belongs to root, can be written by no other user, and is the one that shims use.",
        "Owner or mode are wrong, the file system is read-only, or containerd's environment names another directory.",
        "Do what the check prints: `chown root`, `chmod 711`, or `--run-dir`.";
    "installation", "control socket":
        "Only root can reach the control socket.",
        "Its mode lets other users connect, which could then move containers.",
        "`chmod 600` the socket.";
    "installation", "configuration":
        "The configuration of Affinode is valid.",
        "A key or a value is not accepted. A controller does not start with it.",
        "Correct the key that is named; `affinode policy validate FILE` checks a file beforehand.";
    "installation", "controller":
        "The controller answers and is of the same release as this command.",
        "It does not answer, or runs since before an upgrade.",
        "End its process: a shim starts the installed release within a second, and containers are not affected. `controller.log` in the run directory has more.";
}

/// Whether a check has an entry.
#[must_use]
pub fn is_explained(group: &str, name: &str) -> bool {
    CHECKS.iter().any(|check| check.group == group && check.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each check with an entry must still be made: this finds the calls that make checks in the
    /// text of the modules.
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
