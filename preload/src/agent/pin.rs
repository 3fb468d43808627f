//! Keeps libcuda loaded. Before `cuInit` the driver's library goes with its last `dlclose` (seen
//! with 580; from `cuInit` on it stays): a program that asks for the version, closes it, and loads
//! it at another address would leave the agent with addresses of what is not there any more.
//!
//! `dlopen` takes the loader's lock, which a thread holds whose constructor waits at the gate for
//! this very agent: so a thread of its own takes the reference, and the agent waits for it for a
//! moment alone.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::{libc, sys};

/// 1 once the reference is taken, or cannot be.
static DONE: AtomicU32 = AtomicU32::new(0);

/// Takes the reference, unless that lasts.
pub fn pin_libcuda() {
    const PIN_TIMEOUT_MS: u64 = 1_000;
    if libc::start_thread(take_reference, core::ptr::null_mut()) {
        sys::futex_wait(&DONE, 0, PIN_TIMEOUT_MS);
    }
}

unsafe extern "C" fn take_reference(_: *mut c_void) -> *mut c_void {
    sys::set_signal_mask(!libc::internal_signals());
    sys::set_thread_name(c"affinode-pin");
    open(c"libcuda.so.1");
    DONE.store(1, Ordering::Release);
    sys::futex_wake_all(&DONE);
    core::ptr::null_mut()
}

/// One more reference to a library that is loaded already, for as long as the process lives.
fn open(name: &CStr) {
    const LAZY_NOLOAD_NODELETE: c_int = 1 | 4 | 0x1000;
    let Some(address) = libc::dlopen() else {
        return;
    };
    // SAFETY: the symbol has this signature in every libc.
    let dlopen: unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void =
        unsafe { core::mem::transmute(address) };
    // SAFETY: a name that zero ends. What is not loaded is not loaded by this.
    unsafe { dlopen(name.as_ptr(), LAZY_NOLOAD_NODELETE) };
}
