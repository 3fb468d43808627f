//! Registration of the process and of its threads.
//!
//! ```text
//! New ──first CUDA call──> Busy ──page, barrier, agent thread──> Ready
//!  ^                         └── disabled, or anything missing ─> Unmanaged (all calls pass)
//!  └──────────────────────────── fork: the child finds zeroes ───────┘
//! ```
//!
//! The state is in one page, which the kernel zeroes in a forked child. Zero means New, so the
//! child needs no fork handler. Each registration has a token. A thread's thread-local block
//! contains the token of the registration to which the thread belongs. A process and its forked
//! descendants all have different tokens.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use affinode_proto::paths::DISABLE_ENV;
use affinode_proto::wire::counters::{Gate, PAGE_BYTES};

use crate::counters::{CounterPage, ThreadSlot};
use crate::libc::StackSize;
use crate::oom_wait::OomWaiter;
use crate::vram_limit::VramLimit;
use crate::{agent, exit, fds, hazard, libc, nvml, swap, sys};

const NEW: u32 = 0;
const BUSY: u32 = 1;
const READY: u32 = 2;
const UNMANAGED: u32 = 3;

/// Registration of this process with the controller. A forked child starts with all zero.
#[repr(C, align(4096))]
pub struct Process {
    /// Token of this registration, a multiple of [`TOKEN_STEP`]; 0 while the process is not registered.
    /// This is the first field, because the thunk compares it.
    token: AtomicU64,
    page: AtomicPtr<CounterPage>,
    state: AtomicU32,
    /// 1 if the kernel does not support the memory barrier on all threads. All threads then use the
    /// shared slot 0.
    unfenced: AtomicU32,
    page_fd: AtomicI32,
    agent_tid: AtomicU32,
    /// Id of the thread that registers the process while the state is BUSY.
    registering_tid: AtomicU32,
    /// Hook number of the call that arrived last at the closed gate.
    pub waiting_hook: AtomicU32,
    /// 1 once the process has shared an event with another process, or opened an event of another
    /// process.
    pub shares_events: AtomicU32,
    /// State of the allocation that waits for free VRAM, if there is one.
    pub oom_wait: OomWaiter,
    /// The limit of the container's VRAM.
    pub vram_limit: VramLimit,
    /// Counts of calls into NVML.
    pub nvml: nvml::NvmlCallCount,
    /// State of the process's first load of a CUDA module, which must end before the library copies
    /// memory.
    pub module_load: swap::loader_lock::ModuleLoad,
}

const _: () = assert!(size_of::<Process>() == 4096);

pub static PROCESS: Process = Process {
    token: AtomicU64::new(0),
    page: AtomicPtr::new(core::ptr::null_mut()),
    state: AtomicU32::new(NEW),
    unfenced: AtomicU32::new(0),
    page_fd: AtomicI32::new(0),
    agent_tid: AtomicU32::new(0),
    registering_tid: AtomicU32::new(0),
    waiting_hook: AtomicU32::new(0),
    shares_events: AtomicU32::new(0),
    oom_wait: OomWaiter::new(),
    vram_limit: VramLimit::new(),
    nvml: nvml::NvmlCallCount::new(),
    module_load: swap::loader_lock::ModuleLoad::new(),
};

const TOKEN_STEP: u64 = 16;
/// Bit that is added to the token of a thread that uses the shared slot. The token then differs
/// from the process's token, so the thread does not take the thunk's fast path.
const SHARED: u64 = 1;

/// This library's data of one thread, in thread-local storage of the initial-exec model.
#[repr(C)]
pub struct ThreadState {
    /// The thread's slot in the counters. Null until the thread has one.
    slot: *const ThreadSlot,
    /// Token of the registration to which the thread belongs. Before the thread's first call it is
    /// -1, which is not a token.
    token: u64,
    /// Number of slow-path calls in progress in this thread. It is above 1 if calls are nested.
    pub depth: u32,
    /// 1 if the gate never holds calls of this thread, because it is the agent's thread or works
    /// for the agent.
    pub is_agent: u32,
}

global_asm!(
    ".section .tdata,\"awT\",@progbits",
    ".p2align 3",
    ".globl affinode_thread",
    ".hidden affinode_thread",
    ".type affinode_thread, @tls_object",
    ".size affinode_thread, 24",
    "affinode_thread:",
    ".quad 0, -1",
    ".long 0, 0",
    ".text",
);

/// Returns the address of the calling thread's block.
pub fn thread() -> *mut ThreadState {
    let block: *mut ThreadState;
    // SAFETY: the ABI defines this way to find a thread-local block: its offset is added to the
    // thread pointer, which is the first word at fs.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + affinode_thread@GOTTPOFF]",
            "add {0}, qword ptr fs:[0]",
            out(reg) block,
            options(pure, readonly, nostack)
        );
    }
    block
}

