//! Proof of free device memory for a return without a controller, from NVML.
//!
//! Asked on a thread of its own and for a limited time, because the answer may never
//! come: while a process is checkpointed, libcuda holds the lock of the process's NVML
//! (seen with 580), and the loader's lock may be held by a caller that waits at the gate.
//! Nothing that the agent needs may wait for either.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{elf, libc, sys};

/// How long an answer is waited for.
const PATIENCE_MS: u64 = 1_500;

/// The one question that may be under way.
struct Question {
    state: AtomicU32,
    /// The answer: [`UNKNOWN`] or the bytes that are free on every device.
    free_bytes: AtomicU64,
}

const NONE: u32 = 0;
const ASKED: u32 = 1;
const ANSWERED: u32 = 2;
const UNKNOWN: u64 = u64::MAX;

static QUESTION: Question =
    Question { state: AtomicU32::new(NONE), free_bytes: AtomicU64::new(UNKNOWN) };

/// A forked child has no thread that could still be asking.
pub fn forget() {
    QUESTION.state.store(NONE, Ordering::Release);
}

/// Whether so many bytes are free on every device that the process can see: on which it
/// held its memory, only the driver knows. True when that cannot be found out.
pub fn has_room(vram_bytes: u64) -> bool {
    let state = &QUESTION.state;
    // The thread of an earlier question that was not answered is still stuck.
    if state.load(Ordering::Acquire) == ASKED {
        return true;
    }
    QUESTION.free_bytes.store(UNKNOWN, Ordering::Relaxed);
    state.store(ASKED, Ordering::Release);
    if !libc::start_thread(answer, core::ptr::null_mut()) {
        state.store(NONE, Ordering::Release);
        return true;
    }
    let end_us = sys::now_us() + PATIENCE_MS * 1_000;
    while state.load(Ordering::Acquire) == ASKED && sys::now_us() < end_us {
        sys::futex_wait(state, ASKED, PATIENCE_MS);
    }
    state.load(Ordering::Acquire) != ANSWERED
        || QUESTION.free_bytes.load(Ordering::Acquire) >= vram_bytes
}

unsafe extern "C" fn answer(_: *mut c_void) -> *mut c_void {
    sys::set_thread_name(c"affinode-vram");
    if let Some(handle) = libc::dlopen(FILE) {
        let free_bytes = Nvml::start().and_then(|nvml| nvml.least_free_bytes());
        QUESTION.free_bytes.store(free_bytes.unwrap_or(UNKNOWN), Ordering::Release);
        // SAFETY: NVML is shut down again; only addresses of functions were taken.
        unsafe { libc::dlclose(handle) };
    }
    QUESTION.state.store(ANSWERED, Ordering::Release);
    sys::futex_wake_all(&QUESTION.state);
    core::ptr::null_mut()
}

const FILE: &core::ffi::CStr = c"libnvidia-ml.so.1";

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total_bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
}

type Plain = unsafe extern "C" fn() -> u32;
type Count = unsafe extern "C" fn(*mut u32) -> u32;
type ByIndex = unsafe extern "C" fn(u32, *mut *mut c_void) -> u32;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> u32;

struct Nvml {
    shutdown: Plain,
    count: Count,
    by_index: ByIndex,
    memory: MemoryInfo,
}

fn function(name: &[u8]) -> Option<usize> {
    elf::find(|object| {
        let dynamic = object.dynamic()?;
        if dynamic.soname()?.starts_with(b"libnvidia-ml.so") {
            dynamic.function(name)
        } else {
            None
        }
    })
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised by `start`; NVML counts.
        let _ = unsafe { (self.shutdown)() };
    }
}

impl Nvml {
    fn start() -> Option<Nvml> {
        // SAFETY: NVML's documented signatures of these functions.
        let (init, nvml) = unsafe {
            use core::mem::transmute;
            let nvml = Nvml {
                shutdown: transmute::<usize, Plain>(function(b"nvmlShutdown")?),
                count: transmute::<usize, Count>(function(b"nvmlDeviceGetCount_v2")?),
                by_index: transmute::<usize, ByIndex>(function(b"nvmlDeviceGetHandleByIndex_v2")?),
                memory: transmute::<usize, MemoryInfo>(function(b"nvmlDeviceGetMemoryInfo")?),
            };
            (transmute::<usize, Plain>(function(b"nvmlInit_v2")?), nvml)
        };
        // SAFETY: may be called at any time, any number of times.
        if unsafe { init() } != 0 {
            core::mem::forget(nvml);
            return None;
        }
        Some(nvml)
    }

    fn least_free_bytes(&self) -> Option<u64> {
        let mut devices = 0;
        // SAFETY: room for one count.
        if unsafe { (self.count)(&raw mut devices) } != 0 {
            return None;
        }
        let mut least = None;
        for index in 0..devices {
            let mut device = core::ptr::null_mut();
            let mut memory = Memory::default();
            // SAFETY: room for one handle; then a handle that NVML has just given.
            let code = unsafe {
                match (self.by_index)(index, &raw mut device) {
                    0 => (self.memory)(device, &raw mut memory),
                    code => code,
                }
            };
            if code == 0 {
                let free_bytes = memory.free_bytes;
                least = Some(least.map_or(free_bytes, |least: u64| least.min(free_bytes)));
            }
        }
        least
    }
}
