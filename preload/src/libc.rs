//! Calls libc functions that this library cannot implement itself. They are found at run time in
//! the process's own libc.
//!
//! The references to these functions are weak, so the library also loads into a process whose libc
//! lacks one of them.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::elf;

/// Returns the address of a weakly linked symbol, or 0 if no loaded object defines it.
macro_rules! weak {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: reads one word of our own global offset table.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) address,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        address
    }};
}

/// The first fields of libc's `struct dl_phdr_info`, which describes a loaded object.
#[repr(C)]
pub struct PhdrInfo {
    pub base: usize,
    pub name: *const c_char,
    pub headers: *const elf::ProgramHeader,
    pub header_count: u16,
}

type Visit = unsafe extern "C" fn(*const PhdrInfo, usize, *mut c_void) -> c_int;

/// Calls `visit` for each loaded object with `dl_iterate_phdr`. Does nothing if libc lacks that
/// function.
///
/// # Safety
/// `visit` must be sound to call with `data` for each loaded object.
pub unsafe fn iterate_objects(visit: Visit, data: *mut c_void) {
    let address = weak!("dl_iterate_phdr");
    if address != 0 {
        // SAFETY: the symbol has had this signature in every libc that has it.
        let iterate: unsafe extern "C" fn(Visit, *mut c_void) -> c_int =
            unsafe { core::mem::transmute(address) };
        // SAFETY: the caller guarantees that `visit` may be called with `data`.
        unsafe { iterate(visit, data) };
    }
}

/// Reads the monotonic clock in nanoseconds. libc usually does so without a system call. Returns
/// `None` if libc lacks `clock_gettime`.
pub fn monotonic_ns() -> Option<u64> {
    const CLOCK_MONOTONIC: c_int = 1;
    let address = weak!("clock_gettime");
    if address == 0 {
        return None;
    }
    let mut time = [0_i64; 2]; // struct timespec
    // SAFETY: the symbol has had this signature in every libc of this machine that has it.
    let get: unsafe extern "C" fn(c_int, *mut i64) -> c_int =
        unsafe { core::mem::transmute(address) };
    // SAFETY: the call cannot fail, because every kernel has this clock, and there is space for the
    // result.
    unsafe { get(CLOCK_MONOTONIC, time.as_mut_ptr()) };
    let [seconds, nanoseconds] = time.map(i64::cast_unsigned);
    Some(seconds.wrapping_mul(1_000_000_000).wrapping_add(nanoseconds))
}

/// Returns the environment of the process: a list that ends with a null pointer. The list itself
/// may be null.
pub fn environ() -> *const *const c_char {
    let environ = weak!("environ") as *const *const *const c_char;
    // SAFETY: libc's variable, if it exists.
    if environ.is_null() { core::ptr::null() } else { unsafe { *environ } }
}

/// Returns the value of an environment variable of the process.
pub fn environment(name: &[u8]) -> Option<&'static [u8]> {
    let environ = environ();
    // SAFETY: a list that ends with a null pointer, or null itself. If a program changes its
    // environment during its first CUDA call, this read is unsafe, as a call of `getenv` would be.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            if let Some([b'=', value @ ..]) = text.strip_prefix(name) {
                return Some(value);
            }
            entry = entry.add(1);
        }
    }
    None
}

/// Whether the process has more privileges than its caller (setuid). The environment comes from the
/// caller, so it must not control this library in such a process.
pub fn is_secure() -> bool {
    const AT_SECURE: u64 = 23;
    let address = weak!("getauxval");
    if address == 0 {
        return false;
    }
    // SAFETY: the symbol has this signature in glibc and musl.
    let getauxval: unsafe extern "C" fn(u64) -> u64 = unsafe { core::mem::transmute(address) };
    // SAFETY: reads the auxiliary vector.
    unsafe { getauxval(AT_SECURE) != 0 }
}

/// Runs `body`, and then restores the `errno` that the application had before.
pub fn with_errno_kept<R>(body: impl FnOnce() -> R) -> R {
    let address = weak!("__errno_location");
    if address == 0 {
        return body();
    }
    // SAFETY: the symbol has this signature in glibc and musl.
    let location: unsafe extern "C" fn() -> *mut c_int = unsafe { core::mem::transmute(address) };
    // SAFETY: the calling thread's errno, valid as long as the thread.
    let errno = unsafe { location() };
    // SAFETY: this is the calling thread's errno.
    let before = unsafe { errno.read() };
    let result = body();
    // SAFETY: this is the calling thread's errno.
    unsafe { errno.write(before) };
    result
}

/// Returns the set of signals that libc sends to all threads for `setuid` and cancellation. libc
/// waits until each thread has handled such a signal. If a thread of this library blocked these
/// signals, the application would hang.
pub fn internal_signals() -> u64 {
    const fn bit(signal: u64) -> u64 {
        1 << (signal - 1)
    }
    if weak!("gnu_get_libc_version") == 0 { bit(32) | bit(33) | bit(34) } else { bit(32) | bit(33) }
}

/// The first fields of the loader's `struct link_map`, which describes a loaded object.
#[repr(C)]
pub struct LinkMap {
    /// Offset that the loader adds to the addresses in the file.
    pub base: usize,
    name: *const c_char,
    /// The object's dynamic section: pairs of tag and value. It has the addresses of the symbol table
    /// and the string table.
    pub dynamic: *const [usize; 2],
}

