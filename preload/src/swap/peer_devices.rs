//! Detects other devices on the bus that could access device memory: network cards, capture cards,
//! drives.
//!
//! To map and unmap memory that such devices may access takes 12 us longer (H200, driver 580.159).
//! This is about a seventh of the time of a pair of `cuMemAlloc` and `cuMemFree`. A container
//! without such a device in `/dev` cannot use one.

use core::ffi::CStr;

use crate::sys::{self, folder};

const DEVICES: &CStr = c"/dev";
const DESCRIPTORS: &CStr = c"/proc/self/fd";

/// Whether `/dev` contains a device that is neither usual in a container nor part of a GPU. True
/// also if `/dev` cannot be read.
pub fn has_others() -> bool {
    folder::has(DEVICES, |name| !is_known(name)).unwrap_or(true)
}

/// Whether another device may access memory of this process without a call into the driver. The
/// process then has the file of such a device open, and the kernel gives the device the pages
/// behind GPU addresses (`nvidia_p2p_get_pages`). The gate does not stop the device's writes, and
/// the driver's lock does not wait for them. The writes go to the memory that was mapped when the
/// device requested the pages.
pub fn is_reached() -> bool {
    has_others() && is_reached_by(DESCRIPTORS, has_peer_memory())
}

fn is_reached_by(descriptors: &CStr, peer_memory: bool) -> bool {
    let reaches = |device: &[u8]| {
        device.starts_with(b"/dev/gdrdrv")
            || device.starts_with(b"/dev/nvidia-fs")
            || (peer_memory && device.starts_with(b"/dev/infiniband/uverbs"))
    };
    folder::has_link(descriptors, reaches).unwrap_or(true)
}

/// Whether network cards accept GPU addresses as memory (`ibv_reg_mr`), because a kernel module for
/// this is loaded. True also if this cannot be determined. Without such a module, network cards
/// accept only descriptors, which come from a call into the driver.
fn has_peer_memory() -> bool {
    const MODULES: [&CStr; 2] = [c"/sys/module/nvidia_peermem", c"/sys/module/nv_peer_mem"];
    !sys::exists(c"/sys/module") || MODULES.into_iter().any(sys::exists)
}

fn is_known(name: &[u8]) -> bool {
    is_usual(name) || is_gpu(name)
}

/// Whether `/dev` of every container has a file of this name. The names are match patterns and not
/// a table, because the loader would relocate the table's pointers in every process.
fn is_usual(name: &[u8]) -> bool {
    matches!(
        name,
        b"." | b".."
            | b"console"
            | b"core"
            | b"fd"
            | b"full"
            | b"mqueue"
            | b"null"
            | b"ptmx"
            | b"pts"
            | b"random"
            | b"shm"
            | b"stderr"
            | b"stdin"
            | b"stdout"
            | b"tty"
            | b"urandom"
            | b"zero"
    )
}

/// Whether the name is that of a file which appears in `/dev` together with a GPU, or which
/// Kubernetes adds there.
fn is_gpu(name: &[u8]) -> bool {
    let number = name.strip_prefix(b"nvidia");
    matches!(
        name,
        b"nvidiactl"
            | b"nvidia-uvm"
            | b"nvidia-uvm-tools"
            | b"nvidia-modeset"
            | b"nvidia-caps"
            | b"nvidia-caps-imex-channels"
            | b"dri"
            | b"termination-log"
    ) || number.is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit))
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

    #[test]
    fn open_peer_device_reaches_the_process() {
        let dir = std::env::temp_dir().join(format!("affinode-open-{}", std::process::id()));
        let path = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
        assert!(is_reached_by(&path, false), "an unreadable folder counts as reached");
        for (device, alone, with_peers) in [
            ("/dev/nvidia0", false, false),
            ("socket:[7]", false, false),
            ("/dev/infiniband/rdma_cm", false, false),
            ("/dev/infiniband/uverbs3", false, true),
            ("/dev/gdrdrv", true, true),
            ("/dev/nvidia-fs12", true, true),
        ] {
            std::fs::create_dir_all(&dir).unwrap();
            std::os::unix::fs::symlink("/dev/null", dir.join("0")).unwrap();
            std::os::unix::fs::symlink(device, dir.join("1")).unwrap();
            let found = [false, true].map(|peers| is_reached_by(&path, peers));
            assert_eq!(found, [alone, with_peers], "{device}");
            std::fs::remove_dir_all(&dir).unwrap();
        }
        assert!(!is_reached_by(DESCRIPTORS, true), "this process has no such device open");
    }
}
