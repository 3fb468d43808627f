//! Makes system calls without libc. The library does not link against libc, and `errno` belongs to
//! the application.

use core::arch::asm;
use core::ffi::CStr;
use core::sync::atomic::AtomicU32;

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!(
    "this library can be built for Linux on x86_64 only: it contains system call numbers"
);

pub mod datagram;
pub mod folder;
mod memory;
pub mod task;

pub use self::memory::{
    MappedRegion, PagePlacement, SealedFile, are_same, copy_own_memory, discard, keep_page_sizes,
    make_resident, map_aligned, map_over, map_private, map_to_read, memory_file, prefer_huge_pages,
    punch, read_at, seal_size, unmap_private, wipe_on_fork, with_scratch,
};

mod number {
    pub const READ: usize = 0;
    pub const OPEN: usize = 2;
    pub const CLOSE: usize = 3;
    pub const FSTAT: usize = 5;
    pub const POLL: usize = 7;
    pub const MMAP: usize = 9;
    pub const MPROTECT: usize = 10;
    pub const MUNMAP: usize = 11;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const PREAD64: usize = 17;
    pub const ACCESS: usize = 21;
    pub const MREMAP: usize = 25;
    pub const MADVISE: usize = 28;
    pub const DUP2: usize = 33;
    pub const NANOSLEEP: usize = 35;
    pub const GETPID: usize = 39;
    pub const SOCKET: usize = 41;
    pub const CONNECT: usize = 42;
    pub const SENDMSG: usize = 46;
    pub const RECVMSG: usize = 47;
    pub const SHUTDOWN: usize = 48;
    pub const BIND: usize = 49;
    pub const SOCKETPAIR: usize = 53;
    pub const SETSOCKOPT: usize = 54;
    pub const CLONE: usize = 56;
    pub const EXECVE: usize = 59;
    pub const WAIT4: usize = 61;
    pub const KILL: usize = 62;
    pub const FCNTL: usize = 72;
    pub const FLOCK: usize = 73;
    pub const FTRUNCATE: usize = 77;
    pub const RT_SIGTIMEDWAIT: usize = 128;
    pub const GETRUSAGE: usize = 98;
    pub const SCHED_SETAFFINITY: usize = 203;
    pub const SCHED_GETAFFINITY: usize = 204;
    pub const PRCTL: usize = 157;
    pub const GETTID: usize = 186;
    pub const MUNLOCK: usize = 150;
    pub const FUTEX: usize = 202;
    pub const GETDENTS64: usize = 217;
    pub const CLOCK_GETTIME: usize = 228;
    pub const TGKILL: usize = 234;
    pub const READLINKAT: usize = 267;
    pub const FALLOCATE: usize = 285;
    pub const PIPE2: usize = 293;
    pub const PRLIMIT64: usize = 302;
    pub const GETCPU: usize = 309;
    pub const PROCESS_VM_READV: usize = 310;
    pub const GETRANDOM: usize = 318;
    pub const MEMFD_CREATE: usize = 319;
    pub const MEMBARRIER: usize = 324;
    pub const CLOSE_RANGE: usize = 436;
}

/// Error of a failed system call, as a positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// The signal that wakes the agent. The agent blocks the signal and waits for it. The signal's
/// default action is to be ignored.
pub const SIGURG: u64 = 23;

/// `O_CLOEXEC`, the flag of `open`.
const CLOEXEC: usize = 0x8_0000;

const ENOENT: Errno = Errno(2);
pub const ESRCH: Errno = Errno(3);
pub const EINTR: Errno = Errno(4);
pub const EAGAIN: Errno = Errno(11);
pub const ETOOMANYREFS: Errno = Errno(109);

/// Makes one system call.
///
/// # Safety
/// The arguments must meet the conditions of this system call.
unsafe fn call(n: usize, args: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = args;
    let ret: isize;
    // SAFETY: the kernel preserves all registers but rax, rcx and r11. The caller guarantees that
    // the memory that the kernel reads and writes is valid.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") n as isize => ret,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    if (-4095..0).contains(&ret) { Err(Errno(-ret as i32)) } else { Ok(ret as usize) }
}

