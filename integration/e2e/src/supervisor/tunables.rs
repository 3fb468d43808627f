//! Kernel settings that a kubelet changes. The supervisor restores them when the kubelet's testbed
//! ends.

use std::fs;

/// Paths of the settings' files, each with its original content.
pub(super) struct Tunables(Vec<(&'static str, String)>);

impl Tunables {
    const KEPT: [&'static str; 6] = [
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/panic_on_oom",
        "/proc/sys/kernel/panic",
        "/proc/sys/kernel/panic_on_oops",
        "/proc/sys/kernel/keys/root_maxkeys",
        "/proc/sys/kernel/keys/root_maxbytes",
    ];

    /// Reads the kernel settings before the testbed changes them.
    pub(super) fn remember() -> Self {
        let read = |file| Some((file, fs::read_to_string(file).ok()?));
        Self(Self::KEPT.into_iter().filter_map(read).collect())
    }

    /// Restores the original kernel settings.
    pub(super) fn put_back(&self) {
        for (file, value) in &self.0 {
            // If this process cannot write a file, the kubelet could not change the file either.
            let _ = fs::write(file, value);
        }
    }
}