/// Adds a reference to a loaded library, so that it stays loaded for the life of the process. Takes
/// the loader's lock, so the agent's thread must not call it. Returns `None` if the library is not
/// loaded, or libc cannot return its address.
pub fn keep_loaded(name: &CStr) -> Option<&'static LinkMap> {
    const LAZY_NOLOAD_NODELETE: c_int = 1 | 4 | 0x1000;
    const RTLD_DI_LINKMAP: c_int = 2;
    type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    type Dlinfo = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
    // Before glibc 2.34, `dlopen` and `dlinfo` are in libdl.
    let address = match weak!("dlopen") {
        0 => elf::find_function(b"dlopen")?,
        found => found,
    };
    // SAFETY: the symbol has this signature in every libc.
    let dlopen: Dlopen = unsafe { core::mem::transmute(address) };
    // SAFETY: a string with its terminating zero. RTLD_NOLOAD loads nothing new.
    let handle = unsafe { dlopen(name.as_ptr(), LAZY_NOLOAD_NODELETE) };
    if handle.is_null() {
        return None;
    }
    let address = match weak!("dlinfo") {
        0 => elf::find_function(b"dlinfo")?,
        found => found,
    };
    // SAFETY: the symbol has this signature in glibc and musl.
    let dlinfo: Dlinfo = unsafe { core::mem::transmute(address) };
    let mut map: *const LinkMap = core::ptr::null();
    // SAFETY: the handle is never closed. The request writes one pointer, to a description that
    // exists as long as the library is loaded, which is until the process ends.
    unsafe {
        let failed = dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0;
        map.as_ref().filter(|_| !failed)
    }
}

type ThreadMain = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// Stack size of a thread that [`start_thread`] starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StackSize {
    /// The size that libc or the application has chosen for all threads. It is 8 MiB with glibc, and
    /// 128 KiB with musl.
    Default,
    /// A size that suffices for the driver's compiler, which needs 1 MiB.
    Large,
}

/// True once [`start_thread`] could not request the large stack that a thread needs. The thread
/// then has the default stack, which may be too small.
static HAS_SMALL_STACKS: AtomicBool = AtomicBool::new(false);

/// Whether all threads that need a large stack were started with one.
pub fn are_stacks_large() -> bool {
    !HAS_SMALL_STACKS.load(Ordering::SeqCst)
}

/// Starts a thread with the functions of the application's libc. They set up thread-local storage,
/// which libcuda uses and a plain `clone` would not set up.
pub fn start_thread(main: ThreadMain, argument: *mut c_void, stack: StackSize) -> bool {
    type Create = unsafe extern "C" fn(*mut usize, *const c_void, ThreadMain, *mut c_void) -> c_int;
    // Before glibc 2.34, `pthread_create` is in libpthread, which may be loaded outside of this
    // library's scope.
    let address = match weak!("pthread_create") {
        0 => elf::find_function(b"pthread_create").unwrap_or(0),
        found => found,
    };
    if address == 0 {
        return false;
    }
    // SAFETY: the symbol has this signature in every libc.
    let create: Create = unsafe { core::mem::transmute(address) };
    let mut thread = 0;
    let mut start = |attributes: *const c_void| {
        // SAFETY: null or initialised attributes; the caller matches `main` and its argument.
        unsafe { create(&raw mut thread, attributes, main, argument) == 0 }
    };
    let started = (stack == StackSize::Large && with_large_stack(&mut start))
        || (start(core::ptr::null()) && {
            HAS_SMALL_STACKS.fetch_or(stack == StackSize::Large, Ordering::SeqCst);
            true
        });
    let address = match weak!("pthread_detach") {
        0 => elf::find_function(b"pthread_detach").unwrap_or(0),
        found => found,
    };
    if started && address != 0 {
        // SAFETY: the symbol has this signature in every libc; no thread joins this one.
        unsafe {
            let detach: unsafe extern "C" fn(usize) -> c_int = core::mem::transmute(address);
            detach(thread);
        }
    }
    started
}

/// Calls `start` with thread attributes that request a large stack. Returns the result of `start`,
/// or false if libc lacks the functions for thread attributes.
fn with_large_stack(start: impl FnOnce(*const c_void) -> bool) -> bool {
    const STACK_BYTES: usize = 8 << 20;
    type Attribute = unsafe extern "C" fn(*mut c_void) -> c_int;
    // Before glibc 2.34, these functions may be outside of this library's scope, as
    // `pthread_create` may.
    let addresses = [
        (weak!("pthread_attr_init"), &b"pthread_attr_init"[..]),
        (weak!("pthread_attr_setstacksize"), b"pthread_attr_setstacksize"),
        (weak!("pthread_attr_destroy"), b"pthread_attr_destroy"),
    ]
    .map(|(found, name)| if found == 0 { elf::find_function(name).unwrap_or(0) } else { found });
    if addresses.contains(&0) {
        return false;
    }
    let [init, set_size, destroy] = addresses;
    // pthread_attr_t has 56 bytes in glibc and musl.
    let mut attributes = [0_u64; 16];
    let at = attributes.as_mut_ptr().cast::<c_void>();
    // SAFETY: the symbols have these signatures in glibc and musl; the attributes are initialised
    // before they are used, and in place until they are destroyed.
    unsafe {
        let init: Attribute = core::mem::transmute(init);
        let destroy: Attribute = core::mem::transmute(destroy);
        let set_size: unsafe extern "C" fn(*mut c_void, usize) -> c_int =
            core::mem::transmute(set_size);
        if init(at) != 0 {
            return false;
        }
        let started = set_size(at, STACK_BYTES) == 0 && start(at);
        destroy(at);
        started
    }
}
