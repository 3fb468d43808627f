//! Identifies the process at the other end of a socket, and validates its counter file.

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use affinode_core::input::Identity;
use affinode_proto::wire::counters::PAGE_BYTES;
use nix::sys::socket::{getsockopt, sockopt::PeerPidfd};
use rustix::{
    event::{PollFd, PollFlags},
    fs::{FileType, SealFlags},
    process::{Pid, PidfdFlags},
};

use crate::inventory::process;

/// Value of `f_type` for tmpfs (`linux/magic.h`). The counter file must be a memfd, and the kernel
/// keeps memfds on a tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Maximum memory of a counter file in bytes. The kernel may store a small file in a huge page.
const MAX_PAGE_MEMORY_BYTES: u64 = 2 << 20;

/// Reason why the controller refused a process that connected.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The kernel does not report the pid of the process.
    #[error("the process that connected has no pid in the controller's pid namespace")]
    NoPid,
    /// The process has ended, or its folder in `/proc` cannot be read.
    #[error("cannot identify process {pid}")]
    Process {
        pid: u32,
        #[source]
        source: std::io::Error,
    },
    /// The process ended while the controller identified it. Contains its pid.
    #[error("process {0} ended while it was identified")]
    Ended(u32),
    /// The Hello (the agent's first message) carried no descriptor, or more than one. It must carry
    /// exactly one descriptor, the counter file. The value is the number of descriptors.
    #[error("the Hello carries {0} descriptors, but must carry one: the counter file")]
    Descriptors(usize),
    /// The counter file cannot be examined.
    #[error("cannot examine the counter file")]
    Page(#[source] std::io::Error),
    /// The descriptor is not a counter file, which is a memfd of a fixed size. For example, it is a
    /// pipe, a file on FUSE, a file on huge pages, or a file of another size.
    #[error("the counter file is not a memfd of {PAGE_BYTES} bytes")]
    NotAPage,
    /// The size of the counter file can change, or the file has memory beyond its size. When the
    /// controller closes the file, the kernel frees its memory, which takes 0.1 s for each GiB.
    #[error(
        "the counter file is not sealed against changes of its size, or has memory beyond its \
         size; Affinode's library seals it, so use the library of this installation"
    )]
    NotSealed,
}

/// Result of an identification: the identity of the process, the lead of its clock, and its pidfd.
/// The lead is the time in milliseconds by which the process's `CLOCK_MONOTONIC` is ahead of the
/// controller's. The pidfd becomes readable when the process ends.
pub type Identified = (Identity, i64, OwnedFd);

/// Identifies the process at the other end of a socket.
///
/// # Errors
/// [`PeerError`]: the process has ended or cannot be identified.
pub fn identify(peer: &(impl AsFd + AsRawFd)) -> Result<Identified, PeerError> {
    let credentials = rustix::net::sockopt::socket_peercred(peer).map_err(|_| PeerError::NoPid)?;
    let pid = credentials.pid;
    identify_pid(pid, getsockopt(peer, PeerPidfd).ok())
}

/// Identifies the process with the pid `raw`. `peer` is the pidfd that the kernel returned for the
/// connected process (Linux 6.5). If it is `None`, a pidfd is opened by pid. The pidfd
/// distinguishes an ended process from a later process with the same pid.
fn identify_pid(raw: Pid, peer: Option<OwnedFd>) -> Result<Identified, PeerError> {
    let pid = raw.as_raw_nonzero().get().cast_unsigned();
    let pidfd = match peer {
        Some(pidfd) => pidfd,
        None => rustix::process::pidfd_open(raw, PidfdFlags::NONBLOCK)
            .map_err(|e| PeerError::Process { pid, source: e.into() })?,
    };
    let identity = process::identity(pid).map_err(|source| PeerError::Process { pid, source })?;
    let clock_ahead_ms = process::clock_ahead_ms(pid);
    // This check comes last. The pidfd refers to one process. If this process still runs, its pid
    // was not reused, so all values that were read above by pid belong to it.
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    let now = rustix::event::Timespec::default();
    let ended = rustix::event::poll(&mut polled, Some(&now))
        .map_err(|e| PeerError::Process { pid, source: e.into() })?;
    if ended > 0 { Err(PeerError::Ended(pid)) } else { Ok((identity, clock_ahead_ms, pidfd)) }
}

