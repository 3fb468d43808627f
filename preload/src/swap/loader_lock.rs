//! Avoids a deadlock on the dynamic loader's lock. The first load of a CUDA module takes this lock,
//! because the driver then loads its compiler. A thread that loads a library holds the lock while
//! the library's constructor runs. If the constructor makes a CUDA call while the gate is closed,
//! the call waits for the agent. If the agent loaded the first module itself, it would wait for the
//! lock.
//!
//! Therefore a separate thread takes the lock and loads the module once. The agent waits only a
//! limited time for that thread:
//!
//! ```text
//!         copy out              lock taken          module loaded
//! Idle ──────────────> Waiting ────────────> Loading ────────────> Idle: the copy goes on
//!  ^                      │ too long            │ too long
//!  │                      v                     v
//!  └── lock taken ─── GivenUp               the copy is refused; no context ends before the load
//!                     the copy is refused, the gate opens, the constructor ends
//! ```
//!
//! In the state GivenUp the thread makes no call into the driver, because the application may have
//! destroyed the context. While the state is not Idle, nothing is moved. If the load fails, no digest
//! is computed, because the agent's own load would then be the first one and wait for the lock.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use affinode_cuda_sys::result;

use super::copy::relax_captures;
use super::digest;
use crate::libc::StackSize;
use crate::process::{self, PROCESS};
use crate::{libc, sys};

/// Maximum time, in milliseconds, that the agent waits for the thread that loads the module. The
/// thread takes the lock within microseconds. To compile the kernel for the first time takes about
/// 100 ms.
const PATIENCE_MS: u64 = 2_000;

const IDLE: u32 = 0;
const WAITING: u32 = 1;
const LOADING: u32 = 2;
const GIVEN_UP: u32 = 3;

/// State of the first load of the CUDA module. In a forked child it is all zero, like all of
/// [`PROCESS`], because the loading thread is not in the child.
pub struct ModuleLoad {
    /// Futex that contains the state: IDLE, WAITING, LOADING or GIVEN_UP.
    state: AtomicU32,
    /// 1 once the module was loaded successfully.
    is_loaded: AtomicU32,
    /// Context in which the thread loads the module. It must exist while the state is WAITING or
    /// LOADING.
    context: AtomicUsize,
}

impl ModuleLoad {
    pub const fn new() -> ModuleLoad {
        ModuleLoad {
            state: AtomicU32::new(IDLE),
            is_loaded: AtomicU32::new(0),
            context: AtomicUsize::new(0),
        }
    }

    fn state(&self) -> u32 {
        self.state.load(Ordering::SeqCst)
    }

    fn change(&self, from: u32, to: u32) -> bool {
        let changed = self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
        changed.is_ok()
    }

    fn end(&self) {
        self.state.store(IDLE, Ordering::SeqCst);
        sys::futex_wake_all(&self.state);
    }

    /// Sleeps while the state is `state`, until `end_us` at most. Returns false without a sleep if
    /// that time has passed.
    fn wait_while(&self, state: u32, end_us: u64) -> bool {
        let now_us = sys::now_us();
        if now_us < end_us {
            sys::futex_wait(&self.state, state, (end_us - now_us).div_ceil(1_000));
        }
        now_us < end_us
    }
}

/// Whether the loading thread still waits for the loader's lock or loads the module.
pub fn is_awaited() -> bool {
    PROCESS.module_load.state() != IDLE
}

/// Whether the module was loaded successfully once. Later loads then do not take the loader's lock.
pub fn is_loaded() -> bool {
    PROCESS.module_load.is_loaded.load(Ordering::SeqCst) == 1
}

/// Loads the CUDA module once on a separate thread, so that later loads do not wait for the
/// loader's lock. False: the thread could not be started, or the load has not ended in time.
pub fn load_ahead(context: usize) -> bool {
    load_ahead_within(context, PATIENCE_MS)
}

fn load_ahead_within(context: usize, patience_ms: u64) -> bool {
    let load = &PROCESS.module_load;
    load.context.store(context, Ordering::SeqCst);
    let is_new = !load.change(GIVEN_UP, WAITING) && load.change(IDLE, WAITING);
    if is_new && !libc::start_thread(run, core::ptr::null_mut(), StackSize::Large) {
        load.end();
        return false;
    }
    let end_us = sys::now_us() + patience_ms * 1_000;
    loop {
        let state = load.state();
        if state == IDLE {
            return true;
        }
        if !load.wait_while(state, end_us) && (load.change(WAITING, GIVEN_UP) || state == LOADING) {
            return false;
        }
    }
}

/// Waits until a module load in progress has ended. Callers wait before they end a context, because
/// the load may use it. The wait is limited, because a longer load may be waiting for the calling
/// thread.
pub fn wait_for_load() {
    const LIMIT_MS: u64 = 10_000;
    let load = &PROCESS.module_load;
    let end_us = sys::now_us() + LIMIT_MS * 1_000;
    while load.state() == LOADING && load.wait_while(LOADING, end_us) {}
}

unsafe extern "C" fn run(_: *mut c_void) -> *mut c_void {
    sys::set_signal_mask(!libc::internal_signals());
    sys::set_thread_name(c"affinode-load");
    process::pass_gate();
    #[cfg(test)]
    drop(tests::LOCK.lock());
    let _ = libc::keep_loaded(c"libcuda.so.1");
    let load = &PROCESS.module_load;
    loop {
        if load.change(WAITING, LOADING) {
            // Otherwise the load would invalidate a capture of the application: the unload of a
            // module returns error 900 then (H200, driver 580.159).
            relax_captures();
            if !is_loaded()
                && digest::load_once(load.context.load(Ordering::SeqCst)) == result::SUCCESS
            {
                load.is_loaded.store(1, Ordering::SeqCst);
            }
            load.end();
            break;
        }
        if load.change(GIVEN_UP, IDLE) {
            break;
        }
    }
    core::ptr::null_mut()
}

#[cfg(test)]
pub mod tests;