/// Makes a system call that is sound with any arguments: they are numbers, or pointers to memory
/// that outlives the call.
fn plain(n: usize, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: this function is private to the module. Each use below passes numbers, or references
    // that live across the call with the sizes that the kernel assumes.
    unsafe { call(n, args) }
}

/// Returns this process's id. It is not cached, because it changes in a forked child.
pub fn getpid() -> u32 {
    plain(number::GETPID, [0; 6]).unwrap_or(0) as u32
}

/// The calling thread's id.
pub fn gettid() -> u32 {
    plain(number::GETTID, [0; 6]).unwrap_or(0) as u32
}

/// Whether a thread of this process exists. Returns true if this cannot be determined.
pub fn thread_lives(tid: u32) -> bool {
    signal_thread(tid, 0) != Err(ESRCH)
}

/// Sends a signal to one thread of this process.
pub fn signal_thread(tid: u32, signal: u64) -> Result<(), Errno> {
    let args = [getpid() as usize, tid as usize, signal as usize, 0, 0, 0];
    plain(number::TGKILL, args).map(drop)
}

/// Sets the name of the calling thread. At most 15 bytes of it are used.
pub fn set_thread_name(name: &CStr) {
    const PR_SET_NAME: usize = 15;
    let args = [PR_SET_NAME, name.as_ptr() as usize, 0, 0, 0, 0];
    let _ = plain(number::PRCTL, args);
}

/// Sets the signal mask of the calling thread. Returns the previous mask.
pub fn set_signal_mask(mask: u64) -> u64 {
    const SIG_SETMASK: usize = 2;
    let mut old = 0_u64;
    let (new, old_at) = (&raw const mask as usize, &raw mut old as usize);
    let _ = plain(number::RT_SIGPROCMASK, [SIG_SETMASK, new, old_at, size_of::<u64>(), 0, 0]);
    old
}

/// Waits until a blocked signal of `mask` is pending, and consumes it. The function can also return
/// without a signal: after the timeout, after an interruption or, if the kernel refuses the call,
/// after at most 50 ms. The caller must therefore read the state that the signal announces.
pub fn wait_signal(mask: u64, timeout_ms: u64) {
    const MOMENT_MS: u64 = 50;
    static NEVER_WOKEN: AtomicU32 = AtomicU32::new(0);
    let timeout = Timespec::from_ms(timeout_ms);
    let (mask, timeout) = (&raw const mask as usize, &raw const timeout as usize);
    let args = [mask, 0, timeout, size_of::<u64>(), 0, 0];
    match plain(number::RT_SIGTIMEDWAIT, args) {
        Ok(_) | Err(EAGAIN | EINTR) => {}
        // Wait with a futex, because the filter that refused this call may also refuse a sleep.
        Err(_) => futex_wait(&NEVER_WOKEN, 0, timeout_ms.min(MOMENT_MS)),
    }
}

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

impl Timespec {
    fn from_us(us: u64) -> Timespec {
        Timespec { seconds: (us / 1_000_000) as i64, nanoseconds: (us % 1_000_000 * 1_000) as i64 }
    }

    fn from_ms(ms: u64) -> Timespec {
        Timespec::from_us(ms.saturating_mul(1_000))
    }
}

/// Sleeps for this number of microseconds, or less if a signal is handled.
pub fn sleep_us(us: u64) {
    let time = Timespec::from_us(us);
    let _ = plain(number::NANOSLEEP, [&raw const time as usize, 0, 0, 0, 0, 0]);
}

/// Returns the microseconds since boot, without the time in suspend.
pub fn now_us() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    let mut time = Timespec::from_us(0);
    let args = [CLOCK_MONOTONIC, &raw mut time as usize, 0, 0, 0, 0];
    let _ = plain(number::CLOCK_GETTIME, args);
    time.seconds as u64 * 1_000_000 + time.nanoseconds as u64 / 1_000
}