/// Returns the counter file from the descriptors that came with a Hello.
///
/// # Errors
/// [`PeerError`]: there is not exactly one descriptor, or it is not a sealed memfd of the right
/// size.
pub fn page(descriptors: Vec<OwnedFd>) -> Result<File, PeerError> {
    let [page]: [OwnedFd; 1] = descriptors
        .try_into()
        .map_err(|descriptors: Vec<OwnedFd>| PeerError::Descriptors(descriptors.len()))?;
    // Other files are refused here, because `fstat` on a file in FUSE may block until its server
    // answers.
    if !is_memory(&page) {
        return Err(PeerError::NotAPage);
    }
    let io = |e: rustix::io::Errno| PeerError::Page(e.into());
    let stat = rustix::fs::fstat(page.as_fd()).map_err(io)?;
    let system = rustix::fs::fstatfs(page.as_fd()).map_err(io)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let memory = u64::try_from(system.f_type).is_ok_and(|magic| magic == TMPFS_MAGIC);
    let fits = usize::try_from(stat.st_size).is_ok_and(|size| size == PAGE_BYTES);
    if !(regular && memory && fits) {
        return Err(PeerError::NotAPage);
    }
    // The seals come first: afterwards, the file can get no more memory.
    let seals = rustix::fs::fcntl_get_seals(&page).map_err(io)?;
    let memory_blocks = rustix::fs::fstat(page.as_fd()).map_err(io)?.st_blocks;
    let is_small = u64::try_from(memory_blocks).is_ok_and(|n| n <= MAX_PAGE_MEMORY_BYTES / 512);
    let is_sealed = seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    if is_sealed && is_small { Ok(File::from(page)) } else { Err(PeerError::NotSealed) }
}

/// Returns whether a file is in memory, as a memfd is. The check reads the file's seals, which only
/// such files have. The kernel calls no file system for this, so the check cannot block.
pub fn is_memory(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    fn unsealed(bytes: usize) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("page", flags).unwrap();
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        fd
    }

    fn memfd(bytes: usize) -> OwnedFd {
        let fd = unsealed(bytes);
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        fd
    }

    /// A process could otherwise fill the file after the check, up to its memory limit, and make
    /// the actor free all that memory.
    #[test]
    fn page_of_unlimited_memory_is_refused() {
        assert!(matches!(page(vec![unsealed(PAGE_BYTES)]), Err(PeerError::NotSealed)));
        for left_out in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let fd = unsealed(PAGE_BYTES);
            rustix::fs::fcntl_add_seals(&fd, SEALS.difference(left_out)).unwrap();
            assert!(matches!(page(vec![fd]), Err(PeerError::NotSealed)), "{left_out:?}");
        }
        // Memory beyond the end of the file is not part of its size.
        let fd = unsealed(PAGE_BYTES);
        let keep_size = rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&fd, keep_size, 0, 2 * MAX_PAGE_MEMORY_BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        assert!(matches!(page(vec![fd]), Err(PeerError::NotSealed)));
    }

    #[test]
    fn only_one_memfd_of_the_right_size_is_a_page() {
        assert!(page(vec![memfd(PAGE_BYTES)]).is_ok());
        assert!(matches!(page(vec![]), Err(PeerError::Descriptors(0))));
        assert!(matches!(
            page(vec![memfd(PAGE_BYTES), memfd(PAGE_BYTES)]),
            Err(PeerError::Descriptors(2))
        ));
        assert!(matches!(page(vec![memfd(PAGE_BYTES - 1)]), Err(PeerError::NotAPage)));
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        assert!(matches!(page(vec![reader]), Err(PeerError::NotAPage)));
        let proc_file = File::open("/proc/self/stat").unwrap();
        assert!(matches!(page(vec![proc_file.into()]), Err(PeerError::NotAPage)));
    }

    #[test]
    fn a_dead_process_is_not_identified() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(identify(&ours).unwrap().0.pid, std::process::id());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        child.wait().unwrap();
        assert!(identify_pid(pid, None).is_err());
    }

    /// Checks that the identification fails if the pid of the connected process now belongs to
    /// another process.
    #[test]
    fn a_pid_that_was_given_again_is_not_believed() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let connected =
            rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::NONBLOCK).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let next = rustix::process::getpid();
        let answer = identify_pid(next, Some(connected));
        assert!(matches!(answer, Err(PeerError::Ended(_))), "{answer:?}");
    }
}
