//! The dynamic loader's lock, which the first load of a module takes: the driver loads its compiler
//! then. A thread has that lock as long as a constructor of a library runs that it loads; if the
//! constructor makes a CUDA call while the gate is closed, it waits for the agent, and the agent
//! would wait for the lock.
//!
//! So a thread of its own takes the lock and loads the module once, and the agent waits for it for
//! a moment alone:
//!
//! ```text
//! Idle ──copy out──> Running ──lock taken, module loaded──> Idle: the copy goes on
//!                       │ too long
//!                       └──> the copy is refused, the gate opens, the constructor ends ──> Idle
//! ```
//!
//! As long as it is Running it may be inside the driver, and nothing is moved.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::digest;
use crate::{libc, process, sys};

/// How long the agent waits: to take the lock is a matter of microseconds, to compile the kernel for
/// the first time one of some 100 ms.
const PATIENCE_MS: u64 = 2_000;

/// The process in which the thread runs, else 0: it is not in a forked child.
static RUNNING_IN: AtomicU32 = AtomicU32::new(0);
/// The process in which the module was loaded once.
static LOADED_IN: AtomicU32 = AtomicU32::new(0);
/// A context that lives, for the thread.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);

/// Whether the thread still waits, or loads.
pub fn is_awaited() -> bool {
    RUNNING_IN.load(Ordering::Acquire) == sys::getpid()
}

/// Sees to it that no load of a module that follows waits for another thread of this process. False:
/// it would.
pub fn load_ahead(context: usize) -> bool {
    if !is_awaited() {
        CONTEXT.store(context, Ordering::Relaxed);
        RUNNING_IN.store(sys::getpid(), Ordering::Release);
        if !libc::start_thread(load, core::ptr::null_mut()) {
            RUNNING_IN.store(0, Ordering::Release);
            return false;
        }
    }
    let end_us = sys::now_us() + PATIENCE_MS * 1_000;
    while is_awaited() {
        let now_us = sys::now_us();
        if now_us >= end_us {
            return false;
        }
        sys::futex_wait(&RUNNING_IN, sys::getpid(), (end_us - now_us).div_ceil(1_000));
    }
    true
}

unsafe extern "C" fn load(_: *mut c_void) -> *mut c_void {
    sys::set_signal_mask(!libc::internal_signals());
    sys::set_thread_name(c"affinode-load");
    process::pass_gate();
    let _ = libc::keep_loaded(c"libcuda.so.1");
    let own = sys::getpid();
    // The unit tests' driver counts calls.
    if LOADED_IN.swap(own, Ordering::AcqRel) != own && !cfg!(test) {
        digest::load_once(CONTEXT.load(Ordering::Relaxed));
    }
    RUNNING_IN.store(0, Ordering::Release);
    sys::futex_wake_all(&RUNNING_IN);
    core::ptr::null_mut()
}
