//! Keeps libcuda loaded. Before `cuInit`, the last `dlclose` unloads libcuda (seen with driver
//! 580). After `cuInit`, libcuda stays loaded. A program might request the driver's version, close
//! libcuda, and load it again at another address. The agent would then hold addresses of unmapped
//! code.
//!
//! To add a reference, `dlopen` takes the loader's lock. Another thread may hold that lock while
//! its constructor waits at the gate for this agent. So a separate thread calls `dlopen`, and the
//! agent waits for that thread for at most 1 s.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::libc::StackSize;
use crate::{libc, libcuda, sys};

/// 1 once the attempt to add a reference to libcuda has ended, even if it failed.
static DONE: AtomicU32 = AtomicU32::new(0);

/// Adds a reference to libcuda on a separate thread, and waits for that thread for at most 1 s.
pub fn pin_libcuda() {
    const PIN_TIMEOUT_MS: u64 = 1_000;
    // A forked child may have inherited the reference from its parent.
    if !libcuda::is_kept()
        && libc::start_thread(take_reference, core::ptr::null_mut(), StackSize::Default)
    {
        sys::futex_wait(&DONE, 0, PIN_TIMEOUT_MS);
    }
}

unsafe extern "C" fn take_reference(_: *mut c_void) -> *mut c_void {
    sys::set_signal_mask(!libc::internal_signals());
    sys::set_thread_name(c"affinode-pin");
    libcuda::keep();
    DONE.store(1, Ordering::Release);
    sys::futex_wake_all(&DONE);
    core::ptr::null_mut()
}
