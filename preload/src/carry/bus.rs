//! Whether others on the bus could be let at device memory: network cards, capture cards, drives.
//!
//! Memory that they may reach takes 12 us more to map and unmap (H200, 580.159), about a seventh of
//! a pair of `cuMemAlloc` and `cuMemFree`. A container that has no device but those of the GPU and
//! the ones that every container has cannot ask anybody to.

use core::ffi::CStr;

use crate::sys::folder;

const DEVICES: &CStr = c"/dev";

/// In every container.
const USUAL: [&[u8]; 18] = [
    b".", b"..", b"console", b"core", b"fd", b"full", b"mqueue", b"null", b"ptmx", b"pts",
    b"random", b"shm", b"stderr", b"stdin", b"stdout", b"tty", b"urandom", b"zero",
];
/// What comes with a GPU, and what Kubernetes adds.
const OF_GPU: [&[u8]; 6] = [
    b"dri",
    b"nvidia-caps",
    b"nvidia-caps-imex-channels",
    b"nvidia-modeset",
    b"nvidia-uvm-tools",
    b"termination-log",
];

/// Whether there is any other device, or it cannot be told.
pub fn has_others() -> bool {
    folder::has(DEVICES, |name| !is_known(name)).unwrap_or(true)
}

fn is_known(name: &[u8]) -> bool {
    let is_gpu = |name: &[u8]| {
        let number = name.strip_prefix(b"nvidia");
        name == b"nvidiactl"
            || name == b"nvidia-uvm"
            || number.is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit))
    };
    USUAL.contains(&name) || OF_GPU.contains(&name) || is_gpu(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_alone_is_no_other() {
        for name in ["null", "nvidia0", "nvidia15", "nvidiactl", "nvidia-uvm", "dri", "..", "pts"] {
            assert!(is_known(name.as_bytes()), "{name}");
        }
        for name in ["infiniband", "gdrdrv", "nvidia-fs0", "nvidia", "ajantv20", "nvme0", "vfio"] {
            assert!(!is_known(name.as_bytes()), "{name}");
        }
    }
}