/// The slot in which one call is counted, from the call's begin to its end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SlotLocation {
    slot: *const ThreadSlot,
    token: u64,
}

impl SlotLocation {
    /// Returns the slot in which the call was counted. Returns `None` if this process was forked
    /// after that, because the slot is then in the parent's page.
    pub fn slot(&self) -> Option<&'static ThreadSlot> {
        let current = PROCESS.token.load(Ordering::Relaxed);
        if current == 0 || self.token & !SHARED != current {
            return None;
        }
        // SAFETY: made by `place` from the page of the registration that is current,
        // which is never unmapped.
        unsafe { self.slot.as_ref() }
    }
}

/// Returns the counters of this process. Returns `None` if the process is not registered.
pub fn page() -> Option<&'static CounterPage> {
    // SAFETY: null, or a page that is mapped for the life of the process.
    unsafe { PROCESS.page.load(Ordering::Acquire).as_ref() }
}

/// Returns the slot of the calling thread, and the counters. Registers process and thread if
/// needed. Returns `None` if the process is not managed.
pub fn place() -> Option<(SlotLocation, &'static CounterPage)> {
    let page = register()?;
    let token = PROCESS.token.load(Ordering::Acquire);
    let thread = thread();
    // SAFETY: the block belongs to this thread; signal handlers that change it find
    // and leave it consistent, as `attach` runs with signals blocked.
    unsafe {
        if (*thread).token & !SHARED != token {
            attach(thread, page, token);
        }
        let place = SlotLocation { slot: (*thread).slot, token: (*thread).token };
        Some((place, page))
    }
}

/// Gives the calling thread a slot in the counters.
///
/// # Safety
/// `thread` must be the calling thread's block.
unsafe fn attach(thread: *mut ThreadState, page: &'static CounterPage, token: u64) {
    let mask = sys::set_signal_mask(!libc::internal_signals());
    let own = if PROCESS.unfenced.load(Ordering::Relaxed) == 0 {
        page.claim(sys::gettid())
    } else {
        None
    };
    // SAFETY: the caller guarantees that this is its own thread's block, and no signal handler runs
    // in between.
    unsafe {
        (*thread).slot = own.unwrap_or(page.shared_slot());
        (*thread).depth = 0;
        (*thread).token = if own.is_some() { token } else { token | SHARED };
    }
    sys::set_signal_mask(mask);
}

/// Makes the calling thread's calls take the slow path from now on.
pub fn leave_fast_path() {
    // SAFETY: the calling thread's own block.
    unsafe { (*thread()).token |= SHARED };
}

/// Runs `run` while the calls of the calling thread are counted on the page `scratch` instead of
/// the process's page. The agent uses this function to measure a counted call, because its own
/// calls are otherwise not counted.
pub fn with_slot<T>(scratch: &CounterPage, run: impl FnOnce() -> T) -> T {
    let thread = thread();
    // SAFETY: the calling thread's own block. The slot is replaced before the page is freed.
    let before = unsafe { ((*thread).slot, (*thread).token) };
    // SAFETY: the calling thread's own block.
    unsafe {
        (*thread).slot = scratch.shared_slot();
        (*thread).token = PROCESS.token.load(Ordering::Acquire);
    }
    let done = run();
    // SAFETY: the calling thread's own block.
    unsafe { ((*thread).slot, (*thread).token) = before };
    done
}

fn register() -> Option<&'static CounterPage> {
    loop {
        match PROCESS.state.load(Ordering::Acquire) {
            READY => return page(),
            UNMANAGED => return None,
            // This call comes from a library that is loaded in front of libc and calls the driver
            // while this thread creates the agent's thread.
            BUSY if PROCESS.registering_tid.load(Ordering::Relaxed) == sys::gettid() => {
                return None;
            }
            BUSY => sys::futex_wait(&PROCESS.state, BUSY, 100),
            _ => {
                if !children_start_anew() {
                    return None;
                }
                // A signal handler must not wait for a registration that it has interrupted.
                let mask = sys::set_signal_mask(!libc::internal_signals());
                let first =
                    PROCESS.state.compare_exchange(NEW, BUSY, Ordering::Acquire, Ordering::Acquire);
                if first.is_ok() {
                    PROCESS.registering_tid.store(sys::gettid(), Ordering::Relaxed);
                    let made = !is_disabled() && libc::with_errno_kept(make).is_some();
                    let state = if made { READY } else { UNMANAGED };
                    PROCESS.state.store(state, Ordering::Release);
                    sys::futex_wake_all(&PROCESS.state);
                }
                sys::set_signal_mask(mask);
            }
        }
    }
}