/// Sleeps while `word` has the value `value`, for at most `timeout_ms`. It may return early. The
/// futex is identified by the memory behind the word, so it also works across a fork.
pub fn futex_wait(word: &AtomicU32, value: u32, timeout_ms: u64) {
    const FUTEX_WAIT: usize = 0;
    let timeout = Timespec::from_ms(timeout_ms);
    let args = [
        core::ptr::from_ref(word) as usize,
        FUTEX_WAIT,
        value as usize,
        &raw const timeout as usize,
        0,
        0,
    ];
    let _ = plain(number::FUTEX, args);
}

/// Wakes all threads that sleep on `word`.
pub fn futex_wake_all(word: &AtomicU32) {
    const FUTEX_WAKE: usize = 1;
    let at = core::ptr::from_ref(word) as usize;
    let _ = plain(number::FUTEX, [at, FUTEX_WAKE, i32::MAX as usize, 0, 0, 0]);
}

/// Registers this process with the kernel, so that it can use [`barrier`].
pub fn register_barrier() -> Result<(), Errno> {
    const REGISTER_PRIVATE_EXPEDITED: usize = 1 << 4;
    plain(number::MEMBARRIER, [REGISTER_PRIVATE_EXPEDITED, 0, 0, 0, 0, 0]).map(drop)
}

/// Executes a full memory barrier on every running thread of the process.
pub fn barrier() -> Result<(), Errno> {
    const PRIVATE_EXPEDITED: usize = 1 << 3;
    plain(number::MEMBARRIER, [PRIVATE_EXPEDITED, 0, 0, 0, 0, 0]).map(drop)
}

/// A set of processors, with one bit for each processor.
pub type CpuSet = [u64; 128];

/// Returns the processors on which the calling thread may run.
pub fn processors_allowed() -> Option<CpuSet> {
    let mut set: CpuSet = [0; 128];
    let args = [0, size_of_val(&set), set.as_mut_ptr() as usize, 0, 0, 0];
    plain(number::SCHED_GETAFFINITY, args).ok().map(|_| set)
}

/// Returns the number of processors on which the calling thread may run, at least one.
pub fn processors() -> usize {
    let allowed = processors_allowed().unwrap_or([0; 128]);
    allowed.iter().map(|word| word.count_ones() as usize).sum::<usize>().max(1)
}

/// Restricts the calling thread to these processors. Returns false, without a change, if the thread
/// may not run on any of them.
pub fn run_on(set: &CpuSet) -> bool {
    let args = [0, size_of_val(set), set.as_ptr() as usize, 0, 0, 0];
    plain(number::SCHED_SETAFFINITY, args).is_ok()
}

fn limit(resource: usize) -> Option<usize> {
    let mut limits = [0_usize; 2];
    let args = [0, resource, 0, limits.as_mut_ptr() as usize, 0, 0];
    let [soft, _] = plain(number::PRLIMIT64, args).ok().map(|_| limits)?;
    Some(soft)
}

/// Returns the limit of open descriptors of the process. Returns 0 if it cannot be read.
pub fn descriptor_limit() -> usize {
    const RLIMIT_NOFILE: usize = 7;
    limit(RLIMIT_NOFILE).unwrap_or(0)
}

/// Returns the limit of the size of a file that the process may write. Returns `usize::MAX` if it
/// cannot be read.
fn file_limit_bytes() -> usize {
    const RLIMIT_FSIZE: usize = 1;
    limit(RLIMIT_FSIZE).unwrap_or(usize::MAX)
}

/// Reads the first bytes of a file, as many as fit into the buffer.
pub fn read_file<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    const RDONLY_CLOEXEC_NONBLOCK: usize = 0x8_0000 | 0x800;
    let args = [path.as_ptr() as usize, RDONLY_CLOEXEC_NONBLOCK, 0, 0, 0, 0];
    let fd = plain(number::OPEN, args).ok()?;
    let args = [fd, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0];
    let read = plain(number::READ, args);
    close(fd as i32);
    buffer.get(..read.ok()?)
}

