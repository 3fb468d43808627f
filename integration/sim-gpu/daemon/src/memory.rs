//! Device memory of the simulated GPUs, as memory files of fixed size. The daemon fills the files,
//! so that simulated VRAM is charged to the daemon's cgroup and never to the cgroup of the process
//! that uses it.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Creates a memory file of exactly this size. It is sealed against a change of its size.
pub fn create(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    let length = i64::try_from(bytes).map_err(io::Error::other)?;
    let fd = memfd_create(name.as_c_str(), MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    fallocate(&fd, FallocateFlags::empty(), 0, length)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(fd)
}