/// Makes the kernel fill [`PROCESS`] with zeros in each forked child. Returns false if the kernel
/// has refused this.
pub fn children_start_anew() -> bool {
    static ARRANGED: AtomicU32 = AtomicU32::new(0);
    match ARRANGED.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: one whole page of zero-initialised data, hence anonymous memory.
            let done = unsafe { sys::wipe_on_fork((&raw const PROCESS).cast(), 4096) };
            ARRANGED.store(if done.is_ok() { 1 } else { 2 }, Ordering::Relaxed);
            done.is_ok()
        }
        known => known == 1,
    }
}

/// Creates the process's counters and starts the agent.
fn make() -> Option<()> {
    let fd = take_page()?;
    agent::note_path();
    let started =
        libc::start_thread(agent::main, agent::connection::named_socket(), StackSize::Large);
    if !started {
        sys::close(fd);
    }
    started.then_some(())
}

/// Creates the page of counters, on which calls are counted from now on. Returns the descriptor of
/// its file.
fn take_page() -> Option<i32> {
    static LAST_TOKEN: AtomicU64 = AtomicU64::new(0);
    fds::close_inherited();
    let fd = sys::lift(sys::memory_file(c"affinode-page", PAGE_BYTES).ok()?);
    let Ok(at) = sys::map_aligned(fd, PAGE_BYTES) else {
        sys::close(fd);
        return None;
    };
    let at = at.cast::<CounterPage>();
    // SAFETY: just mapped with this size and alignment, all zero, which is a value of
    // every field; never unmapped.
    let page = unsafe { &*at };
    page.initialise();
    // Allocations are paused until the agent has received a controller's Welcome or has found no
    // controller. The gate can be sealed, because no call is inside the driver yet.
    page.set_sealed(true);
    page.set_gate(Gate::AllocationsHeld);
    page.add_hazards(hazard::at_start());
    exit::find_code();
    // The file works without the seals; only the controller requires them.
    let _ = sys::seal_size(fd);
    let unfenced = u32::from(sys::register_barrier().is_err());
    PROCESS.unfenced.store(unfenced, Ordering::Relaxed);
    PROCESS.page_fd.store(fd, Ordering::Relaxed);
    PROCESS.page.store(at, Ordering::Release);
    let token = LAST_TOKEN.fetch_add(TOKEN_STEP, Ordering::Relaxed) + TOKEN_STEP;
    PROCESS.token.store(token, Ordering::Release);
    Some(fd)
}

/// Runs `body` with a page of counters in a test, without registering the process.
#[cfg(test)]
pub fn with_page<R>(body: impl FnOnce(&'static CounterPage) -> R) -> R {
    let page = Box::leak(crate::counters::tests::page());
    let before = PROCESS.page.swap(&raw mut *page, Ordering::AcqRel);
    let result = body(page);
    PROCESS.page.store(before, Ordering::Release);
    result
}

/// Registers the process of a test, without an agent.
#[cfg(test)]
pub fn manage() -> Option<&'static CounterPage> {
    children_start_anew().then_some(())?;
    take_page()?;
    PROCESS.state.store(READY, Ordering::Release);
    page()
}

/// Whether `AFFINODE_DISABLE=1` was in the environment at the first call of this function.
pub fn is_disabled() -> bool {
    static ANSWER: AtomicU32 = AtomicU32::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let disabled = libc::environment(DISABLE_ENV.as_bytes()) == Some(b"1");
            ANSWER.store(1 + u32::from(disabled), Ordering::Relaxed);
            disabled
        }
        known => known == 2,
    }
}

/// Whether the memory barrier on all threads works. The barrier makes the plain increments of all
/// threads visible to the agent.
pub fn is_fenced() -> bool {
    PROCESS.unfenced.load(Ordering::Relaxed) == 0
}

/// Returns the number of this process's registration. A process and its forked descendants all have
/// different numbers, whereas process ids can repeat.
pub fn registration() -> u32 {
    (PROCESS.token.load(Ordering::Acquire) / TOKEN_STEP) as u32
}

/// Returns the descriptor of the file that contains the counters.
pub fn page_fd() -> i32 {
    PROCESS.page_fd.load(Ordering::Relaxed)
}

/// Makes the calling thread the agent of this process.
pub fn become_agent(tid: u32) {
    pass_gate();
    PROCESS.agent_tid.store(tid, Ordering::SeqCst);
}

/// Makes the gate pass all calls of the calling thread, because it works for the agent.
pub fn pass_gate() {
    // SAFETY: the calling thread's own block.
    unsafe { (*thread()).is_agent = 1 };
}

/// Returns the agent's thread id. Returns `None` if the agent does not run yet.
pub fn agent_tid() -> Option<u32> {
    Some(PROCESS.agent_tid.load(Ordering::SeqCst)).filter(|tid| *tid != 0)
}

/// Wakes the agent by a signal. The agent blocks the signal and waits for it, so the signal has no
/// other effect. If no thread blocked it, the default action would be to ignore it.
pub fn poke_agent() {
    if let Some(tid) = agent_tid() {
        let _ = sys::signal_thread(tid, sys::SIGURG);
    }
}