/// Opens a file for reading.
pub fn open_to_read(path: &CStr) -> Option<Descriptor> {
    const RDONLY_CLOEXEC_NONBLOCK: usize = 0x8_0000 | 0x800;
    let args = [path.as_ptr() as usize, RDONLY_CLOEXEC_NONBLOCK, 0, 0, 0, 0];
    plain(number::OPEN, args).ok().map(|fd| Descriptor(fd as i32))
}

/// Returns the number of context switches of all threads of this process except the calling thread.
pub fn switches_of_others() -> u64 {
    const SELF: usize = 0;
    const THREAD: usize = 1;
    let of = |whom: usize| {
        // struct rusage: two times of two words, then 14 counts.
        let mut usage = [0_u64; 18];
        let args = [whom, usage.as_mut_ptr() as usize, 0, 0, 0, 0];
        let _ = plain(number::GETRUSAGE, args);
        let [.., voluntary, involuntary] = usage;
        voluntary.wrapping_add(involuntary)
    };
    of(SELF).wrapping_sub(of(THREAD))
}

/// Reads memory of this process that may be unmapped. Returns false if a part of it could not be
/// read.
pub fn read_own_memory(at: usize, words: &mut [usize]) -> bool {
    let bytes = size_of_val(words);
    // SAFETY: the memory is that of `words`, which is borrowed exclusively.
    unsafe { copy_own_memory(words.as_mut_ptr().cast(), at, bytes) }
}

/// Whether a path exists for this process.
pub fn exists(path: &CStr) -> bool {
    plain(number::ACCESS, [path.as_ptr() as usize, 0, 0, 0, 0, 0]).is_ok()
}

/// Whether this process can open a file for reading and writing now.
pub fn can_open(path: &CStr) -> bool {
    const RDWR_NONBLOCK_CLOEXEC: usize = 2 | 0x800 | 0x8_0000;
    let opened = plain(number::OPEN, [path.as_ptr() as usize, RDWR_NONBLOCK_CLOEXEC, 0, 0, 0, 0]);
    opened.is_ok_and(|fd| {
        close(fd as i32);
        true
    })
}

fn fcntl(fd: i32, command: usize, argument: usize) -> Result<usize, Errno> {
    plain(number::FCNTL, [fd as usize, command, argument, 0, 0, 0])
}

/// Moves a descriptor to a high number and closes the old one, because some programs expect certain
/// low numbers for their own descriptors. Returns the old number if the limit of descriptors is too
/// low.
pub fn lift(fd: i32) -> i32 {
    const F_DUPFD_CLOEXEC: usize = 1030;
    for lowest in [1000, 400, 200] {
        if let Ok(high) = fcntl(fd, F_DUPFD_CLOEXEC, lowest) {
            close(fd);
            return high as i32;
        }
    }
    fd
}

/// Returns a new descriptor, with a high number, of the file that a descriptor refers to.
pub fn duplicate(fd: i32) -> Option<Descriptor> {
    const F_DUPFD_CLOEXEC: usize = 1030;
    fcntl(fd, F_DUPFD_CLOEXEC, 0).ok().map(|new| Descriptor(lift(new as i32)))
}

/// Closes a descriptor that is known to belong to this library.
pub fn close(fd: i32) {
    let _ = plain(number::CLOSE, [fd as usize, 0, 0, 0, 0, 0]);
}

/// Identity of an open file. It shows whether a descriptor number still refers to the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub device: u64,
    pub inode: u64,
}

/// Returns the identity of the file that a descriptor refers to. Returns `None` if the descriptor
/// is closed.
pub fn identity(fd: i32) -> Option<Identity> {
    // struct stat begins with st_dev and st_ino, and is 144 bytes long.
    let mut stat = [0_u64; 18];
    let args = [fd as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0];
    plain(number::FSTAT, args).ok().map(|_| Identity { device: stat[0], inode: stat[1] })
}

