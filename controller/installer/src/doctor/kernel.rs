//! Checks of the user and of the kernel's features.

use rustix::{
    fs::{MemfdFlags, SealFlags},
    process::PidfdFlags,
    thread::{MembarrierCommand, membarrier_query},
};

use super::{CheckGroup, DoctorCheck};
use crate::sys;

/// Values that the checks of the user and the kernel examine.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // A list of independent answers.
pub struct KernelFacts {
    /// Effective user id of this process.
    pub uid: u32,
    /// Whether the user is root of the machine, not only of a user namespace.
    pub whole_machine: bool,
    /// Release of the kernel, as in `uname -r`.
    pub release: String,
    /// Whether membarrier(PRIVATE_EXPEDITED) works. With it, CUDA calls can check without a lock
    /// whether the process is offloaded.
    pub membarrier: bool,
    /// Whether pidfd_open works. With it, the controller notices the end of a process and detects a
    /// reused pid.
    pub pidfd: bool,
    /// Whether memfds can be sealed. Sealed counter files cannot shrink while they are read.
    pub seals: bool,
    /// Whether MADV_WIPEONFORK works. With it, the library in a forked child process detects that
    /// the child has not registered with the controller.
    pub wipe_on_fork: bool,
    /// Whether SELinux is in enforcing mode.
    pub selinux_enforces: bool,
}

/// File of the kernel with the mode of SELinux: 1 is enforcing. It does not exist without SELinux.
const SELINUX_MODE: &str = "/sys/fs/selinux/enforce";

impl KernelFacts {
    /// Tests each feature with one system call.
    #[must_use]
    pub fn gather() -> KernelFacts {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let barriers = membarrier_query();
        KernelFacts {
            uid: rustix::process::geteuid().as_raw(),
            whole_machine: map.split_whitespace().eq(["0", "0", "4294967295"]),
            release: rustix::system::uname().release().to_string_lossy().into_owned(),
            membarrier: barriers.contains_command(MembarrierCommand::PrivateExpedited),
            pidfd: rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
                .is_ok(),
            seals: seals_hold(),
            wipe_on_fork: sys::wipe_on_fork_works(),
            selinux_enforces: std::fs::read_to_string(SELINUX_MODE)
                .is_ok_and(|mode| mode.trim() == "1"),
        }
    }
}

fn seals_hold() -> bool {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let Ok(file) = rustix::fs::memfd_create("affinode-doctor", flags) else {
        return false;
    };
    let sealed = rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW);
    sealed.is_ok() && rustix::fs::ftruncate(&file, 1).is_err()
}

/// Returns the checks of the user and the kernel.
#[must_use]
pub fn judge(facts: &KernelFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("machine");
    if facts.uid != 0 {
        let hint =
            "run as root: only root can access containerd, the controller and /proc of containers";
        group.bad("permissions", format!("this command runs as user {}", facts.uid), hint);
    } else if facts.whole_machine {
        group.good("permissions", "root");
    } else {
        let hint = "run affinode doctor on the host: root of a user namespace cannot see all processes and limits";
        group.warning("permissions", "this command runs as root of a user namespace", hint);
    }
    let missing: Vec<&str> = [
        (facts.pidfd, "pidfd_open (Linux 5.3)"),
        (facts.seals, "sealed memfds (Linux 3.17)"),
        (facts.wipe_on_fork, "MADV_WIPEONFORK (Linux 4.14)"),
    ]
    .into_iter()
    .filter(|(there, _)| !there)
    .map(|(_, name)| name)
    .collect();
    if missing.is_empty() {
        group.good("kernel", format!("Linux {}", facts.release));
    } else {
        let found = format!("Linux {} lacks {}", facts.release, missing.join(", "));
        group.bad("kernel", found, "use a newer kernel, or allow the feature in the sandbox");
    }
    if facts.membarrier {
        group.good("membarrier", "private expedited");
    } else {
        let hint = "use Linux 4.14 or newer, or allow the system call in the sandbox; without \
                    it, each CUDA call takes about 15 ns longer";
        group.warning("membarrier", "the system call does not work", hint);
    }
    if facts.selinux_enforces {
        let hint = "if containers run unmanaged, look for denials with ausearch -m avc, and label the library and /run/affinode/containers as container_file_t (docs/compatibility.md)";
        group.warning("SELinux", "enforcing, which was not tested with Affinode", hint);
    } else {
        group.good("SELinux", "not enforcing");
    }
    group.checks
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    fn good() -> KernelFacts {
        KernelFacts {
            uid: 0,
            whole_machine: true,
            release: "6.18".into(),
            membarrier: true,
            pidfd: true,
            seals: true,
            wipe_on_fork: true,
            selinux_enforces: false,
        }
    }

    fn verdicts(facts: &KernelFacts) -> Vec<CheckVerdict> {
        judge(facts).iter().map(|check| check.verdict).collect()
    }

    #[test]
    fn each_lack_is_judged_by_what_it_costs() {
        use CheckVerdict::{Bad, Good, Warning};
        assert_eq!(verdicts(&good()), [Good, Good, Good, Good]);
        assert_eq!(verdicts(&KernelFacts { uid: 1000, ..good() }), [Bad, Good, Good, Good]);
        assert_eq!(
            verdicts(&KernelFacts { whole_machine: false, ..good() }),
            [Warning, Good, Good, Good]
        );
        assert_eq!(verdicts(&KernelFacts { pidfd: false, ..good() }), [Good, Bad, Good, Good]);
        let slow = KernelFacts { membarrier: false, ..good() };
        assert_eq!(verdicts(&slow), [Good, Good, Warning, Good]);
        let enforcing = KernelFacts { selinux_enforces: true, ..good() };
        assert_eq!(verdicts(&enforcing), [Good, Good, Good, Warning]);
    }

    /// The kernel that runs the tests has pidfd_open, sealed memfds and MADV_WIPEONFORK, because
    /// other tests start agents that need these features. [`KernelFacts::gather`] must find them.
    #[test]
    fn this_kernel_is_seen_as_it_is() {
        let facts = KernelFacts::gather();
        assert!(facts.pidfd && facts.seals && facts.wipe_on_fork, "{facts:?}");
        assert!(!facts.release.is_empty());
    }
}