/// Creates a Unix stream socket that never blocks.
pub fn stream_socket() -> Result<i32, Errno> {
    const AF_UNIX: usize = 1;
    const STREAM_NONBLOCK_CLOEXEC: usize = 1 | 0x800 | 0x8_0000;
    let args = [AF_UNIX, STREAM_NONBLOCK_CLOEXEC, 0, 0, 0, 0];
    plain(number::SOCKET, args).map(|fd| lift(fd as i32))
}

/// Connects a socket to `path`. If this fails, it can be tried again with the same socket.
pub fn connect(fd: i32, path: &[u8]) -> Result<(), Errno> {
    const AF_UNIX: u16 = 1;
    let mut address = [0_u8; 110];
    address[..2].copy_from_slice(&AF_UNIX.to_ne_bytes());
    let Some(room) = address.get_mut(2..2 + path.len()).filter(|r| r.len() < 108) else {
        return Err(Errno(36));
    };
    room.copy_from_slice(path);
    let args = [fd as usize, address.as_ptr() as usize, address.len(), 0, 0, 0];
    plain(number::CONNECT, args).map(drop)
}

/// Requests that the kernel sends `signal` to thread `tid` whenever `fd` becomes readable or its
/// other end is closed.
pub fn notify(fd: i32, tid: u32, signal: u64) -> Result<usize, Errno> {
    const F_SETFL: usize = 4;
    const F_SETSIG: usize = 10;
    const F_SETOWN_EX: usize = 15;
    const O_RDWR_NONBLOCK_ASYNC: usize = 2 | 0x800 | 0x2000;
    let owner = [0_u32, tid]; // struct f_owner_ex with F_OWNER_TID
    fcntl(fd, F_SETOWN_EX, owner.as_ptr() as usize)?;
    fcntl(fd, F_SETSIG, signal as usize)?;
    fcntl(fd, F_SETFL, O_RDWR_NONBLOCK_ASYNC)
}

/// Returns the number of the processor on which this thread runs, or 0 if it is unknown.
pub fn processor() -> u32 {
    let mut number = 0_u32;
    let _ = plain(number::GETCPU, [&raw mut number as usize, 0, 0, 0, 0, 0]);
    number
}

/// Sends bytes on a socket, with a descriptor if one is given. The bytes are sent as a whole or not
/// at all. The call neither blocks nor raises SIGPIPE.
pub fn send(fd: i32, bytes: &[u8], descriptor: Option<i32>) -> Result<usize, Errno> {
    const SOL_SOCKET: u64 = 1;
    const SCM_RIGHTS: u64 = 1;
    const DONTWAIT_NOSIGNAL: usize = 0x40 | 0x4000;
    let part = [bytes.as_ptr() as usize, bytes.len()];
    // struct cmsghdr and one descriptor.
    let length = 20_u64;
    let rights = descriptor.unwrap_or(-1);
    let control = [length, SOL_SOCKET | SCM_RIGHTS << 32, u64::from(rights as u32)];
    let mut message = [0_usize; 7];
    message[2] = part.as_ptr() as usize;
    message[3] = 1;
    if descriptor.is_some() {
        message[4] = control.as_ptr() as usize;
        message[5] = size_of_val(&control);
    }
    let at = message.as_ptr() as usize;
    plain(number::SENDMSG, [fd as usize, at, DONTWAIT_NOSIGNAL, 0, 0, 0])
}

/// An owned descriptor, such as one that was received from a socket. It is closed when the value is
/// dropped.
#[derive(Debug)]
pub struct Descriptor(i32);

impl Descriptor {
    /// Returns the descriptor's number. The descriptor is still closed when this value is dropped.
    pub fn number(&self) -> i32 {
        self.0
    }

    /// Moves the descriptor to a high number, which applications usually do not use.
    pub fn lifted(self) -> Descriptor {
        Descriptor(lift(self.take()))
    }

    /// Returns the number and gives up ownership. The caller must close it.
    pub fn take(self) -> i32 {
        let number = self.0;
        core::mem::forget(self);
        number
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// Receives bytes from a socket without blocking, and a descriptor if one was sent with them.
/// Returns 0 bytes at the end of the stream. If several descriptors were sent, the kernel passes
/// only the first.
pub fn receive(fd: i32, buffer: &mut [u8]) -> Result<(usize, Option<Descriptor>), Errno> {
    const DONTWAIT_CLOEXEC: usize = 0x40 | 0x4000_0000;
    const SOL_SOCKET_RIGHTS: u64 = 1 | 1 << 32;
    const ONE_DESCRIPTOR: u64 = 20;
    let part = [buffer.as_mut_ptr() as usize, buffer.len()];
    let mut control = [0_u64; 3];
    let mut message = [0_usize; 7];
    message[2] = part.as_ptr() as usize;
    message[3] = 1;
    message[4] = control.as_mut_ptr() as usize;
    // There is space for only one descriptor. In 24 bytes the kernel would pass two descriptors.
    message[5] = ONE_DESCRIPTOR as usize;
    let at = message.as_mut_ptr() as usize;
    let bytes = plain(number::RECVMSG, [fd as usize, at, DONTWAIT_CLOEXEC, 0, 0, 0])?;
    let came = control[0] == ONE_DESCRIPTOR && control[1] == SOL_SOCKET_RIGHTS;
    Ok((bytes, came.then(|| Descriptor(lift(control[2] as u32 as i32)))))
}

/// Shuts down a connection, for all processes that have a descriptor of it.
pub fn shut_down(fd: i32) {
    const SHUT_RDWR: usize = 2;
    let _ = plain(number::SHUTDOWN, [fd as usize, SHUT_RDWR, 0, 0, 0, 0]);
}

/// A lock on a folder. It holds for the whole node, because the folder is shared between
/// containers.
#[derive(Debug)]
pub enum FolderLock {
    /// The folder is locked through this descriptor until this value is dropped.
    Held(i32),
    /// The folder does not exist, so no other process can lock it.
    Missing,
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let FolderLock::Held(fd) = self {
            close(*fd);
        }
    }
}

/// Locks a folder. Returns `None` if another process has locked it, or if this process cannot open
/// it, for example because it has no free descriptor. Other processes may then have the lock.
pub fn lock_folder(path: &CStr) -> Option<FolderLock> {
    const O_DIRECTORY_CLOEXEC: usize = 0o200_000 | CLOEXEC;
    const LOCK_EXCLUSIVE_NONBLOCK: usize = 2 | 4;
    let args = [path.as_ptr() as usize, O_DIRECTORY_CLOEXEC, 0, 0, 0, 0];
    let fd = match plain(number::OPEN, args) {
        Ok(fd) => fd,
        Err(ENOENT) => return Some(FolderLock::Missing),
        Err(_) => return None,
    };
    let lock = FolderLock::Held(fd as i32);
    plain(number::FLOCK, [fd, LOCK_EXCLUSIVE_NONBLOCK, 0, 0, 0, 0]).ok().map(|_| lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_thread_lives_and_a_joined_one_does_not() {
        assert!(thread_lives(gettid()));
        let tid = std::thread::spawn(gettid).join().unwrap();
        // `join` returns when the kernel clears the thread's id, which is before the task has
        // completely ended.
        while thread_lives(tid) {
            std::thread::yield_now();
        }
    }
    /// Only a folder that does not exist can be locked by no process.
    #[test]
    fn folder_that_cannot_be_opened_is_not_locked() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = folder.path().join(name).into_os_string().into_encoded_bytes();
            std::ffi::CString::new(path).unwrap()
        };
        std::os::unix::fs::symlink("loop", folder.path().join("loop")).unwrap();
        assert!(lock_folder(&path("loop")).is_none());
        assert!(matches!(lock_folder(&path("missing")), Some(FolderLock::Missing)));
        let held = lock_folder(&path("")).unwrap();
        assert!(matches!(held, FolderLock::Held(_)) && lock_folder(&path("")).is_none());
        drop(held);
        assert!(lock_folder(&path("")).is_some());
    }
}
